"""The clock of a pipeline: tables of actions, their seconds and the transfers between stages -> who does what when.

A slot runs its actions in the order of its table, one at a time, each as soon as its inputs have arrived:

    F(s, i) after F(source, i) + its transfer, for every transfer into s
    B(s, i) after F(s, i), and B(target, i) + its transfer back, for every transfer out of s
    I(s, i) as B;  W(s, i) after I(s, i)

Slots may share hardware: then one of them runs at a time, in the order in which their actions become ready.

Transfers overlap with computation unless they keep their sender busy. A link carries one transfer at a time, in the
order in which they become ready. Every pair of slots has a link of its own in each direction, unless transfers name one
that they share.
"""

import enum
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple


class Phase(enum.StrEnum):
    """What an action does with a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"  # the whole of it; or in two parts:
    INPUT = "I"  # gradients with respect to the stage's inputs, which the stage before waits for
    WEIGHT = "W"  # gradients with respect to its parameters; no other action waits for them


class Action(NamedTuple):
    """One pass of one micro-batch through one stage; prints as F0.3: forward of stage 0, micro-batch 3."""

    phase: Phase
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.phase}{self.stage}.{self.microbatch}"


class Event(NamedTuple):
    """An action at its place in time."""

    slot: int
    action: Action
    start: float  # s
    end: float  # s


@dataclass(frozen=True)
class Transfer:
    """What stage `source` sends to stage `target` in the forward, and receives from it in the backward.

    The two need not be neighbours.
    """

    source: int
    target: int  # > source
    forward: tuple[float, ...]  # s, of each micro-batch; where it is 0, neither link nor sender is needed
    backward: tuple[float, ...]  # s, of each micro-batch; not read where the schedule has forwards only
    link: str | None = None  # that transfers share, in both directions; None: the slots' own, one for each direction
    overlap: bool = True  # False: the sender computes nothing while it waits for the link and sends


class Send(NamedTuple):
    """A transfer of one micro-batch at its place in time."""

    slot: int  # the sender
    action: Action  # whose result it carries
    transfer: Transfer
    start: float  # s
    end: float  # s


@dataclass(frozen=True)
class ExecutedSchedule:
    """When everything ran, or why it did not."""

    events: list[Event]  # each after those it needs
    sends: list[Send]  # those that take time
    stuck: list[str]  # a line for every slot that did not get through its table


def chain(n_stages: int, n_microbatches: int) -> list[Transfer]:
    """Transfers from each stage to the next that take no time."""
    nothing = (0.0,) * n_microbatches
    return [Transfer(stage, stage + 1, nothing, nothing) for stage in range(n_stages - 1)]


# F before B or I before W of a stage and micro-batch: an action waits for that of the rank before its own.
_RANK = {Phase.FORWARD: 0, Phase.BACKWARD: 1, Phase.INPUT: 1, Phase.WEIGHT: 2}


def execute(
    tables: Sequence[Sequence[Action]],
    seconds: Callable[[Action], float],
    transfers: Sequence[Transfer],
    barrier: float | None = None,
    hardware: Sequence[int] = (),
) -> ExecutedSchedule:
    """Run the tables from time 0.

    `hardware`: for each slot, a number that slots on the same hardware have in common; (): each has its own.

    `barrier`: every slot's first backward also waits until this many seconds after the last forward of all slots. Where
    several transfers become ready for a link at the same time, the lower slot goes first, then the order of
    `transfers`.

    A discrete-event simulation: the ends of actions are taken in the order of time, so that a link learns of its
    transfers in the order in which it carries them. O(n log(slots) + transfers), n the actions and transfers of all
    micro-batches.
    """
    return _Clock(tables, seconds, transfers, barrier, hardware).run()


class _Clock:
    """An action is a number, its key: (rank of its phase, stage, micro-batch) in mixed radix. A row is a key without
    its micro-batch."""

    def __init__(
        self,
        tables: Sequence[Sequence[Action]],
        seconds: Callable[[Action], float],
        transfers: Sequence[Transfer],
        barrier: float | None,
        hardware: Sequence[int],
    ) -> None:
        self.tables, self.seconds, self.transfers, self.barrier = tables, seconds, transfers, barrier
        stages = [a.stage for table in tables for a in table] + [t.target for t in transfers]
        self.n_stages = max(stages, default=0) + 1
        self.width = max((a.microbatch for table in tables for a in table), default=0) + 1
        self.keys = [[(_RANK[p] * self.n_stages + s) * self.width + i for p, s, i in table] for table in tables]

        inputs = [0] * self.n_stages + [1] * (2 * self.n_stages)
        self.sends: list[list[tuple[int, Transfer, tuple[float, ...]]]] = [[] for _ in inputs]  # of a row: to which row
        for t in transfers:
            inputs[t.target] += 1
            inputs[self.n_stages + t.source] += 1
            self.sends[t.source].append((t.target, t, t.forward))
            self.sends[self.n_stages + t.target].append((self.n_stages + t.source, t, t.backward))

        # Of each action, by key:
        self.missing = [n for n in inputs for _ in range(self.width)]  # results that it waits for
        self.arrival = [0.0] * len(self.missing)  # s, of the latest of those that came
        self.done = bytearray(len(self.missing))
        self.home = [-1] * len(self.missing)  # its slot
        for slot, keys in enumerate(self.keys):
            for key in keys:
                self.home[key] = slot

        self.forwards_left = 0
        self.held_back: list[int] = []  # keys that wait for the barrier
        if barrier is not None:
            first_backward = self.n_stages * self.width
            for keys in self.keys:
                self.forwards_left += sum(key < first_backward for key in keys)
                self.held_back += [key for key in keys if key >= first_backward][:1]
            for key in self.held_back:
                self.missing[key] += 1

        # Of each slot:
        self.position = [0] * len(tables)  # in its table
        self.free = [0.0] * len(tables)  # s, when it ended what came before
        self.waiting_for = [-1] * len(tables)  # the key of its next action if it is idle
        self.outbox: list[deque[tuple[int, Action, Transfer, float]]] = [deque() for _ in tables]  # sends it must do

        self.link_free: dict[str | tuple[int, int], float] = {}  # s, when a link ends what it carries
        # Heap: when a slot ends its action or send; with ~slot, when it is ready for an action on shared hardware.
        self.ends: list[tuple[float, int]] = []
        self.hardware = hardware
        self.running = dict.fromkeys(hardware, False)
        self.queues: dict[int, deque[int]] = {number: deque() for number in hardware}  # slots that wait for hardware
        self.events: list[Event] = []
        self.sent: list[Send] = []

    def run(self) -> ExecutedSchedule:
        for slot in range(len(self.tables)):
            self._next(slot)
        sending = [False] * len(self.tables)
        while self.ends:
            now, slot = heappop(self.ends)
            if slot < 0:
                self._claim(~slot, now)
                continue
            if not sending[slot]:
                self._end(slot, now)
                self._release(slot, now)
            outbox = self.outbox[slot]
            sending[slot] = bool(outbox)
            if outbox:
                heappush(self.ends, (self._send(slot, now, *outbox.popleft()), slot))
            else:
                self.free[slot] = now
                self._next(slot)
        return ExecutedSchedule(self.events, self.sent, list(self._stuck()))

    def _next(self, slot: int) -> None:
        """The slot is free: start its next action, or wait for the results that it needs."""
        position = self.position[slot]
        if position < len(self.keys[slot]):
            key = self.keys[slot][position]
            if self.missing[key] > 0:
                self.waiting_for[slot] = key
            else:
                self._start(slot, key)

    def _start(self, slot: int, key: int) -> None:
        self.waiting_for[slot] = -1
        start = max(self.free[slot], self.arrival[key])
        if self.hardware:
            heappush(self.ends, (start, ~slot))
        else:
            self._run(slot, start)

    def _run(self, slot: int, start: float) -> None:
        action = self.tables[slot][self.position[slot]]
        end = start + self.seconds(action)
        self.events.append(Event(slot, action, start, end))
        heappush(self.ends, (end, slot))

    def _claim(self, slot: int, now: float) -> None:
        """The slot's next action is ready: run it as soon as its hardware is free."""
        number = self.hardware[slot]
        if self.running[number]:
            self.queues[number].append(slot)
        else:
            self.running[number] = True
            self._run(slot, now)

    def _release(self, slot: int, now: float) -> None:
        """The slot's hardware has done an action: the slot that has waited longest is next."""
        if not self.hardware:
            return
        number = self.hardware[slot]
        if self.queues[number]:
            self._run(self.queues[number].popleft(), now)
        else:
            self.running[number] = False

    def _end(self, slot: int, now: float) -> None:
        """An action of the slot has ended: deliver its results to the actions that wait for them."""
        position = self.position[slot]
        self.position[slot] = position + 1
        key = self.keys[slot][position]
        self.done[key] = True
        row, microbatch = divmod(key, self.width)
        if row < 2 * self.n_stages:
            self._arrive(key + self.n_stages * self.width, now)
        for target_row, transfer, times in self.sends[row]:
            seconds = times[microbatch]
            target = target_row * self.width + microbatch
            if not seconds:
                self._arrive(target, now)
            elif transfer.overlap:
                self._send(slot, now, target, self.tables[slot][position], transfer, seconds)
            else:
                self.outbox[slot].append((target, self.tables[slot][position], transfer, seconds))
        if self.barrier is not None and row < self.n_stages:
            self.forwards_left -= 1
            if not self.forwards_left:
                for held in self.held_back:
                    self._arrive(held, now + self.barrier)

    def _send(self, slot: int, ready: float, target: int, action: Action, transfer: Transfer, seconds: float) -> float:
        """Put a transfer on its link; returns the time of its arrival."""
        link = transfer.link or (slot, self.home[target])
        start = max(ready, self.link_free.get(link, 0.0))
        self.link_free[link] = start + seconds
        self.sent.append(Send(slot, action, transfer, start, start + seconds))
        self._arrive(target, start + seconds)
        return start + seconds

    def _arrive(self, key: int, when: float) -> None:
        """One of the results that an action waits for has arrived."""
        self.missing[key] -= 1
        if when > self.arrival[key]:
            self.arrival[key] = when
        if not self.missing[key]:
            slot = self.home[key]
            if self.waiting_for[slot] == key:
                self._start(slot, key)

    def _stuck(self) -> Iterator[str]:
        split = any(action.phase is Phase.INPUT for table in self.tables for action in table)
        phases = (Phase.FORWARD, Phase.INPUT if split else Phase.BACKWARD, Phase.WEIGHT)
        for slot, table in enumerate(self.tables):
            if self.position[slot] == len(table):
                continue
            action = table[self.position[slot]]
            rank = _RANK[action.phase]
            before = [(rank - 1, action.stage)] if rank else []
            if rank == 0:
                before += [(0, t.source) for t in self.transfers if t.target == action.stage]
            if rank == 1:
                before += [(1, t.target) for t in self.transfers if t.source == action.stage]
            missing = [
                str(Action(phases[rank], stage, action.microbatch))
                for rank, stage in before
                if not self.done[(rank * self.n_stages + stage) * self.width + action.microbatch]
            ]
            yield f"slot {slot}: {action} waits for {missing[0] if missing else 'all forwards'}"
