"""What each process recorded of a step, and the profile that the records of all processes make together.

```
   process 0    F0 F1 .... B0 B1     a record: actions, messages sent and received, on its own clock
   process 1       F0 F1 B0 B1 ...   another one; `shifted` brings it to the clock of process 0
```
One process alone makes one record, with the actions of all its workers.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.plan.plan import Plan
from autopar.plan.recompute import Recompute
from autopar.planner.predicted_step import PredictedStage, step_of_plan
from autopar.runtime.step.mailbox import Address
from autopar.runtime.step_profile import MeasuredAction, MeasuredSend, StageStep, StepProfile
from autopar.schedule.clock import Action, Phase

Spans = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class RecordedAction:
    """One action on one device."""

    device: str  # name
    spans: Spans  # s of the clock: start and end; a wait lies between
    seconds: float  # without waiting
    waiting: float  # s, for messages
    loss: float  # s in the loss function, part of `seconds`
    allocated: int | None = None  # bytes of tensors on its GPU at its end


@dataclass(frozen=True)
class StepRecord:
    """What one process recorded. Instants are seconds of one clock."""

    actions: Mapping[Action, RecordedAction]
    sent: Mapping[Address, tuple[str, float]]  # by which device, and when
    received: Mapping[Address, tuple[str, float]]  # by which device, and when it went on with the message
    n_threads: int = 1  # that did the actions

    @property
    def one_worker(self) -> bool:
        """Whether one thread did the actions of several devices."""
        return self.n_threads == 1 and len({one.device for one in self.actions.values()}) > 1

    def shifted(self, seconds: float) -> StepRecord:
        """The same on a clock that shows `seconds` more."""
        return replace(
            self,
            actions={
                action: replace(one, spans=tuple((start + seconds, end + seconds) for start, end in one.spans))
                for action, one in self.actions.items()
            },
            sent={address: (device, at + seconds) for address, (device, at) in self.sent.items()},
            received={address: (device, at + seconds) for address, (device, at) in self.received.items()},
        )


def step_profile(
    records: Sequence[StepRecord], plan: Plan, seconds: float, batch_size: int, *, clock_error: float = 0.0
) -> StepProfile:
    """The step of all processes, which took `seconds`, and what `plan` predicts if that is for this batch.

    `records`: one per process, on one clock. `clock_error`: s by which their instants may be wrong.
    """
    recorded = [(action, one) for record in records for action, one in record.actions.items()]
    batch_size = max(batch_size, 1)  # inputs without a batch count as one sample, as in the plan
    n_microbatches = 1 + max(action.microbatch for action, _ in recorded)
    is_predicted = (
        plan.predicted_step_time is not None
        and plan.training
        and (plan.batch_size, plan.n_microbatches) == (batch_size, n_microbatches)
    )
    at: defaultdict[tuple[int, str], list[tuple[Action, RecordedAction]]] = defaultdict(list)
    for action, one in recorded:
        at[action.stage, one.device].append((action, one))
    expected = step_of_plan(plan) if is_predicted else None
    first = min((one.spans[0][0] for _, one in recorded), default=0.0)
    return StepProfile(
        seconds=seconds,
        predicted=plan.predicted_step_time if is_predicted else None,
        batch_size=batch_size,
        n_microbatches=n_microbatches,
        schedule=plan.schedule,
        stages=tuple(
            _stage_step(index, name, at[index, name], expected.stages[index] if expected is not None else None)
            for index, stage in enumerate(plan.stages)
            for name in stage.devices
            if (index, name) in at
        ),
        one_worker=any(record.one_worker for record in records),
        actions=_measured_actions(recorded, first),
        sends=_measured_sends(records, plan, first),
        clock_error=clock_error,
    )


def _measured_actions(recorded: Sequence[tuple[Action, RecordedAction]], first: float) -> tuple[MeasuredAction, ...]:
    """All actions by their start, in seconds from the first one's."""
    found = [
        MeasuredAction(
            phase=action.phase.value,
            stage=action.stage,
            microbatch=action.microbatch,
            device=one.device,
            spans=tuple((start - first, end - first) for start, end in one.spans),
            allocated=one.allocated,
        )
        for action, one in recorded
    ]
    return tuple(sorted(found, key=lambda one: one.spans))


def _measured_sends(records: Sequence[StepRecord], plan: Plan, first: float) -> tuple[MeasuredSend, ...]:
    """All messages that arrived, by when they were sent.

    The devices of a mesh in one process are one sender. Where each is a process, all of them have the whole value, and
    the receivers are served in turn, as `Routes.sender_to` does.
    """
    places = {name: place for place, name in enumerate(dict.fromkeys(n for s in plan.stages for n in s.devices))}
    sent: defaultdict[Address, dict[str, float]] = defaultdict(dict)  # by device
    received: defaultdict[Address, dict[str, float]] = defaultdict(dict)
    for record in records:
        for address, (device, at) in record.sent.items():
            sent[address][device] = at
        for address, (device, at) in record.received.items():
            received[address][device] = at
    found = []
    for address, receivers in received.items():
        senders = sorted(sent[address], key=lambda name: places[name])
        for number, device in enumerate(sorted(receivers, key=lambda name: places[name])):
            source = senders[number % len(senders)]
            found.append(
                MeasuredSend(
                    stage=address.sender,
                    to=address.receiver,
                    microbatch=address.microbatch,
                    gradient=address.direction is not Phase.FORWARD,
                    sent=sent[address][source] - first,
                    received=receivers[device] - first,
                    device=source,
                    to_device=device,
                )
            )
    return tuple(sorted(found, key=operator.attrgetter("sent")))


def _stage_step(
    index: int, device: str, actions: Sequence[tuple[Action, RecordedAction]], predicted: PredictedStage | None
) -> StageStep:
    """One stage on one device, from its actions. `predicted`: the stage, if the plan predicts this step."""
    forwards = [one for action, one in actions if action.phase is Phase.FORWARD]
    backwards = [one for action, one in actions if action.phase is not Phase.FORWARD]
    forward = backward = None
    if predicted is not None:
        own = [action.microbatch for action, _ in actions if action.phase is Phase.FORWARD]
        again = predicted.forward if predicted.recompute == Recompute.STAGE else predicted.again
        forward = sum(predicted.forward[i] for i in own)
        backward = sum(predicted.backward[i] + (again[i] if again else 0.0) for i in own)
    return StageStep(
        stage=index,
        device=device,
        microbatches=len(forwards),
        forward=sum(one.seconds for one in forwards),
        loss=sum(one.loss for one in forwards),
        backward=sum(one.seconds for one in backwards),
        waiting=sum(one.waiting for _, one in actions),
        predicted_forward=forward,
        predicted_backward=backward,
    )
