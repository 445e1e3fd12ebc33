"""A schedule as a value: who does what, in which order."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.schedule.clock import Action, Phase, chain, execute


@dataclass(frozen=True)
class Schedule:
    """Who does what, in which order; `print(schedule)` draws it."""

    name: str  # one of SCHEDULES
    n_microbatches: int
    placement: tuple[tuple[int, ...], ...]  # slots of each stage; micro-batch i runs on its slot i mod replicas
    actions: tuple[tuple[Action, ...], ...]  # one list per slot, in the order in which it runs them

    @property
    def n_stages(self) -> int:
        return len(self.placement)

    @property
    def n_slots(self) -> int:
        return len(self.actions)

    @property
    def replicas(self) -> tuple[int, ...]:
        """The number of slots of each stage."""
        return tuple(map(len, self.placement))

    @cached_property
    def training(self) -> bool:
        """Whether there are backwards."""
        return any(action.phase is not Phase.FORWARD for table in self.actions for action in table)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether backwards run in two parts, INPUT and WEIGHT."""
        return any(action.phase in (Phase.INPUT, Phase.WEIGHT) for table in self.actions for action in table)

    def slots_of(self, stage: int) -> tuple[int, ...]:
        """The slots that serve a stage."""
        return self.placement[stage]

    def slot_of(self, stage: int, microbatch: int) -> int:
        """The slot on which a stage runs a micro-batch."""
        slots = self.placement[stage]
        return slots[microbatch % len(slots)]

    def stages_of(self, slot: int) -> tuple[int, ...]:
        """The stages that a slot serves."""
        return tuple(stage for stage, slots in enumerate(self.placement) if slot in slots)

    def in_flight(self, slot: int) -> int:
        """The most pairs of a stage and a micro-batch that the slot holds at a time (see `held`)."""
        return max((during for during, _ in held(self.actions[slot], lambda action: 1)), default=0)

    def row_label(self, slot: int) -> str:
        """How drawings name a slot: `stage.replica`; `0+2.1` for the second slot of stages 0 and 2."""
        stages = self.stages_of(slot)
        return f"{'+'.join(map(str, stages))}.{self.placement[stages[0]].index(slot)}"

    def __str__(self) -> str:
        """One row per slot, on a clock where every action takes one unit; the last lines name deadlocks."""
        ran = execute(self.actions, lambda action: 1.0, chain(self.n_stages, self.n_microbatches))
        n_ticks = max((round(event.end) for event in ran.events), default=0)
        several = len(set(self.placement)) < self.n_stages
        names = {action: _cell(action, several) for table in self.actions for action in table}
        cell = max(map(len, names.values()), default=0)
        rows = [["." * cell] * n_ticks for _ in self.actions]
        for event in ran.events:
            rows[event.slot][round(event.start)] = names[event.action].ljust(cell)
        labels = [self.row_label(slot) for slot in range(self.n_slots)]
        width = max(map(len, labels))
        head = f"{self.name}: {self.n_microbatches} micro-batches, {self.n_stages} stages, {self.n_slots} slots"
        lines = [f"{label:>{width}} | {' '.join(row)}".rstrip() for label, row in zip(labels, rows, strict=True)]
        return "\n".join([head, *lines, *(f"stuck: {line}" for line in ran.stuck)])


def _cell(action: Action, several_stages: bool) -> str:
    return str(action) if several_stages else f"{action.phase}{action.microbatch}"


def phased(schedule: Schedule) -> Schedule:
    """The schedule with all forwards of a slot before its backwards, each in their order.

    It runs where the caller computes the loss on the whole batch in between. A slot then holds all its micro-batches,
    whatever the schedule's limit is.
    """
    tables = (tuple(sorted(table, key=lambda action: action.phase is not Phase.FORWARD)) for table in schedule.actions)
    return replace(schedule, actions=tuple(tables))


def held(actions: Iterable[Action], size: Callable[[Action], int]) -> Iterator[tuple[int, int]]:
    """For each action the sum of `size` over what is in flight (while it runs, after it).

    A stage holds a micro-batch from the start of its forward to the end of its backward, or of its WEIGHT part; without
    backwards, while the forward runs. Since a slot runs one action at a time, this is independent of how long each
    takes. `size` must be the same for all actions of one stage and micro-batch.
    """
    actions = list(actions)
    training = any(action.phase is not Phase.FORWARD for action in actions)
    total = 0
    for action in actions:
        if action.phase is Phase.FORWARD:
            total += size(action)
        during = total
        if action.phase is Phase.BACKWARD or action.phase is Phase.WEIGHT or not training:
            total -= size(action)
        yield during, total
