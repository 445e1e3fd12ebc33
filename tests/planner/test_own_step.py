"""A plan's own numbers make the step that it predicts, and changes of them count from there."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from test_prices import BATCH, line_of
from test_step_prices import launched
from torch import nn

from autopar import Plan
from autopar.costs.recipe import Recipe
from autopar.plan.display import step_parts
from autopar.plan.recompute import Recompute
from autopar.plan.scaling import scaled
from autopar.planner.arrangement import Arrangement, Conditions
from autopar.planner.explain import own_explanation
from autopar.planner.inter_op.candidates import Searching
from autopar.planner.other_networks import network_sensitivity
from autopar.planner.predict import as_plan
from autopar.planner.predicted_step import step_of_plan
from autopar.planner.priced_step import predicted_step
from autopar.planner.search_options import SearchOptions
from autopar.planner.sensitivity import sensitivity
from autopar.schedule.builders import INTERLEAVED, SCHEDULES, possible_chunks, ranks_of_stages
from cost_models import Cluster
from cost_models.collectives.overlap import Overlap

SAME = 1e-9
SECONDS = st.floats(1e-4, 1e-1)
DEGREES: tuple[dict[str, Any], ...] = (
    {"data": 4},
    {"tensor": 4},
    {"pipeline": 4, "micro_batch": 4},
    {"pipeline": 4, "micro_batch": 4, "schedule": "zb-h1"},
    {"pipeline": 2, "tensor": 2, "micro_batch": 4},
    {"pipeline": 2, "data": 2, "micro_batch": 4, "recompute": "full"},
)


def model_and_call(loss_inside: bool) -> tuple[nn.Module, dict[str, Any]]:
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(4)]
        model, x = nn.Sequential(*layers).train(), torch.empty(64, 1024)
    call: dict[str, Any] = {"example_args": (x,)}
    if loss_inside:
        call |= {"target": x, "loss_fn": nn.functional.mse_loss}
    return model, call


@cache
def priced(number: int, loss_inside: bool) -> Plan:
    model, call = model_and_call(loss_inside)
    return Plan.by_hand(model, Cluster.preset("4xH100"), **DEGREES[number], **call)


@st.composite
def small_plans(draw: st.DrawFn) -> Plan:
    """Of four operators in up to four stages. Micro-batches are often uneven, and take not as their samples say:
    launches take as long for one sample as for many."""
    kernels, launches = (draw(st.lists(SECONDS, min_size=4, max_size=4)) for _ in range(2))
    costs = line_of(
        kernels, [1 << 20] * 4, Cluster.preset("8xH100"), sent=1e8, accumulated=draw(st.sampled_from([0, 0.1]))
    )
    costs = launched(costs, launches, recipe=Recipe(overlap=Overlap(sends=draw(st.booleans()))))
    costs = dataclasses.replace(costs, training=draw(st.booleans()))
    m, schedule, ranks = draw(st.integers(1, BATCH)), draw(st.sampled_from(SCHEDULES)), draw(st.sampled_from([1, 2, 4]))
    every = [v for v in (1, 2, 4) if v * ranks <= 4 and possible_chunks(schedule, ranks, v)]
    assume(every)
    chunks = draw(st.sampled_from(every))
    same = draw(st.integers(1, min(2, m)))
    replicas = [same if schedule in INTERLEAVED else draw(st.integers(1, min(2, m))) for _ in range(ranks)]
    free = iter(costs.groups)
    of_ranks = [tuple(next(free) for _ in range(n)) for n in replicas]
    groups = [of_ranks[rank] for rank in ranks_of_stages(schedule, ranks, chunks)]
    searching, each = Searching(costs, SearchOptions()), 4 // len(groups)
    assume(len(searching.atoms.nodes) == 4)
    stages = tuple(tuple(range(each * s, each * (s + 1))) for s in range(len(groups)))
    modes = tuple(draw(st.sampled_from([Recompute.NONE, Recompute.STAGE])) for _ in groups)
    arrangement = Arrangement(stages, tuple(groups), m, schedule, modes)
    conditions = Conditions("adam", loss_inside=draw(st.booleans()))
    step = predicted_step(costs, searching.atoms, arrangement, conditions)
    return as_plan(costs, searching.atoms, arrangement, step, step.one_copy().timeline(), conditions.optimizer)


@pytest.mark.slow
@given(plan=small_plans(), factor=st.sampled_from([1.0, 0.3, 4.0]))
def test_the_timeline_of_a_plan_s_own_numbers_is_its_predicted_step(plan: Plan, factor: float) -> None:
    """However uneven its micro-batches, also of a plan from a file and of one that is scaled to measured steps."""
    loaded = Plan.from_json(plan.to_json())
    for one in (plan, loaded, scaled(loaded, factor, 3, "this plan")):
        step = step_of_plan(one)
        assert step is not None
        assert step.timeline().step_time == pytest.approx(one.predicted_step_time, rel=SAME)
        assert step.timeline().bubble == pytest.approx(one.bubble, abs=SAME)
        assert sum(step_parts(one).values()) == pytest.approx(one.predicted_step_time, rel=SAME)


@pytest.mark.slow
@pytest.mark.parametrize("loss_inside", [False, True])
@pytest.mark.parametrize("number", range(len(DEGREES)))
def test_a_plan_s_own_numbers_make_the_step_that_it_predicts(number: int, loss_inside: bool) -> None:
    """On a mesh, with a loss of the caller that holds all backwards back, and without; of whole operators also with
    micro-batches of 10 and 11 samples."""
    plans = [priced(number, loss_inside)]
    if not any(stage.sharding for stage in plans[0].stages):
        plans.append(plans[0].with_(n_microbatches=6))
    for plan in plans:
        assert plan.predicted_step_time is not None
        step = step_of_plan(Plan.from_json(plan.to_json()))
        assert step is not None
        assert step.timeline().step_time == pytest.approx(plan.predicted_step_time, rel=SAME)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(DEGREES)))
def test_nothing_that_gets_faster_makes_a_step_longer(number: int) -> None:
    plan = priced(number, False)
    faster = [one for one in sensitivity(plan) if "faster" in one.what or "twice as fast" in one.what]
    slower = [one for one in sensitivity(plan) if "slower" in one.what or "half as fast" in one.what]
    faster += [one for one in own_explanation(plan).helps if "faster" in one.what]
    assert faster
    assert slower
    assert min(one.gain(plan) for one in faster) >= -1e-9
    assert max(one.gain(plan) for one in slower) <= 1e-9


@pytest.mark.slow
def test_networks_count_as_they_do_for_a_plan_that_is_priced_on_them() -> None:
    """Faster networks: the price of the same decisions on a cluster with other line rates."""
    plan, cluster = priced(0, True), Cluster.preset("4xH100")
    changes = {one.what: one.step_time for one in network_sensitivity(plan)}
    slower, faster = changes["all networks half as fast"], changes["all networks twice as fast"]
    assert plan.predicted_step_time is not None
    assert faster < plan.predicted_step_time < slower
    inside = dataclasses.replace(cluster.intra_node, line_rate=cluster.intra_node.line_rate / 2)
    model, call = model_and_call(True)
    again = Plan.by_hand(model, dataclasses.replace(cluster, intra_node=inside), **DEGREES[0], **call)
    assert slower == pytest.approx(again.predicted_step_time)
    assert network_sensitivity(Plan.from_json(plan.to_json())) == (), "a plan from a file knows no model"
    report = plan.report(search=True).only("Sensitivity")
    assert "all networks half as fast" in str(report)
