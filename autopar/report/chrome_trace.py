"""The predicted step of a plan as a Chrome trace (JSON), which Perfetto and chrome://tracing show, and which Holistic
Trace Analysis reads, one file a rank.

    pid   rank: the place of a device among those that the plan uses; of a mesh, whose devices do the same at the same
          time, a trace of all ranks shows the first
    tid   stream: computing; sends, one stream for each stage that they go to, as they may run at once; collectives
    X     an action, its collectives, a send that takes time, what a stage does once a step
    s, f  a value or gradient on its way from the action that makes it to the one that reads it
    C     bytes that the slot holds, by owner
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.errors import InputError
from autopar.plan.display import traced
from autopar.plan.plan import Plan
from autopar.planner.device_memory import OWNERS
from autopar.planner.pass_collectives import PassCollectives
from autopar.planner.predicted_step import step_of_plan
from autopar.report.trace_events import COMMUNICATION, COMPUTING, PHASES, TraceEvent, TraceProcesses, write
from autopar.schedule.clock import Action, Event, Phase, Send
from autopar.schedule.timeline import StageMemory, Timeline

_BACKWARDS = (Phase.BACKWARD, Phase.INPUT, Phase.WEIGHT)


@traced.register
def _(plan: Plan, path: Path, rank: int | None) -> None:
    step = step_of_plan(plan)
    if step is None:
        raise InputError(
            "the plan has no predicted times; price it first: autopar.plan(model, devices, plan=plan, ...)"
        )
    events = predicted_events(plan, step.timeline(), TraceProcesses(), rank)
    write(path, events, f"predicted step of {plan.places}, {plan.schedule}", len(plan.used_devices), rank)


def predicted_events(plan: Plan, timeline: Timeline, processes: TraceProcesses, rank: int | None) -> list[TraceEvent]:
    """The events of one rank, or of the first rank of each slot. Raises InputError for a rank that there is not."""
    places = {name: number for number, name in enumerate(plan.used_devices)}
    if rank is not None and rank not in places.values():
        raise InputError(f"rank {rank!r} has no trace; the plan has ranks 0..{len(places) - 1}")
    schedule, slots = timeline.schedule, []
    for number in range(schedule.n_slots):
        stage = schedule.stages_of(number)[0]
        replica, shards = schedule.slots_of(stage).index(number), plan.stages[stage].shards
        devices = plan.stages[stage].devices[replica * shards : (replica + 1) * shards]
        slots.append(_Slot(number, tuple(places[name] for name in devices), devices))
    trace = _Trace(plan, timeline, processes)
    if rank is not None:
        return [event for slot in slots if rank in slot.ranks for event in trace.of_rank(slot, rank)]
    events = [event for slot in slots for event in trace.of_rank(slot, None)]
    return [*events, *trace.arrows(slots)]


@dataclass(frozen=True)
class _Slot:
    number: int
    ranks: tuple[int, ...]
    devices: tuple[str, ...]


class _Trace:
    """The events of a timeline, slot by slot."""

    def __init__(self, plan: Plan, timeline: Timeline, processes: TraceProcesses) -> None:
        self._plan, self._timeline, self._processes = plan, timeline, processes
        self._collectives = PassCollectives(plan)
        self._streams: dict[int, dict[int, int]] = defaultdict(dict)  # slot -> stage that it sends to -> stream
        for send in timeline.sends:
            streams = self._streams[send.slot]
            streams.setdefault(_target(send), COMPUTING + 1 + len(streams))

    def of_rank(self, slot: _Slot, rank: int | None) -> Iterator[TraceEvent]:
        """Everything but arrows, of one rank, or (None) of the first one for its whole mesh."""
        stages = self._timeline.schedule.stages_of(slot.number)
        sends = self._streams[slot.number]
        streams = {COMPUTING: "computing"} | {tid: f"sends to stage {stage}" for stage, tid in sends.items()}
        beside = COMPUTING + 1 + len(sends)
        if any(map(self._collectives.in_stage, stages)):
            streams[beside] = "collectives"
        devices = slot.devices if rank is None else (slot.devices[slot.ranks.index(rank)],)
        named = f"{devices[0]} .. {devices[-1]}" if len(devices) > 1 else devices[0]
        rank = slot.ranks[0] if rank is None else rank
        yield from self._processes.named(rank, f"{named}, stage {', '.join(map(str, stages))}", streams)
        for event in self._timeline.events:
            if event.slot == slot.number:
                yield from self._action(event, rank, beside)
        yield from self._sends(slot.number, rank)
        yield from self._finishes(slot.number, rank)
        yield from self._memory(slot.number, rank)

    def _action(self, event: Event, rank: int, beside: int) -> Iterator[TraceEvent]:
        """The action, and its collectives on the stream `beside`."""
        action, start, end = event.action, event.start, event.end
        about = {"stage": action.stage, "micro-batch": action.microbatch}
        name = f"{PHASES[action.phase]} of stage {action.stage}"
        computed, collectives = self._collectives.of(event)
        if not collectives:
            yield self._processes.kernel(name, rank, COMPUTING, start, end, **about)
            return
        yield self._processes.annotation(name, rank, COMPUTING, start, end, **about)
        yield self._processes.kernel(f"computing, {name}", rank, COMPUTING, start, computed, **about)
        for one in collectives:
            kind = f"{COMMUNICATION}: {one.name}, {name}"
            known = {"collectives": one.times, "bytes": round(one.nbytes)}
            yield self._processes.kernel(kind, rank, beside, one.start, one.end, **about, **known)

    def _sends(self, slot: int, rank: int) -> Iterator[TraceEvent]:
        for send in self._timeline.sends:
            if send.slot != slot:
                continue
            target = _target(send)
            about = {"micro-batch": send.action.microbatch, "blocking": not send.transfer.overlap}
            name = f"{COMMUNICATION}: send of stage {send.action.stage} to {target}"
            yield self._processes.kernel(name, rank, self._streams[slot][target], send.start, send.end, **about)

    def _finishes(self, slot: int, rank: int) -> Iterator[TraceEvent]:
        for finish in self._timeline.finishes:
            if finish.slot != slot:
                continue
            about = {"stage": finish.stage}
            if finish.start < finish.reduced:
                name = f"{COMMUNICATION}: reduction of gradients of stage {finish.stage}"
                yield self._processes.kernel(name, rank, COMPUTING, finish.start, finish.reduced, **about)
            if finish.reduced < finish.end:
                name = f"optimizer step of stage {finish.stage}"
                yield self._processes.kernel(name, rank, COMPUTING, finish.reduced, finish.end, **about)

    def arrows(self, slots: Sequence[_Slot]) -> Iterator[TraceEvent]:
        """From rank to rank, for each micro-batch of a transfer, and for its gradient."""
        of: dict[Action, Event] = {event.action: event for event in self._timeline.events}
        ranks = [slot.ranks[0] for slot in slots]

        def middle(event: Event) -> tuple[int, float]:
            return ranks[event.slot], (event.start + event.end) / 2  # an arrow belongs to the slice around its time

        for link in self._plan.transfers:
            for m in range(self._timeline.schedule.n_microbatches):
                made, read = of[Action(Phase.FORWARD, link.source, m)], of[Action(Phase.FORWARD, link.target, m)]
                yield from self._processes.arrow("value", middle(made), middle(read))
                if not (self._timeline.schedule.training and link.backward_bytes):
                    continue
                back = [
                    next(of[a] for p in _BACKWARDS if (a := Action(p, s, m)) in of) for s in (link.target, link.source)
                ]
                yield from self._processes.arrow("gradient", middle(back[0]), middle(back[1]))

    def _memory(self, slot: int, rank: int) -> Iterator[TraceEvent]:
        """Bytes by owner, from the start and the end of each action and of the optimizer's step on, where the plan says
        them."""
        memory = self._stage_memory()
        if memory is None:
            return
        for time, parts in self._timeline.memory_by_part(slot, memory):
            yield self._counter(rank, time, list(parts.values()))

    def _stage_memory(self) -> Sequence[StageMemory] | None:
        """What each stage holds; of plans by older versions, parameters and activations alone."""
        if self._timeline.stage_memory is not None:
            return self._timeline.stage_memory
        found = []
        for stage in self._plan.stages:
            if stage.activation_bytes is None or stage.parameter_bytes is None:
                return None
            activations = (stage.activation_bytes,) * self._plan.n_microbatches
            found.append(StageMemory(stage.parameter_bytes, 0, 0, activations, 0))
        return found

    def _counter(self, rank: int, time: float, sizes: Sequence[int]) -> TraceEvent:
        return self._processes.counter("bytes held", rank, time, dict(zip(OWNERS, sizes, strict=True)))


def _target(send: Send) -> int:
    """The stage that a send goes to."""
    return send.transfer.target if send.action.phase is Phase.FORWARD else send.transfer.source
