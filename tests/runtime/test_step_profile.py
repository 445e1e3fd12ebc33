"""Profiled training steps compute the same as others, and report how long every stage computed and waited."""

from __future__ import annotations

import copy
import dataclasses
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import assert_same_gradients, gradients
from pretend_gpus import PretendGpus, pipelined
from torch import nn
from torch.nn.functional import mse_loss
from trace_format import assert_well_formed

import autopar
from autopar import PipelinedModule, Plan
from autopar.costs.history import history_path, recall
from autopar.plan.stage import SizeRatios, Stage
from autopar.report.tables import WIDTH
from autopar.runtime import module as module_room
from autopar.runtime import step_recorder
from autopar.runtime.step.mailbox import Address, Mailbox
from autopar.runtime.step_record import RecordedAction, StepRecord, step_profile
from autopar.runtime.step_recorder import StepRecorder
from autopar.schedule.clock import Action, Phase
from cost_models import parse_devices
from cost_models.measuring import device_clock

CPUS = parse_devices(["cpu", "cpu"])


@pytest.fixture
def own_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory."""
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path / "own"))
    return history_path()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))


X, Y = torch.linspace(-1, 1, 64).view(8, 8), torch.linspace(1, 0, 64).view(8, 8)
CALL: dict[str, Any] = {"example_args": (X,), "target": Y, "loss_fn": mse_loss}
SPLIT = {"0": 0, "3": 1}


def hand_plan(schedule: str = "1f1b", n_microbatches: int = 4) -> Plan:
    return Plan.from_split(SPLIT, n_microbatches=n_microbatches, schedule=schedule)


# -- profiled steps --------------------------------------------------------------------------------------------------


def priced_plan(schedule: str) -> Plan:
    """Made by hand, with predictions."""
    found = autopar.compare(net(), ["cpu", "cpu"], {"hand": hand_plan(schedule)}, repeats=1, cache=True, **CALL)
    return found["hand"].plan


def recording(model: nn.Module, plan: Plan) -> PipelinedModule:
    return autopar.parallelize(model, ["cpu", "cpu"], plan=plan)


PLANS: dict[str, Callable[[], Plan]] = {
    "1f1b": lambda: hand_plan("1f1b"),
    "zb-h1": lambda: hand_plan("zb-h1"),
    "interleaved": lambda: Plan.from_split(
        {"0": 0, "2": 1, "3": 2, "5": 3}, n_microbatches=4, schedule="interleaved-1f1b"
    ),
    "replicas": lambda: Plan.from_split({"0": 0}, n_microbatches=4, devices=[["cpu:0", "cpu:1"]]),
    "recompute": lambda: Plan.from_split(SPLIT, n_microbatches=2, recompute=[0, 1]),
    "plain": lambda: Plan((Stage(("cpu:0",)),), n_microbatches=1),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_profiled_step_is_the_step_as_always(name: str) -> None:
    model = net()
    twin = copy.deepcopy(model)
    plain, profiled = recording(model, PLANS[name]()), recording(twin, PLANS[name]())
    for _ in range(3):
        state = torch.get_rng_state()
        loss = plain.train_step(X, target=Y, loss_fn=mse_loss)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        again = profiled.train_step(X, target=Y, loss_fn=mse_loss, profile=True)
        assert torch.equal(torch.get_rng_state(), after)
        assert torch.equal(loss, again)
        assert not again.requires_grad
        assert_same_gradients(gradients(model), gradients(twin))
    assert plain.last_profile is None
    plain.close()
    profiled.close()


@pytest.mark.parametrize("name", PLANS)
def test_a_profile_has_every_stage_with_its_microbatches_and_no_device_busy_for_longer_than_the_step(name: str) -> None:
    plan = PLANS[name]()
    pm = recording(net(), plan)
    pm.train_step(X, target=Y, loss_fn=mse_loss, profile=True)
    found = pm.last_profile
    pm.close()
    assert found is not None
    assert (found.batch_size, found.n_microbatches, found.schedule) == (8, plan.n_microbatches, plan.schedule)
    for stage in range(len(plan.stages)):
        mine = [one for one in found.stages if one.stage == stage]
        assert sum(one.microbatches for one in mine) == plan.n_microbatches
        assert all((one.loss > 0) == (stage == len(plan.stages) - 1) for one in mine)
    for one in found.stages:
        assert min(one.forward, one.backward) > 0
        assert one.forward >= one.loss
    for device in {one.device for one in found.stages}:
        assert sum(one.busy + one.waiting for one in found.stages if one.device == device) <= found.seconds
    assert (found.predicted, found.error) == (None, None)  # a plan made by hand


@pytest.mark.slow
def test_a_profile_shows_the_plans_predictions_and_is_recorded_beside_them(own_history: Path) -> None:
    plan = priced_plan("gpipe")
    before = len(recall())
    pm = recording(net(), plan)
    pm.train_step(X, target=Y, loss_fn=mse_loss, profile=True)
    found = pm.last_profile
    pm.close()
    assert found is not None
    assert found.predicted == plan.predicted_step_time
    for one, stage in zip(found.stages, plan.stages, strict=True):
        assert one.predicted_forward == pytest.approx(4 * (stage.forward_time or 0.0))
        assert one.predicted_backward == pytest.approx(4 * (stage.backward_time or 0.0))
    (recorded,) = recall()[before:]
    assert (recorded.source, recorded.predicted, recorded.measured) == ("train_step", found.predicted, found.seconds)
    assert recorded.error == found.error
    text = str(found)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= WIDTH
    data = json.loads(found.to_json())
    assert data["seconds"] == found.seconds
    assert [one["waiting"] for one in data["stages"]] == [one.waiting for one in found.stages]


def test_uneven_microbatches_are_predicted_by_those_that_a_device_ran() -> None:
    plan = Plan.from_split({"": 0}, devices=[["cpu:0", "cpu:1"]], n_microbatches=4)
    stage = dataclasses.replace(
        plan.stages[0], forward_time=7.0, backward_time=14.0, size_ratios=SizeRatios(0.5, 0.5, 0.5, 0.5)
    )
    plan = dataclasses.replace(plan, batch_size=7, training=True, predicted_step_time=1.0, stages=(stage,))
    actions = {
        Action(phase, 0, i): RecordedAction(f"cpu:{i % 2}", ((0.0, 1.0),), 1.0, 0.0, 0.0)
        for phase in (Phase.FORWARD, Phase.BACKWARD)
        for i in range(4)
    }
    found = step_profile([StepRecord(actions, {}, {})], plan, 1.0, 7)
    larger = 4 * 7.0 / 3.5  # of the sizes 2, 2, 2, 1
    assert [one.predicted_forward for one in found.stages] == pytest.approx([2 * larger, 1.5 * larger])
    assert [one.predicted_backward for one in found.stages] == pytest.approx([4 * larger, 3 * larger])


def test_a_profiled_step_on_gpus_waits_for_none_of_them_before_it_has_ended(
    own_history: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its times are those of events."""
    before = len(recall())
    plan = Plan.from_split(SPLIT, n_microbatches=4, devices=["cuda:0", "cuda:1"])
    plan = dataclasses.replace(plan, predicted_step_time=0.01, batch_size=8, training=True)
    gpus = PretendGpus(monkeypatch)
    pm = pipelined(net().eval(), plan, record=True)
    with gpus.recording():
        pm.train_step(X, target=Y, loss_fn=mse_loss, profile=True)
    here = f" in {threading.current_thread().name}: "
    assert [wait for wait in gpus.waits if here not in wait] == [], "only the caller waits, before and after the step"
    gpus.check()
    pm.close()
    gpus.close()
    found = pm.last_profile
    assert found is not None
    assert found.predicted is not None
    assert min(one.forward for one in found.stages) > 0
    assert min(one.backward for one in found.stages) > 0
    assert len(found.sends) == 2 * 4, "values and gradients of four micro-batches"
    assert len(recall()) == before + 1


@pytest.mark.slow
def test_a_prediction_for_another_batch_is_not_compared(own_history: Path) -> None:
    plan = priced_plan("1f1b")
    before = len(recall())
    pm = recording(net(), plan)
    pm.train_step(X[:4], target=Y[:4], loss_fn=mse_loss, profile=True)
    pm.close()
    assert pm.last_profile is not None
    assert pm.last_profile.predicted is None
    assert "without a prediction" in str(pm.last_profile)
    assert len(recall()) == before


@pytest.mark.slow
def test_a_first_step_that_is_profiled_is_captured_and_planned_before_its_time_starts(
    own_history: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pm = autopar.parallelize(net(), ["cpu", "cpu"])
    ready = []

    def timed(step: Callable[[], torch.Tensor], devices: Any) -> tuple[torch.Tensor, float]:
        ready.append((pm.plan, pm.stages))
        return step_recorder.timed(step, devices)

    monkeypatch.setattr(module_room, "timed", timed)
    pm.train_step(X, target=Y, loss_fn=mse_loss, profile=True)
    pm.close()
    ((plan, stages),) = ready
    assert plan is not None
    assert plan is pm.plan
    assert len(stages) == len(plan.stages)
    (recorded,) = (record for record in recall() if record.source == "train_step")  # planning may have run some, too
    assert recorded.predicted == plan.predicted_step_time


# -- the recorder ----------------------------------------------------------------------------------------------------


class Clock:
    """Time passes where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


def test_waiting_for_messages_is_no_work_and_the_loss_is_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, recorder = Clock(), StepRecorder()
    monkeypatch.setattr(device_clock, "time", clock)
    monkeypatch.setattr(Mailbox, "receive", lambda mailbox, slot, address: clock.spend(5))
    mailbox = recorder.mailbox(Mailbox(1))
    loss = recorder.timed_loss(lambda output, target: clock.spend(2))  # type: ignore[arg-type, return-value]

    def forward(replica: object, microbatch: int) -> None:
        for _ in range(2):
            mailbox.receive(0, Address(Phase.FORWARD, 0, 1, microbatch))
        clock.spend(3)
        loss(None, None)

    def backward(replica: object, microbatch: int) -> None:
        clock.spend(4)

    acts = recorder.timed_acts({Phase.FORWARD: forward, Phase.BACKWARD: backward})
    replica: Any = SimpleNamespace(stage=SimpleNamespace(index=1), worker=SimpleNamespace(device=CPUS[0]))
    for microbatch in range(2):
        acts[Phase.FORWARD](replica, microbatch)
        acts[Phase.BACKWARD](replica, microbatch)
    for microbatch in range(2):
        assert recorder.times[Action(Phase.FORWARD, 1, microbatch)] == (CPUS[0], 3 + 2, 2 * 5, 2)
        assert recorder.times[Action(Phase.BACKWARD, 1, microbatch)] == (CPUS[0], 4, 0, 0)
    assert recorder.seconds()[Action(Phase.FORWARD, 1, 0)] == 5
    assert recorder.spans[Action(Phase.FORWARD, 1, 0)] == ((0, 0), (5, 5), (10, 15))
    assert recorder.spans[Action(Phase.BACKWARD, 1, 0)] == ((15, 19),)


class QueueClock:
    """A GPU's clock and the host's. A mark is reached when all that was queued before is done."""

    def __init__(self) -> None:
        self.host = self.queued = 0.0  # s: now; when the GPU will have done all
        self.waits = 0

    def perf_counter(self) -> float:
        return self.host

    def launch(self, seconds: float) -> None:
        self.host += 1
        self.queued = max(self.queued, self.host) + seconds

    def mark(self) -> float:
        self.queued = max(self.queued, self.host)
        return self.queued

    def wait(self) -> None:
        self.waits += 1
        self.host = max(self.host, self.queued)

    def between(self, start: float, end: float) -> float:
        return end - start


def test_on_a_gpu_actions_take_as_long_as_their_kernels_and_wait_where_the_gpu_has_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """
    host   | wait ..... | launches 10 | launches 20 | wait ..... | launches 10 |
    GPU    |            idle 5 + 1    | 10 ........ | 20 .................... | 10 ...
    """
    clock = QueueClock()
    monkeypatch.setattr(step_recorder, "device_clock", lambda place: clock)
    monkeypatch.setattr(step_recorder, "time", clock)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda place: 64)
    monkeypatch.setattr(Mailbox, "receive", lambda *_: setattr(clock, "host", clock.host + 5))
    gpu: Any = SimpleNamespace(torch_device=torch.device("cuda", 0), name="cuda:0")
    recorder = StepRecorder([gpu])
    mailbox = recorder.mailbox(Mailbox(1))

    def forward(replica: object, microbatch: int) -> None:
        mailbox.receive(0, Address(Phase.FORWARD, 0, 1, microbatch))
        clock.launch(10)

    acts = recorder.timed_acts({Phase.FORWARD: forward, Phase.BACKWARD: lambda replica, i: clock.launch(20)})
    replica: Any = SimpleNamespace(stage=SimpleNamespace(index=1), worker=SimpleNamespace(device=gpu))
    for phase, microbatch in ((Phase.FORWARD, 0), (Phase.BACKWARD, 0), (Phase.FORWARD, 1)):
        acts[phase](replica, microbatch)
    assert clock.waits == 1, "for an idle GPU, before the step"
    first, backward, second = recorder.times.values()
    assert (first.seconds, first.waiting) == (1 + 10, 5), "the first kernels wait for their launch"
    assert (backward.seconds, backward.waiting) == (20, 0)
    assert (second.seconds, second.waiting) == (10, 0), "the GPU was busy while the host waited"
    assert list(recorder.spans.values()) == [((0, 0), (5, 16)), ((16, 36),), ((36, 36), (36, 46))]
    assert set(recorder.allocated.values()) == {64}


@pytest.mark.slow
def test_a_profiled_step_has_a_trace_of_its_actions(tmp_path: Path) -> None:
    pm = recording(net(), hand_plan(n_microbatches=2))
    pm.train_step(X, target=Y, loss_fn=mse_loss, profile=True)
    pm.close()
    profile = pm.last_profile
    assert profile is not None
    profile.trace(tmp_path / "t.json")
    trace = json.loads((tmp_path / "t.json").read_text())
    assert_well_formed(trace)
    events = trace["traceEvents"]
    arrows = [(event["name"], event["ph"]) for event in events if event["ph"] in "sf"]
    assert sorted(arrows) == sorted([("value", "s"), ("value", "f"), ("gradient", "s"), ("gradient", "f")] * 2)
    assert len(profile.sends) == 4, "two micro-batches, there and back"
    kernels = [event for event in events if event.get("cat") == "kernel"]
    found = {(e["name"], e["args"]["micro-batch"]) for e in kernels}
    assert found == {(f"{phase} of stage {s}", m) for phase in ("forward", "backward") for s in (0, 1) for m in (0, 1)}
    assert len({event["pid"] for event in kernels}) == len({one.device for one in profile.stages})
    computed = sum(event["dur"] for event in kernels) / 1e6
    assert computed == pytest.approx(sum(stage.busy for stage in profile.stages))
    waits = sum(event["dur"] for event in events if event.get("cat") == "user_annotation") / 1e6
    assert waits == pytest.approx(sum(stage.waiting for stage in profile.stages))
    with pytest.raises(autopar.InputError, match="rank 9 has no trace"):
        profile.trace(tmp_path / "u.json", rank=9)


def test_a_call_without_a_recorder_reads_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    pm = recording(net(), hand_plan())
    monkeypatch.setattr(device_clock, "time", None)
    pm.train_step(X, target=Y, loss_fn=mse_loss)
    pm.close()


def test_a_call_and_its_backward_can_be_recorded_too() -> None:
    pm, recorder = recording(net(), hand_plan(n_microbatches=2)), StepRecorder()
    with pm.recording(recorder):
        output = pm(X)
    mse_loss(output, Y).backward()
    pm.close()
    phases = (Phase.FORWARD, Phase.BACKWARD)
    assert recorder.times.keys() == {Action(phase, stage, i) for phase in phases for stage in (0, 1) for i in (0, 1)}
