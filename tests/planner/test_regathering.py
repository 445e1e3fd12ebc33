"""Gathering activations again in the backward: the bytes that are kept are those that run, and a plan has one price."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from sharded_plans import chosen
from shardings import one_stage, pipelined
from test_kept_bytes import kept_bytes, sharded
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

import autopar
from autopar import Cluster, Plan
from autopar.capture.program import capture
from autopar.plan.stage import Stage
from autopar.planner.intra_op.frontier import with_regathered
from autopar.planner.intra_op.regathering import regathered
from autopar.sharding.redistribution import before_gathers
from autopar.sharding.stage_sharding import parse_layout
from cost_models.collectives.overlap import CONTENTION, exposed_behind
from cost_models.graphs import storage_key

N, SAMPLES, LENGTH, HIDDEN = 4, 2, 8, 16
LAYERS, TOKENS, WIDTH, VOCABULARY = 2, 4096, 4096, 65536
pytestmark = pytest.mark.usefixtures("shared_exports")


@pytest.mark.parametrize(
    ("passed", "place"),
    [("S1 R", 0), ("P S1 R", 1), ("S1", 0), ("S1 S0", 1), ("P R", 1), ("S0S1 S0R RR", 0), ("PS1 S0S1 S0R", 1)],
)
def test_what_is_kept_is_what_the_last_gathers_start_from(passed: str, place: int) -> None:
    assert before_gathers([parse_layout(text) for text in passed.split()]) == place


# -- bytes -------------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """`viewed`: products read tokens as rows, of a view of what was gathered."""

    def __init__(self, *, viewed: bool = False) -> None:
        super().__init__()
        self.norm, self.viewed = nn.LayerNorm(HIDDEN), viewed
        self.query, self.key, self.value, self.out = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        if self.viewed:
            y = y.view(-1, HIDDEN)
        return self.out(self.query(y) * self.key(y) + self.value(y)).view_as(x) + x


COLUMNS = {"mul": "S2 S2 -> S2", "add": "S2 S2 -> S2", "linear_3": "S2 S1 -> P", "view_as": "P R -> P"}
COLUMNS |= {f"linear{i}": "R S0 -> S2" for i in ("", "_1", "_2")} | {
    "layer_norm": "S1 R R -> S1",
    "add_1": "S1 S1 -> S1",
}
AS_ROWS = COLUMNS | {"mul": "S1 S1 -> S1", "add": "S1 S1 -> S1", "linear_3": "S1 S1 -> P", "view": "R -> R"}
AS_ROWS |= {f"linear{i}": "R S0 -> S1" for i in ("", "_1", "_2")}


@pytest.mark.slow
@pytest.mark.parametrize("viewed", [False, True])
def test_devices_keep_the_bytes_that_are_priced(viewed: bool) -> None:
    model, x = Layer(viewed=viewed), torch.randn(SAMPLES, LENGTH, HIDDEN)
    wanted = AS_ROWS if viewed else COLUMNS
    configuration = sharded(model, x, (N,), wanted, regather=True)
    sharding = configuration.sharding(list(configuration.program.nodes))
    assert sharding.regather
    pm = pipelined(model, one_stage(capture(model, (x,), {}), sharding, 1))
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = pm(x)
    for parameter in model.parameters():
        kept.pop(storage_key(parameter), None)
    assert output.requires_grad
    assert sum(kept.values()) / N == pytest.approx(kept_bytes(configuration))
    saved = x.nbytes * (1 - 1 / N)
    assert kept_bytes(sharded(model, x, (N,), wanted)) == pytest.approx(kept_bytes(configuration) + saved)


# -- prices ------------------------------------------------------------------------------------------------------------


class Decoder(nn.Module):
    """Large enough that gathering and scattering pays."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(self.norm(x)).transpose(1, 2), tokens)


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        heads = (f(y).unflatten(-1, (32, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        x = x + self.out(functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


@cache
def decoder() -> nn.Module:
    with torch.device("meta"):
        return Decoder().to(torch.bfloat16)


TENSOR, M, CLUSTER = 4, 4, Cluster.preset("4xH100")
CALL: dict[str, Any] = {"example_args": (torch.empty(M, TOKENS, dtype=torch.int64, device="meta"),)}
HOW: dict[str, Any] = {"precision": "bf16-mixed", "optimizer_step": "fused"}  # the passes are the peak, not the step
GATHERED = 2 * LAYERS + 1  # once for queries, keys and values; the perceptron's; the head's
WHOLE = TOKENS * WIDTH * 2  # bytes
GATHER = CLUSTER.seconds("all_gather", WHOLE, [device.name for device in CLUSTER.devices])


@cache
def by_hand(recompute: str = "none", overlap: str = "none") -> Plan:
    degrees: dict[str, Any] = {"tensor": TENSOR, "micro_batch": 1, "sequence_parallel": True}
    options: dict[str, Any] = {"recompute": recompute, "overlap": overlap}
    return Plan.by_hand(decoder(), CLUSTER, **CALL, **degrees, **options, **HOW)


@cache
def keeping(recompute: str = "none") -> Plan:
    """The same plan, which keeps what it gathers."""
    plan = by_hand(recompute)
    return priced(replace(plan, stages=tuple(without(stage) for stage in plan.stages)))


def without(stage: Stage) -> Stage:
    assert stage.sharding is not None
    return replace(stage, sharding=replace(stage.sharding, regather=False))


def priced(plan: Plan, **options: Any) -> Plan:
    return autopar.plan(decoder(), CLUSTER, plan=plan, **CALL, **options, **HOW)


def gathers(plan: Plan) -> Counter[bool]:
    """All-gathers of a micro-batch, in the backward and not."""
    exchanges = [one for stage in plan.stages if stage.sharding is not None for one in stage.sharding.exchanges]
    return Counter(one.backward for one in exchanges if one.collective == "all_gather" and not one.once)


def step(plan: Plan) -> float:
    assert plan.predicted_step_time is not None
    return plan.predicted_step_time


def bytes_of(plan: Plan) -> tuple[int, int]:
    (stage,) = plan.stages
    return stage.activation_bytes or 0, stage.peak_memory or 0


@pytest.mark.slow
def test_sequence_parallel_plans_by_hand_gather_again_and_have_one_price() -> None:
    plan = by_hand()
    (stage,) = plan.stages
    assert stage.sharding is not None
    assert stage.sharding.regather
    again = priced(Plan.from_json(plan.to_json()))
    assert again.predicted_step_time == pytest.approx(plan.predicted_step_time, rel=1e-9)
    assert bytes_of(again) == bytes_of(plan)
    assert again.stages[0].sharding == stage.sharding
    assert "gathered again in the backward" in str(Plan.from_json(plan.to_json()))
    assert "activations gathered again" in str(plan.diff(keeping()))


@pytest.mark.slow
def test_memory_falls_by_what_is_kept_as_shards_and_the_step_grows_by_the_gathers() -> None:
    plan, other = by_hand(), keeping()
    saved = GATHERED * WHOLE * (1 - 1 / TENSOR)
    assert bytes_of(other)[0] - bytes_of(plan)[0] == pytest.approx(saved, abs=GATHERED)
    # The head needs most while it runs, and in its backward what it gathers again.
    assert bytes_of(other)[1] - bytes_of(plan)[1] == pytest.approx(saved - WHOLE, abs=GATHERED)
    assert gathers(plan)[False] == gathers(other)[False]
    assert gathers(plan)[True] == gathers(other)[True] + GATHERED
    assert step(plan) - step(other) == pytest.approx(M * GATHERED * GATHER, rel=0.01)


@pytest.mark.slow
def test_layers_that_run_again_gather_in_that_run_alone() -> None:
    """Only the head gathers again, which lies outside of them."""
    plan, other = by_hand("full"), keeping("full")
    assert gathers(plan)[True] == gathers(other)[True] + 1
    assert bytes_of(other)[0] - bytes_of(plan)[0] == pytest.approx(WHOLE * (1 - 1 / TENSOR), abs=1)
    assert step(plan) - step(other) == pytest.approx(M * GATHER, rel=0.01)


@pytest.mark.slow
def test_gathers_behind_products_only_slow_these_down() -> None:
    longer = step(by_hand(overlap="gathers")) - step(keeping())
    assert longer == pytest.approx(M * GATHERED * GATHER * CONTENTION, rel=0.01)


@pytest.mark.parametrize(
    ("seconds", "kernels", "added"),
    [(0.0, 1.0, 0.0), (1.0, 0.0, 1.0), (1.0, 10.0, CONTENTION), (3.0, 1.0, 2.0)],
)
def test_a_gather_is_exposed_as_far_as_it_outlasts_the_product(seconds: float, kernels: float, added: float) -> None:
    assert exposed_behind(seconds, kernels) == pytest.approx(added)


# -- the search --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_search_has_a_variant_that_gathers_again_where_memory_is_short() -> None:
    _, problem, found, _, _ = chosen("llama")
    assert with_regathered(problem, [found], math.inf) == (found,)
    kept, again = with_regathered(problem, [found], found.nbytes / 2)
    assert kept is found
    assert again.keeping is found
    assert again.strategies == found.strategies
    assert again.nbytes < found.nbytes
    assert again.seconds > found.seconds
    assert regathered(problem, again) is again
