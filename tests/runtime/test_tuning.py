"""tune="auto": plans run beside the plain model before one is followed, and the fastest is followed."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autopar
from autopar import Plan
from autopar.analysis.example import capture_example
from autopar.costs.cost_graph import CostGraph
from autopar.costs.measured import measure_costs
from autopar.options import PlanOptions
from autopar.planner.search_options import search_options
from autopar.runtime.comparing import in_turn
from autopar.runtime.comparing.contestants import ComparedCall, Contestant, Rounds, contestants
from autopar.runtime.comparing.disturbance import SteadySteps
from autopar.runtime.planning import at_hand as planning
from autopar.runtime.planning import tuning
from autopar.runtime.signatures.bound_signature import RunSettings
from cost_models import parse_devices
from cost_models.hardware.devices import operator_threads

NAMES = ("automatic", "plain model", "one device", "without replicas")
X, Y = torch.randn(8, 16), torch.randn(8, 16)
CALL: dict[str, Any] = {"example_args": (X,), "target": Y, "loss_fn": F.mse_loss}


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()) for _ in range(2)))


@pytest.fixture
def costly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators of seconds: every plan on two devices is predicted to gain."""
    make_costly(monkeypatch)


def make_costly(monkeypatch: pytest.MonkeyPatch, **other: float) -> None:
    def slow(*args: Any, **options: Any) -> CostGraph:
        costs = measure_costs(*args, **options)
        tables = tuple(
            dataclasses.replace(t, forward=0 * t.forward + t.rows[-1] * 0.1, backward=0 * t.backward + t.rows[-1] * 0.1)
            for t in costs.tables
        )
        return dataclasses.replace(costs, tables=tables, **other)

    monkeypatch.setattr(planning, "measure_costs", slow)


class Clock:
    """Steps that take what it says; counts them."""

    def __init__(self, took: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.took, self.ran = took, dict.fromkeys(took, 0)
        monkeypatch.setattr(Contestant, "timed", lambda contestant, devices: self.timed(contestant))

    def timed(self, contestant: Contestant) -> float:
        self.ran[contestant.name] = self.ran.get(contestant.name, 0) + 1
        return self.took.get(contestant.name, 9.0)


@pytest.mark.slow
@pytest.mark.usefixtures("costly")
@pytest.mark.parametrize("fastest", NAMES)
def test_the_fastest_is_followed_and_the_plan_says_what_was_measured(
    fastest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock({name: 0.5 if name == fastest else 1.0 for name in NAMES}, monkeypatch)
    pm = autopar.parallelize(layers(), ["cpu", "cpu"], cache=False, **CALL)
    assert pm.plan is not None
    ran = {name for name, count in clock.ran.items() if count}
    if fastest in ran:  # those that are the same plan as another run once
        assert pm.plan.measured_step_time == 0.5
        assert f"*{fastest} " in pm.plan.notes[-1]
    assert all(f"{name} " in pm.plan.notes[-1] for name in ran)
    if fastest == "plain model":
        assert (len(pm.plan.used_devices), pm.plan.n_microbatches) == (1, 1)
    if fastest == "automatic":
        assert len(pm.plan.used_devices) == 2
    assert str(pm.plan)
    assert pm.plan.explain().limits == (), "the user gave none"
    pm.train_step(X, target=Y, loss_fn=F.mse_loss)


@pytest.mark.slow
def test_replicas_of_the_whole_model_run_beside_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adding up gradients is priced so high that the search chooses a pipeline; as measured, replicas are faster."""
    make_costly(monkeypatch, accumulate=1e-3)
    clock = Clock({"without a pipeline": 5.0}, monkeypatch)
    plan = autopar.plan(layers(), ["cpu", "cpu"], cache=False, **CALL)
    assert clock.ran["without a pipeline"]
    assert [stage.replicas for stage in plan.stages] == [2]


@pytest.mark.slow
@pytest.mark.usefixtures("costly")
def test_of_equally_fast_plans_the_one_with_fewest_devices_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock({"automatic": 0.996, "plain model": 1.0}, monkeypatch)
    pm = autopar.parallelize(layers(), ["cpu", "cpu"], cache=False, **CALL)
    assert pm.plan is not None
    assert len(pm.plan.used_devices) == 1
    hand = Plan.from_split({"0": 0, "1": 1}, n_microbatches=2)
    Clock({"automatic 1": 1.0, "hand": 0.99}, monkeypatch)
    plan = autopar.plan(layers(), ["cpu", "cpu"], tune=1, candidates={"hand": hand}, cache=False, **CALL)
    assert "*hand" in plan.notes[-1], "a number of plans to tune means the fastest, by however little"


@pytest.mark.slow
@pytest.mark.usefixtures("costly")
def test_measured_steps_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({"automatic": 1.0, "without replicas": 2.0, "plain model": 3.0, "one device": 4.0}, monkeypatch)
    first = autopar.plan(layers(), ["cpu", "cpu"], **CALL)
    ran, clock.took = dict(clock.ran), {"automatic": 5.0}
    again = autopar.plan(layers(), ["cpu", "cpu"], **CALL)
    assert clock.ran == ran
    assert (again.stages, again.notes) == (first.stages, first.notes)
    autopar.plan(layers(), ["cpu", "cpu"], cache=False, **CALL)
    assert clock.ran != ran
    ran = dict(clock.ran)
    with operator_threads(torch.get_num_threads() + 1):  # the plain model takes another time then
        autopar.plan(layers(), ["cpu", "cpu"], **CALL)
    assert clock.ran != ran


@pytest.mark.slow
@pytest.mark.usefixtures("costly")
def test_the_users_model_and_random_state_stay_as_they_are() -> None:
    model = layers()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    plan = autopar.plan(model, ["cpu", "cpu"], cache=False, **CALL)
    assert plan.notes[-1].startswith(("tuned over", "the machine was busy"))
    torch.testing.assert_close(model.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
@pytest.mark.usefixtures("costly")
@pytest.mark.parametrize("options", [{"tune": 0}, {"n_microbatches": 4}, {"pinned": True}])
def test_options_and_hints_limit_what_is_tried(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({"plain model": 0.1}, monkeypatch)
    model = layers()
    if options.pop("pinned", False):
        autopar.pipeline_stage(model[0], 0)
        autopar.pipeline_stage(model[1], 1)
        options["n_microbatches"] = None
    plan = autopar.plan(model, ["cpu", "cpu"], cache=False, **options, **CALL)
    assert not clock.ran["plain model"]
    if options.get("tune") == 0:
        assert clock.ran == {"plain model": 0}
        assert plan.measured_step_time is None
    elif options["n_microbatches"]:
        assert plan.n_microbatches == 4
    else:
        assert len(plan.stages) >= 2


@pytest.mark.slow
def test_the_plain_model_needs_no_measuring_where_it_is_predicted_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({}, monkeypatch)
    plan = autopar.plan(layers(), ["cpu"], n_microbatches=1, cache=False, **CALL)
    assert not clock.ran
    assert plan.measured_step_time is None


@pytest.mark.slow
@pytest.mark.usefixtures("costly")
def test_without_memory_for_all_copies_the_prediction_is_trusted_and_the_plan_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock({"plain model": 0.1}, monkeypatch)
    monkeypatch.setattr(in_turn, "available_memory", lambda device: 1000)
    plan = autopar.plan(layers(), ["cpu", "cpu"], cache=False, **CALL)
    assert not clock.ran["plain model"]
    assert "not measured beside other plans" in plan.notes[-1]
    assert "has 1 kB" in plan.notes[-1]


@pytest.mark.slow
@pytest.mark.usefixtures("costly")
@pytest.mark.parametrize("fastest", ["plain model", "automatic"])
def test_only_the_plan_that_is_followed_warns(fastest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock({fastest: 0.1}, monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pm = autopar.parallelize(layers(), ["cpu", "cpu"], cache=False, **CALL)
        pm.train_step(X, target=Y, loss_fn=F.mse_loss)
    said = [str(w.message) for w in caught if issubclass(w.category, autopar.AutoparWarning)]
    assert sum("statistics of each micro-batch" in text for text in said) == (fastest == "automatic")


@pytest.mark.parametrize("hook", [False, True])
def test_contestants_train_like_the_model_whether_its_capture_is_taken_over_or_not(hook: bool) -> None:
    model = layers()
    calls: list[int] = []
    if hook:
        model[1].register_forward_hook(lambda *_: calls.append(1))
    example = capture_example(model, parse_devices(["cpu", "cpu"]), (X,), {}, loss_fn=F.mse_loss, target=Y)
    options = PlanOptions(batch_norm="exact")
    plans = {
        "pipeline": Plan.from_split({"0": 0, "1": 1}, n_microbatches=1),
        "data": Plan.from_split({"": 0}, n_microbatches=1, devices=[("cpu:1",)]),
    }
    expected = copy.deepcopy(model)
    F.mse_loss(expected(X), Y).backward()
    made = len(calls)
    with contestants(
        ComparedCall(example, RunSettings.of(options)), plans, parse_devices(["cpu"] * 2), _silent
    ) as ready:
        for contestant in ready:
            contestant.step()
            for mine, plain in zip(contestant.model.parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, plain.grad)
            torch.testing.assert_close(contestant.model.state_dict(), expected.state_dict())
    assert len(calls) == made
    assert all(p.grad is None for p in model.parameters())


def _silent(what: str, done: float) -> None:
    """A progress that nobody sees."""


seconds = st.lists(st.floats(1e-4, 10), max_size=12)


@given(st.lists(seconds, min_size=1, max_size=4), st.integers(1, 6), st.floats(0, 5), st.floats(0, 20))
def test_rounds_end_with_enough_steps_and_seconds_or_with_the_budget_but_not_before_one_counts(
    steps: list[list[float]], least: int, enough: float, budget: float
) -> None:
    length = min(map(len, steps))
    steps = [one[:length] for one in steps]
    elapsed = sum(map(sum, steps))
    done = Rounds(least, enough, budget).done(steps, elapsed) >= 1
    ran = min(map(sum, steps))
    assert done == (length >= 1 and (elapsed >= budget or (length >= least and ran >= enough)))


@pytest.mark.slow
@pytest.mark.parametrize(("spent", "budget"), [(0.0, 0.3), (10.0, 5.0)])
def test_tuning_takes_at_most_a_share_of_planning(spent: float, budget: float, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Rounds] = []

    def take(ready: Any, devices: Any, rounds: Rounds, progress: Any, doubts: Any) -> SteadySteps:
        seen.append(rounds)
        return SteadySteps({one.name: (1.0,) for one in ready})

    monkeypatch.setattr(in_turn, "steady_steps", take)
    example = capture_example(layers(), parse_devices(["cpu", "cpu"]), (X,), {}, loss_fn=F.mse_loss, target=Y)
    hand = Plan.from_split({"0": 0, "1": 1}, n_microbatches=2)
    options = PlanOptions(cache=False, candidates={"hand": hand})
    example, search = search_options(example, options, 2)
    costs = measure_costs(example, parse_devices(["cpu", "cpu"]), cache=False)
    runs = in_turn.InThisProcess(ComparedCall(example, RunSettings.of(options)), costs.devices)
    tuning.tuned(example, costs, options, search, spent, _silent, None, runs)
    assert seen[-1].budget == budget


@pytest.mark.slow
@pytest.mark.usefixtures("costly")
@pytest.mark.parametrize("training", [True, False])
def test_a_first_call_in_inference_mode_is_planned_and_later_ones_train(training: bool) -> None:
    """Statistics are buffers that the measured copies write."""
    model = layers().train(training)
    original = copy.deepcopy(model)
    pm = autopar.parallelize(model, ["cpu", "cpu"], batch_norm="exact", cache=False)
    with torch.inference_mode():
        torch.testing.assert_close(pm(X), original(X))
    pm.train_step(X, target=Y, loss_fn=F.mse_loss)
    F.mse_loss(original(X), Y).backward()
    for mine, plain in zip(pm.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, plain.grad)
    torch.testing.assert_close(dict(pm.named_buffers()), dict(original.named_buffers()))


@pytest.mark.slow
@pytest.mark.usefixtures("costly")
@pytest.mark.parametrize("callers", [2, 1])
def test_a_plan_that_runs_the_model_itself_says_with_how_many_threads_it_was_measured(
    callers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock({"plain model": 0.1, "plain model on 1 thread": 0.2}, monkeypatch)
    with operator_threads(callers):
        plan = autopar.plan(layers(), ["cpu", "cpu"], cache=False, **CALL)
    workers = parse_devices(["cpu", "cpu"])[0].threads
    said = " ".join(str(plan).split())
    if callers == workers:
        assert plan.measured_threads is None
        assert ", measured 100 ms," in said
    else:
        assert plan.measured_threads == callers
        assert f" ms with a worker's threads, measured 100 ms with {callers} thread" in said
    assert Plan.from_json(plan.to_json()).measured_threads == plan.measured_threads


@pytest.mark.slow
@pytest.mark.usefixtures("costly")
@pytest.mark.parametrize("options", [{}, {"tune": 0}, {"tune": 2}, {"tune": 0, "calibrate": True}])
def test_planning_leaves_no_gradients_in_what_the_loss_or_the_call_has(options: dict[str, Any]) -> None:
    """The first step's gradients are then those of the plain model."""
    found = []
    for pipelined in (False, True):
        tau, scale = nn.Parameter(torch.tensor(2.0)), nn.Linear(16, 16)
        scale.load_state_dict({"weight": torch.eye(16), "bias": torch.ones(16)})
        x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
        y.grad = torch.ones_like(y)

        def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(scale(output) * tau, target)  # noqa: B023  called in this round alone

        model = layers().eval()
        if pipelined:
            hand = Plan.from_split({"0": 0, "1": 1}, n_microbatches=2)
            mine = options if options.get("tune") == 0 else {**options, "candidates": {"hand": hand}}
            pm = autopar.parallelize(model, ["cpu", "cpu"], cache=False, **mine)
            pm.prepare((x,), {}, loss_fn=loss_fn, target=y)
            assert tau.grad is scale.weight.grad is x.grad is None
            assert torch.equal(y.grad, torch.ones_like(y))
            pm.train_step(x, target=y, loss_fn=loss_fn)
        else:
            loss_fn(model(x), y).backward()
        found.append([tau.grad, scale.weight.grad, x.grad, y.grad])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.slow
@pytest.mark.parametrize("callers", [2, 1])
def test_a_compared_plan_that_runs_the_model_itself_on_other_threads_has_no_error_of_prediction(callers: int) -> None:
    alone = Plan.from_split({"": 0}, n_microbatches=1)
    with operator_threads(callers):
        found = autopar.compare(layers(), ["cpu", "cpu"], {"alone": alone}, repeats=1, cache=False, **CALL)
    workers = parse_devices(["cpu", "cpu"])[0].threads
    assert (found["alone"].error is None) == (callers != workers)
    assert found.single.error is not None


@pytest.mark.slow
@pytest.mark.usefixtures("costly")
def test_comparing_plans_leaves_no_gradients_in_what_the_loss_trains() -> None:
    tau = nn.Parameter(torch.tensor(2.0))
    plans = {"hand": Plan.from_split({"0": 0, "1": 1}, n_microbatches=2)}
    call = {**CALL, "loss_fn": lambda output, target: F.mse_loss(output * tau, target)}
    autopar.compare(layers(), ["cpu", "cpu"], plans, repeats=1, cache=False, **call)
    assert tau.grad is None


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b"])
def test_a_step_whose_loss_has_a_temperature_is_rehearsed_and_leaves_it_no_gradient(
    schedule: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Backwards without values would leave a gradient without values in it."""
    tau = nn.Parameter(torch.tensor(2.0))
    call = {**CALL, "loss_fn": lambda output, target: F.mse_loss(output / tau, target)}
    for _ in range(2):
        hand = Plan.from_split({"0": 0, "1": 1}, n_microbatches=2, schedule=schedule)
        plan = autopar.plan(layers(), ["cpu", "cpu"], plan=hand, cache=False, **call)
        assert tau.grad is None
    assert plan.stages[0].peak_memory is not None
    assert not [one.message for one in caplog.records if "cannot be rehearsed" in one.message]
