"""A stage on a mesh, projected to every one of its devices, computes what the original model computes.

The ranks are threads here, with a stand-in for the collectives of processes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from models import assert_same_gradients, assert_same_outputs, sum_of_squares
from rank_threads import RankThreads
from shardings import Attention, Convolutions, InPlace, Mlp, Pieces, Tied, at_random
from torch import nn

from autopar.analysis.example import examine
from autopar.analysis.operators import operator_keys
from autopar.capture.program import Program
from autopar.capture.torch_private import tree_leaves
from autopar.lower.projection import project
from autopar.lower.random_operators import seeded
from autopar.lower.regather import with_shards_kept
from autopar.lower.sharded import Piece
from autopar.lower.stages import StageProgram, lower, replica
from autopar.sharding.stage_sharding import StageSharding
from cost_models.graphs import get_attribute

pytestmark = pytest.mark.usefixtures("shared_exports")

MESHES = [(2,), pytest.param((3,), marks=pytest.mark.slow), (2, 2)]
CPU = torch.device("cpu")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> RankThreads:
    return RankThreads(monkeypatch)


def captured(
    model: nn.Module, x: torch.Tensor, choose: Callable[[Program], StageSharding]
) -> tuple[Program, StageProgram]:
    program, batching = examine(model, (x,), {}, {"cpu"}, batch_dim=None, verify=False)
    stage_of = dict.fromkeys(operator_keys(program), 0)
    (stage,) = lower(program, stage_of, batching.storages, shardings=[choose(program)]).stages
    return program, stage


def on_ranks(
    ranks: RankThreads,
    program: Program,
    stage: StageProgram,
    mesh: tuple[int, ...],
    x: torch.Tensor,
    seed: int | None = None,
) -> list[tuple[list[torch.Tensor], torch.Tensor | None, dict[str, tuple[Piece, torch.Tensor]]]]:
    """For every rank: its outputs, the gradient of its input, and its pieces with their leaves."""

    def work(rank: int) -> Any:
        own = project(stage, rank, mesh, ranks.lines(mesh, rank))
        leaves: dict[str, torch.Tensor] = {}
        for piece in own.pieces:
            whole = get_attribute(program.graph_module, piece.name)
            part = piece.taken(whole).clone()
            leaves[piece.attribute] = nn.Parameter(part, whole.requires_grad) if part.is_floating_point() else part
        module = replica(own, leaves, [CPU], CPU)
        mine = x.clone().requires_grad_() if x.is_floating_point() else x
        with nullcontext() if seed is None else seeded(seed):
            outputs = with_shards_kept(module)(mine)
        sum_of_squares(outputs).backward()
        pieces = {piece.name: (piece, leaves[piece.attribute]) for piece in own.pieces}
        return [y.detach() for y in outputs], mine.grad, pieces

    return ranks.run(work, math.prod(mesh))


def whole_gradients(found: list[Any], model: nn.Module) -> dict[str, torch.Tensor]:
    """What the pieces' gradients add up to."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    by_id = {id(p): name for name, p in parameters.items()}  # the last of a tied parameter's names
    for _, _, pieces in found:
        for name, (piece, leaf) in pieces.items():
            if leaf.grad is not None:
                whole = total[by_id[id(parameters[name])]]
                part = whole if piece.whole else whole[piece.entries(whole)]
                part.add_(leaf.grad)
    return {name: total[by_id[id(p)]] for name, p in parameters.items()}


def assert_as_the_original(
    ranks: RankThreads, model: nn.Module, x: torch.Tensor, mesh: tuple[int, ...], seed: int
) -> None:
    program, stage = captured(model, x, lambda program: at_random(program, mesh, seed))
    original = copy.deepcopy(model)
    mine = x.clone().requires_grad_() if x.is_floating_point() else x
    expected = tree_leaves(original(mine))
    sum_of_squares(expected).backward()
    found = on_ranks(ranks, program, stage, mesh, x)
    for outputs, gradient, _ in found:
        assert_same_outputs(outputs, [y.detach() for y in expected], 1e-9)
        if x.is_floating_point():
            torch.testing.assert_close(gradient, mine.grad, rtol=1e-9, atol=1e-9)
    wanted = {name: p.grad for name, p in original.named_parameters(remove_duplicate=False)}
    assert_same_gradients(whole_gradients(found, model), wanted, 1e-9)
    for calls in ranks.log.values():  # every group's ranks called the same, in the same order
        first, *others = calls.values()
        assert all(other == first for other in others)


def rows(*shape: int) -> Callable[[int], torch.Tensor]:
    return lambda batch: torch.randn(batch, *shape, dtype=torch.float64)


GRAPHS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "mlp": (Mlp, rows(12)),
    "attention": (Attention, rows(12, 24)),
    "convolutions, frozen norms": (lambda: Convolutions().eval(), rows(3, 8, 8)),
    "tied": (Tied, lambda batch: torch.randint(24, (batch, 12))),
    "pieces": (Pieces, rows(4, 12)),
    "in place": (InPlace, rows(12, 12)),
}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("graph", GRAPHS)
def test_ranks_with_any_strategies_give_the_originals_outputs_and_gradients(
    ranks: RankThreads, graph: str, mesh: tuple[int, ...], seed: int
) -> None:
    build, inputs = GRAPHS[graph]
    torch.manual_seed(0)
    assert_as_the_original(ranks, build().double(), inputs(2 * math.prod(mesh)), mesh, seed)


def test_batch_norm_over_all_ranks_rows_moves_the_running_statistics_of_every_rank_alike(ranks: RankThreads) -> None:
    torch.manual_seed(0)
    model, x = Convolutions().double(), torch.randn(8, 3, 8, 8, dtype=torch.float64)
    original = copy.deepcopy(model)
    program, stage = captured(model, x, lambda program: at_random(program, (2,), 1))
    assert stage.written_buffers
    expected = original(x)
    sum_of_squares(expected).backward()
    found = on_ranks(ranks, program, stage, (2,), x)
    for (output,), _, pieces in found:
        torch.testing.assert_close(output, expected.detach())
        for name, wanted in original.named_buffers():
            if name in pieces:
                piece, buffer = pieces[name]
                torch.testing.assert_close(buffer.detach(), piece.taken(wanted))
