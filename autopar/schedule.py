"""Pipeline schedules as data: for every device, the list of forwards and backwards it runs, in order.

Stages are numbered 0..p-1. Stage s is served by `replicas[s]` devices, its *slots*; micro-batch i runs on slot
i mod replicas[s] of the stage. Slots are numbered globally, stage by stage:

    replicas = (2, 1)        stage 0            stage 1
                             slot 0: i even     slot 2: every i
                             slot 1: i odd

The two schedules, for 3 stages of one device and 4 micro-batches, on a clock where every action takes one unit:

    gpipe  0.0 | F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3
           1.0 | .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..
           2.0 | .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..

    1f1b   0.0 | F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
           1.0 | .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
           2.0 | .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

Both take equally long on equal stages; 1f1b holds the activations of fewer micro-batches at a time.
"""

import enum
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

SCHEDULES = ("gpipe", "1f1b")


class Phase(enum.StrEnum):
    """What is done with a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True)
class Action:
    """One pass of one micro-batch through one stage; prints as F0.3: forward of stage 0, micro-batch 3."""

    phase: Phase
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.phase}{self.stage}.{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Event:
    """An action at its place in time."""

    slot: int
    action: Action
    start: float  # s
    end: float  # s


Needs = Callable[[Action], Iterable[tuple[Action, float]]]
"""What an action waits for: the actions before it, and the seconds from the end of each until its result is there."""


@dataclass(frozen=True)
class Schedule:
    """Who does what, in which order; `print(schedule)` draws it."""

    name: str  # one of SCHEDULES
    n_microbatches: int
    replicas: tuple[int, ...]  # slots of each stage
    actions: tuple[tuple[Action, ...], ...]  # one list a slot, in the order of running

    @property
    def n_stages(self) -> int:
        return len(self.replicas)

    @property
    def training(self) -> bool:
        """Whether there are backwards."""
        return any(action.phase is Phase.BACKWARD for table in self.actions for action in table)

    def slots_of(self, stage: int) -> range:
        """The slots that serve a stage."""
        first = sum(self.replicas[:stage])
        return range(first, first + self.replicas[stage])

    def slot_of(self, stage: int, microbatch: int) -> int:
        """The slot on which a stage runs a micro-batch."""
        return sum(self.replicas[:stage]) + microbatch % self.replicas[stage]

    def stage_of(self, slot: int) -> int:
        """The stage that a slot serves."""
        return bisect_right(list(accumulate(self.replicas)), slot)

    def in_flight(self, stage: int) -> int:
        """The largest number of micro-batches that any one slot of the stage holds at a time (see `peak_held`)."""
        return max(peak_held(self.actions[slot], [1] * self.n_microbatches) for slot in self.slots_of(stage))

    def row_label(self, slot: int) -> str:
        """How drawings name a slot: `stage.replica`."""
        stage = self.stage_of(slot)
        return f"{stage}.{slot - self.slots_of(stage).start}"

    def __str__(self) -> str:
        """The tables on a clock where every action takes one unit, a row a slot; a table that gets stuck says where."""
        events, stuck = execute(self, lambda action: 1.0, neighbour_needs(self.n_stages))
        n_ticks = max((round(event.end) for event in events), default=0)
        cell = len(f"F{self.n_microbatches - 1}")
        rows = [["." * cell] * n_ticks for _ in self.actions]
        for event in events:
            rows[event.slot][round(event.start)] = f"{event.action.phase}{event.action.microbatch}".ljust(cell)
        labels = [self.row_label(slot) for slot in range(len(rows))]
        width = max(map(len, labels))
        head = f"{self.name}: {self.n_microbatches} micro-batches, {self.n_stages} stages, {len(rows)} slots"
        lines = [f"{label:>{width}} | {' '.join(row)}".rstrip() for label, row in zip(labels, rows, strict=True)]
        return "\n".join([head, *lines, *(f"stuck: {line}" for line in stuck)])


def in_flight_limit(name: str, n_microbatches: int, replicas_here: int, devices_from_here_on: int) -> int:
    """How many micro-batches a slot may hold at a time; `make_schedule` uses exactly as many.

    With m micro-batches, r replicas here, and R devices in this stage and all later ones:

        gpipe  ceil(m / r)                      all that the slot has
        1f1b   min(ceil(m / r), ceil(R / r))    enough to keep every device from here on busy; p - s where all r are 1

    ValueError: an unknown name, or numbers that no pipeline has.
    """
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}: choose one of {', '.join(SCHEDULES)}")
    if n_microbatches < 1:
        raise ValueError(f"n_microbatches is {n_microbatches}: a step has at least one micro-batch")
    if not 1 <= replicas_here <= devices_from_here_on:
        raise ValueError(
            f"{replicas_here} replicas of {devices_from_here_on} devices from here on: "
            "a stage has at least one replica, and those are among the devices"
        )
    all_of_slot = -(-n_microbatches // replicas_here)
    if name == "gpipe":
        return all_of_slot
    return min(all_of_slot, -(-devices_from_here_on // replicas_here))


def make_schedule(name: str, n_microbatches: int, replicas: Sequence[int], *, training: bool = True) -> Schedule:
    """The table of `name` (one of SCHEDULES) for stages of `replicas[s]` devices; without training, forwards only.

    A slot runs as many forwards as it may hold micro-batches (`in_flight_limit`), then one backward and one forward in
    turn, then the backwards left. For gpipe, which may hold all, that means all forwards, then all backwards.

    No stage deadlocks. B(s+1, i) waits for at most F(s, i + a), where a = (w[s+1] - 1) r[s+1] with w the limit; the
    slot of stage s runs that forward once B(s, i + a - w[s] r[s]) is done; and a < R[s+1] < w[s] r[s], so that every
    backward waits only for backwards of earlier micro-batches.

    ValueError: an unknown name, n_microbatches < 1, no stages, a stage without replicas.
    """
    if not replicas:
        raise ValueError("replicas is empty: a pipeline has at least one stage")
    tables = []
    for stage, here in enumerate(replicas):
        limit = in_flight_limit(name, n_microbatches, here, sum(replicas[stage:]))
        for replica in range(here):
            tables.append(tuple(_table(stage, range(replica, n_microbatches, here), limit, training)))
    return Schedule(name, n_microbatches, tuple(replicas), tuple(tables))


def _table(stage: int, microbatches: range, limit: int, training: bool) -> Iterator[Action]:
    """One slot's actions. Backwards run in the order of the forwards, under every schedule: gradients are then summed
    in one order, and the choice of schedule does not change a single bit of them."""
    for position, microbatch in enumerate(microbatches):
        if training and position >= limit:
            yield Action(Phase.BACKWARD, stage, microbatches[position - limit])
        yield Action(Phase.FORWARD, stage, microbatch)
    if training:
        for microbatch in microbatches[max(0, len(microbatches) - limit) :]:
            yield Action(Phase.BACKWARD, stage, microbatch)


def peak_held(actions: Iterable[Action], weight: Sequence[int]) -> int:
    """The largest sum of `weight[i]` over the micro-batches i in flight at one time, for one slot's actions in order.

    A micro-batch is in flight from the start of its forward to the end of its backward; where no backward follows,
    while its forward runs. Since a slot runs one action at a time, the answer does not depend on how long each takes.
    """
    actions = list(actions)
    kept = {action.microbatch for action in actions if action.phase is Phase.BACKWARD}
    held = peak = 0
    for action in actions:
        if action.phase is Phase.FORWARD:
            held += weight[action.microbatch]
            peak = max(peak, held)
        if action.phase is Phase.BACKWARD or action.microbatch not in kept:
            held -= weight[action.microbatch]
    return peak


def neighbour_needs(n_stages: int) -> Needs:
    """The dependencies of a chain of stages: F(s) after F(s-1); B(s) after F(s) and B(s+1); results arrive at once."""

    def needs(action: Action) -> list[tuple[Action, float]]:
        stage, microbatch = action.stage, action.microbatch
        if action.phase is Phase.FORWARD:
            return [(Action(Phase.FORWARD, stage - 1, microbatch), 0.0)] if stage > 0 else []
        before = [(Action(Phase.FORWARD, stage, microbatch), 0.0)]
        if stage + 1 < n_stages:
            before.append((Action(Phase.BACKWARD, stage + 1, microbatch), 0.0))
        return before

    return needs


def execute(schedule: Schedule, duration: Callable[[Action], float], needs: Needs) -> tuple[list[Event], list[str]]:
    """Run the tables: a slot takes its actions in order, each as soon as the slot is free and all it needs is there.

    Returns the events, each after those it needs, and one line for every slot that got stuck (none: all ran). A slot
    that has to wait is set aside under the action it waits for and woken by it: O(actions + dependencies).
    """
    end: dict[Action, float] = {}
    free = [0.0] * len(schedule.actions)
    position = [0] * len(schedule.actions)
    waiting: dict[Action, list[int]] = {}
    events: list[Event] = []
    runnable = list(range(len(schedule.actions)))
    while runnable:
        slot = runnable.pop()
        table = schedule.actions[slot]
        while position[slot] < len(table):
            action = table[position[slot]]
            start = free[slot]
            missing = None
            for before, delay in needs(action):
                if before not in end:
                    missing = before
                    break
                start = max(start, end[before] + delay)
            if missing is not None:
                waiting.setdefault(missing, []).append(slot)
                break
            end[action] = free[slot] = start + duration(action)
            events.append(Event(slot, action, start, end[action]))
            position[slot] += 1
            runnable.extend(waiting.pop(action, ()))
    stuck = sorted((slot, str(missing)) for missing, slots in waiting.items() for slot in slots)
    return events, [f"slot {slot}: {schedule.actions[slot][position[slot]]} waits for {name}" for slot, name in stuck]


def validate(schedule: Schedule) -> None:
    """Check a table: every action once, on its slot, forward before backward, no deadlock, the in-flight limit kept.

    Dependencies are those of a chain of stages. A stage that also needs results from further up is covered: they
    are there before those of the stage in between.

    ValueError: lists everything found wrong.
    """
    name, m, replicas = schedule.name, schedule.n_microbatches, schedule.replicas
    make_schedule(name, m, replicas)  # raises for a name and sizes that no table could be right for
    if len(schedule.actions) != sum(replicas):
        raise ValueError(f"{len(schedule.actions)} lists of actions for {sum(replicas)} slots: one list a slot")
    problems = [*_misplaced(schedule), *_wrong_counts(schedule)]
    if not problems:
        # Only over complete tables do these two say anything that the lines above have not said.
        for stage, here in enumerate(replicas):
            limit = in_flight_limit(name, m, here, sum(replicas[stage:]))
            if (held := schedule.in_flight(stage)) > limit:
                problems.append(f"stage {stage} holds {held} micro-batches at a time, {name} allows {limit}")
        _, stuck = execute(schedule, lambda action: 1.0, neighbour_needs(schedule.n_stages))
        problems += [f"deadlock: {line}" for line in stuck]
    if problems:
        raise ValueError(f"not a valid {name} schedule:\n  " + "\n  ".join(problems))


def _misplaced(schedule: Schedule) -> Iterator[str]:
    """Actions that exist nowhere, are on another slot, or are backwards ahead of their forward."""
    for slot, table in enumerate(schedule.actions):
        forwards_seen = set()
        for action in table:
            stage, microbatch = action.stage, action.microbatch
            if not (0 <= stage < schedule.n_stages and 0 <= microbatch < schedule.n_microbatches):
                yield f"{action} on slot {slot}: there is no such stage or micro-batch"
                continue
            right = schedule.slot_of(stage, microbatch)
            if slot != right:
                yield f"{action} is on slot {slot}, its slot is {right}"
            if action.phase is Phase.FORWARD:
                forwards_seen.add((stage, microbatch))
            elif (stage, microbatch) not in forwards_seen:
                yield f"{action} on slot {slot} has no forward before it"


def _wrong_counts(schedule: Schedule) -> Iterator[str]:
    """Actions that are missing or there more than once."""
    count = Counter(action for table in schedule.actions for action in table)
    phases = tuple(Phase) if schedule.training else (Phase.FORWARD,)
    for stage in range(schedule.n_stages):
        for microbatch in range(schedule.n_microbatches):
            for phase in phases:
                action = Action(phase, stage, microbatch)
                if count[action] != 1:
                    yield f"{action} is missing" if not count[action] else f"{action} is there {count[action]} times"
