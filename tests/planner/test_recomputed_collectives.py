"""Collectives of stages that recompute: those that run again count once more, wherever a plan speaks of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from report_plans import priced
from test_recompute_layers import Model
from test_selective import BATCH, HIDDEN, LENGTH
from torch import nn

import autopar
from autopar import Cluster, Plan
from autopar.plan.display import step_parts
from autopar.plan.recompute import RECOMPUTE, Recompute, recompute_flags
from autopar.plan.stage import Stage
from autopar.planner.communication import (
    collectives_each,
    exposed_communication,
    exposed_each,
    hidden_communication,
    hidden_each,
    rounds,
    times_a_step,
)
from autopar.planner.pass_collectives import PassCollectives
from autopar.planner.predicted_step import step_of_plan
from autopar.sharding.stage_sharding import Exchange

DEGREES: list[dict[str, Any]] = [
    {"tensor": 2, "sequence_parallel": True, "micro_batch": 2},
    {"zero": 3, "micro_batch": 2},
    {"pipeline": 2, "tensor": 2, "micro_batch": 2},
]
# So small a model waits for launches otherwise.
CALL: dict[str, Any] = {"example_args": (torch.empty(BATCH, LENGTH, HIDDEN, device="meta"),), "launch": "cuda-graphs"}


@cache
def model() -> nn.Module:
    with torch.device("meta"):
        return Model(2)


def cluster(degrees: dict[str, Any], slower: float = 1.0) -> Cluster:
    found = Cluster.preset(f"{2 * degrees.get('pipeline', 1)}xH100")
    return replace(found, intra_node=replace(found.intra_node, line_rate=found.intra_node.line_rate / slower))


@cache
def by_hand(number: int, mode: str, overlap: str, slower: float = 1.0) -> Plan:
    degrees = DEGREES[number]
    return Plan.by_hand(model(), cluster(degrees, slower), recompute=mode, overlap=overlap, **CALL, **degrees)


def passes(stage: Stage) -> float:
    """Seconds of a micro-batch."""
    again = stage.forward_time if stage.recompute else stage.recompute_time
    return (stage.forward_time or 0.0) + (stage.backward_time or 0.0) + (again or 0.0)


def agree(plan: Plan) -> None:
    """What reports, traces and prices make of the collectives of every stage of a plan of equal micro-batches."""
    step = step_of_plan(plan)
    assert step is not None
    timeline, collectives = step.timeline(), PassCollectives(plan)
    for number, stage in enumerate(plan.stages):
        assert stage.sharding is not None
        listed = sum(times_a_step(e, plan, stage) * e.seconds for e in stage.sharding.exchanges if not e.once)
        all_of_them = rounds(plan, stage) * collectives_each(stage)
        assert listed == pytest.approx(all_of_them)
        slot = timeline.schedule.slots_of(number)[0]
        events = [event for event in timeline.events if event.slot == slot and event.action.stage == number]
        drawn = [(event, *collectives.of(event)) for event in events]
        assert sum(one.end - one.start for _, _, ones in drawn for one in ones) == pytest.approx(all_of_them)
        waiting = sum(event.end - computed for event, computed, _ in drawn)
        assert waiting == pytest.approx(rounds(plan, stage) * exposed_each(stage))
        assert 0 <= exposed_each(stage) <= passes(stage)
        assert hidden_each(stage) >= 0
    total = sum(a + b for a, b in zip(exposed_communication(plan), hidden_communication(plan), strict=True))
    sums = sum(stage.sync_time or 0.0 for stage in plan.stages)
    assert total == pytest.approx(sum(rounds(plan, s) * collectives_each(s) for s in plan.stages) + sums)
    parts = step_parts(plan)
    waited = [sum(rounds(plan, s) * exposed_each(s) for s in plan.stages[r :: plan.ranks]) for r in range(plan.ranks)]
    assert parts["exchanging tensors within its stage"] in [pytest.approx(one) for one in waited]
    assert sum(parts.values()) == pytest.approx(timeline.step_time)


@given(st.sampled_from(sorted(RECOMPUTE)), st.sampled_from(["1f1b", "gpipe"]), st.floats(0.0, 0.01), st.data())
def test_collectives_that_run_again_are_counted_wherever_a_plan_speaks_of_them(
    mode: str, schedule: str, hidden: float, data: st.DataObject
) -> None:
    stages = []
    for stage in priced().stages:
        assert stage.sharding is not None
        key, seconds = stage.operators[0], data.draw(st.lists(st.floats(1e-6, 1e-3), min_size=4, max_size=4))
        exchanges = (
            Exchange("all_reduce", "tensor", key, key, 100, seconds[0]),
            Exchange("all_gather", "tensor", key, key, 100, seconds[1], again=mode not in ("none", "stage")),
            Exchange("reduce_scatter", "tensor", key, key, 100, seconds[2], backward=True),
            Exchange("all_reduce", "data", key, key, 100, seconds[3], backward=True, once=True),
        )
        sharding = replace(stage.sharding, exchanges=exchanges, collective_time=sum(seconds[:3]))
        again = 0.005 if mode not in ("none", "stage") else None
        changes: dict[str, Any] = {"hidden_time": hidden, "recompute_time": again, **recompute_flags(mode)}
        stages.append(replace(stage, sharding=sharding, **changes))
        runs_again = {"none": 0.0, "stage": seconds[0] + seconds[1]}.get(mode, seconds[1])
        assert collectives_each(stages[-1]) == pytest.approx(sum(seconds[:3]) + runs_again)
    agree(replace(priced(), stages=tuple(stages), schedule=schedule))


every_plan = pytest.mark.parametrize(
    ("number", "mode"), [(number, mode) for number in range(len(DEGREES)) for mode in RECOMPUTE]
)


@every_plan
@pytest.mark.slow
def test_reports_traces_and_prices_agree_on_collectives(number: int, mode: str) -> None:
    plan = by_hand(number, mode, "all")
    agree(plan)
    loaded = Plan.from_json(plan.to_json())
    assert loaded == plan
    priced_again = autopar.plan(model(), cluster(DEGREES[number]), plan=loaded, overlap="all", **CALL)
    assert priced_again.predicted_step_time == pytest.approx(plan.predicted_step_time)
    for ours, theirs in zip(plan.stages, priced_again.stages, strict=True):
        assert exposed_each(ours) == pytest.approx(exposed_each(theirs))
        assert hidden_each(ours) == pytest.approx(hidden_each(theirs))


@every_plan
@pytest.mark.slow
def test_what_is_not_exposed_takes_as_long_over_any_links(number: int, mode: str) -> None:
    """So exposed collectives are all that the price has of them: those that run again, too."""
    fast, slow = (by_hand(number, mode, "all", slower) for slower in (1.0, 1.5))
    for ours, theirs in zip(fast.stages, slow.stages, strict=True):
        assert collectives_each(ours) < collectives_each(theirs)
        assert passes(ours) - exposed_each(ours) == pytest.approx(passes(theirs) - exposed_each(theirs))
    if RECOMPUTE[mode] is Recompute.FULL:
        alone = by_hand(number, "none", "all")
        assert collectives_each(fast.stages[0]) > collectives_each(alone.stages[0])


def test_files_of_before_name_no_collective_that_runs_again() -> None:
    """They are read as they were."""
    plan = priced()
    assert '"again"' not in plan.to_json()
    (exchange,) = Plan.from_json(plan.to_json()).stages[0].sharding.exchanges  # type: ignore[union-attr]
    assert not exchange.again
    stage = plan.stages[0]
    assert stage.sharding is not None
    again = replace(stage, sharding=replace(stage.sharding, exchanges=(replace(exchange, again=True),)))
    other = replace(plan, stages=(again, *plan.stages[1:]))
    assert Plan.from_json(other.to_json()) == other
