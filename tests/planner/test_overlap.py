"""Collectives behind computing: objective and simulator agree, nothing gets slower, and activations never overlap."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_hand_plans import Language
from test_prices import INSIDE, OPTIONS, SAME, Mlp, line_of, meshes_of, objective, one_stage, two_stages

import autopar
from autopar import Cluster, InputError, Plan
from autopar.analysis.example import example_ahead
from autopar.costs.cost_graph import CostGraph
from autopar.costs.estimated import estimate_costs
from autopar.costs.gradient_reduction import bucketed
from autopar.costs.recipe import Recipe
from autopar.planner.inter_op.candidates import Searching
from autopar.planner.inter_op.mesh_configuration import MeshConfiguration, mesh_configuration
from autopar.planner.inter_op.meshes import Meshes, mesh_program_of
from autopar.planner.intra_op.sharding_task import GraphFacts
from autopar.planner.intra_op.strategy_search import ShardingProblem
from autopar.planner.predict import as_plan
from autopar.planner.predicted_step import step_of_plan
from autopar.planner.priced_step import predicted_step
from autopar.schedule.builders import SPLIT_BACKWARD
from autopar.sharding.mesh import make_mesh
from autopar.sharding.stage_sharding import Stored
from cost_models.collectives.overlap import OVERLAPS, SLOWDOWN, Overlap, left_over, overlap_named

NAMES = ["none", "gradients", "parameters", "sends", "gradients+parameters", "all"]
CLUSTERS = [("4xH100", 2), ("8xA100-80", 1), ("2xT4", 4)]


def overlapping(costs: CostGraph, name: str) -> CostGraph:
    return replace(costs, recipe=replace(costs.recipe or Recipe(), overlap=overlap_named(name)))


# -- one collective behind one pass -----------------------------------------------------------------------------------


@given(seconds=st.floats(0, 10), room=st.floats(0, 10), bucket=st.floats(0, 10))
def test_what_is_left_over_is_that_of_kernels_that_slow_down_while_the_network_is_busy(
    seconds: float, room: float, bucket: float
) -> None:
    apart = min(bucket, seconds)
    behind = seconds - apart
    work_done = min(room, behind / (1 + SLOWDOWN))  # while the network is busy
    end = max(behind, 0.0) + (room - work_done)  # then the rest of the work at full speed
    assert left_over(seconds, room, bucket) == pytest.approx(end - room + apart, abs=1e-9)
    assert left_over(seconds, room, bucket) <= seconds * (1 + 1e-12)
    assert left_over(seconds, room, bucket) >= left_over(seconds, room + 1, bucket) - 1e-12


@pytest.mark.parametrize("name", [*NAMES, "serial"])
def test_an_overlap_prints_as_it_is_named(name: str) -> None:
    assert str(overlap_named(name)) == name
    assert overlap_named("+".join(reversed(OVERLAPS))) == overlap_named("all") == Overlap(*[True] * len(OVERLAPS))


@pytest.mark.parametrize("wrong", ["", "gradient", "gradients,sends", "sends+sends", "all+sends", "serial+sends"])
def test_an_unknown_overlap_is_refused_with_the_names(wrong: str) -> None:
    with pytest.raises(InputError, match=r"overlap cannot be used.*gradients, parameters, gathers, sends"):
        autopar.plan(Mlp(8), Cluster.preset("2xH100"), example_args=(torch.zeros(2, 4, 8),), overlap=wrong)


# -- the objective is the simulated step ------------------------------------------------------------------------------


@given(
    seconds=st.lists(st.floats(1e-3, 1e-1), min_size=1, max_size=5),
    mbytes=st.floats(1e-3, 1e3),
    replicas=st.integers(1, 8),
    m=st.sampled_from([1, 2, 4, 8, 16]),
    schedule=st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    cluster=st.sampled_from(CLUSTERS),
)
def test_gradients_of_replicas_behind_the_backward_have_one_price(
    seconds: list[float], mbytes: float, replicas: int, m: int, schedule: str, cluster: tuple[str, int]
) -> None:
    replicas = min(replicas, m)
    apart = line_of(seconds, [int(mbytes * 2**20)] * len(seconds), Cluster.preset(*cluster))
    costs = overlapping(apart, "gradients")
    searching = Searching(costs, OPTIONS)
    problem = searching.problem(m, schedule, (replicas,))
    arrangement = one_stage(searching, replicas, m, schedule)
    step = predicted_step(costs, searching.atoms, arrangement, INSIDE)
    assert objective(problem, 0, replicas) == pytest.approx(step.timeline().step_time, rel=SAME)
    exposed = predicted_step(apart, searching.atoms, arrangement, INSIDE)
    assert step.timeline().step_time <= exposed.timeline().step_time * (1 + 1e-12)
    if replicas > 1 and schedule not in SPLIT_BACKWARD:
        backward = 2 * sum(seconds) / m
        reduction, bucket = exposed.stages[0].once, step_of_bucket(costs, replicas)
        assert step.stages[0].once == pytest.approx(left_over(reduction, backward, bucket))


def step_of_bucket(costs: CostGraph, replicas: int) -> float:
    cluster = costs.cluster
    assert cluster is not None
    names = [device.name for device in costs.devices[:replicas]]
    return bucketed(lambda n: cluster.seconds("all_reduce", n, names), 25 << 20)


@cache
def of_mlp(name: str, cut: bool, m: int) -> tuple[CostGraph, str]:
    """An MLP over a mesh of four H100, replicas with whole or cut parameters (ZeRO 1 or 3), and its configuration."""
    with torch.device("meta"):
        model, x = Mlp().train(), torch.empty(64, 512, 1024)
    example = example_ahead(model, (x,), {}, batch_dim=None)
    costs = estimate_costs(example, Cluster.preset("4xH100"), Recipe(overlap=overlap_named(name)), n_microbatches=m)
    subject = mesh_program_of(example, "none")
    folded = Meshes(costs, subject)._folded
    task = subject.task(costs, folded, m)
    facts = GraphFacts(task)
    problem = ShardingProblem(task, make_mesh((4,), [device.name for device in costs.devices], ("data",)), facts)
    samples = {
        node: next(s for s in choice.costs.strategies if all(p[0] == 0 for p in (*s.inputs[:1], *s.outputs[:1])))
        for node, choice in problem.options.items()
        if any(all(p[0] == 0 for p in (*s.inputs[:1], *s.outputs[:1])) for s in choice.costs.strategies)
    }
    stored = {one: Stored((0,) if cut else (-1,), (0,)) for one in problem.stored if one.endswith("weight")}
    found = problem.with_choices(samples, stored)
    program = subject.program(costs, folded)
    mesh = mesh_configuration("replicas", costs.devices[0].kind, program, task, facts, found, fastest=True)
    return replace(costs, configurations=(mesh,), alone=False), mesh.name


@pytest.mark.slow
@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_collectives_of_a_mesh_behind_its_passes_have_one_price(name: str, cut: bool, schedule: str, m: int) -> None:
    costs, configuration = of_mlp(name, cut, m)
    searching = Searching(costs, OPTIONS)
    arrangement = one_stage(searching, 1, m, schedule, configuration)
    step = predicted_step(costs, searching.atoms, arrangement, INSIDE)
    timeline = step.timeline()
    kind = [k.name for k in searching.problem(m, schedule, searching.full).kinds].index(configuration)
    assert objective(searching.problem(m, schedule, searching.full), kind, 1) == pytest.approx(
        timeline.step_time, rel=SAME
    )
    plan = as_plan(costs, searching.atoms, arrangement, step, timeline)
    loaded = step_of_plan(Plan.from_json(plan.to_json()))
    assert loaded is not None
    assert loaded.timeline().step_time == pytest.approx(timeline.step_time)
    # Behind passes nothing gets slower; what overlaps depends on what is stored in parts.
    apart, _ = of_mlp("none", cut, m)
    exposed = predicted_step(apart, Searching(apart, OPTIONS).atoms, arrangement, INSIDE).timeline().step_time
    overlap = overlap_named(name)
    if overlap.gradients or overlap.parameters:
        assert timeline.step_time < exposed
    else:
        assert timeline.step_time == pytest.approx(exposed, rel=1e-12)


def test_a_pass_takes_no_less_than_its_network_and_no_less_than_its_kernels() -> None:
    costs, name = of_mlp("all", True, 4)
    (mesh,) = costs.configurations
    assert isinstance(mesh, MeshConfiguration)
    searching = Searching(costs, OPTIONS)
    (stage,) = predicted_step(costs, searching.atoms, one_stage(searching, 1, 4, "1f1b", name), INSIDE).stages
    for backward, taken in ((False, stage.forward[0]), (True, stage.backward[0])):
        every = [c for c in mesh.solution.collectives if c.backward is backward and not c.once]
        assert every
        exposed = sum(c.seconds for c in every if c.moves == "activation")  # the loss
        works = [w.backward if backward else w.forward for w in mesh.solution.work.values()]
        network, kernels = sum(c.seconds for c in every), sum(works)
        lost = (network - exposed) * SLOWDOWN / (1 + SLOWDOWN)
        assert taken >= max(network, kernels + exposed + lost) * (1 - 1e-9)
        assert taken < kernels + network


# -- plans ------------------------------------------------------------------------------------------------------------

DEGREES = [
    {"tensor": 4},
    {"tensor": 2, "zero": 1},
    {"zero": 3},
    {"tensor": 2, "zero": 3, "recompute": "full"},
    {"pipeline": 2, "tensor": 2, "data": 2, "zero": 1, "micro_batch": 1},
    {"pipeline": 2, "chunks": 2, "data": 2, "zero": 1, "micro_batch": 1},
    {"pipeline": 2, "data": 2, "schedule": "zb-h1", "micro_batch": 1},
]


@pytest.mark.parametrize("degrees", DEGREES)
@pytest.mark.slow
def test_overlap_never_makes_a_plan_by_hand_slower(degrees: dict[str, object]) -> None:
    model, tokens = Language(4 if "chunks" in degrees else 2), torch.zeros(16, 64, dtype=torch.long)
    wanted = {"data": None, **degrees}
    size = int(str(degrees.get("tensor", 1))) * int(str(degrees.get("pipeline", 1))) * int(str(degrees.get("data", 2)))
    if "data" not in degrees and "zero" not in degrees:
        size = 4
    cluster = Cluster.preset(f"{size}xV100")
    seconds = {}
    for name in NAMES:
        plan = Plan.by_hand(model, cluster, example_args=(tokens,), overlap=name, **wanted)  # type: ignore[arg-type]
        assert plan.predicted_step_time is not None
        assert "np." not in repr(plan)  # a plan has numbers of Python alone
        seconds[name] = plan.predicted_step_time
    slack = 1 + 1e-9
    for name in NAMES:
        assert seconds["all"] <= seconds[name] * slack
        assert seconds[name] <= seconds["none"] * slack
    assert seconds["gradients+parameters"] <= min(seconds["gradients"], seconds["parameters"]) * slack
    if degrees == {"tensor": 4}:  # one stage whose devices exchange activations alone
        assert seconds["all"] == pytest.approx(seconds["none"], rel=1e-12)


@pytest.mark.slow
def test_a_search_that_may_overlap_is_never_slower() -> None:
    model, tokens = Language(2), torch.zeros(16, 64, dtype=torch.long)
    cluster = Cluster.preset("2xT4", nodes=2)
    steps = {
        name: autopar.plan(model, cluster, example_args=(tokens,), overlap=name).predicted_step_time or 0.0
        for name in ("none", "gradients", "all")
    }
    assert steps["all"] <= steps["gradients"] * (1 + SAME)
    assert steps["gradients"] <= steps["none"] * (1 + SAME)


def test_senders_that_wait_make_a_pipeline_slower() -> None:
    costs = line_of([0.01] * 4, [4] * 4, Cluster.preset("2xH100"), sent=1e9)
    steps = []
    for name in ("none", "sends"):
        own = overlapping(costs, name)
        searching = Searching(own, OPTIONS)
        arrangement = replace(two_stages(searching, 2, 8), schedule="gpipe")
        step = predicted_step(own, searching.atoms, arrangement, INSIDE)
        steps.append(step.timeline().step_time)
        plan = as_plan(own, searching.atoms, arrangement, step, step.timeline())
        assert [t.blocking for t in plan.transfers] == [name == "none"]
        loaded = step_of_plan(Plan.from_json(plan.to_json()))
        assert loaded is not None
        assert loaded.timeline().step_time == pytest.approx(steps[-1], rel=SAME)
    assert steps[1] < steps[0]


@pytest.mark.slow
def test_exposed_communication_falls_with_overlap() -> None:
    model, tokens = Language(4), torch.zeros(16, 64, dtype=torch.long)
    cluster = Cluster.preset("4xH100")
    # So small a model waits for launches otherwise, whatever overlaps.
    call: dict[str, Any] = {"example_args": (tokens,), "launch": "cuda-graphs"}
    plan = Plan.by_hand(model, cluster, zero=3, **call)
    exposed = [
        autopar.compare(model, cluster, plans={"own": plan}, overlap=name, **call)["own"].communication
        for name in ("none", "all")
    ]
    assert 0 <= exposed[1] < exposed[0]


def test_meshes_of_the_search_know_what_may_overlap() -> None:
    costs, name = of_mlp("all", False, 4)
    (mesh,) = costs.configurations
    assert isinstance(mesh, MeshConfiguration)
    table = mesh.table
    assert table.overlapped is not None
    once = [c for c in mesh.solution.collectives if c.once]
    assert sum(c.seconds for c in once if c.moves == "gradient") == pytest.approx(table.overlapped.gradients.sum())
    assert sum(c.seconds for c in once if c.moves == "parameter") == pytest.approx(table.overlapped.parameters.sum())
    assert table.once is not None
    assert not table.once.any()
    assert not np.any(table.overlapped.hidden)  # whole parameters: nothing for every micro-batch
    assert meshes_of(costs)
    assert name == mesh.name
