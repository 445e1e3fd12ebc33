"""The solutions of a mesh that the partition search picks from: fast ones, and small ones where memory may lack."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar import Cluster, Plan
from autopar.analysis.example import example_ahead
from autopar.analysis.operators import on_device
from autopar.capture.program import capture
from autopar.costs.estimated import estimate_costs
from autopar.planner.inter_op.meshes import Meshes, mesh_program_of
from autopar.planner.intra_op.frontier import frontier
from autopar.planner.intra_op.sharding_task import ShardingTask
from autopar.planner.intra_op.strategy_search import Sharding, ShardingProblem
from autopar.sharding.mesh import make_mesh

META = torch.device("meta")
M, ROWS = 16, 4096
CLUSTER = Cluster.preset("8xH100")


class Mlp(nn.Module):
    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x))).square().mean()


def problem(rows: int = ROWS) -> ShardingProblem:
    """Micro-batches of `rows` samples on four devices."""
    with META:
        model, x = Mlp().train(), torch.empty(rows, 1024)
    program = capture(model, (x,), {})
    module = on_device(program.graph_module, program.device, META)
    task = ShardingTask(module, [x], rows, CLUSTER, n_microbatches=M)
    return ShardingProblem(task, make_mesh((4,), [device.name for device in CLUSTER.devices[:4]]))


def costs(one: Sharding) -> tuple[float, float, float, float]:
    return one.each, one.once, one.nbytes - one.resident, one.resident


def in_flight(one: Sharding, n: int) -> float:
    """Bytes with `n` micro-batches in flight."""
    return one.resident + n * (one.nbytes - one.resident)


def test_one_mesh_with_enough_memory_needs_the_fastest_strategies_alone() -> None:
    one = problem()
    (found,) = frontier(one, math.inf, n_meshes=1, most=8)
    assert found == one.priced(0.0)
    enough = in_flight(found, M) * 2
    assert frontier(one, enough, 1, 8) == (found,)


@pytest.mark.parametrize("room", [1.0, 0.8, 0.6])
def test_small_strategies_are_offered_for_all_micro_batches_that_are_in_flight(room: float) -> None:
    """One of them alone would leave most of the memory free."""
    one = problem()
    fastest = one.priced(0.0)
    memory = room * in_flight(fastest, M)
    assert 2 * fastest.nbytes < memory
    found = frontier(one, memory, 2, 8)
    assert len(found) > 1
    assert min(in_flight(other, M) for other in found) < in_flight(fastest, M)


@pytest.mark.slow
def test_the_meshes_of_a_cluster_offer_them_too() -> None:
    with META:
        model, x = Mlp().train(), torch.empty(ROWS * M, 1024)
    example = example_ahead(model, (x,), {}, batch_dim=None)
    of_devices = estimate_costs(example, CLUSTER)

    def solutions(limit: float | None) -> list[Sharding]:
        found = Meshes(of_devices, mesh_program_of(example, "adamw"), limit).configurations(4, M)
        return [one.solution for one in found if one.solution.mesh.shape == (4,)]

    fastest = solutions(None)[0]
    limit = 0.7 * in_flight(fastest, M)
    assert 2 * fastest.nbytes < limit
    assert min(in_flight(one, M) for one in solutions(limit)) < in_flight(fastest, M)


@pytest.mark.parametrize("memory", [5e7, 1e8, 2e8])
def test_no_solution_is_worse_than_another_in_all_four_costs_and_the_first_one_is_the_fastest(memory: float) -> None:
    one = problem()
    found = frontier(one, memory, 8, 8)
    assert 2 < len(found) <= 8
    for a, b in itertools.permutations(found, 2):
        assert any(x < y for x, y in zip(costs(a), costs(b), strict=True))
    assert found[0].seconds == pytest.approx(one.priced(0.0).seconds)
    assert found[0].seconds == min(other.seconds for other in found)
    for other in found:
        assert other.seconds == pytest.approx(other.each + other.once / M)
    assert len(frontier(one, memory, 8, 2)) <= 2
    assert frontier(one, memory, 8, 8) == found


def test_what_happens_once_a_step_weighs_more_on_meshes_that_run_few_of_the_micro_batches() -> None:
    """The reduction of gradients is shared by 16 micro-batches, or belongs to one: then tensors are split instead."""
    one = problem()
    many, *few = frontier(one, math.inf, n_meshes=M, most=8)
    assert len(few) == 1
    assert few[0].each + few[0].once < many.each + many.once
    assert few[0].seconds > many.seconds


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(1024), nn.Linear(1024, 4096), nn.Linear(4096, 1024)
        self.q, self.k, self.v, self.o = (nn.Linear(1024, 1024) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (of(self.norm(x)).unflatten(-1, (8, 128)).transpose(1, 2) for of in (self.q, self.k, self.v))
        scores = torch.softmax(q @ k.transpose(-1, -2) / 8, -1)
        x = x + self.o((scores @ v).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(x)))


class Deep(nn.Module):
    """Layers that are recomputed one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(2)), nn.Linear(1024, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_search_finds_what_a_plan_by_hand_fits_into(recompute: str) -> None:
    """Its memory is scarce to the byte: what operators need while they run, and layers that run again, count."""
    with META:
        model, x, y = Deep().train(), torch.empty(8, 512, 1024), torch.empty(8, 512, 512)
    cluster, call = Cluster.preset("2xA100-80"), {"example_args": (x,), "target": y, "loss_fn": functional.mse_loss}
    hand = Plan.by_hand(model, cluster, tensor=2, micro_batch=2, recompute=recompute, **call)
    limit = max(stage.peak_memory or 0 for stage in hand.stages) + 1
    found = autopar.plan(model, cluster, memory_limit=limit, n_microbatches=4, **call)
    assert found.predicted_step_time is not None
    assert hand.predicted_step_time is not None
    assert found.predicted_step_time <= hand.predicted_step_time * 1.001


@pytest.mark.slow
def test_more_memory_makes_no_plan_slower_where_the_step_of_the_optimizer_decides_what_fits() -> None:
    with META:
        sizes = (1024, 1024, 256, 256, 2048)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in itertools.pairwise(sizes)))
        x = torch.empty(8, 16, 1024)
    held = sum(4 * p.numel() for p in model.parameters())
    steps = [
        autopar.plan(
            model, Cluster.preset("2xH100"), example_args=(x,), optimizer="adam", memory_limit=share * held
        ).predicted_step_time
        for share in (2.7, 3.0, 3.6)
    ]
    assert all(b <= a * 1.001 for a, b in itertools.pairwise(steps))  # type: ignore[operator]
