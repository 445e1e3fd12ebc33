"""One step laid out in time: what every slot does when, how idle it is, and how many bytes it holds."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from autopar.errors.numbers import count, seconds_text
from autopar.schedule.clock import Event, Phase, Send
from autopar.schedule.table import Schedule, held

CHART_COLUMNS = 66  # of time; labels and the busy share make it at most 80

_LETTERS = {
    Phase.FORWARD: "0123456789",
    Phase.BACKWARD: "abcdefghij",
    Phase.INPUT: "abcdefghij",
    Phase.WEIGHT: "ABCDEFGHIJ",
}


@dataclass(frozen=True)
class StageMemory:
    """Bytes that one slot holds for a stage."""

    parameters: int  # bytes, with buffers
    gradients: int  # bytes
    optimizer: int  # bytes of the optimizer's state
    activation: tuple[int, ...]  # bytes of each micro-batch in flight, from its forward to the end of its backward
    transient: int  # bytes, on top, while any action of the stage runs
    step: int = 0  # bytes, on top, while the optimizer steps


class Finish(NamedTuple):
    """What a slot does for a stage once a step, after its last backward."""

    slot: int
    stage: int
    start: float  # s, of the gradient reduction
    reduced: float  # s, its end and the start of the optimizer step
    end: float  # s


@dataclass(frozen=True)
class Timeline:
    """One step, laid out in time from 0; `print(timeline)` draws it."""

    schedule: Schedule  # as it ran: phased, where the step has a barrier
    events: tuple[Event, ...]  # by start, then slot
    sends: tuple[Send, ...]  # transfers that take time, by start, then slot
    finishes: tuple[Finish, ...]  # one for each slot and stage that it serves, by slot, then start
    stage_memory: tuple[StageMemory, ...] | None = None  # what was given
    hardware: tuple[int, ...] = ()  # for each slot, a number that slots on the same hardware share; (): each its own
    on_whole_batch: float = 0.0  # s, once after the last forward, where the outputs are (`whole_batch_slots`)

    @property
    def whole_batch_slots(self) -> tuple[int, ...]:
        """Those of the last stage, and of those that share hardware the first."""
        slots = self.schedule.slots_of(self.schedule.n_stages - 1)
        first = {self.hardware[slot] if self.hardware else slot: slot for slot in reversed(slots)}
        return tuple(first.values())

    @cached_property
    def step_time(self) -> float:
        """s, until the last slot has finished."""
        return max(finish.end for finish in self.finishes)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """s, of each slot: its actions, the sends that it cannot overlap with them, its finishes, and what runs on the
        whole batch."""
        seconds = [0.0] * self.schedule.n_slots
        for slot in self.whole_batch_slots:
            seconds[slot] += self.on_whole_batch
        for slot, _, start, end in self.events:
            seconds[slot] += end - start
        for send in self.sends:
            if not send.transfer.overlap:
                seconds[send.slot] += send.end - send.start
        for finish in self.finishes:
            seconds[finish.slot] += finish.end - finish.start
        return tuple(seconds)

    @property
    def bubble(self) -> float:
        """The idle fraction of slots x step_time; slots on the same hardware count as one."""
        total = (len(set(self.hardware)) or self.schedule.n_slots) * self.step_time
        return max(0.0, 1 - sum(self.busy) / total) if total else 0.0  # rounding must not make it negative

    @cached_property
    def busiest(self) -> tuple[int, ...]:
        """The slots of the hardware that works most: several if they share it, and then work in turns."""
        slots: dict[int, list[int]] = defaultdict(list)
        for slot, place in enumerate(self.hardware or range(self.schedule.n_slots)):
            slots[place].append(slot)
        return tuple(max(slots.values(), key=lambda some: sum(self.busy[slot] for slot in some)))

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """The most pairs of a stage and a micro-batch that each slot holds at a time."""
        return tuple(self.schedule.in_flight(slot) for slot in range(self.schedule.n_slots))

    @cached_property
    def peak_memory(self) -> tuple[int, ...] | None:
        """Bytes, the most that each slot holds at a time for all its stages; None if no memory was given."""
        if self.stage_memory is None:
            return None
        return tuple(sum(self.memory_parts(slot).values()) for slot in range(self.schedule.n_slots))

    def memory(self, slot: int) -> list[tuple[float, int]]:
        """Bytes that the slot holds over time: pairs (s, bytes from then on), from time 0.

            bytes         +---+
                 +---+    |   |        an activation and the transient part come when a forward starts;
                 |   +----+   +---+    the latter goes when it ends, the former when the backward does
            -----+                +--

        Bytes that go and come at the same time make one pair; two pairs of one time belong to an action that takes no
        time. Raises ValueError if the simulation knew no memory.
        """
        return [(time, sum(held.values())) for time, held in self.memory_by_part(slot)]

    def memory_by_part(
        self, slot: int, memory: Sequence[StageMemory] | None = None
    ) -> list[tuple[float, dict[str, int]]]:
        """The same with the bytes of each part, as `memory_parts` names them.

        `memory`: of each stage, in place of what the simulation knew. Raises ValueError if neither knows it.
        """
        memory = self._memory() if memory is None else memory
        stages = [memory[stage] for stage in self.schedule.stages_of(slot)]
        sizes = held(self.schedule.actions[slot], lambda a: memory[a.stage].activation[a.microbatch])
        steps = [(0.0, _parts(stages, 0, 0))]
        for event, (during, after) in zip((e for e in self.events if e.slot == slot), sizes, strict=True):
            if steps[-1][0] == event.start:
                steps.pop()
            steps.append((event.start, _parts(stages, during, memory[event.action.stage].transient)))
            steps.append((event.end, _parts(stages, after, 0)))
        stepping = sum(stage.step for stage in stages)
        last = [finish for finish in self.finishes if finish.slot == slot]
        if stepping and last:
            steps.append((max(finish.reduced for finish in last), _parts(stages, 0, stepping)))
            steps.append((max(finish.end for finish in last), _parts(stages, 0, 0)))
        return steps

    def memory_parts(self, slot: int) -> dict[str, int]:
        """The parts of the slot's peak, in bytes: parameters, gradients, optimizer, activations, transient.

        Where the optimizer's step, with what it needs for all stages at once, is the peak, no activations are left.
        Raises ValueError if the simulation knew no memory.
        """
        memory = self._memory()
        actions = self.schedule.actions[slot]
        sizes = held(actions, lambda a: memory[a.stage].activation[a.microbatch])
        working = [(during, memory[a.stage].transient) for a, (during, _) in zip(actions, sizes, strict=True)]
        activations, transient = max(working, key=sum, default=(0, 0))
        stages = [memory[stage] for stage in self.schedule.stages_of(slot)]
        stepping = sum(stage.step for stage in stages)
        if stepping > activations + transient:
            activations, transient = 0, stepping
        return _parts(stages, activations, transient)

    def _memory(self) -> tuple[StageMemory, ...]:
        if self.stage_memory is None:
            raise ValueError("this timeline knows no memory: pass memory= to simulate()")
        return self.stage_memory

    def __str__(self) -> str:
        """A row for every stage of every slot, time to the right; each character is what runs in the middle of its
        stretch of time. A slot's first row ends in its busy share."""
        spans: dict[tuple[int, int], list[tuple[float, float, str]]] = defaultdict(list)
        for slot, action, start, end in self.events:
            spans[slot, action.stage].append((start, end, _LETTERS[action.phase][action.microbatch % 10]))
        for send in self.sends:
            if not send.transfer.overlap:
                spans[send.slot, send.action.stage].append((send.start, send.end, ">"))
        if self.on_whole_batch:
            last = max(event.end for event in self.events if event.action.phase is Phase.FORWARD)
            for slot in self.whole_batch_slots:
                spans[slot, self.schedule.n_stages - 1].append((last, last + self.on_whole_batch, "*"))
        for finish in self.finishes:
            spans[finish.slot, finish.stage] += [(finish.start, finish.reduced, "="), (finish.reduced, finish.end, "+")]

        rows = []
        for slot, busy in enumerate(self.busy):
            share = f" {busy / (self.step_time or 1):4.0%}"
            for stage in self.schedule.stages_of(slot):
                label = f"{stage}.{self.schedule.slots_of(stage).index(slot)}"
                rows.append((label, self._row(sorted(spans[slot, stage])), share))
                share = ""
        width = max(len(label) for label, _, _ in rows)
        head = (
            f"{self.schedule.name}: {count(self.schedule.n_microbatches, 'micro-batch', 'micro-batches')}, "
            f"step {seconds_text(self.step_time)}, bubble {self.bubble:.1%}"
        )
        return "\n".join([head, *(f"{label:>{width}} |{row}|{share}" for label, row, share in rows), self._legend()])

    def _row(self, spans: list[tuple[float, float, str]]) -> str:
        spans = [span for span in spans if span[0] < span[1]]
        starts = [start for start, _, _ in spans]
        row = ""
        for column in range(CHART_COLUMNS):
            now = (column + 0.5) * self.step_time / CHART_COLUMNS
            latest = bisect_right(starts, now) - 1
            row += spans[latest][2] if latest >= 0 and now < spans[latest][1] else " "
        return row

    def _legend(self) -> str:
        words = ["forward 0-9"]
        if self.schedule.splits_backward:
            words.append("backward to inputs a-j, to parameters A-J")
        else:
            words.append("backward a-j")
        words = [f"{', '.join(words)}: micro-batch modulo 10"]
        if any(not send.transfer.overlap for send in self.sends):
            words.append("> sending")
        if self.on_whole_batch:
            words.append("* whole batch")
        words.append("= finish")
        if any(finish.reduced < finish.end for finish in self.finishes):
            words.append("+ optimizer")
        words.append("right: busy share")
        return "; ".join(words)


def _parts(stages: Iterable[StageMemory], activations: int, transient: int) -> dict[str, int]:
    """Bytes by part, of the stages of one slot."""
    mine = list(stages)
    return {
        "parameters": sum(stage.parameters for stage in mine),
        "gradients": sum(stage.gradients for stage in mine),
        "optimizer": sum(stage.optimizer for stage in mine),
        "activations": activations,
        "transient": transient,
    }
