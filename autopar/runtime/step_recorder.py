"""Times of the actions of one call. A call without a recorder reads no clock.

```
    device's time     | waits for a message | computes ........ the loss ....... | waits ...
    recorded as         waiting               seconds           loss, part of seconds
```
The clock is the device's (`device_clock.py`). An action only queues the kernels that it runs on a GPU: there its
instants are events in the GPU's own queue, and no thread waits for a GPU before the step has ended.

```
    host    | action 0 | action 1 | ...                    end of the step: reads all events
    GPU          | kernels of 0 ..... | waits for a copy | kernels of 1 .....
    events       ^start            end^ ^                ^                end^
```
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from autopar.analysis.example import LossFunction
from autopar.plan.plan import Plan
from autopar.runtime.stages.stage_replica import StageReplica
from autopar.runtime.step.mailbox import Address, Mailbox
from autopar.runtime.step.transfers import PushedTensor, Transfers
from autopar.runtime.step_profile import StepProfile
from autopar.runtime.step_record import RecordedAction, StepRecord, step_profile
from autopar.schedule.clock import Action, Phase
from cost_models.hardware.devices import Device, synchronize
from cost_models.measuring.device_clock import DeviceClock, device_clock

T = TypeVar("T")
Act = Callable[[StageReplica, int], None]  # does an action's phase on a stage, for a micro-batch


class ActionTimes(NamedTuple):
    """Seconds of one action."""

    device: Device
    seconds: float  # without waiting
    waiting: float  # s, for messages
    loss: float  # s in the loss function, part of `seconds`


class _DeviceTime:
    """Instants on one device, in seconds of the host's clock."""

    def __init__(self, place: torch.device) -> None:
        self.clock: DeviceClock = device_clock(place)
        self._host, self._origin = 0.0, 0.0
        if place.type == "cuda":
            self.clock.wait()  # then the GPU is idle, and reaches its first mark as the host makes it
            self._host, self._origin = time.perf_counter(), self.clock.mark()

    def at(self, mark: Any) -> float:
        """Only once the device has reached the mark."""
        return self._host + self.clock.between(self._origin, mark)


@dataclass
class _Marks:
    """The instants of an action, on the clock of its device."""

    device: Device
    time: _DeviceTime
    start: Any
    end: Any = None
    waits: list[tuple[Any, Any]] = field(default_factory=list)  # for messages: start and end
    losses: list[tuple[Any, Any]] = field(default_factory=list)  # in the loss function: start and end

    def seconds(self, parts: Sequence[tuple[Any, Any]]) -> float:
        return sum(self.time.clock.between(start, end) for start, end in parts)


class _Current(threading.local):
    """Of one thread."""

    marks: _Marks | None = None  # of the action that it does


class StepRecorder:
    """Records the times of one call's actions. This costs some microseconds per action."""

    def __init__(self, devices: Sequence[Device] = ()) -> None:
        """`devices`: those of the call. A GPU that is not among them is waited for at its first action."""
        self.threads: set[int] = set()  # those that did the actions
        self.allocated: dict[Action, int] = {}  # bytes of tensors on a GPU, at an action's end
        self._times: dict[torch.device, _DeviceTime] = {}
        self._lock = threading.Lock()
        self._marks: dict[Action, _Marks] = {}
        self._sent: dict[Address, tuple[_Marks, Any]] = {}
        self._received: dict[Address, tuple[_Marks, Any]] = {}
        self._current = _Current()
        for device in devices:
            self._time_of(device.torch_device)

    @contextmanager
    def action(self, action: Action, device: Device) -> Iterator[None]:
        """Time what a worker of `device` does inside as `action`."""
        of_device = self._time_of(device.torch_device)
        self._current.marks = marks = _Marks(device, of_device, of_device.clock.mark())
        try:
            yield
        finally:
            self._current.marks = None
        marks.end = of_device.clock.mark()
        if device.torch_device.type == "cuda":
            self.allocated[action] = torch.cuda.memory_allocated(device.torch_device)
        self._marks[action] = marks
        self.threads.add(threading.get_ident())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, the thread's current action, if it is in one, waits for a message."""
        marks = self._current.marks
        if marks is None:
            yield
            return
        start = marks.time.clock.mark()
        try:
            yield
        finally:
            marks.waits.append((start, marks.time.clock.mark()))

    def sends(self, address: Address) -> None:
        """The thread's current action sends a message."""
        marks = self._current.marks
        assert marks is not None, "actions send"
        self._sent[address] = marks, marks.time.clock.mark()

    def receives(self, address: Address) -> None:
        """The thread's current action has a message that it waited for."""
        marks = self._current.marks
        assert marks is not None, "actions receive"
        self._received[address] = marks, marks.waits[-1][1]

    @property
    def times(self) -> dict[Action, ActionTimes]:
        """Of every action. Waits for the devices."""
        self._wait()
        found = {}
        for action, marks in self._marks.items():
            waiting = marks.seconds(marks.waits)
            seconds = marks.seconds([(marks.start, marks.end)]) - waiting
            found[action] = ActionTimes(marks.device, seconds, waiting, marks.seconds(marks.losses))
        return found

    @property
    def spans(self) -> dict[Action, tuple[tuple[float, float], ...]]:
        """For every action, when it did not wait: start and end in s of the host's clock. Waits for the devices."""
        self._wait()
        found = {}
        for action, marks in self._marks.items():
            edges = [marks.start, *itertools.chain.from_iterable(marks.waits), marks.end]
            at = list(map(marks.time.at, edges))
            found[action] = tuple(zip(at[::2], at[1::2], strict=True))
        return found

    def transfers(self, streams: Sequence[torch.cuda.Stream]) -> Transfers:
        """Transfers that record how long actions wait for copies."""
        return _TimedTransfers(streams, self)

    def _time_of(self, place: torch.device) -> _DeviceTime:
        with self._lock:
            if place not in self._times:
                self._times[place] = _DeviceTime(place)
            return self._times[place]

    def _wait(self) -> None:
        for one in self._times.values():
            one.clock.wait()

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
            marks = self._current.marks
            assert marks is not None, "a forward computes the loss"
            start = marks.time.clock.mark()
            result = function(output, target)
            marks.losses.append((start, marks.time.clock.mark()))
            return result

        return timed

    def mailbox(self, timed: Mailbox) -> Mailbox:
        """The same mailbox, which records how long actions wait for messages."""
        return _TimedMailbox(timed, self)

    def seconds(self) -> dict[Action, float]:
        """Seconds of every action, without waiting."""
        return {action: times.seconds for action, times in self.times.items()}

    def record(self) -> StepRecord:
        """All of it, on the host's clock. Waits for the devices."""
        times, spans = self.times, self.spans
        return StepRecord(
            actions={
                action: RecordedAction(
                    device=of.device.name,
                    spans=spans[action],
                    seconds=of.seconds,
                    waiting=of.waiting,
                    loss=of.loss,
                    allocated=self.allocated.get(action),
                )
                for action, of in times.items()
            },
            sent={address: (marks.device.name, marks.time.at(at)) for address, (marks, at) in self._sent.items()},
            received={a: (marks.device.name, marks.time.at(at)) for a, (marks, at) in self._received.items()},
            n_threads=len(self.threads),
        )

    def profile(self, plan: Plan, seconds: float, batch_size: int) -> StepProfile:
        """The call as a training step that took `seconds`, and what `plan` predicts if that is for this batch."""
        return step_profile([self.record()], plan, seconds, batch_size)


class _TimedMailbox(Mailbox):
    """Counts the time until a message is here as waiting."""

    def __init__(self, timed: Mailbox, recorder: StepRecorder) -> None:
        super().__init__(0)
        self._timed, self._recorder = timed, recorder

    def send(self, slot: int, address: Address, message: Any) -> None:
        self._recorder.sends(address)
        self._timed.send(slot, address, message)

    def receive(self, slot: int, address: Address) -> Any:
        with self._recorder.waiting():
            message = self._timed.receive(slot, address)
        self._recorder.receives(address)
        return message

    def abort(self) -> None:
        self._timed.abort()


class _TimedTransfers(Transfers):
    """Counts the time until a copy has arrived as waiting."""

    def __init__(self, streams: Sequence[torch.cuda.Stream], recorder: StepRecorder) -> None:
        super().__init__(streams)
        self._recorder = recorder

    def arrived(self, value: Any, device: torch.device) -> Any:
        if not isinstance(value, PushedTensor):
            return value
        with self._recorder.waiting():
            return super().arrived(value, device)


def timed(step: Callable[[], T], devices: Sequence[Device]) -> tuple[T, float]:
    """What `step` returns, and its seconds, from when all GPUs are idle until they are idle again."""
    synchronize(*devices)
    start = time.perf_counter()
    result = step()
    synchronize(*devices)
    return result, time.perf_counter() - start
