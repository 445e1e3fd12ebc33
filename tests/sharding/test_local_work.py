"""A device's part of an operator costs what a model costs that has only this part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from autopar import Cluster
from autopar.analysis.operators import on_device
from autopar.capture.program import capture
from autopar.planner.intra_op.sharding_task import ShardingTask
from autopar.planner.intra_op.strategy_search import ShardingProblem
from autopar.sharding.mesh import make_mesh
from autopar.sharding.stage_sharding import strategy_text
from cost_models.hardware.device_specs import efficiency_of, rates_of
from cost_models.kernels.roofline import estimate

META = torch.device("meta")
CLUSTER = Cluster.preset("4xH100")


class Mlp(nn.Module):
    """Sizes that are no multiples of tiles; parts of them are."""

    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, wide, bias=False), nn.Linear(wide, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x)))


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(64, hidden, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return functional.scaled_dot_product_attention(*split, is_causal=True)


def flat(model: nn.Module, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    program = capture(model, (x,), {})
    return on_device(program.graph_module, program.device, META), x


def seconds_on_one_device(model: nn.Module, x: torch.Tensor) -> dict[str, tuple[float, float]]:
    """By node: forward, backward."""
    spec = CLUSTER.node[0]
    module, x = flat(model, x)
    found = estimate(module, len(x), rates_of(spec), efficiency_of(spec), inputs=[x])
    return {name: (one.forward_seconds, one.backward_seconds) for name, one in found.items()}


def seconds_of_strategy(model: nn.Module, x: torch.Tensor, mesh: tuple[int, ...], node: str, text: str) -> Any:
    module, x = flat(model, x)
    task = ShardingTask(module, [x], len(x), CLUSTER)
    problem = ShardingProblem(task, make_mesh(mesh, [d.name for d in CLUSTER.devices]))
    costs = problem.options[node].costs
    place = [strategy_text(s) for s in costs.strategies].index(text)
    return costs.forward[place], costs.seconds[place] - costs.forward[place]


def on_meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (
        torch.empty(*shape, device=META, dtype=dtype) if dtype.is_floating_point else torch.zeros(*shape, dtype=dtype)
    )


HIDDEN, WIDE, TOKENS = 1536, 6144, 4608


@pytest.mark.parametrize(
    ("mesh", "node", "text", "hidden", "wide", "tokens"),
    [
        ((4,), "linear", "R S0 -> S1", HIDDEN, WIDE // 4, TOKENS),
        ((4,), "linear_1", "S1 S1 -> P", HIDDEN, WIDE // 4, TOKENS),
        ((4,), "linear", "S0 R -> S0", HIDDEN, WIDE, TOKENS // 4),
        ((4,), "linear_1", "S0 R -> S0", HIDDEN, WIDE, TOKENS // 4),
        ((2, 2), "linear", "S0R RS0 -> S0S1", HIDDEN, WIDE // 2, TOKENS // 2),
        ((2, 2), "linear_1", "S0S1 RS1 -> S0P", HIDDEN, WIDE // 2, TOKENS // 2),
        ((2, 2), "linear", "RR S0S0 -> S1S1", HIDDEN, WIDE // 4, TOKENS),
        ((4,), "linear", "R R -> R", HIDDEN, WIDE, TOKENS),
        ((4,), "gelu", "S1 -> S1", HIDDEN, WIDE // 4, TOKENS),
    ],
)
def test_products_of_parts_are_priced_at_their_own_sizes(
    mesh: tuple[int, ...], node: str, text: str, hidden: int, wide: int, tokens: int
) -> None:
    with META:
        whole, part = Mlp(HIDDEN, WIDE).bfloat16(), Mlp(hidden, wide).bfloat16()
    own = seconds_on_one_device(part, on_meta(tokens, hidden))[node]
    found = seconds_of_strategy(whole, on_meta(TOKENS, HIDDEN), mesh, node, text)
    assert found == pytest.approx(own)


@pytest.mark.slow
@pytest.mark.parametrize(("text", "samples", "heads"), [("S1 S1 S1 -> S1", 8, 4), ("S0 S0 S0 -> S0", 2, 16)])
def test_attention_of_some_heads_is_attention_of_fewer_heads(text: str, samples: int, heads: int) -> None:
    with META:
        whole, part = Attention(1024, 16).bfloat16(), Attention(64 * heads, heads).bfloat16()
    node = "scaled_dot_product_attention"
    own = seconds_on_one_device(part, on_meta(samples, 512, 64))[node]
    assert seconds_of_strategy(whole, on_meta(8, 512, 64), (4,), node, text) == pytest.approx(own)


@pytest.mark.parametrize(("text", "samples", "columns"), [("S1 R -> S2", 8, 256), ("R S0 -> S0", 2, 1024)])
def test_a_table_is_read_for_the_rows_that_are_looked_up(text: str, samples: int, columns: int) -> None:
    """However large the table is, and however it is cut."""
    with META:
        whole, part = nn.Embedding(50000, 1024).bfloat16(), nn.Embedding(50000, columns).bfloat16()
    tokens = torch.zeros(8, 512, dtype=torch.long, device=META)
    own = seconds_on_one_device(part, tokens[:samples])["embedding"]
    found = seconds_of_strategy(whole, tokens, (4,), "embedding", text)
    assert found == pytest.approx(own)
