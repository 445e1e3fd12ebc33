"""The predicted memory of a plan's step as a snapshot of PyTorch's allocator, which memory_viz shows.

    bytes   +---------------------------+  peak of the plan
            |          workspace        |  while an action runs: what the peak leaves
            |     +------+---+----+     |
            |     | activations   |     |  from the forward of a micro-batch to the end of its backward
            +-----+---------------+-----+
            |         gradients         |  from the end of a stage's first backward on
            +---------------------------+
            |  weights, optimizer state |  all the time
            +---------------------------+-> time

The layout is that of `torch.cuda.memory._snapshot()`: "segments", one a device, with the blocks held at the end of the
step, and "device_traces" with an alloc, a free_requested and a free_completed for each block. The first frame of a
block names its owner and, in place of a file, the modules of its stage. Times are microseconds of the predicted step.

A plan states the peak of its fullest device, which a rehearsal found, and the bytes of each owner. Gradients come one
by one as activations go: where all of them together with the activations would exceed the peak, the snapshot has as
much of them as fits.
"""

from __future__ import annotations

import bisect
import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.errors import InputError
from autopar.plan.display import snapshotted
from autopar.plan.plan import Plan
from autopar.planner.predicted_step import step_of_plan
from autopar.schedule.clock import Action, Event, Phase
from autopar.schedule.table import held
from autopar.schedule.timeline import Timeline

_ENDS = (Phase.BACKWARD, Phase.WEIGHT)  # the backward of a micro-batch
_US = 1e6  # microseconds of a second
_BASE = 1 << 32  # of the first device's addresses
_APART = 1 << 42  # between the addresses of two devices: memory_viz keeps addresses as doubles, exact below 2**53
_PROTOCOL = 4  # of pickle, the newest that memory_viz reads


@snapshotted.register
def _(plan: Plan, path: Path) -> None:
    path.write_bytes(pickle.dumps(snapshot_of(plan), protocol=_PROTOCOL))


def snapshot_of(plan: Plan) -> dict[str, Any]:
    """The snapshot as PyTorch would return it. Raises InputError for a plan without predictions of memory."""
    step = step_of_plan(plan)
    needed = ("peak_memory", "parameter_bytes", "activation_bytes")
    if step is None or any(getattr(stage, name) is None for stage in plan.stages for name in needed):
        raise InputError(
            "the plan has no predicted memory; price it first: autopar.plan(model, devices, plan=plan, ...)"
        )
    timeline = step.timeline()
    schedule = timeline.schedule
    places = {name: number for number, name in enumerate(plan.used_devices)}
    devices: dict[int, _Device] = {}
    for slots in _alike(timeline):
        memory = _Resident.of(plan, timeline, slots)
        for slot in slots:
            stage = schedule.stages_of(slot)[0]
            first = schedule.slots_of(stage).index(slot) * plan.stages[stage].shards
            place = places[plan.stages[stage].devices[first]]
            devices[place] = _Device(place)
            _fill(devices[place], plan, timeline, slot, memory)
    empty: list[dict[str, Any]] = []
    return {
        "segments": [devices[place].segment() for place in sorted(devices)],
        "device_traces": [devices[p].trace() if p in devices else empty for p in range(len(places))],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _alike(timeline: Timeline) -> list[tuple[int, ...]]:
    """The slots that serve the same stages: replicas of each other."""
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for slot in range(timeline.schedule.n_slots):
        groups[timeline.schedule.stages_of(slot)].append(slot)
    return [tuple(slots) for slots in groups.values()]


@dataclass(frozen=True)
class _Resident:
    """Bytes of the stages that some slots serve."""

    weights: dict[int, int]
    optimizer: dict[int, int]
    gradients: dict[int, int]
    workspace: int  # of every action, at the most; the fullest action has all of it
    peak: int

    @classmethod
    def of(cls, plan: Plan, timeline: Timeline, slots: Sequence[int]) -> _Resident:
        schedule, stages = timeline.schedule, timeline.schedule.stages_of(slots[0])
        numbers = {s: plan.stages[s] for s in stages}
        weights = {s: one.parameter_bytes or 0 for s, one in numbers.items()}
        optimizer = {s: one.optimizer_bytes or 0 for s, one in numbers.items()}
        gradients = {s: one.gradient_bytes or 0 for s, one in numbers.items()}
        peak = max(one.peak_memory or 0 for one in numbers.values())
        levels = [  # for each action: activations, and the stages whose gradients are there
            (during, tuple(have))
            for slot in slots
            for during, have in zip(
                _activations(plan, schedule.actions[slot]), _with_gradients(schedule.actions[slot]), strict=True
            )
        ]
        most = max((during for during, _ in levels), default=0)
        room = peak - sum(weights.values()) - most
        if room < 0:
            raise InputError(
                f"stage {stages[0]} has {sum(weights.values())} bytes of weights and {most} of activations at once, "
                f"but a peak of {peak}; price the plan again"
            )
        optimizer = _within(optimizer, room)
        held_always = sum(weights.values()) + sum(optimizer.values())
        after = [(0, stages)] if schedule.training else []  # all gradients, and no activations
        fits = min((peak - held_always - during for during, have in [*levels, *after] if have), default=0)
        gradients = _within(gradients, fits)
        highest = max(
            (held_always + during + sum(gradients[s] for s in have) for during, have in levels), default=held_always
        )
        return cls(weights, optimizer, gradients, peak - highest, peak)


def _within(parts: dict[int, int], room: int) -> dict[int, int]:
    """The parts, each by the same share smaller if they exceed the room."""
    total = sum(parts.values())
    return parts if total <= room else {s: nbytes * max(0, room) // total for s, nbytes in parts.items()}


def _activations(plan: Plan, actions: Sequence[Action]) -> list[int]:
    """Bytes during each action."""
    return [during for during, _ in held(actions, lambda action: plan.stages[action.stage].activation_bytes or 0)]


def _with_gradients(actions: Sequence[Action]) -> Iterator[list[int]]:
    """For each action, the stages whose first backward has ended before it."""
    done: list[int] = []
    for action in actions:
        yield list(done)
        if action.phase in _ENDS and action.stage not in done:
            done.append(action.stage)


def _fill(device: _Device, plan: Plan, timeline: Timeline, slot: int, memory: _Resident) -> None:
    """Put the blocks of one slot's step on its device."""
    for s, nbytes in memory.weights.items():
        device.hold(f"weights of stage {s}", _modules(plan, s), nbytes, 0.0)
    for s, nbytes in memory.optimizer.items():
        device.hold(f"state of the optimizer, stage {s}", _modules(plan, s), nbytes, 0.0)
    training = timeline.schedule.training
    activations: dict[tuple[int, int], int] = {}
    events: list[Event] = [event for event in timeline.events if event.slot == slot]
    done: set[int] = set()
    for event in events:
        action, stage = event.action, plan.stages[event.action.stage]
        modules, which = _modules(plan, action.stage), (action.stage, action.microbatch)
        about = f"stage {action.stage}, micro-batch {action.microbatch}"
        if action.phase is Phase.FORWARD:
            nbytes = stage.activation_bytes or 0
            activations[which] = device.hold(f"activations of {about}", modules, nbytes, event.start)
        workspace = device.hold(f"workspace of {about}", modules, memory.workspace, event.start)
        device.release(workspace, event.end)
        if action.phase in _ENDS or not training:
            device.release(activations.pop(which), event.end)
            if training and action.stage not in done:
                done.add(action.stage)
                name = f"gradients of stage {action.stage}"
                device.hold(name, modules, memory.gradients[action.stage], event.end)


def _modules(plan: Plan, stage: int) -> str:
    """The first and the last module of a stage, or the whole model."""
    paths = list(dict.fromkeys(key.rpartition("/")[0] for key in plan.stages[stage].operators))
    named = [path for path in paths if path] or [path for path, s in plan.split if s == stage]
    return " .. ".join(dict.fromkeys((named[0], named[-1]))) if named else "the whole model"


@dataclass
class _Device:
    """The blocks of a device: each takes the first gap that is large enough."""

    number: int
    _events: list[dict[str, Any]] = field(default_factory=list)
    _blocks: list[tuple[int, int]] = field(default_factory=list)  # (offset, bytes) of those held, by offset
    _frames: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # by offset
    _highest: int = 0

    @property
    def _base(self) -> int:
        return _BASE + self.number * _APART

    def hold(self, owner: str, modules: str, nbytes: int, time: float) -> int:
        """Allocate a block; returns its offset, or -1 for an empty one."""
        if nbytes <= 0:
            return -1
        offset = 0
        for start, size in self._blocks:
            if start - offset >= nbytes:
                break
            offset = start + size
        bisect.insort(self._blocks, (offset, nbytes))
        self._highest = max(self._highest, offset + nbytes)
        self._frames[offset] = [{"name": owner, "filename": modules, "line": 0}]
        self._add("alloc", offset, nbytes, time)
        return offset

    def release(self, offset: int, time: float) -> None:
        if offset < 0:
            return
        place = bisect.bisect_left(self._blocks, (offset, 0))
        nbytes = self._blocks.pop(place)[1]
        self._add("free_requested", offset, nbytes, time)
        self._add("free_completed", offset, nbytes, time)
        del self._frames[offset]

    def _add(self, action: str, offset: int, nbytes: int, time: float) -> None:
        times = {"time_us": round(time * _US)}
        event = {"action": action, "addr": self._base + offset, "size": nbytes, "stream": 0, **times}
        self._events.append({**event, "frames": self._frames[offset]})

    def trace(self) -> list[dict[str, Any]]:
        """All events by time; the first one allocates the segment."""
        first = {"action": "segment_alloc", "addr": self._base, "size": self._highest, "stream": 0, "time_us": 0}
        return [{**first, "frames": []}, *self._events]

    def segment(self) -> dict[str, Any]:
        """The memory of the device with the blocks that are held at the end."""
        blocks: list[dict[str, Any]] = []
        end = 0
        for offset, nbytes in [*self._blocks, (self._highest, 0)]:
            if offset > end:
                free = {"address": self._base + end, "size": offset - end, "requested_size": 0}
                blocks.append({**free, "state": "inactive", "frames": []})
            if nbytes:
                mine = {"address": self._base + offset, "size": nbytes, "requested_size": nbytes}
                blocks.append({**mine, "state": "active_allocated", "frames": self._frames[offset]})
            end = offset + nbytes
        active = sum(nbytes for _, nbytes in self._blocks)
        return {
            "device": self.number,
            "address": self._base,
            "total_size": self._highest,
            "stream": 0,
            "segment_type": "large",
            "allocated_size": active,
            "active_size": active,
            "requested_size": active,
            "blocks": blocks,
            "frames": [],
            "is_expandable": False,
            "segment_pool_id": (0, 0),
        }
