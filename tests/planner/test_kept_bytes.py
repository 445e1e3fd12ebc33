"""What a sharded operator keeps for its backward: the shares of the tensors that are saved, as each device has them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from autopar import Cluster
from autopar.analysis.example import example_ahead
from autopar.capture.repeated_layers.fold import fold
from autopar.costs.estimated import estimate_costs
from autopar.planner.inter_op.mesh_configuration import MeshConfiguration, mesh_configuration
from autopar.planner.inter_op.meshes import mesh_program_of
from autopar.planner.inter_op.split_program import SplitProgram
from autopar.planner.intra_op.regathering import regathered
from autopar.planner.intra_op.sharding_task import GraphFacts, ShardingTask
from autopar.planner.intra_op.strategy_search import ShardingProblem
from autopar.sharding.mesh import make_mesh
from autopar.sharding.stage_sharding import strategy_text

SAMPLES, LENGTH, HIDDEN, WIDE, N = 4, 8, 16, 64, 4


def really_kept(run: Callable[[], torch.Tensor], parameters: list[torch.Tensor]) -> int:
    """Bytes of the storages that a forward keeps, without those of parameters."""
    known = {p.untyped_storage().data_ptr() for p in parameters}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    assert result.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def sharded(
    model: nn.Module, x: torch.Tensor, mesh: tuple[int, ...], wanted: Mapping[str, str], *, regather: bool = False
) -> MeshConfiguration:
    """The stage configuration in which operators (nodes) have the strategies `wanted`, as plans write them."""
    meta = copy.deepcopy(model).to("meta")
    example = example_ahead(meta, (x.to("meta"),), {}, batch_dim=None)
    cluster = Cluster.preset("4xH100")
    costs, subject = estimate_costs(example, cluster), mesh_program_of(example, "none")
    folded = fold(subject.module)
    inputs = subject.inputs(len(x))
    task = ShardingTask(folded.module, inputs, len(x), cluster, optimizer="none", copies=folded.copies)
    problem = ShardingProblem(task, make_mesh(mesh, [d.name for d in cluster.devices]))
    fixed = {}
    for node, text in wanted.items():
        strategies = problem.options[node].costs.strategies
        fixed[node] = next(s for s in strategies if strategy_text(s) == text)
    found = problem.solve(float("inf"), fixed)
    found = regathered(problem, found) if regather else found
    program = SplitProgram(
        costs, folded, {n.name: n for n in subject.module.graph.nodes if n.name in costs.graph}, subject.storages
    )
    facts = GraphFacts(task)
    return mesh_configuration("mesh", cluster.devices[0].kind, program, task, facts, found, fastest=True)


def kept_bytes(configuration: MeshConfiguration) -> float:
    """Of all operators on one device; operators that share a storage count it once."""
    storages: dict[Any, float] = {}
    for operator in configuration.operators.values():
        for storage, nbytes in operator.saved.items():
            storages[storage] = max(nbytes, storages.get(storage, 0.0))
    return sum(storages.values())


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, WIDE, bias=False), nn.Linear(WIDE, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x)))


# strategies of the three operators; the parts of input, up and down on one device
SPLITS: dict[str, tuple[tuple[str, str, str], tuple[Any, Any, Any]]] = {
    "samples": (("S0 R -> S0", "S0 -> S0", "S0 R -> S0"), (slice(SAMPLES // N), ..., ...)),
    "sequence": (("S1 R -> S1", "S1 -> S1", "S1 R -> S1"), ((slice(None), slice(LENGTH // N)), ..., ...)),
    "columns and rows": (
        ("R S0 -> S2", "S2 -> S2", "S2 S1 -> P"),
        (..., slice(WIDE // N), (slice(None), slice(WIDE // N))),
    ),
    "nothing": (("R R -> R", "R -> R", "R R -> R"), (..., ..., ...)),
}


@pytest.mark.parametrize("split", SPLITS)
def test_a_device_keeps_what_the_same_operators_on_its_parts_keep(split: str) -> None:
    texts, parts = SPLITS[split]
    model, x = Mlp(), torch.randn(SAMPLES, LENGTH, HIDDEN)
    local = [t.detach()[part].clone() for t, part in zip((x, model.up.weight, model.down.weight), parts, strict=True)]
    mine, up, down = local[0], *(w.requires_grad_() for w in local[1:])
    real = really_kept(lambda: functional.linear(functional.gelu(functional.linear(mine, up)), down), [up, down])
    configuration = sharded(model, x, (N,), dict(zip(("linear", "gelu", "linear_1"), texts, strict=True)))
    assert kept_bytes(configuration) == pytest.approx(real)


def test_a_gathered_copy_is_kept_besides_the_parts_it_was_gathered_from() -> None:
    """Sequence-parallel around tensor-parallel, as in Megatron-LM: the norm keeps its part, the product the whole."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(HIDDEN, HIDDEN)
            self.norm, self.up = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, WIDE, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = functional.relu(self.first(x))
            return self.up(x) + self.norm(x).sum(-1, keepdim=True)

    x = torch.randn(SAMPLES, LENGTH, HIDDEN)
    wanted = {"relu": "S1 -> S1", "linear_1": "R S0 -> S2", "layer_norm": "S1 R R -> S1"}
    configuration = sharded(Block(), x, (N,), wanted)
    again = {n: one.saved for n, one in sharded(Block(), x, (N,), wanted, regather=True).operators.items()}
    saved = {n: operator.saved for n, operator in configuration.operators.items()}
    whole = x.numel() * 4
    part = whole / N
    assert list(saved["relu"].values()) == [part]
    assert list(saved["linear_1"].values()) == [whole]
    statistics = 2 * SAMPLES * LENGTH * 4 / N
    assert sum(saved["layer_norm"].values()) == part + statistics
    assert saved["relu"].keys() <= saved["layer_norm"].keys()  # the norm keeps what relu keeps
    assert not saved["linear_1"].keys() & saved["relu"].keys()
    assert again["linear_1"].keys() == again["relu"].keys() == saved["relu"].keys()  # gathered again, it adds nothing


@pytest.mark.slow
def test_views_of_one_tensor_are_kept_once() -> None:
    """A query, a key and a value that are parts of one product's result."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            split = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
            return functional.scaled_dot_product_attention(*split)

    x = torch.randn(SAMPLES, LENGTH, HIDDEN)
    whole, cut = (
        kept_bytes(
            sharded(
                Attention(),
                x,
                (N,),
                {"linear": f"{s} R R -> {s}", "scaled_dot_product_attention": f"{s} {s} {s} -> {s}"},
            )
        )
        for s in ("R", "S0")
    )
    tensors = 5 * x.numel() * 4  # input, query, key, value, result
    assert whole == pytest.approx(tensors + SAMPLES * 4 * LENGTH * 4)  # and a sum for every row of every head
    assert cut == pytest.approx(whole / N)
