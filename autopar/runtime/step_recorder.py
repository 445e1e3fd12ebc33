"""What the actions of a call take, noted on request: a call that nobody notes has no clock in it.

```
    worker's time     | waits for a message | computes ........ the loss ....... | waits ...
    noted as            waiting               seconds           loss, of seconds
```
Kernels of a GPU are only queued by the action that needs them. So that they count where they belong, the worker of a
GPU waits for them at the end of every action, around the loss, and before it sends a message (else its receiver would
do the waiting, and call it computing).
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

from autopar.plan.plan import Plan, Stage
from autopar.runtime.executable import Part
from autopar.runtime.mailbox import Address, Mailbox
from autopar.runtime.passes import LossFunction
from autopar.runtime.step_profile import StageStep, StepProfile
from autopar.schedule.clock import Action, Phase
from cost_models.hardware.devices import Device, synchronize

T = TypeVar("T")
Act = Callable[[Part, int], None]  # on a part and a micro-batch


class ActionTimes(NamedTuple):
    """What an action took."""

    device: Device
    seconds: float  # waiting left out
    waiting: float  # s, for messages
    loss: float  # s, of `seconds`: in the loss function


class StepRecorder:
    """What the actions of one call took. Noting costs some microseconds an action."""

    def __init__(self) -> None:
        self.taken: dict[Action, ActionTimes] = {}
        self.threads: set[int] = set()  # that did them
        self._now = threading.local()  # of the action that the thread is in: device, waiting and loss so far

    @contextmanager
    def action(self, action: Action, device: Device) -> Iterator[None]:
        """Around what a worker of `device` does for an action."""
        now = self._now
        now.device, now.waiting, now.loss = device, 0.0, 0.0
        start = time.perf_counter()
        yield
        _finish(device)
        seconds = time.perf_counter() - start - now.waiting
        self.taken[action] = ActionTimes(device, seconds, now.waiting, now.loss)
        self.threads.add(threading.get_ident())

    def actions(self, ways: Mapping[Phase, Act]) -> dict[Phase, Act]:
        """The same, noted."""

        def noted(phase: Phase, act: Act) -> Act:
            def timed(part: Part, microbatch: int) -> None:
                with self.action(Action(phase, part.stage.index, microbatch), part.worker.device):
                    act(part, microbatch)

            return timed

        return {phase: noted(phase, act) for phase, act in ways.items()}

    def loss(self, function: LossFunction) -> LossFunction:
        """The same, noted."""

        def timed(output: Any, target: Any) -> torch.Tensor:
            _finish(self._now.device)
            start = time.perf_counter()
            result = function(output, target)
            _finish(self._now.device)
            self._now.loss += time.perf_counter() - start
            return result

        return timed

    def mail(self, n_slots: int) -> Mailbox:
        """Mailboxes that note who waits."""
        return _NotedMail(n_slots, self._now)

    def seconds(self) -> dict[Action, float]:
        """Of every action, waiting left out."""
        return {action: taken.seconds for action, taken in self.taken.items()}

    def profile(self, plan: Plan, seconds: float, batch_size: int) -> StepProfile:
        """The call as a training step by `plan` that took `seconds`, with what the plan predicts for such a batch."""
        batch_size = max(batch_size, 1)  # inputs without a batch are one sample, as in the plan
        n_microbatches = 1 + max(action.microbatch for action in self.taken)
        foreseen = (
            plan.predicted_step_time is not None
            and plan.training
            and (plan.batch_size, plan.n_microbatches) == (batch_size, n_microbatches)
        )
        parts: dict[tuple[int, str], list[tuple[Action, ActionTimes]]] = defaultdict(list)
        for action, taken in self.taken.items():
            parts[action.stage, taken.device.name].append((action, taken))
        places = [(index, name) for index, stage in enumerate(plan.stages) for name in stage.devices]
        devices = {taken.device.name: taken.device for taken in self.taken.values()}
        return StepProfile(
            seconds=seconds,
            predicted=plan.predicted_step_time if foreseen else None,
            batch_size=batch_size,
            n_microbatches=n_microbatches,
            schedule=plan.schedule,
            stages=tuple(
                _stage_step(index, name, parts[index, name], plan.stages[index] if foreseen else None)
                for index, name in places
                if (index, name) in parts
            ),
            one_worker=len(self.threads) == 1 and len(devices) > 1,
            synchronized=any(device.torch_device.type == "cuda" for device in devices.values()),
        )


class _NotedMail(Mailbox):
    """Adds up what threads wait in it."""

    def __init__(self, n_slots: int, now: threading.local) -> None:
        super().__init__(n_slots)
        self._now = now

    def send(self, slot: int, address: Address, message: Any) -> None:
        _finish(self._now.device)
        super().send(slot, address, message)

    def receive(self, slot: int, address: Address) -> Any:
        start = time.perf_counter()
        try:
            return super().receive(slot, address)
        finally:
            self._now.waiting += time.perf_counter() - start


def timed(step: Callable[[], T], devices: Sequence[Device]) -> tuple[T, float]:
    """What `step` returns, and its seconds: from when all GPUs are idle until they are again."""
    synchronize(*devices)
    start = time.perf_counter()
    result = step()
    synchronize(*devices)
    return result, time.perf_counter() - start


def _finish(device: Device) -> None:
    """Wait for what this thread has queued on a GPU (and, on the same stream, other threads)."""
    if device.torch_device.type == "cuda":
        torch.cuda.current_stream(device.torch_device).synchronize()


def _stage_step(
    index: int, device: str, actions: Sequence[tuple[Action, ActionTimes]], predicted: Stage | None
) -> StageStep:
    """`predicted`: the stage in the plan, if it predicts this step."""
    forwards = [taken for action, taken in actions if action.phase is Phase.FORWARD]
    backwards = [taken for action, taken in actions if action.phase is not Phase.FORWARD]
    forward = backward = None
    if predicted is not None and predicted.forward_time is not None and predicted.backward_time is not None:
        forward = predicted.forward_time * len(forwards)
        backward = (predicted.backward_time + predicted.recompute * predicted.forward_time) * len(forwards)
    return StageStep(
        stage=index,
        device=device,
        microbatches=len(forwards),
        forward=sum(taken.seconds for taken in forwards),
        loss=sum(taken.loss for taken in forwards),
        backward=sum(taken.seconds for taken in backwards),
        waiting=sum(taken.waiting for _, taken in actions),
        predicted_forward=forward,
        predicted_backward=backward,
    )
