"""Predictions scaled to the machine as it is now, by measured steps of the whole model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from test_tuning import CALL, Clock, X, Y, costly, layers
from torch import nn

import autopar
from autopar import InputError, Plan
from autopar.analysis.example import capture_example
from autopar.costs.measured import measure_costs
from autopar.costs.present_speed import PresentSpeed, runs_whole_model
from autopar.options import PlanOptions
from autopar.plan.display import step_parts
from autopar.plan.scaling import notes_without_scale, scaled
from autopar.plan.stage import RunnerUp, Stage, StageTransfer
from autopar.planner.predicted_step import step_of_plan
from autopar.planner.search_options import search_options
from autopar.planner.sensitivity import sensitivity
from autopar.runtime.comparing.contestants import ComparedCall
from autopar.runtime.comparing.in_turn import InThisProcess
from autopar.runtime.planning.calibration import calibrated
from autopar.runtime.signatures.bound_signature import RunSettings
from cost_models import parse_devices

__all__ = ["costly"]  # a fixture

TWO = ["cpu", "cpu"]


def whole(busy: int, m: int, predicted: float | None = 1.0, kind: str = "k") -> Plan:
    """The whole model on `busy` devices."""
    names = tuple(f"d{i}" for i in range(4))
    return Plan(
        (Stage(names[:busy]),), m, batch_size=8, devices=names, device_kinds=(kind,) * 4, predicted_step_time=predicted
    )


def pipeline(n: int, m: int, kinds: tuple[str, ...] = ("k",) * 4) -> Plan:
    names = tuple(f"d{i}" for i in range(4))
    stages = tuple(Stage((name,), (f"m{i}/op#0",), 0.1, 0.2, 0.05, sync_time=0.01) for i, name in enumerate(names[:n]))
    return Plan(
        stages,
        m,
        "zb-h1",
        8,
        names,
        predicted_step_time=2.0,
        single_device_time=4.0,
        transfers=tuple(StageTransfer(s, s + 1, 8, 8, 0.03, 0.02) for s in range(n - 1)),
        objective=2.1,
        bound=1.9,
        runners_up=(RunnerUp("another", 2.2),),
        device_kinds=kinds,
    )


# -- the factor --------------------------------------------------------------------------------------------------------


def test_replicas_have_the_factor_of_as_many_busy_devices_and_pipelines_that_of_one() -> None:
    speed = PresentSpeed.of([(whole(1, 1, 2.0), [3.0, 2.2, 2.0]), (whole(3, 3, 1.0), [1.5]), (pipeline(2, 4), [9.0])])
    assert speed.factors == {("k", 1): pytest.approx(1.1), ("k", 3): 1.5}
    assert speed.steps == 1
    assert speed.factor(whole(1, 1)) == speed.factor(whole(1, 8)) == speed.factor(pipeline(2, 1)) == pytest.approx(1.1)
    assert speed.factor(whole(3, 6)) == speed.factor(whole(4, 4)) == 1.5, "three busy devices are as near as can be"
    assert speed.factor(pipeline(3, 4)) == speed.factor(pipeline(4, 4)) == pytest.approx(1.1)
    assert speed.factor(whole(4, 2)) == pytest.approx(1.1), "two of four replicas have no micro-batch; one is as near"


def test_the_plain_model_counts_before_the_same_model_in_micro_batches() -> None:
    measured = [(whole(1, 4), [5.0]), (whole(1, 1), [2.0])]
    for order in (measured, measured[::-1]):
        speed = PresentSpeed.of(order)
        assert speed.factors == {("k", 1): 2.0}


def test_without_the_whole_model_or_a_prediction_of_it_nothing_is_scaled() -> None:
    nothing = PresentSpeed.of([(pipeline(2, 4), [1.0]), (whole(1, 1, None), [1.0]), (whole(1, 1), [])])
    assert nothing.factors == {}
    assert nothing.applied(one := pipeline(2, 4)) is one
    recomputing = whole(1, 1)
    recomputing = replace(recomputing, stages=(replace(recomputing.stages[0], recompute=True),))
    assert not runs_whole_model(recomputing)
    speed = PresentSpeed.of([(whole(1, 1), [2.0])])
    other = pipeline(2, 4, ("other",) * 4)
    assert speed.factor(other) is None
    assert speed.applied(other) is other
    assert speed.factor(pipeline(2, 4, ())) is None, "a plan that does not know the kinds of its devices"
    mixed = PresentSpeed.of([(whole(1, 1), [2.0]), (whole(1, 1, kind="other"), [4.0])])
    assert mixed.factor(pipeline(2, 4, ("k", "other", "k", "k"))) == 3.0


def test_a_plan_that_ran_has_a_factor_of_its_own() -> None:
    for measured in ([(whole(1, 1, 2.0), [3.0])], []):  # the plain model ran beside it, or did not
        now = PresentSpeed.of(measured).applied(pipeline(2, 4), [2.6, 2.2, 2.4])
        assert now.predicted_step_time == pytest.approx(2.4)
        assert now.time_scale == pytest.approx(1.2)
        assert now.single_device_time == pytest.approx(4.0 * (1.5 if measured else 1.2))
        assert now.notes == ("predictions scaled by 1.2 after 3 measured steps of this plan",)


def test_a_plan_that_ran_shows_what_was_predicted_before() -> None:
    ran = replace(pipeline(2, 4), measured_step_time=2.4)
    now = PresentSpeed.of([]).applied(ran, [2.4])
    assert (now.predicted_step_time, now.priced_step_time) == pytest.approx((2.4, 2.0))
    assert "measured step 2400 ms, predicted before it ran 2000 ms" in " ".join(str(now).split())
    others = replace(now, measured_threads=4)  # other threads than predictions are for: another plan's steps scale
    assert others.priced_step_time == others.predicted_step_time
    assert ran.priced_step_time == ran.predicted_step_time


@given(st.floats(0.1, 10.0), st.integers(1, 4), st.integers(1, 6), st.integers(1, 9))
def test_all_seconds_of_a_plan_are_scaled_and_its_decision_stays(factor: float, n: int, m: int, steps: int) -> None:
    plan = pipeline(n, m)
    now = scaled(plan, factor, steps, "this plan", single=2.0)
    assert now.predicted_step_time == pytest.approx(2.0 * factor)
    assert (now.single_device_time, now.objective, now.bound) == pytest.approx((8.0, 2.1 * factor, 1.9 * factor))
    assert now.runners_up[0].step_time == pytest.approx(2.2 * factor)
    assert [s.devices for s in now.stages] == [s.devices for s in plan.stages]
    many = "s" if steps > 1 else ""
    assert now.notes == (f"predictions scaled by {factor:.3g} after {steps} measured step{many} of this plan",)
    assert notes_without_scale(now) == ()
    assert Plan.from_json(now.to_json()) == now
    assert Plan.from_json(now.to_json()).time_scale == factor
    before, after = step_of_plan(plan), step_of_plan(now)
    assert before is not None
    assert after is not None
    assert after.timeline().step_time == pytest.approx(before.timeline().step_time * factor)


# -- planning ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("costly")
@pytest.mark.parametrize("fastest", ["automatic", "without replicas", "plain model"])
def test_a_tuned_plan_is_scaled_by_its_own_steps_and_one_device_by_those_of_the_plain_model(
    fastest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(dict.fromkeys(("automatic", "plain model", "one device", "without replicas"), 1.0), monkeypatch)
    clock.took[fastest] = 0.5
    raw = autopar.plan(layers(), TWO, cache=False, tune=0, **CALL)
    plan = autopar.plan(layers(), TWO, cache=False, **CALL)
    assert plan.time_scale is not None
    assert plan.single_device_time is not None
    assert raw.single_device_time is not None
    # The plain model on one device: what was measured of it.
    assert plan.single_device_time == pytest.approx(clock.took["plain model"], rel=0.2)
    assert any(note.startswith(f"predictions scaled by {plan.time_scale:.3g} after") for note in plan.notes)
    assert plan.notes[-1].startswith("tuned over")
    assert plan.predicted_step_time == pytest.approx(plan.measured_step_time)
    explained = plan.explain()
    assert not explained.partial, "its search still explains it"
    for change in explained.helps:  # in the same seconds
        assert change.step_time <= (plan.predicted_step_time or 0.0) * 1.2


@pytest.mark.slow
@pytest.mark.usefixtures("costly")
def test_a_remembered_measurement_scales_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock({"automatic": 1.0, "without replicas": 2.0, "plain model": 3.0, "one device": 4.0}, monkeypatch)
    first, again = (autopar.plan(layers(), TWO, **CALL) for _ in range(2))
    assert first.time_scale is not None
    assert (first.time_scale, first.notes, first.predicted_step_time) == (
        again.time_scale,
        again.notes,
        again.predicted_step_time,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("costly")
def test_on_request_the_whole_model_runs_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({"plain model on cpu:0": 4.0, "plain model on 2 devices": 3.0}, monkeypatch)
    model = layers()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fixed: dict[str, Any] = {"cache": False, "tune": 0, "n_microbatches": 2, "max_replicas": 1, **CALL}
    raw = autopar.plan(model, TWO, **fixed)
    plan = autopar.plan(model, TWO, calibrate=True, **fixed)
    assert raw.time_scale is None
    assert {name for name, count in clock.ran.items() if count} == set(clock.took)
    assert plan.time_scale is not None
    assert raw.predicted_step_time is not None
    assert plan.predicted_step_time == pytest.approx(raw.predicted_step_time * plan.time_scale, rel=1e-3)
    assert plan.notes[0].startswith("predictions scaled by")
    torch.testing.assert_close(model.state_dict(), before)
    assert plan.with_decision("changed", n_microbatches=4).time_scale is None
    # The same for a plan of the user's.
    hand = autopar.plan(model, TWO, plan=Plan.from_split({"0": 0, "1": 1}, n_microbatches=2), calibrate=True, **CALL)
    assert hand.time_scale is not None
    again = autopar.plan(model, TWO, plan=hand, **CALL)
    assert again.time_scale is None
    assert not any(note.startswith("predictions scaled") for note in again.notes)


@pytest.mark.slow
def test_a_batch_that_cannot_be_split_is_measured_on_one_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({}, monkeypatch)

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            return self.b(torch.softmax(y @ y.T, 0) @ y)

    example = capture_example(Mixing(), parse_devices(TWO), (X,), {}, loss_fn=F.mse_loss, target=Y)
    options = PlanOptions(cache=False)
    example, search = search_options(example, options, 2)
    costs = measure_costs(example, parse_devices(TWO), cache=False)
    hand = autopar.plan(Mixing(), TWO, plan=Plan.from_split({"a": 0, "b": 1}, n_microbatches=1), cache=False, **CALL)
    silent: Any = lambda what, done: None  # noqa: E731
    in_turn = InThisProcess(ComparedCall(example, RunSettings.of(options)), costs.devices)
    now = calibrated(hand, example, costs, search, silent, in_turn)
    assert set(clock.ran) == {"plain model on cpu:0"}
    assert now.time_scale is not None


def test_calibrating_is_refused_where_nothing_can_run() -> None:
    with pytest.raises(InputError, match="calibrate"):
        autopar.plan(layers(), autopar.Cluster.preset("2xT4"), calibrate=True, **CALL)
    with pytest.raises(InputError, match="calibrate must be True or False"):
        PlanOptions(calibrate=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("factor", [0.25, 2.0])
def test_a_scaled_plan_has_the_shares_and_gains_of_the_plan(factor: float) -> None:
    """Collectives of meshes are scaled with what they are part of."""
    cluster = autopar.Cluster.preset("4xH100")
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    plan = Plan.by_hand(model, cluster, example_args=(torch.zeros(64, 256),), tensor=2, pipeline=2, micro_batch=8)
    other = scaled(plan, factor, 1, "this plan")
    parts = step_parts(plan)
    assert any("exchanging" in name for name in parts)
    assert step_parts(other) == pytest.approx({name: seconds * factor for name, seconds in parts.items()})
    for stage, one in zip(plan.stages, other.stages, strict=True):
        assert stage.sharding is not None
        assert one.sharding is not None
        assert one.sharding.collective_time == pytest.approx(factor * (stage.sharding.collective_time or 0.0))
    gains = [{c.what: c.step_time for c in sensitivity(p)} for p in (plan, other)]
    assert gains[1] == pytest.approx({what: seconds * factor for what, seconds in gains[0].items()})
