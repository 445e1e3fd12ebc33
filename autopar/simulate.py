"""Schedule x costs x links -> Timeline: when every forward and backward runs, and what every slot holds meanwhile.

The clock is that of an asynchronous pipeline: a slot runs its actions in order, one at a time, each as soon as what it
needs has arrived. Transfers overlap with computation and do not share links. Since the order of every slot is given, a
start is the largest of the arrivals before it, and the step time is the longest path through the dependencies:

    F(s, i) after F(source, i) + its transfer, for every transfer into s
    B(s, i) after F(s, i), and B(target, i) + its transfer back, for every transfer out of s
    finish of s after the last backward on all slots of s
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.schedule import Action, Event, Needs, Phase, Schedule, execute, peak_held

CHART_COLUMNS = 88  # of time; labels and the busy share make it about 100


@dataclass(frozen=True)
class StageTimes:
    """What one slot of a stage takes."""

    forward: tuple[float, ...]  # s, of each micro-batch
    backward: tuple[float, ...]  # s, of each micro-batch; not read where the schedule has forwards only
    finish: float = 0.0  # s, once a step on all slots of the stage after its last backward: gradient reduction


@dataclass(frozen=True)
class Transfer:
    """What stage `source` hands to stage `target`, which need not be its neighbour, and gets back in the backward."""

    source: int
    target: int  # > source
    forward: tuple[float, ...]  # s, of each micro-batch
    backward: tuple[float, ...]  # s, of each micro-batch; not read where the schedule has forwards only


@dataclass(frozen=True)
class StageMemory:
    """What one slot of a stage holds."""

    resident: int  # bytes: parameters, gradients, optimizer state, buffers
    activation: tuple[int, ...]  # bytes held for each micro-batch, from its forward to the end of its backward
    transient: int  # bytes, on top, while anything is computed


@dataclass(frozen=True)
class Timeline:
    """One step, laid out in time from 0; `print(timeline)` draws it."""

    schedule: Schedule
    events: tuple[Event, ...]  # by start, then slot
    finishes: tuple[
        tuple[float, float], ...
    ]  # s, start and end of the finish of each slot's stage; equal if it has none
    step_time: float  # s
    busy: tuple[float, ...]  # s, of each slot: forwards, backwards and finish
    in_flight: tuple[int, ...]  # most micro-batches held at a time, of each slot
    peak_memory: tuple[int, ...] | None  # bytes, of each slot; None if no memory was given

    @property
    def bubble(self) -> float:
        """The idle fraction of slots x step_time."""
        total = len(self.busy) * self.step_time
        return max(0.0, 1 - sum(self.busy) / total) if total else 0.0  # rounding must not make it negative

    def __str__(self) -> str:
        """A row a slot, time to the right; each character is what runs in the middle of its stretch of time."""
        labels = [self.schedule.row_label(slot) for slot in range(len(self.busy))]
        width = max(map(len, labels))
        rows = [
            f"{label:>{width}} |{self._row(slot)}| {self.busy[slot] / (self.step_time or 1):4.0%}"
            for slot, label in enumerate(labels)
        ]
        head = (
            f"{self.schedule.name}: {self.schedule.n_microbatches} micro-batches, "
            f"step {self.step_time:.4g} s, bubble {self.bubble:.1%}"
        )
        legend = "forward 0-9, backward a-j: micro-batch modulo 10; = finish; right: busy share"
        return "\n".join([head, *rows, legend])

    def _row(self, slot: int) -> str:
        finish_start, finish_end = self.finishes[slot]
        spans = [(event.start, event.end, _letter(event.action)) for event in self.events if event.slot == slot]
        spans.append((finish_start, finish_end, "="))
        starts = [start for start, _, _ in spans]
        row = ""
        for column in range(CHART_COLUMNS):
            now = (column + 0.5) * self.step_time / CHART_COLUMNS
            latest = bisect_right(starts, now) - 1
            row += spans[latest][2] if latest >= 0 and now < spans[latest][1] else " "
        return row


def _letter(action: Action) -> str:
    return ("0123456789" if action.phase is Phase.FORWARD else "abcdefghij")[action.microbatch % 10]


def simulate(
    schedule: Schedule,
    stages: Sequence[StageTimes],
    transfers: Sequence[Transfer],
    *,
    memory: Sequence[StageMemory] | None = None,
    barrier: float | None = None,
) -> Timeline:
    """Lay one step out in time.

    `stages[s]` and `memory[s]` are of stage s. Stages depend on each other through `transfers` alone: one that takes no
    time is still listed. With `barrier`, no backward starts before `barrier` seconds after the last forward has ended
    everywhere: the loss is computed by the caller on the whole batch.

    O(actions x transfers a stage), and a sort.

    ValueError: sizes or stage numbers that do not fit the schedule, negative times, a schedule that deadlocks (1f1b
    with a barrier does, as soon as a slot has more micro-batches than it may hold).
    """
    _check(schedule, stages, transfers, memory, barrier)

    def duration(action: Action) -> float:
        times = stages[action.stage]
        return (times.forward if action.phase is Phase.FORWARD else times.backward)[action.microbatch]

    events, stuck = execute(schedule, duration, _needs(schedule, transfers, barrier))
    if stuck:
        raise ValueError(f"the {schedule.name} schedule deadlocks:\n  " + "\n  ".join(stuck))
    events.sort(key=lambda event: (event.start, event.slot))

    finishes = _finishes(schedule, stages, events)
    busy = [end - start for start, end in finishes]
    for event in events:
        busy[event.slot] += duration(event.action)
    return Timeline(
        schedule=schedule,
        events=tuple(events),
        finishes=finishes,
        step_time=max(end for _, end in finishes),
        busy=tuple(busy),
        in_flight=tuple(peak_held(table, [1] * schedule.n_microbatches) for table in schedule.actions),
        peak_memory=None if memory is None else _peak_memory(schedule, memory),
    )


def _needs(schedule: Schedule, transfers: Sequence[Transfer], barrier: float | None) -> Needs:
    """The dependencies in the head of this file, as the engine of the schedule asks for them."""
    into: list[list[Transfer]] = [[] for _ in range(schedule.n_stages)]
    out_of: list[list[Transfer]] = [[] for _ in range(schedule.n_stages)]
    for transfer in transfers:
        into[transfer.target].append(transfer)
        out_of[transfer.source].append(transfer)

    # A slot runs in order, so that its first backward waiting for the last forward of every slot is barrier enough.
    held_back: set[Action] = set()
    last_forwards: list[tuple[Action, float]] = []
    if barrier is not None:
        for table in schedule.actions:
            held_back.update([action for action in table if action.phase is Phase.BACKWARD][:1])
            last_forwards += [(action, barrier) for action in table if action.phase is Phase.FORWARD][-1:]

    def needs(action: Action) -> list[tuple[Action, float]]:
        stage, i = action.stage, action.microbatch
        if action.phase is Phase.FORWARD:
            return [(Action(Phase.FORWARD, t.source, i), t.forward[i]) for t in into[stage]]
        before = [(Action(Phase.BACKWARD, t.target, i), t.backward[i]) for t in out_of[stage]]
        before.append((Action(Phase.FORWARD, stage, i), 0.0))
        return before + last_forwards if action in held_back else before

    return needs


def _finishes(
    schedule: Schedule, stages: Sequence[StageTimes], events: Sequence[Event]
) -> tuple[tuple[float, float], ...]:
    """When each slot works on the finish of its stage: its slots do so together, once the last of them is through."""
    through = [0.0] * schedule.n_stages
    for event in events:
        through[event.action.stage] = max(through[event.action.stage], event.end)
    seconds = [times.finish if schedule.training else 0.0 for times in stages]
    return tuple(
        (through[stage], through[stage] + seconds[stage])
        for stage in range(schedule.n_stages)
        for _ in schedule.slots_of(stage)
    )


def _peak_memory(schedule: Schedule, memory: Sequence[StageMemory]) -> tuple[int, ...]:
    """Bytes: the most is held while a forward runs, so that the transient part comes on top of the peak of the rest."""
    peaks = []
    for slot, table in enumerate(schedule.actions):
        stage = memory[schedule.stage_of(slot)]
        computing = peak_held(table, stage.activation) + stage.transient if table else 0
        peaks.append(stage.resident + computing)
    return tuple(peaks)


def _check(
    schedule: Schedule,
    stages: Sequence[StageTimes],
    transfers: Sequence[Transfer],
    memory: Sequence[StageMemory] | None,
    barrier: float | None,
) -> None:
    p, m = schedule.n_stages, schedule.n_microbatches
    if len(stages) != p:
        raise ValueError(f"times of {len(stages)} stages for a schedule of {p}")
    if memory is not None and len(memory) != p:
        raise ValueError(f"memory of {len(memory)} stages for a schedule of {p}")
    if barrier is not None and barrier < 0:
        raise ValueError(f"barrier is {barrier} s: it cannot be negative")
    for transfer in transfers:
        if not 0 <= transfer.source < transfer.target < p:
            raise ValueError(
                f"transfer from stage {transfer.source} to {transfer.target}: "
                f"it goes from an earlier to a later of stages 0..{p - 1}"
            )
    timed: list[tuple[str, StageTimes | Transfer]] = [(f"stage {stage}", times) for stage, times in enumerate(stages)]
    timed += [(f"transfer {t.source} -> {t.target}", t) for t in transfers]
    for what, times in timed:
        for phase, seconds in (("forward", times.forward), ("backward", times.backward)):
            if phase == "backward" and not schedule.training:
                continue
            if len(seconds) != m:
                raise ValueError(f"{what} has {len(seconds)} {phase} times for {m} micro-batches")
            if min(seconds) < 0:
                raise ValueError(f"{what} has a {phase} time of {min(seconds)} s: it cannot be negative")
    for stage, times in enumerate(stages):
        if times.finish < 0:
            raise ValueError(f"stage {stage} has a finish of {times.finish} s: it cannot be negative")
    for stage, held in enumerate(memory or ()):
        if len(held.activation) != m:
            raise ValueError(f"stage {stage} has {len(held.activation)} activation sizes for {m} micro-batches")
