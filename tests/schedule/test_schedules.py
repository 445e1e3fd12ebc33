import re
from dataclasses import replace
from itertools import pairwise

import networkx as nx
import pytest
from examples import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from simulations import chunk_counts

import autopar.schedule
from autopar.schedule.builders import (
    INTERLEAVED,
    SCHEDULES,
    SPLIT_BACKWARD,
    in_flight_limit,
    interleaved_in_flight_limit,
    make_schedule,
)
from autopar.schedule.clock import Action, Phase
from autopar.schedule.table import Schedule, phased
from autopar.schedule.validation import validate

F, B, I, W = Phase.FORWARD, Phase.BACKWARD, Phase.INPUT, Phase.WEIGHT  # noqa: E741

one_stage_names = st.sampled_from([name for name in SCHEDULES if name not in INTERLEAVED])
microbatches = st.integers(1, 24)


@st.composite
def pipelines(draw: st.DrawFn, max_ranks: int = 6, max_replicas: int = 4) -> tuple[str, tuple[int, ...], int]:
    """A schedule's name, the devices of its ranks, and the stages of each device."""
    name = draw(st.sampled_from(SCHEDULES))
    replicas = st.integers(1, max_replicas)
    if name in INTERLEAVED:
        ranks = draw(st.integers(1, max_ranks))
        return name, (draw(replicas),) * ranks, draw(st.sampled_from(chunk_counts(name, ranks, 4)))
    return name, tuple(draw(st.lists(replicas, min_size=1, max_size=max_ranks))), 1


def with_table(schedule: Schedule, slot: int, table: list[Action]) -> Schedule:
    tables = list(schedule.actions)
    tables[slot] = tuple(table)
    return replace(schedule, actions=tuple(tables))


def order_of_ranks(name: str, ranks: int, chunks: int) -> list[int]:
    """The rank of each stage: round and round, or there and back."""
    if name == "zb-v" and chunks == 2:
        return [*range(ranks), *reversed(range(ranks))]
    return [stage % ranks for stage in range(ranks * chunks)]


def can_finish(schedule: Schedule) -> bool:
    """Whether some order in time respects the tables and the dependencies: the graph of both has no cycle."""
    graph = nx.DiGraph()
    for table in schedule.actions:
        graph.add_edges_from(pairwise(table))
        for action in table:
            phase, stage, i = action
            if phase is F and stage > 0:
                graph.add_edge(Action(F, stage - 1, i), action)
            if phase in (B, I):
                graph.add_edge(Action(F, stage, i), action)
            if phase in (B, I) and stage + 1 < schedule.n_stages:
                graph.add_edge(Action(phase, stage + 1, i), action)
            if phase is W:
                graph.add_edge(Action(I, stage, i), action)
    return nx.is_directed_acyclic_graph(graph)


def holds(schedule: Schedule, slot: int) -> int:
    """Most micro-batches from forward to the end of the backward, counted from scratch at every point of the table."""
    table = schedule.actions[slot]
    last = W if schedule.splits_backward else B
    return max(
        (sum(a.phase is F for a in table[:n]) - sum(a.phase is last for a in table[:n]) for n in range(len(table) + 1)),
    )


def limit_of(schedule: Schedule, slot: int) -> int:
    stage, replicas, m = min(schedule.stages_of(slot)), schedule.replicas, schedule.n_microbatches
    if schedule.name in INTERLEAVED:
        ranks = len(set(schedule.placement))
        chunks = schedule.n_stages // ranks
        return interleaved_in_flight_limit(schedule.name, -(-m // replicas[0]), ranks, chunks, stage)
    return in_flight_limit(schedule.name, m, replicas[stage], sum(replicas[stage:]), sum(replicas))


@given(pipelines(), microbatches, st.booleans())
def test_every_schedule_made_is_valid(pipeline: tuple[str, tuple[int, ...], int], m: int, training: bool) -> None:
    name, replicas, chunks = pipeline
    schedule = make_schedule(name, m, replicas, chunks=chunks, training=training)
    validate(schedule)
    assert schedule.training is training
    assert schedule.splits_backward is (training and name in SPLIT_BACKWARD)


@given(pipelines(), microbatches, st.booleans())
def test_each_microbatch_runs_once_per_phase_and_stage_on_its_slot(
    pipeline: tuple[str, tuple[int, ...], int], m: int, training: bool
) -> None:
    name, replicas, chunks = pipeline
    schedule = make_schedule(name, m, replicas, chunks=chunks, training=training)
    phases = (F,) if not training else (F, I, W) if name in SPLIT_BACKWARD else (F, B)
    placed = sorted((*action, slot) for slot, table in enumerate(schedule.actions) for action in table)
    expected = sorted(
        (phase, stage, i, sum(replicas[:rank]) + i % replicas[rank])
        for stage, rank in enumerate(order_of_ranks(name, len(replicas), chunks))
        for i in range(m)
        for phase in phases
    )
    assert placed == expected


@given(pipelines(), microbatches)
def test_no_slot_holds_more_than_the_limit(pipeline: tuple[str, tuple[int, ...], int], m: int) -> None:
    name, replicas, chunks = pipeline
    schedule = make_schedule(name, m, replicas, chunks=chunks)
    for slot in range(schedule.n_slots):
        assert holds(schedule, slot) == schedule.in_flight(slot) <= limit_of(schedule, slot)


@given(st.sampled_from(["gpipe", "1f1b"]), microbatches, st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_the_fullest_slot_of_a_stage_holds_exactly_the_limit(name: str, m: int, replicas: list[int]) -> None:
    schedule = make_schedule(name, m, replicas)
    for stage in range(schedule.n_stages):
        slots = schedule.slots_of(stage)
        assert max(schedule.in_flight(slot) for slot in slots) == limit_of(schedule, slots[0])


@given(microbatches, st.integers(1, 6))
def test_without_replicas_1f1b_is_pipedream_flush(m: int, p: int) -> None:
    schedule = make_schedule("1f1b", m, (1,) * p)
    assert [schedule.in_flight(s) for s in range(p)] == [min(m, p - s) for s in range(p)]
    assert [a.phase for a in schedule.actions[-1]] == [F, B] * m


@given(microbatches, st.integers(1, 6))
def test_zb_h1_is_1f1b_with_its_backwards_split(m: int, p: int) -> None:
    schedule, plain = make_schedule("zb-h1", m, (1,) * p), make_schedule("1f1b", m, (1,) * p)
    for table, whole in zip(schedule.actions, plain.actions, strict=True):
        assert [a for a in table if a.phase is not W] == [a._replace(phase=I) if a.phase is B else a for a in whole]
    assert all(schedule.in_flight(slot) <= p for slot in range(p))
    if m >= p:
        assert schedule.in_flight(0) == p


@given(microbatches, st.integers(1, 6), st.integers(1, 4))
def test_interleaved_zb_is_interleaved_1f1b_with_its_backwards_split(m: int, p: int, v: int) -> None:
    schedule = make_schedule("interleaved-zb", m, (1,) * p, chunks=v)
    plain = make_schedule("interleaved-1f1b", m, (1,) * p, chunks=v)
    assert schedule.placement == plain.placement
    for table, whole in zip(schedule.actions, plain.actions, strict=True):
        assert [a for a in table if a.phase is not W] == [a._replace(phase=I) if a.phase is B else a for a in whole]
    if m % p == 0:  # the first rank holds as much as under interleaved-1f1b, and no other holds more
        assert schedule.in_flight(0) == plain.in_flight(0) == max(map(schedule.in_flight, range(p)))


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4))
def test_interleaved_holds_megatrons_warm_up_and_one_more(groups: int, p: int, v: int) -> None:
    schedule = make_schedule("interleaved-1f1b", groups * p, (1,) * p, chunks=v)
    expected = [min(groups * p * v, 2 * (p - g - 1) + (v - 1) * p + 1) for g in range(p)]
    assert [schedule.in_flight(slot) for slot in range(p)] == expected


def test_interleaved_runs_forwards_in_groups_of_ranks_chunk_by_chunk_and_backwards_in_reverse() -> None:
    table = make_schedule("interleaved-1f1b", 4, (1, 1), chunks=2).actions[0]
    assert [(a.stage, a.microbatch) for a in table if a.phase is F] == [
        *((0, 0), (0, 1), (2, 0), (2, 1)),
        *((0, 2), (0, 3), (2, 2), (2, 3)),
    ]
    assert [(a.stage, a.microbatch) for a in table if a.phase is B] == [
        *((2, 0), (2, 1), (0, 0), (0, 1)),
        *((2, 2), (2, 3), (0, 2), (0, 3)),
    ]


@given(st.sampled_from(INTERLEAVED), st.integers(1, 12), st.integers(1, 4), st.integers(2, 3), st.integers(1, 3))
def test_replicas_of_an_interleaved_schedule_are_pipelines_of_their_own(
    name: str, m: int, p: int, r: int, v: int
) -> None:
    assume(v in chunk_counts(name, p))
    schedule = make_schedule(name, m, (r,) * p, chunks=v)
    for lane in range(min(r, m)):
        alone = make_schedule(name, len(range(lane, m, r)), (1,) * p, chunks=v)
        for rank in range(p):
            table = schedule.actions[rank * r + lane]
            assert [a._replace(microbatch=a.microbatch // r) for a in table] == list(alone.actions[rank])


@given(microbatches, st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_gpipe_runs_all_forwards_first_and_backwards_in_the_same_order(m: int, replicas: list[int]) -> None:
    for table in make_schedule("gpipe", m, replicas).actions:
        half = len(table) // 2
        assert [a.phase for a in table] == [F] * half + [B] * half
        assert [a.microbatch for a in table[:half]] == [a.microbatch for a in table[half:]]


@given(pipelines(), microbatches)
def test_gradients_are_summed_in_one_order_under_every_schedule(
    pipeline: tuple[str, tuple[int, ...], int], m: int
) -> None:
    name, replicas, chunks = pipeline
    for table in make_schedule(name, m, replicas, chunks=chunks).actions:
        for stage in {a.stage for a in table}:
            for phase in (B, I, W):
                order = [a.microbatch for a in table if a.phase is phase and a.stage == stage]
                assert order == sorted(order)


@given(pipelines(), microbatches)
def test_without_training_there_is_one_microbatch_in_flight(pipeline: tuple[str, tuple[int, ...], int], m: int) -> None:
    name, replicas, chunks = pipeline
    schedule = make_schedule(name, m, replicas, chunks=chunks, training=False)
    assert all(a.phase is F for table in schedule.actions for a in table)
    assert all(schedule.in_flight(slot) == bool(table) for slot, table in enumerate(schedule.actions))


@pytest.mark.slow
@given(pipelines(), microbatches)
def test_a_phased_schedule_runs_all_forwards_first_and_still_finishes(
    pipeline: tuple[str, tuple[int, ...], int], m: int
) -> None:
    name, replicas, chunks = pipeline
    schedule = make_schedule(name, m, replicas, chunks=chunks)
    both = phased(schedule)
    for before, table in zip(schedule.actions, both.actions, strict=True):
        assert table == (*(a for a in before if a.phase is F), *(a for a in before if a.phase is not F))
    assert can_finish(both)
    if name == "1f1b":
        assert both.actions == make_schedule("gpipe", m, replicas).actions


@settings(max_examples=examples(40), deadline=None)
@given(pipelines(max_ranks=3, max_replicas=2), st.integers(2, 6), st.data())
def test_validate_accepts_a_reordered_table_exactly_if_it_finishes_within_the_limit(
    pipeline: tuple[str, tuple[int, ...], int], m: int, data: st.DataObject
) -> None:
    name, replicas, chunks = pipeline
    schedule = make_schedule(name, m, replicas, chunks=chunks)
    slot = data.draw(st.integers(0, len(schedule.actions) - 1))
    table = list(schedule.actions[slot])
    for _ in range(data.draw(st.integers(1, 3))):
        here, there = data.draw(st.tuples(*[st.integers(0, len(table) - 1)] * 2))
        table[here], table[there] = table[there], table[here]
    broken = with_table(schedule, slot, table)
    if can_finish(broken) and holds(broken, slot) <= limit_of(broken, slot):
        validate(broken)
    else:
        with pytest.raises(ValueError, match="not a valid"):
            validate(broken)


@given(pipelines(), microbatches, st.data())
def test_validate_names_a_dropped_a_repeated_and_a_misplaced_action(
    pipeline: tuple[str, tuple[int, ...], int], m: int, data: st.DataObject
) -> None:
    name, replicas, chunks = pipeline
    schedule = make_schedule(name, m, replicas, chunks=chunks)
    assume(m * schedule.n_stages > 1)  # without its only backward, a schedule is one of forwards alone
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
    with pytest.raises(ValueError, match="slot 1 holds 4 micro-batches at a time, 1f1b allows 1"):
        validate(replace(make_schedule("gpipe", 4, (1, 1)), name="1f1b"))


def test_validate_refuses_whole_backwards_among_split_ones_and_weights_before_inputs() -> None:
    schedule = make_schedule("zb-h1", 2, (1,))
    whole = [Action(F, 0, 0), Action(B, 0, 0), *schedule.actions[0][3:]]
    with pytest.raises(ValueError, match=r"B0\.0 is a whole backward, others are split(.|\n)*W0\.0 is missing"):
        validate(with_table(schedule, 0, whole))
    swapped = [Action(F, 0, 0), Action(W, 0, 0), Action(I, 0, 0), *schedule.actions[0][3:]]
    with pytest.raises(ValueError, match=r"W0\.0 on slot 0 has no input before it"):
        validate(with_table(schedule, 0, swapped))


def test_a_backward_may_be_split_under_any_name() -> None:
    tables = [
        [part for a in table for part in ((a,) if a.phase is F else (a._replace(phase=I), a._replace(phase=W)))]
        for table in make_schedule("1f1b", 4, (1, 2)).actions
    ]
    validate(replace(make_schedule("1f1b", 4, (1, 2)), actions=tuple(map(tuple, tables))))


@pytest.mark.parametrize(
    ("name", "placement", "n_tables", "message"),
    [
        ("gpipe", ((0,), (1, 2)), 2, "2 lists of actions for 3 slots"),
        ("gpipe", ((0, 1), (1, 2)), 3, "3 lists of actions for 4 slots"),
        ("gpipe", ((0,), ()), 1, "a stage has no slots"),
        ("gpipe", (), 0, "there are no stages"),
        ("zb-h1", ((0,), (1,), (0,)), 2, "under zb-h1 a slot serves one stage"),
        ("interleaved-1f1b", ((0,), (1,), (0,)), 2, "under interleaved-1f1b the stages go round the devices in turn"),
        ("interleaved-1f1b", ((0,), (1,), (1,), (0,)), 2, "the stages go round the devices in turn"),
        ("zb-v", ((0,), (1,), (0,), (1,)), 2, "under zb-v the stages go along the devices and back"),
        ("zb-v", ((0,), (1,)), 2, "under zb-v the stages go along the devices and back"),
        ("interleaved-1f1b", ((0,), (1, 2)), 3, "every rank has as many slots"),
    ],
)
def test_validate_refuses_an_impossible_placement(
    name: str, placement: tuple[tuple[int, ...], ...], n_tables: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        validate(Schedule(name, 4, placement, ((),) * n_tables))


@pytest.mark.parametrize(
    ("arguments", "chunks", "message"),
    [
        (("zigzag", 4, (1,)), 1, "unknown schedule 'zigzag': choose one of gpipe, 1f1b"),
        (("gpipe", 0, (1,)), 1, "n_microbatches is 0"),
        (("1f1b", 4, ()), 1, "replicas is empty"),
        (("1f1b", 4, (1, 0)), 1, "0 replicas"),
        (("1f1b", 4, (1, 1)), 2, "only interleaved-1f1b and interleaved-zb and zb-v put several"),
        (("zb-v", 4, (1, 1)), 1, "1 chunks: zb-v puts two stages on a device, chunks=2"),
        (("zb-v", 4, (1, 1)), 3, "3 chunks: zb-v puts two stages on a device, chunks=2"),
        (("interleaved-1f1b", 4, (1, 1)), 0, "chunks is 0"),
        (("interleaved-1f1b", 4, (1, 2)), 2, "as many devices on every rank"),
    ],
)
def test_an_impossible_schedule_is_refused(
    arguments: tuple[str, int, tuple[int, ...]], chunks: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_schedule(*arguments, chunks=chunks)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1b", 0, 1, 1, 1), "n_microbatches is 0"),
        (("1f1b", 4, 2, 1, 3), "2 replicas of 1 devices from here on of 3"),
        (("zb-h1", 4, 1, 3, 2), "1 replicas of 3 devices from here on of 2"),
        (("interleaved-1f1b", 4, 1, 1, 1), "interleaved_in_flight_limit"),
    ],
)
def test_the_limit_of_an_impossible_stage_is_refused(arguments: tuple[str, int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        in_flight_limit(*arguments)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        interleaved_in_flight_limit("interleaved-zb", 4, 2, 2, 2)
    with pytest.raises(ValueError, match="1f1b is not interleaved: choose one of interleaved-1f1b, interleaved-zb"):
        interleaved_in_flight_limit("1f1b", 4, 2, 2, 1)


def test_slots_are_numbered_rank_by_rank() -> None:
    schedule = make_schedule("gpipe", 5, (2, 1, 3))
    assert [schedule.stages_of(slot) for slot in range(6)] == [(0,), (0,), (1,), (2,), (2,), (2,)]
    assert [schedule.slots_of(stage) for stage in range(3)] == [(0, 1), (2,), (3, 4, 5)]
    assert [schedule.slot_of(2, i) for i in range(5)] == [3, 4, 5, 3, 4]
    chunked = make_schedule("interleaved-1f1b", 5, (2, 2), chunks=2)
    assert [chunked.stages_of(slot) for slot in range(4)] == [(0, 2), (0, 2), (1, 3), (1, 3)]
    assert chunked.placement == ((0, 1), (2, 3), (0, 1), (2, 3))
    assert [chunked.row_label(slot) for slot in range(4)] == ["0+2.0", "0+2.1", "1+3.0", "1+3.1"]


def test_the_drawings_in_the_documentation_are_what_print_shows() -> None:
    text = autopar.schedule.__doc__ or ""
    drawn = re.findall(r"^    \S+\.0 \|.*$", text, re.MULTILINE)
    printed = [
        *str(make_schedule("gpipe", 4, (1, 1, 1))).splitlines()[1:],
        *str(make_schedule("1f1b", 4, (1, 1, 1))).splitlines()[1:],
        *str(make_schedule("interleaved-1f1b", 4, (1, 1), chunks=2)).splitlines()[1:],
        *str(make_schedule("zb-h1", 4, (1, 1, 1))).splitlines()[1:],
        *str(make_schedule("interleaved-zb", 3, (1, 1), chunks=2)).splitlines()[1:],
        *str(make_schedule("zb-v", 3, (1, 1), chunks=2)).splitlines()[1:],
    ]
    assert [line.strip() for line in drawn] == printed


def test_a_deadlocked_schedule_still_prints_and_says_where_it_is_stuck() -> None:
    schedule = with_table(make_schedule("gpipe", 1, (1, 1)), 1, [Action(B, 1, 0), Action(F, 1, 0)])
    assert str(schedule).splitlines()[1:] == [
        "0.0 | F0",
        "1.0 | ..",
        "stuck: slot 0: B0.0 waits for B1.0",
        "stuck: slot 1: B1.0 waits for F1.0",
    ]
