"""Times of the actions of one call. A call without a recorder reads no clock.

```
    worker's time     | waits for a message | computes ........ the loss ....... | waits ...
    recorded as         waiting               seconds           loss, part of seconds
```
An action only queues the kernels that it runs on a GPU. To count them in that action, the worker of a GPU waits for
them at the end of every action, around the loss, and before it sends a message (otherwise the receiver would wait for
them and count that as computing).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

from autopar.analysis.example import LossFunction
from autopar.plan.plan import Plan
from autopar.plan.stage import Stage
from autopar.runtime.mailbox import Address, Mailbox
from autopar.runtime.stage_replica import StageReplica
from autopar.runtime.step_profile import MeasuredAction, MeasuredSend, StageStep, StepProfile
from autopar.schedule.clock import Action, Phase
from cost_models.hardware.devices import Device, synchronize

T = TypeVar("T")
Act = Callable[[StageReplica, int], None]  # does an action's phase on a stage, for a micro-batch


class ActionTimes(NamedTuple):
    """Seconds of one action."""

    device: Device
    seconds: float  # without waiting
    waiting: float  # s, for messages
    loss: float  # s in the loss function, part of `seconds`


class StepRecorder:
    """Records the times of one call's actions. This costs some microseconds per action."""

    def __init__(self) -> None:
        self.times: dict[Action, ActionTimes] = {}
        self.spans: dict[Action, tuple[tuple[float, float], ...]] = {}  # s of the clock: when an action did not wait
        self.threads: set[int] = set()  # those that did the actions
        self.allocated: dict[Action, int] = {}  # bytes of tensors on a GPU, at an action's end
        self.sent: dict[Address, float] = {}  # s of the clock
        self.received: dict[Address, float] = {}  # s of the clock
        self._current = threading.local()  # the thread's current action: device, seconds of waiting and of loss, waits

    @contextmanager
    def action(self, action: Action, device: Device) -> Iterator[None]:
        """Time what a worker of `device` does inside as `action`."""
        current = self._current
        current.device, current.waiting, current.loss, current.waits = device, 0.0, 0.0, []
        start = time.perf_counter()
        yield
        _finish(device)
        end = time.perf_counter()
        if device.torch_device.type == "cuda":
            self.allocated[action] = torch.cuda.memory_allocated(device.torch_device)
        seconds = end - start - current.waiting
        edges = [start, *itertools.chain.from_iterable(current.waits), end]
        self.spans[action] = tuple(zip(edges[::2], edges[1::2], strict=True))
        self.times[action] = ActionTimes(device, seconds, current.waiting, current.loss)
        self.threads.add(threading.get_ident())

    def timed_acts(self, acts: Mapping[Phase, Act]) -> dict[Phase, Act]:
        """The same acts, recorded."""

        def recorded(phase: Phase, act: Act) -> Act:
            def timed(replica: StageReplica, microbatch: int) -> None:
                with self.action(Action(phase, replica.stage.index, microbatch), replica.worker.device):
                    act(replica, microbatch)

            return timed

        return {phase: recorded(phase, act) for phase, act in acts.items()}

    def timed_loss(self, function: LossFunction) -> LossFunction:
        """The same loss function, recorded."""

        def timed(output: Any, target: Any) -> torch.Tensor:
            _finish(self._current.device)
            start = time.perf_counter()
            result = function(output, target)
            _finish(self._current.device)
            self._current.loss += time.perf_counter() - start
            return result

        return timed

    def mailbox(self, n_slots: int) -> Mailbox:
        """A mailbox that records how long actions wait for messages."""
        return _TimedMailbox(n_slots, self._current, self)

    def seconds(self) -> dict[Action, float]:
        """Seconds of every action, without waiting."""
        return {action: times.seconds for action, times in self.times.items()}

    def profile(self, plan: Plan, seconds: float, batch_size: int) -> StepProfile:
        """The call as a training step that took `seconds`, and what `plan` predicts if that is for this batch."""
        batch_size = max(batch_size, 1)  # inputs without a batch count as one sample, as in the plan
        n_microbatches = 1 + max(action.microbatch for action in self.times)
        is_predicted = (
            plan.predicted_step_time is not None
            and plan.training
            and (plan.batch_size, plan.n_microbatches) == (batch_size, n_microbatches)
        )
        actions: dict[tuple[int, str], list[tuple[Action, ActionTimes]]] = defaultdict(list)
        for action, times in self.times.items():
            actions[action.stage, times.device.name].append((action, times))
        places = [(index, name) for index, stage in enumerate(plan.stages) for name in stage.devices]
        devices = {times.device.name: times.device for times in self.times.values()}
        return StepProfile(
            seconds=seconds,
            predicted=plan.predicted_step_time if is_predicted else None,
            batch_size=batch_size,
            n_microbatches=n_microbatches,
            schedule=plan.schedule,
            stages=tuple(
                _stage_step(index, name, actions[index, name], plan.stages[index] if is_predicted else None)
                for index, name in places
                if (index, name) in actions
            ),
            one_worker=len(self.threads) == 1 and len(devices) > 1,
            actions=self._measured_actions(),
            sends=self._measured_sends(),
            synchronized=any(device.torch_device.type == "cuda" for device in devices.values()),
        )

    def _measured_actions(self) -> tuple[MeasuredAction, ...]:
        """All actions by their start, in seconds from the first one's."""
        first = self._first()
        found = [
            MeasuredAction(
                phase=action.phase.value,
                stage=action.stage,
                microbatch=action.microbatch,
                device=self.times[action].device.name,
                spans=tuple((start - first, end - first) for start, end in spans),
                allocated=self.allocated.get(action),
            )
            for action, spans in self.spans.items()
        ]
        return tuple(sorted(found, key=lambda one: one.spans))

    def _measured_sends(self) -> tuple[MeasuredSend, ...]:
        """All messages that arrived, by when they were sent."""
        first = self._first()
        found = [
            MeasuredSend(
                address.sender,
                address.receiver,
                address.microbatch,
                address.direction is not Phase.FORWARD,
                sent - first,
                self.received[address] - first,
            )
            for address, sent in self.sent.items()
            if address in self.received
        ]
        return tuple(sorted(found, key=lambda one: one.sent))

    def _first(self) -> float:
        """s of the clock, when the first action started."""
        return min((spans[0][0] for spans in self.spans.values()), default=0.0)


class _TimedMailbox(Mailbox):
    """Adds the time that a thread waits for a message to its current action."""

    def __init__(self, n_slots: int, current: threading.local, recorder: StepRecorder) -> None:
        super().__init__(n_slots)
        self._current, self._recorder = current, recorder

    def send(self, slot: int, address: Address, message: Any) -> None:
        _finish(self._current.device)
        self._recorder.sent[address] = time.perf_counter()
        super().send(slot, address, message)

    def receive(self, slot: int, address: Address) -> Any:
        start = time.perf_counter()
        try:
            return super().receive(slot, address)
        finally:
            end = time.perf_counter()
            self._current.waiting += end - start
            self._current.waits.append((start, end))
            self._recorder.received[address] = end


def timed(step: Callable[[], T], devices: Sequence[Device]) -> tuple[T, float]:
    """What `step` returns, and its seconds, from when all GPUs are idle until they are idle again."""
    synchronize(*devices)
    start = time.perf_counter()
    result = step()
    synchronize(*devices)
    return result, time.perf_counter() - start


def _finish(device: Device) -> None:
    """Wait for the kernels on this thread's current stream of a GPU (other threads may have queued some of them)."""
    if device.torch_device.type == "cuda":
        torch.cuda.current_stream(device.torch_device).synchronize()


def _stage_step(
    index: int, device: str, actions: Sequence[tuple[Action, ActionTimes]], predicted: Stage | None
) -> StageStep:
    """One stage on one device, from its actions. `predicted`: the stage in the plan, if the plan predicts this step."""
    forwards = [times for action, times in actions if action.phase is Phase.FORWARD]
    backwards = [times for action, times in actions if action.phase is not Phase.FORWARD]
    forward = backward = None
    if predicted is not None and predicted.forward_time is not None and predicted.backward_time is not None:
        forward = predicted.forward_time * len(forwards)
        again = predicted.forward_time if predicted.recompute else predicted.recompute_time or 0.0
        backward = (predicted.backward_time + again) * len(forwards)
    return StageStep(
        stage=index,
        device=device,
        microbatches=len(forwards),
        forward=sum(times.seconds for times in forwards),
        loss=sum(times.loss for times in forwards),
        backward=sum(times.seconds for times in backwards),
        waiting=sum(times.waiting for _, times in actions),
        predicted_forward=forward,
        predicted_backward=backward,
    )
