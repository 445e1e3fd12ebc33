"""Parameters that are stored in parts (ZeRO 3, FSDP): what gathering them takes, when, and the bytes that it needs."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

from autopar import Cluster
from autopar.analysis.example import example_ahead
from autopar.capture.repeated_layers.fold import fold
from autopar.costs.cost_graph import CostGraph
from autopar.costs.estimated import estimate_costs
from autopar.costs.python_overhead import ACTION_OVERHEAD
from autopar.planner.arrangement import Arrangement, Conditions
from autopar.planner.inter_op.candidates import Searching
from autopar.planner.inter_op.mesh_configuration import MeshConfiguration, mesh_configuration
from autopar.planner.inter_op.meshes import mesh_program_of
from autopar.planner.inter_op.split_program import SplitProgram
from autopar.planner.inter_op.stage_costs import Costs
from autopar.planner.inter_op.stage_tables import Mode
from autopar.planner.intra_op.sharding_task import GraphFacts, ShardingTask
from autopar.planner.intra_op.strategy_search import Sharding, ShardingProblem
from autopar.planner.predict import as_plan
from autopar.planner.priced_step import predicted_step
from autopar.planner.search_options import SearchOptions
from autopar.schedule.timeline import Timeline
from autopar.sharding.layouts import REPLICATE
from autopar.sharding.mesh import make_mesh
from autopar.sharding.stage_sharding import Stored, strategy_text

N, M, SAMPLES, LENGTH, HIDDEN, WIDE = 4, 4, 32, 256, 1024, 4096
CLUSTER = Cluster.preset("4xH100")
MESH = make_mesh((N,), [device.name for device in CLUSTER.devices])
WHOLE, CUT = Stored((REPLICATE,), (REPLICATE,)), Stored((0,), (0,))
WEIGHTS = {
    "up.weight": HIDDEN * WIDE * 4,
    "down.weight": HIDDEN * WIDE * 4,
    "last.weight": HIDDEN * HIDDEN * 4,
}  # bytes


class Linears(nn.Module):
    """Three products, the first one without training if it is frozen."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, WIDE, bias=False), nn.Linear(WIDE, HIDDEN, bias=False)
        self.last = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.down.weight.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.down(functional.gelu(self.up(x)))).square().mean()


class Found(NamedTuple):
    costs: CostGraph
    task: ShardingTask
    solution: Sharding
    configuration: MeshConfiguration


def data_parallel(stored: Stored, *, frozen: bool = False) -> Found:
    """Every device does a quarter of the samples with whole weights, which it has as `stored`."""
    with torch.device("meta"):
        model, x = Linears(frozen).train(), torch.empty(SAMPLES, LENGTH, HIDDEN)
    example = example_ahead(model, (x,), {}, batch_dim=None)
    costs, subject = estimate_costs(example, CLUSTER), mesh_program_of(example, "none")
    folded, rows = fold(subject.module), SAMPLES // M
    task = ShardingTask(folded.module, subject.inputs(rows), rows, CLUSTER, n_microbatches=M, optimizer="none")
    problem = ShardingProblem(task, MESH)
    wanted = {"linear": "S0 R -> S0", "gelu": "S0 -> S0", "linear_1": "S0 R -> S0", "linear_2": "S0 R -> S0"}
    strategies = {
        node: next(s for s in problem.options[node].costs.strategies if strategy_text(s) == text)
        for node, text in wanted.items()
    }
    solution = problem.with_choices(strategies, dict.fromkeys(WEIGHTS, stored))
    nodes = {n.name: n for n in subject.module.graph.nodes if n.name in costs.graph}
    program = SplitProgram(costs, folded, nodes, subject.storages)
    kind = CLUSTER.devices[0].kind
    own = mesh_configuration("mesh", kind, program, task, GraphFacts(task), solution, fastest=True)
    return Found(replace(costs, configurations=(own,), alone=False), task, solution, own)


def step_of(found: Found, recompute: bool) -> Timeline:
    """Of one stage on the mesh."""
    searching = Searching(found.costs, SearchOptions(loss_inside=True, optimizer="none"))
    everything = tuple(range(len(searching.atoms.nodes)))
    mesh = found.costs.group(tuple(MESH.devices))
    arrangement = Arrangement((everything,), ((mesh,),), M, "1f1b", (recompute,), ("mesh",))
    step = predicted_step(found.costs, searching.atoms, arrangement, Conditions(optimizer="none", loss_inside=True))
    timeline = step.timeline()
    problem = searching.problem(M, "1f1b", searching.full)
    costs, mode = Costs(problem, problem.counts), Mode(0, recompute)
    objective = (costs.terms_of(mode, 1).fill + costs.max_term(mode, 1))[costs.pair(0, -1)]
    assert objective == pytest.approx(timeline.step_time), "the search's objective is the simulated step"
    plan = as_plan(found.costs, searching.atoms, arrangement, step, timeline)
    assert plan.stages[0].sharding is not None
    return timeline


@pytest.mark.slow
def test_a_gather_happens_before_every_forward_and_backward_and_a_scatter_behind_every_backward() -> None:
    """One micro-batch, by hand: gather, forward; gather, backward, scatter."""
    plain, zero3 = (data_parallel(stored).solution for stored in (WHOLE, CUT))
    gather = sum(MESH.seconds("all_gather", nbytes, 0, CLUSTER) for nbytes in WEIGHTS.values())
    scatter = sum(MESH.seconds("reduce_scatter", nbytes, 0, CLUSTER) for nbytes in WEIGHTS.values())
    reduced = sum(c.seconds for c in plain.collectives if c.once) / M
    assert plain.seconds - reduced + 2 * gather + scatter == pytest.approx(zero3.seconds)
    of_weights = [c for c in zero3.collectives if c.tensor in WEIGHTS]
    assert sum(c.seconds for c in of_weights if not c.backward) == pytest.approx(gather)
    assert sum(c.seconds for c in of_weights if c.backward) == pytest.approx(gather + scatter)
    assert not any(c.once for c in of_weights)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_gathers_twice_a_micro_batch_and_once_more_if_its_stage_recomputes(recompute: bool) -> None:
    plain, zero3 = data_parallel(WHOLE), data_parallel(CUT)
    gather = sum(MESH.seconds("all_gather", nbytes, 0, CLUSTER) for nbytes in WEIGHTS.values())
    scatter = sum(MESH.seconds("reduce_scatter", nbytes, 0, CLUSTER) for nbytes in WEIGHTS.values())
    once = sum(c.seconds for c in plain.solution.collectives if c.once)
    forward = sum(work.forward for work in zero3.solution.work.values())
    backward = sum(work.backward for work in zero3.solution.work.values())
    of_others = [c for c in zero3.solution.collectives if c.tensor not in WEIGHTS]
    forward += sum(c.seconds for c in of_others if not c.backward)
    backward += sum(c.seconds for c in of_others if c.backward)
    kernels = (2 if recompute else 1) * forward + backward + 2 * ACTION_OVERHEAD
    gathers = 3 if recompute else 2
    assert step_of(plain, recompute).step_time == pytest.approx(M * kernels + once)
    assert step_of(zero3, recompute).step_time == pytest.approx(M * (kernels + gathers * gather + scatter))


def test_a_frozen_weight_is_gathered_for_the_backward_that_passes_it_and_has_no_gradient() -> None:
    found = data_parallel(CUT, frozen=True)
    of_frozen = [c for c in found.solution.collectives if c.tensor == "down.weight"]
    assert [(c.backward, [s.collective for s in c.steps]) for c in of_frozen] == [
        (False, ["all_gather"]),
        (True, ["all_gather"]),
    ]
    assert found.solution.gathered["linear_1"] == WEIGHTS["down.weight"]


@pytest.mark.slow
def test_the_peak_holds_the_whole_weight_and_gradient_of_the_operator_that_runs() -> None:
    """And of no other: parts are gathered when they are needed, and let go."""
    plain, zero3 = data_parallel(WHOLE), data_parallel(CUT)
    of_linears = {"linear": "up.weight", "linear_1": "down.weight", "linear_2": "last.weight"}
    assert zero3.solution.gathered == {node: 2 * WEIGHTS[name] for node, name in of_linears.items()}
    assert not plain.solution.gathered
    held = 2 * sum(WEIGHTS.values())  # weights and gradients
    others = {node: _transient(plain, node) for node in of_linears}  # with a fresh gradient
    most = max(others[node] + WEIGHTS[name] for node, name in of_linears.items())
    peaks = [step_of(found, False).peak_memory for found in (plain, zero3)]
    assert all(peaks)
    assert peaks[1][0] - peaks[0][0] == pytest.approx(held / N - held + most - max(others.values()), rel=1e-6)  # type: ignore[index]


def _transient(found: Found, node: str) -> float:
    """Bytes of a micro-batch while an operator runs."""
    cost = found.configuration.operators[node]
    return (cost.allocated_bytes + cost.output_bytes + cost.gradient_bytes) / M
