"""Checks that a table can run and is what its name promises."""

from collections import Counter
from collections.abc import Iterator

from autopar.schedule.builders import (
    INTERLEAVED,
    in_flight_limit,
    interleaved_in_flight_limit,
    make_schedule,
    n_ranks,
    order_in_words,
)
from autopar.schedule.clock import Action, Phase, chain, execute
from autopar.schedule.table import Schedule


def validate(schedule: Schedule) -> None:
    """Check a table: every action once, on its slot and in order there, no deadlock, the in-flight limit kept.

    Every micro-batch has one forward on every stage, and in training one backward after it: whole throughout the
    schedule, or an INPUT part and then a WEIGHT part.

    Dependencies are those of a chain of stages. That covers a stage that also needs results from earlier stages: they
    arrive before those of the stage in between.

    Raises ValueError with a list of all problems. The checks come in three groups - the placement; the actions; their
    order in time and the in-flight limit - and end with the first group that finds a problem.
    """
    make_schedule(schedule.name, schedule.n_microbatches, (1,))  # raises where no table could be right
    problems = list(_wrong_placement(schedule))
    if not problems:
        problems = [*_misplaced(schedule), *_wrong_counts(schedule)]
    if not problems:
        problems = list(_over_limit(schedule))
        ran = execute(schedule.actions, lambda action: 1.0, chain(schedule.n_stages, schedule.n_microbatches))
        problems += [f"deadlock: {line}" for line in ran.stuck]
    if problems:
        raise ValueError(f"not a valid {schedule.name} schedule:\n  " + "\n  ".join(problems))


def _wrong_placement(schedule: Schedule) -> Iterator[str]:
    """Slots that do not exist, serve no stage, or serve more stages than the schedule allows."""
    groups = tuple(dict.fromkeys(schedule.placement))
    slots = [slot for group in groups for slot in group]
    if not groups:
        yield "there are no stages"
    if not all(groups):
        yield "a stage has no slots"
    if len(schedule.actions) != len(slots) or sorted(slots) != list(range(len(slots))):
        yield f"{len(schedule.actions)} lists of actions for {len(slots)} slots: one list for each slot of a stage"
    if schedule.name in INTERLEAVED:
        if groups and n_ranks(schedule.name, schedule.placement) is None:
            yield f"placement {schedule.placement}: under {schedule.name} the stages {order_in_words(schedule.name)}"
        if len(set(map(len, groups))) > 1:
            yield f"placement {schedule.placement}: every rank has as many slots"
    elif len(groups) < schedule.n_stages:
        yield f"placement {schedule.placement}: under {schedule.name} a slot serves one stage"


def _misplaced(schedule: Schedule) -> Iterator[str]:
    """Actions of no stage or micro-batch, on the wrong slot, or before an action of the same slot that they need."""
    after = {Phase.BACKWARD: Phase.FORWARD, Phase.INPUT: Phase.FORWARD, Phase.WEIGHT: Phase.INPUT}
    for slot, table in enumerate(schedule.actions):
        seen: set[Action] = set()
        for action in table:
            phase, stage, microbatch = action
            if not (0 <= stage < schedule.n_stages and 0 <= microbatch < schedule.n_microbatches):
                yield f"{action} on slot {slot}: there is no such stage or micro-batch"
                continue
            right = schedule.slot_of(stage, microbatch)
            if slot != right:
                yield f"{action} is on slot {slot}, its slot is {right}"
            if phase in after and action._replace(phase=after[phase]) not in seen:
                yield f"{action} on slot {slot} has no {after[phase].name.lower()} before it"
            seen.add(action)


def _wrong_counts(schedule: Schedule) -> Iterator[str]:
    """Actions that are missing or repeated, and whole backwards among split ones."""
    count = Counter(action for table in schedule.actions for action in table)
    phases = [Phase.FORWARD]
    if schedule.splits_backward:
        phases += [Phase.INPUT, Phase.WEIGHT]
        yield from (
            f"{action} is a whole backward, others are split" for action in count if action.phase is Phase.BACKWARD
        )
    elif schedule.training:
        phases += [Phase.BACKWARD]
    for stage in range(schedule.n_stages):
        for microbatch in range(schedule.n_microbatches):
            for phase in phases:
                action = Action(phase, stage, microbatch)
                if count[action] != 1:
                    yield f"{action} is missing" if not count[action] else f"{action} is there {count[action]} times"


def _over_limit(schedule: Schedule) -> Iterator[str]:
    """Slots that hold more than the schedule's name allows."""
    name, m, replicas = schedule.name, schedule.n_microbatches, schedule.replicas
    groups = tuple(dict.fromkeys(schedule.placement))
    for rank, slots in enumerate(groups):
        here = len(slots)
        if name in INTERLEAVED:
            chunks = schedule.n_stages // len(groups)
            limit = interleaved_in_flight_limit(name, -(-m // here), len(groups), chunks, rank)
        else:
            limit = in_flight_limit(name, m, here, sum(replicas[rank:]), sum(replicas))
        for slot in slots:
            if (holds := schedule.in_flight(slot)) > limit:
                yield f"slot {slot} holds {holds} micro-batches at a time, {name} allows {limit}"
