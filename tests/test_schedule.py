from dataclasses import replace
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.schedule import SCHEDULES, Action, Phase, Schedule, in_flight_limit, make_schedule, validate

F, B = Phase.FORWARD, Phase.BACKWARD

names = st.sampled_from(SCHEDULES)
pipelines = st.lists(st.integers(1, 4), min_size=1, max_size=6).map(tuple)
microbatches = st.integers(1, 24)


def with_table(schedule: Schedule, slot: int, table: list[Action]) -> Schedule:
    tables = list(schedule.actions)
    tables[slot] = tuple(table)
    return replace(schedule, actions=tuple(tables))


def can_finish(schedule: Schedule) -> bool:
    """Whether some order in time respects the tables and the dependencies: the graph of both has no cycle."""
    graph = nx.DiGraph()
    for table in schedule.actions:
        graph.add_edges_from(pairwise(table))
        for action in table:
            stage, i = action.stage, action.microbatch
            if action.phase is F and stage > 0:
                graph.add_edge(Action(F, stage - 1, i), action)
            if action.phase is B:
                graph.add_edge(Action(F, stage, i), action)
            if action.phase is B and stage + 1 < schedule.n_stages:
                graph.add_edge(Action(B, stage + 1, i), action)
    return nx.is_directed_acyclic_graph(graph)


def held(schedule: Schedule, slot: int) -> int:
    """Most micro-batches between forward and backward, counted from scratch at every point of the table."""
    table = schedule.actions[slot]
    return max(
        (sum(a.phase is F for a in table[:n]) - sum(a.phase is B for a in table[:n]) for n in range(len(table) + 1)),
    )


@given(names, microbatches, pipelines, st.booleans())
def test_every_schedule_made_is_valid(name: str, m: int, replicas: tuple[int, ...], training: bool) -> None:
    schedule = make_schedule(name, m, replicas, training=training)
    validate(schedule)
    assert schedule.training is training


@given(names, microbatches, pipelines, st.booleans())
def test_each_microbatch_runs_once_per_phase_and_stage_on_its_slot(
    name: str, m: int, replicas: tuple[int, ...], training: bool
) -> None:
    schedule = make_schedule(name, m, replicas, training=training)
    placed = sorted(
        (a.stage, a.microbatch, a.phase, slot) for slot, table in enumerate(schedule.actions) for a in table
    )
    expected = sorted(
        (stage, i, phase, sum(replicas[:stage]) + i % replicas[stage])
        for stage in range(len(replicas))
        for i in range(m)
        for phase in ((F, B) if training else (F,))
    )
    assert placed == expected


@given(names, microbatches, pipelines)
def test_a_slot_holds_exactly_the_limit(name: str, m: int, replicas: tuple[int, ...]) -> None:
    schedule = make_schedule(name, m, replicas)
    for stage, here in enumerate(replicas):
        most = max(held(schedule, slot) for slot in schedule.slots_of(stage))
        assert most == schedule.in_flight(stage) == in_flight_limit(name, m, here, sum(replicas[stage:]))


@given(microbatches, st.integers(1, 6))
def test_without_replicas_1f1b_is_pipedream_flush(m: int, p: int) -> None:
    schedule = make_schedule("1f1b", m, (1,) * p)
    assert [schedule.in_flight(s) for s in range(p)] == [min(m, p - s) for s in range(p)]
    assert [a.phase for a in schedule.actions[-1]] == [F, B] * m


@given(microbatches, pipelines)
def test_gpipe_runs_all_forwards_first_and_backwards_in_the_same_order(m: int, replicas: tuple[int, ...]) -> None:
    for table in make_schedule("gpipe", m, replicas).actions:
        half = len(table) // 2
        assert [a.phase for a in table] == [F] * half + [B] * half
        assert [a.microbatch for a in table[:half]] == [a.microbatch for a in table[half:]]


@given(names, microbatches, pipelines)
def test_gradients_are_summed_in_one_order_under_every_schedule(name: str, m: int, replicas: tuple[int, ...]) -> None:
    for table in make_schedule(name, m, replicas).actions:
        order = [a.microbatch for a in table if a.phase is B]
        assert order == sorted(order)


@given(names, microbatches, pipelines)
def test_without_training_there_is_one_microbatch_in_flight(name: str, m: int, replicas: tuple[int, ...]) -> None:
    schedule = make_schedule(name, m, replicas, training=False)
    assert all(a.phase is F for table in schedule.actions for a in table)
    assert {schedule.in_flight(stage) for stage in range(schedule.n_stages)} == {1}


@settings(max_examples=150)
@given(names, st.integers(2, 6), st.lists(st.integers(1, 2), min_size=1, max_size=3).map(tuple), st.data())
def test_validate_accepts_a_reordered_table_exactly_if_it_finishes_within_the_limit(
    name: str, m: int, replicas: tuple[int, ...], data: st.DataObject
) -> None:
    schedule = make_schedule(name, m, replicas)
    slot = data.draw(st.integers(0, len(schedule.actions) - 1))
    table = list(schedule.actions[slot])
    for _ in range(data.draw(st.integers(1, 3))):
        here, there = data.draw(st.tuples(*[st.integers(0, len(table) - 1)] * 2))
        table[here], table[there] = table[there], table[here]
    broken = with_table(schedule, slot, table)
    stage = schedule.stage_of(slot)
    limit = in_flight_limit(name, m, replicas[stage], sum(replicas[stage:]))
    if can_finish(broken) and held(broken, slot) <= limit:
        validate(broken)
    else:
        with pytest.raises(ValueError, match="not a valid"):
            validate(broken)


@given(names, microbatches, pipelines, st.data())
def test_validate_names_a_dropped_a_repeated_and_a_misplaced_action(
    name: str, m: int, replicas: tuple[int, ...], data: st.DataObject
) -> None:
    assume(m * len(replicas) > 1)  # without its only backward, a schedule is one of forwards alone
    schedule = make_schedule(name, m, replicas)
    slot = data.draw(st.sampled_from([slot for slot, table in enumerate(schedule.actions) if table]))
    table = list(schedule.actions[slot])
    position = data.draw(st.integers(0, len(table) - 1))
    action, rest = table[position], table[:position] + table[position + 1 :]

    with pytest.raises(ValueError, match=rf"{action} is missing"):
        validate(with_table(schedule, slot, rest))
    with pytest.raises(ValueError, match=rf"{action} is there 2 times"):
        validate(with_table(schedule, slot, [*table, action]))
    if len(schedule.actions) > 1:
        other = (slot + 1) % len(schedule.actions)
        moved = with_table(with_table(schedule, slot, rest), other, [*schedule.actions[other], action])
        with pytest.raises(ValueError, match=rf"{action} is on slot {other}, its slot is {slot}"):
            validate(moved)


def test_validate_lists_every_violation() -> None:
    schedule = make_schedule("1f1b", 3, (1, 1))
    first, last = (list(table) for table in schedule.actions)
    first.remove(Action(F, 0, 2))
    last.remove(Action(B, 1, 0))
    last.append(Action(F, 7, 0))
    with pytest.raises(ValueError) as error:
        validate(with_table(with_table(schedule, 0, first), 1, last))
    for line in ("F0.2 is missing", "B0.2 on slot 0 has no forward", "B1.0 is missing", "F7.0 on slot 1: there is no"):
        assert line in str(error.value)


def test_validate_says_what_a_deadlocked_slot_waits_for() -> None:
    schedule = make_schedule("1f1b", 2, (1, 1))
    early_backward = [Action(F, 0, 1), Action(B, 0, 1), Action(F, 0, 0), Action(B, 0, 0)]
    with pytest.raises(ValueError, match=r"slot 0: B0\.1 waits for B1\.1\n.*slot 1: F1\.0 waits for F0\.0"):
        validate(with_table(schedule, 0, early_backward))


def test_validate_refuses_a_gpipe_table_called_1f1b() -> None:
    with pytest.raises(ValueError, match="stage 1 holds 4 micro-batches at a time, 1f1b allows 1"):
        validate(replace(make_schedule("gpipe", 4, (1, 1)), name="1f1b"))


def test_validate_refuses_a_wrong_number_of_slots() -> None:
    schedule = make_schedule("gpipe", 4, (1, 2))
    with pytest.raises(ValueError, match="2 lists of actions for 3 slots"):
        validate(replace(schedule, actions=schedule.actions[:2]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zigzag", 4, (1,)), "unknown schedule 'zigzag': choose one of gpipe, 1f1b"),
        (("gpipe", 0, (1,)), "n_microbatches is 0"),
        (("1f1b", 4, ()), "replicas is empty"),
        (("1f1b", 4, (1, 0)), "0 replicas"),
    ],
)
def test_an_impossible_schedule_is_refused(arguments: tuple[str, int, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_schedule(*arguments)


def test_slots_are_numbered_stage_by_stage() -> None:
    schedule = make_schedule("gpipe", 5, (2, 1, 3))
    assert [schedule.stage_of(slot) for slot in range(6)] == [0, 0, 1, 2, 2, 2]
    assert [list(schedule.slots_of(stage)) for stage in range(3)] == [[0, 1], [2], [3, 4, 5]]
    assert [schedule.slot_of(2, i) for i in range(5)] == [3, 4, 5, 3, 4]


def test_a_schedule_prints_as_the_textbook_drawing() -> None:
    assert str(make_schedule("1f1b", 4, (1, 1, 1))).splitlines()[1:] == [
        "0.0 | F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3",
        "1.0 | .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..",
        "2.0 | .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..",
    ]


def test_a_deadlocked_schedule_still_prints_and_says_where_it_is_stuck() -> None:
    schedule = with_table(make_schedule("gpipe", 1, (1, 1)), 1, [Action(B, 1, 0), Action(F, 1, 0)])
    assert str(schedule).splitlines()[1:] == [
        "0.0 | F0",
        "1.0 | ..",
        "stuck: slot 0: B0.0 waits for B1.0",
        "stuck: slot 1: B1.0 waits for F1.0",
    ]
