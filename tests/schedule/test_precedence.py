"""What must have ended before an action starts: of any timing, and of no more than that."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.schedule.builders import INTERLEAVED, SCHEDULES, make_schedule
from autopar.schedule.clock import Action, Event, chain, execute
from autopar.schedule.precedence import Precedence
from autopar.schedule.table import Schedule, phased

LONG = 1e6  # s


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Schedule, bool]:
    """With whether all forwards come first."""
    name = draw(st.sampled_from(SCHEDULES))
    ranks = draw(st.integers(1, 3))
    chunks = 2 if name in INTERLEAVED else 1
    replicas = tuple(draw(st.integers(1, 2 if chunks == 1 else 1)) for _ in range(ranks))
    schedule = make_schedule(name, draw(st.integers(1, 5)), replicas, chunks=chunks)
    barrier = draw(st.booleans())
    return (phased(schedule) if barrier else schedule), barrier


def order(schedule: Schedule, barrier: bool) -> Precedence:
    return Precedence(schedule, [[stage - 1] if stage else [] for stage in range(schedule.n_stages)], barrier=barrier)


def run(schedule: Schedule, barrier: bool, seconds: dict[Action, float]) -> dict[Action, Event]:
    transfers = chain(schedule.n_stages, schedule.n_microbatches)
    ran = execute(schedule.actions, seconds.__getitem__, transfers, 0.0 if barrier else None)
    return {event.action: event for event in ran.events}


@settings(max_examples=60, deadline=None)
@given(drawn=schedules(), seed=st.integers(0, 1000))
def test_what_must_have_ended_has_ended_in_every_run(drawn: tuple[Schedule, bool], seed: int) -> None:
    schedule, barrier = drawn
    found, rng = order(schedule, barrier), random.Random(seed)
    events = run(schedule, barrier, {a: rng.expovariate(1) for table in schedule.actions for a in table})
    for slot, table in enumerate(schedule.actions):
        for number, action in enumerate(table):
            for other, ended in enumerate(found.ended[slot][number]):
                for before in schedule.actions[other][:ended]:
                    assert events[before].end <= events[action].start


@settings(max_examples=60, deadline=None)
@given(drawn=schedules(), data=st.data())
def test_what_need_not_have_ended_can_take_longer(drawn: tuple[Schedule, bool], data: st.DataObject) -> None:
    schedule, barrier = drawn
    found = order(schedule, barrier)
    slot = data.draw(st.integers(0, schedule.n_slots - 1))
    if not schedule.actions[slot]:
        return
    number = data.draw(st.integers(0, len(schedule.actions[slot]) - 1))
    for other, table in enumerate(schedule.actions):
        ended = found.ended[slot][number][other]
        if other == slot or ended == len(table):
            continue
        seconds = {a: 1.0 for row in schedule.actions for a in row} | {table[ended]: LONG}
        events = run(schedule, barrier, seconds)
        assert events[schedule.actions[slot][number]].start < LONG <= events[table[ended]].end
