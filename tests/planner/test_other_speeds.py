"""Steps with other speeds of computing and of collectives, and a bottleneck that tells the two apart."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from report_plans import priced
from torch import nn

from autopar import Cluster, Plan
from autopar.plan.stage import Stage
from autopar.planner.communication import exposed_communication, exposed_each
from autopar.planner.explain import PER_HALF, own_explanation
from autopar.planner.other_speeds import at_other_speed
from autopar.planner.predicted_step import step_of_plan
from autopar.planner.sensitivity import sensitivity
from autopar.report.explain import bottleneck_text
from autopar.report.quantities import percent

FACTORS = st.floats(0.1, 10.0)


def seconds(stage: Stage, training: bool = True) -> float:
    """Of the passes of a micro-batch."""
    again = (stage.forward_time or 0.0) * stage.recompute + (stage.recompute_time or 0.0)
    return (stage.forward_time or 0.0) + (stage.backward_time or 0.0) + again


@given(FACTORS, FACTORS, st.booleans(), st.floats(0.0, 0.001))
def test_computing_and_collectives_change_on_their_own(a: float, b: float, recompute: bool, hidden: float) -> None:
    for one in priced().stages:
        stage = dataclasses.replace(one, recompute=recompute, hidden_time=hidden)
        exposed = exposed_each(stage)
        other = at_other_speed(stage, computing=a, collectives=b)
        assert seconds(other) == pytest.approx(a * (seconds(stage) - exposed) + b * exposed)
        assert other.sync_time == pytest.approx(b * (stage.sync_time or 0.0))
        assert (other.forward_time or 0) / (stage.forward_time or 1) == pytest.approx(
            (other.backward_time or 0) / (stage.backward_time or 1)
        )


def replicas(sync: float) -> Plan:
    """One stage on four devices that add up their gradients."""
    names = tuple(f"cuda:{i}" for i in range(4))
    stage = Stage(names, ("net/linear#0",), 0.01, 0.02, sync_time=sync)
    return Plan((stage,), 4, "1f1b", 4, names, predicted_step_time=0.03 + sync)


def test_slow_sums_of_gradients_are_the_bottleneck() -> None:
    plan = replicas(0.27)
    explained = own_explanation(plan)
    assert explained.bottleneck is not None
    assert explained.bottleneck.bound == "collectives"
    shares = dict(explained.bottleneck.shares)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["collectives"] == pytest.approx(0.27 / 0.30, rel=1e-2)
    helps = {change.what: change.step_time for change in explained.helps}
    assert helps["collectives twice as fast"] == pytest.approx(0.03 + 0.135, rel=1e-2)
    assert helps["computing 10% faster on all devices"] == pytest.approx(0.03 / 1.1 + 0.27, rel=1e-2)
    text = " ".join(str(plan.report().only("At a glance")).split())
    assert "bound by collectives among its devices" in text
    assert "90% in collectives" in text


def test_a_plan_without_collectives_says_nothing_of_them() -> None:
    plan = replicas(0.0)
    explained = own_explanation(plan)
    assert explained.bottleneck is not None
    assert dict(explained.bottleneck.shares).keys() == {"compute", "link", "bubble"}
    assert not [change for change in (*explained.helps, *sensitivity(plan)) if "collectives" in change.what]


def test_collectives_of_a_mesh_count_as_such() -> None:
    plan = priced()
    step = step_of_plan(plan)
    explained = own_explanation(plan)
    assert step is not None
    assert explained.bottleneck is not None
    share = dict(explained.bottleneck.shares)["collectives"]
    wanted = exposed_communication(plan)[explained.bottleneck.stage] / step.timeline().step_time
    assert share == pytest.approx(wanted)
    changes = {change.what: change.step_time for change in sensitivity(plan)}
    assert changes["collectives twice as fast"] < step.timeline().step_time < changes["collectives half as fast"]


def test_a_device_is_idle_because_measured_steps_said_so() -> None:
    """Not because of what notes say of the prices."""
    plan = replicas(0.0)
    plan = dataclasses.replace(plan, devices=(*plan.devices, "cuda:4"))
    estimated = dataclasses.replace(plan, notes=("estimated from the data sheets of 8xH100, not measured",))
    assert own_explanation(estimated).idle == (("cuda:4", "the plan does not use it"),)
    tuned = dataclasses.replace(plan, notes=("no gain", "tuned over 2 steps each: ... (* is followed)"))
    assert own_explanation(tuned).idle == (("cuda:4", tuned.notes[1]),)


@pytest.mark.parametrize("sync", [0.0, 0.028, 0.032, 0.27])
def test_the_bottlenecks_sentence_names_what_saves_most(sync: float) -> None:
    """Not what the largest share of the step is: twice the speed of collectives counts more than 10% of computing."""
    plan = replicas(sync)
    explained = own_explanation(plan)
    best = max(explained.helps, key=lambda change: change.gain(plan))
    text = bottleneck_text(explained)
    assert f"{best.what.removesuffix(PER_HALF)} would save most: {percent(best.gain(plan))}" in text
    assert ("about equally by" in text) == (sync in (0.028, 0.032))
    assert "finer split" not in text, "no pipeline"
    assert text in " ".join(str(plan.report().only("At a glance")).replace("- ", "").split())


def test_a_plan_that_one_device_outruns_says_so() -> None:
    slow = dataclasses.replace(replicas(0.27), single_device_time=0.1)
    said = "slower than one device with enough memory, which is predicted to take 100 ms a step"
    assert said in " ".join(str(slow.report().only("At a glance")).split())
    fast = dataclasses.replace(slow, single_device_time=1.0)
    assert "slower than one device" not in str(fast.report())


def test_every_figure_of_one_device_says_that_it_counts_no_memory() -> None:
    """A plan may be needed because no device has the memory for the model."""
    plan = dataclasses.replace(replicas(0.27), single_device_time=1.0)
    page = " ".join(str(plan.report().only("At a glance")).split())
    assert "one device with enough memory 1000 ms, speed-up" in " ".join(str(plan).split())
    assert "on one device with enough memory" in page
    changed = json.loads(plan.diff(dataclasses.replace(plan, single_device_time=2.0)).to_json())["quantities"]
    assert {one["name"] for one in changed if one["after"] == 2.0} == {"one device with enough memory"}


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["eager", "compiled"])
def test_compiling_is_named_where_eager_launches_bind(launch: str) -> None:
    """Tiny products on a fast device: the host's launches are most of the step."""
    model, x = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), torch.randn(16, 16)
    cluster = Cluster.preset("8xH100")
    plan = Plan.by_hand(model, cluster, example_args=(x,), data=8, launch=launch)
    compiled = Plan.by_hand(model, cluster, example_args=(x,), data=8, launch="compiled")
    found = [change.step_time for change in own_explanation(plan).helps if change.what == "launch='compiled'"]
    assert found == ([compiled.predicted_step_time] if launch == "eager" else [])
    loaded = Plan.from_json(plan.to_json())
    assert not [one for one in own_explanation(loaded).helps if "launch" in one.what]
    untried = "launch='compiled' was not tried, which needs the model"
    shown = [" ".join(str(text).split()) for one in (loaded, plan) for text in (one.explain(), one.report())]
    assert [untried in text for text in shown] == [launch == "eager"] * 2 + [False] * 2
