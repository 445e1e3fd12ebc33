"""The predicted step of a plan, or a measured step, as a Chrome trace (JSON), which Perfetto and chrome://tracing show,
and which Holistic Trace Analysis reads, one file a rank.

    pid   rank: the place of a slot's first device among those that the plan uses
    tid   stream: computing; sends, one stream for each stage that they go to, as they may run at once
    X     an action, a send that takes time, what a stage does once a step
    s, f  a value or gradient on its way from the action that makes it to the one that reads it
    C     bytes that the slot holds: parameters, and activations in flight; of a measured step, tensors on the GPU

Fields are those of the Trace Event Format (Google, "Trace Event Format", revision of 2016) and of torch.profiler's
exports, where `distributedInfo` names the rank, and a kernel has its stream, device and correlation among its args.
Times are microseconds from the start of the step.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autopar.errors import InputError
from autopar.plan.display import traced
from autopar.plan.plan import Plan
from autopar.planner.predicted_step import step_of_plan
from autopar.runtime.step_profile import StepProfile
from autopar.schedule.clock import Action, Event, Phase, Send
from autopar.schedule.table import held
from autopar.schedule.timeline import Timeline

COMPUTING = 7  # the stream of a slot's actions, as torch.profiler numbers the default stream; sends have the next ones

_PHASES = {
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.INPUT: "backward to inputs",
    Phase.WEIGHT: "backward to parameters",
}
_COMMUNICATION = "ncclKernel"  # Holistic Trace Analysis takes kernels whose names begin so for communication
_US = 1e6  # microseconds of a second


@traced.register
def _(plan: Plan, path: Path, rank: int | None) -> None:
    step = step_of_plan(plan)
    if step is None:
        raise InputError(
            "the plan has no predicted times; price it first: autopar.plan(model, devices, plan=plan, ...)"
        )
    trace = _Trace(plan, step.timeline())
    if rank is not None and rank not in trace.ranks:
        raise InputError(f"rank {rank} has no trace; ranks that drive a slot are {', '.join(map(str, trace.ranks))}")
    _write(trace.to_dict(rank), path)


@traced.register
def _(profile: StepProfile, path: Path, rank: int | None) -> None:
    _write(_measured(profile, rank), path)


def _write(trace: dict[str, Any], path: Path) -> None:
    text = json.dumps(trace, allow_nan=False)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode(), mtime=0))  # equal traces are equal files
    else:
        path.write_text(text)


class _Trace:
    """The trace of a plan's timeline."""

    def __init__(self, plan: Plan, timeline: Timeline) -> None:
        self._plan, self._timeline = plan, timeline
        places = {name: number for number, name in enumerate(plan.used_devices)}
        schedule = timeline.schedule
        self._devices = []
        for slot in range(schedule.n_slots):
            stage = schedule.stages_of(slot)[0]
            replica, shards = schedule.slots_of(stage).index(slot), plan.stages[stage].shards
            self._devices.append(plan.stages[stage].devices[replica * shards : (replica + 1) * shards])
        self.ranks = [places[devices[0]] for devices in self._devices]
        self._correlations = itertools.count(1)
        self._streams: dict[tuple[int, int], int] = {}  # (slot, stage that it sends to) -> stream
        for send in timeline.sends:
            others = sum(slot == send.slot for slot, _ in self._streams)
            self._streams.setdefault((send.slot, _target(send)), COMPUTING + 1 + others)

    def to_dict(self, rank: int | None) -> dict[str, Any]:
        """The whole trace, or the events of one rank."""
        events = [*self._names(), *self._actions(), *self._sends(), *self._finishes(), *self._memory()]
        if rank is None:
            events += self._flows()  # from rank to rank
        else:
            events = [event for event in events if event["pid"] == rank]
        return {
            "schemaVersion": 1,
            "distributedInfo": {"rank": rank or 0, "world_size": len(self._plan.used_devices)},
            "displayTimeUnit": "ms",
            "traceName": f"predicted step of {self._plan.places}, {self._plan.schedule}",
            "traceEvents": events,
        }

    def _names(self) -> Iterator[dict[str, Any]]:
        for slot, (rank, devices) in enumerate(zip(self.ranks, self._devices, strict=True)):
            stages = ", ".join(map(str, self._timeline.schedule.stages_of(slot)))
            name = f"rank {rank}: {devices[0]}{f' .. {devices[-1]}' if len(devices) > 1 else ''}, stage {stages}"
            yield _meta(rank, 0, "process_name", name=name)
            yield _meta(rank, 0, "process_sort_index", sort_index=rank)
            yield _meta(rank, COMPUTING, "thread_name", name="computing")
            for (sender, stage), stream in self._streams.items():
                if sender == slot:
                    yield _meta(rank, stream, "thread_name", name=f"sends to stage {stage}")

    def _actions(self) -> Iterator[dict[str, Any]]:
        for slot, action, start, end in self._timeline.events:
            about = {"stage": action.stage, "micro-batch": action.microbatch}
            yield self._slice(f"{_PHASES[action.phase]} of stage {action.stage}", slot, COMPUTING, start, end, about)

    def _sends(self) -> Iterator[dict[str, Any]]:
        for send in self._timeline.sends:
            target = _target(send)
            about = {"micro-batch": send.action.microbatch, "blocking": not send.transfer.overlap}
            name = f"{_COMMUNICATION}: send of stage {send.action.stage} to {target}"
            yield self._slice(name, send.slot, self._streams[send.slot, target], send.start, send.end, about)

    def _finishes(self) -> Iterator[dict[str, Any]]:
        for slot, stage, start, reduced, end in self._timeline.finishes:
            about = {"stage": stage}
            if start < reduced:
                name = f"{_COMMUNICATION}: reduction of gradients of stage {stage}"
                yield self._slice(name, slot, COMPUTING, start, reduced, about)
            if reduced < end:
                yield self._slice(f"optimizer step of stage {stage}", slot, COMPUTING, reduced, end, about)

    def _slice(
        self, name: str, slot: int, stream: int, start: float, end: float, about: dict[str, Any]
    ) -> dict[str, Any]:
        rank = self.ranks[slot]
        args = {"stream": stream, "device": rank, "correlation": next(self._correlations), **about}
        times = {"ts": start * _US, "dur": (end - start) * _US}
        return {"ph": "X", "cat": "kernel", "name": name, "pid": rank, "tid": stream, **times, "args": args}

    def _flows(self) -> Iterator[dict[str, Any]]:
        """An arrow for each micro-batch of a transfer, and of its gradient."""
        of: dict[Action, Event] = {event.action: event for event in self._timeline.events}
        number = itertools.count(1)
        backwards = (Phase.BACKWARD, Phase.INPUT, Phase.WEIGHT)
        for link in self._plan.transfers:
            for m in range(self._timeline.schedule.n_microbatches):
                made, read = of[Action(Phase.FORWARD, link.source, m)], of[Action(Phase.FORWARD, link.target, m)]
                yield from self._flow("value", next(number), made, read)
                if not (self._timeline.schedule.training and link.backward_bytes):
                    continue
                found = [[of[a] for p in backwards if (a := Action(p, s, m)) in of] for s in (link.target, link.source)]
                yield from self._flow("gradient", next(number), found[0][0], found[1][0])

    def _flow(self, name: str, number: int, made: Event, read: Event) -> Iterator[dict[str, Any]]:
        middle = (made.start + made.end) / 2  # an arrow belongs to the slice around its time
        for phase, event, time in (("s", made, middle), ("f", read, (read.start + read.end) / 2)):
            place = {"pid": self.ranks[event.slot], "tid": COMPUTING, "ts": time * _US}
            yield {
                "ph": phase,
                "id": number,
                "cat": "send",
                "name": name,
                **place,
                **({"bp": "e"} if phase == "f" else {}),
            }

    def _memory(self) -> Iterator[dict[str, Any]]:
        """Bytes on each device of a slot, where the plan says them."""
        stages, schedule = self._plan.stages, self._timeline.schedule
        if any(stage.activation_bytes is None or stage.parameter_bytes is None for stage in stages):
            return
        for slot, rank in enumerate(self.ranks):
            parameters = sum(stages[s].parameter_bytes or 0 for s in schedule.stages_of(slot))
            events = [event for event in self._timeline.events if event.slot == slot]
            sizes = held(schedule.actions[slot], lambda action: stages[action.stage].activation_bytes or 0)
            yield _counter(rank, 0.0, parameters, 0)
            for event, (during, after) in zip(events, sizes, strict=True):
                yield _counter(rank, event.start, parameters, during)
                yield _counter(rank, event.end, parameters, after)


def _measured(profile: StepProfile, rank: int | None) -> dict[str, Any]:
    """A measured step: a slice for each part of an action between waits, and for each wait."""
    devices = list(dict.fromkeys(one.device for one in profile.stages))
    if rank is not None and rank not in range(len(devices)):
        raise InputError(f"rank {rank} has no trace; the step has ranks 0..{len(devices) - 1}")
    events: list[dict[str, Any]] = []
    for number, name in enumerate(devices):
        stages = ", ".join(str(one.stage) for one in profile.stages if one.device == name)
        events.append(_meta(number, 0, "process_name", name=f"rank {number}: {name}, stage {stages}"))
        events.append(_meta(number, 0, "process_sort_index", sort_index=number))
        events.append(_meta(number, COMPUTING, "thread_name", name="computing"))
    for correlation, one in enumerate(profile.actions, 1):
        number, about = devices.index(one.device), {"stage": one.stage, "micro-batch": one.microbatch}
        place = {"ph": "X", "pid": number, "tid": COMPUTING}
        name = f"{_PHASES[Phase(one.phase)]} of stage {one.stage}"
        for start, end in one.spans:
            args = {"stream": COMPUTING, "device": number, "correlation": correlation, **about}
            times = {"ts": start * _US, "dur": (end - start) * _US}
            events.append({**place, "cat": "kernel", "name": name, **times, "args": args})
        for (_, start), (end, _) in itertools.pairwise(one.spans):
            times = {"ts": start * _US, "dur": (end - start) * _US}
            events.append({**place, "cat": "user_annotation", "name": "waiting for a message", **times, "args": about})
    if rank is None:
        events += _measured_flows(profile, devices)
    events += _measured_memory(profile, devices)
    return {
        "schemaVersion": 1,
        "distributedInfo": {"rank": rank or 0, "world_size": len(devices)},
        "displayTimeUnit": "ms",
        "traceName": f"measured step of {profile.seconds} s, {profile.schedule}",
        "traceEvents": [event for event in events if rank is None or event["pid"] == rank],
    }


def _measured_flows(profile: StepProfile, devices: Sequence[str]) -> Iterator[dict[str, Any]]:
    """An arrow for each value and gradient, from when it was sent to when its receiver went on."""
    for number, send in enumerate(profile.sends, 1):
        name = "gradient" if send.gradient else "value"
        ends = (send.device, send.sent), (send.to_device, send.received)
        for phase, (device, time) in zip("sf", ends, strict=True):
            place = {"pid": devices.index(device), "tid": COMPUTING, "ts": time * _US}
            bound = {"bp": "e"} if phase == "f" else {}
            yield {"ph": phase, "id": number, "cat": "send", "name": name, **place, **bound}


def _measured_memory(profile: StepProfile, devices: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Bytes of tensors on each GPU, as its actions ended."""
    for one in profile.actions:
        if one.allocated is not None:
            place = {"pid": devices.index(one.device), "tid": 0, "ts": one.spans[-1][1] * _US}
            yield {"ph": "C", "name": "bytes allocated", **place, "args": {"tensors": one.allocated}}


def _target(send: Send) -> int:
    """The stage that a send goes to."""
    return send.transfer.target if send.action.phase is Phase.FORWARD else send.transfer.source


def _meta(pid: int, tid: int, kind: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _counter(rank: int, time: float, parameters: int, activations: int) -> dict[str, Any]:
    values = {"parameters": parameters, "activations": activations}
    return {"ph": "C", "name": "bytes held", "pid": rank, "tid": 0, "ts": time * _US, "args": values}
