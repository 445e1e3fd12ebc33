from dataclasses import replace
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.schedule import SCHEDULES, Phase, Schedule, make_schedule
from autopar.simulate import StageMemory, StageTimes, Timeline, Transfer, simulate

F, B = Phase.FORWARD, Phase.BACKWARD

# Whole numbers of seconds, so that sums are exact and compared with ==.
seconds = st.integers(0, 9).map(float)
names = st.sampled_from(SCHEDULES)
Case = tuple[Schedule, list[StageTimes], list[Transfer], float | None]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A schedule with random times; transfers between all neighbours and from some stages to later ones."""
    m = draw(st.integers(1, 8))
    replicas = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    p = len(replicas)
    per_microbatch = st.lists(seconds, min_size=m, max_size=m).map(tuple)
    stages = [StageTimes(draw(per_microbatch), draw(per_microbatch), draw(seconds)) for _ in replicas]
    pairs = [(s, s + 1) for s in range(p - 1)]
    pairs += [(s, t) for s in range(p) for t in range(s + 2, p) if draw(st.booleans())]
    transfers = [Transfer(s, t, draw(per_microbatch), draw(per_microbatch)) for s, t in pairs]
    barrier = draw(st.none() | seconds)
    name = "gpipe" if barrier is not None else draw(names)  # with 1f1b, a barrier deadlocks
    return make_schedule(name, m, replicas, training=draw(st.booleans())), stages, transfers, barrier


def run(case: Case) -> Timeline:
    schedule, stages, transfers, barrier = case
    return simulate(schedule, stages, transfers, barrier=barrier)


def longest_path(case: Case) -> float:
    """The step time from a graph of the same dependencies: a node an action, weights in seconds from start to start."""
    schedule, stages, transfers, barrier = case
    graph = nx.DiGraph()

    def seconds_of(action: tuple[Phase, int, int]) -> float:
        phase, stage, i = action
        return (stages[stage].forward if phase is F else stages[stage].backward)[i]

    def after(before: tuple[Phase, int, int], node: object, delay: float = 0.0) -> None:
        graph.add_edge(
            before, node, weight=max(seconds_of(before) + delay, graph.edges.get((before, node), {}).get("weight", 0))
        )

    for table in schedule.actions:
        actions = [(a.phase, a.stage, a.microbatch) for a in table]
        for before, action in pairwise(actions):
            after(before, action)
        for action in actions:
            phase, stage, i = action
            after(action, ("through", stage))
            if phase is B:
                after((F, stage, i), action)
                graph.add_edge("all forwards", action, weight=0.0)
            elif schedule.training and barrier is not None:
                after(action, "all forwards", barrier)
    for transfer in transfers:
        for i in range(schedule.n_microbatches):
            after((F, transfer.source, i), (F, transfer.target, i), transfer.forward[i])
            if schedule.training:
                after((B, transfer.target, i), (B, transfer.source, i), transfer.backward[i])
    for stage, times in enumerate(stages):
        graph.add_edge(("through", stage), "end", weight=times.finish if schedule.training else 0.0)
    return nx.dag_longest_path_length(graph)


def uniform(
    name: str, m: int, p: int, forward: float, backward: float, *, training: bool = True, barrier: float | None = None
) -> Timeline:
    """p equal stages of one device each, and transfers that take no time."""
    return simulate(
        make_schedule(name, m, (1,) * p, training=training),
        [StageTimes((forward,) * m, (backward,) * m)] * p,
        [Transfer(s, s + 1, (0.0,) * m, (0.0,) * m) for s in range(p - 1)],
        memory=[StageMemory(1000, (10,) * m, 3)] * p,
        barrier=barrier,
    )


@given(names, st.integers(1, 12), st.integers(1, 6), st.integers(1, 9), st.integers(1, 9))
def test_equal_stages_take_the_textbook_time_under_both_schedules(name: str, m: int, p: int, f: int, b: int) -> None:
    timeline = uniform(name, m, p, f, b)
    assert timeline.step_time == (m + p - 1) * (f + b)
    assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert timeline.busy == (m * (f + b),) * p
    in_flight = [m if name == "gpipe" else min(m, p - s) for s in range(p)]
    assert list(timeline.in_flight) == in_flight
    assert timeline.peak_memory == tuple(1000 + 10 * n + 3 for n in in_flight)


@given(names, st.integers(1, 12), st.integers(1, 6), st.integers(1, 9))
def test_forwards_alone_hold_one_activation_and_do_without_backward_times(name: str, m: int, p: int, f: int) -> None:
    timeline = uniform(name, m, p, f, 7, training=False)
    assert timeline.step_time == (m + p - 1) * f
    assert timeline.peak_memory == (1013,) * p
    schedule = make_schedule(name, m, (1,), training=False)
    assert simulate(schedule, [StageTimes((f,) * m, (), finish=5.0)], []).step_time == m * f


@settings(deadline=None)
@given(cases())
def test_step_time_is_the_longest_path_through_the_dependencies(case: Case) -> None:
    assert run(case).step_time == longest_path(case)


@settings(deadline=None)
@given(cases())
def test_events_are_all_actions_in_table_order_without_overlap(case: Case) -> None:
    schedule = case[0]
    timeline = run(case)
    for slot, table in enumerate(schedule.actions):
        events = [event for event in timeline.events if event.slot == slot]
        assert tuple(event.action for event in events) == table
        assert all(before.end <= after.start for before, after in pairwise(events))
        start, end = timeline.finishes[slot]
        assert all(event.end <= start for event in events)
        assert end <= timeline.step_time
        assert timeline.busy[slot] == sum(event.end - event.start for event in events) + end - start
    assert 0 <= timeline.bubble <= 1
    assert list(timeline.events) == sorted(timeline.events, key=lambda event: (event.start, event.slot))


@settings(deadline=None)
@given(cases(), st.integers(0, 99), seconds)
def test_a_longer_transfer_never_shortens_the_step(case: Case, which: int, extra: float) -> None:
    schedule, stages, transfers, barrier = case
    if not transfers:
        return
    chosen = transfers[which % len(transfers)]
    longer = replace(
        chosen, forward=tuple(t + extra for t in chosen.forward), backward=tuple(t + extra for t in chosen.backward)
    )
    slower = [longer if transfer is chosen else transfer for transfer in transfers]
    assert run((schedule, stages, slower, barrier)).step_time >= run(case).step_time


@given(names, st.integers(1, 20), st.integers(1, 5), st.integers(1, 9), st.integers(1, 9), st.integers(0, 9))
def test_one_stage_with_replicas_is_data_parallel(name: str, m: int, r: int, f: int, b: int, finish: int) -> None:
    timeline = simulate(make_schedule(name, m, (r,)), [StageTimes((f,) * m, (b,) * m, finish)], [])
    assert timeline.step_time == -(-m // r) * (f + b) + finish


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 9), st.integers(1, 9), seconds)
def test_no_backward_starts_before_the_barrier(m: int, p: int, f: int, b: int, loss: float) -> None:
    timeline = uniform("gpipe", m, p, f, b, barrier=loss)
    forwards_end = (m + p - 1) * f
    assert min(event.start for event in timeline.events if event.action.phase is B) == forwards_end + loss
    assert timeline.step_time == forwards_end + loss + (m + p - 1) * b


def test_peak_memory_follows_the_sizes_of_the_microbatches_in_flight() -> None:
    m, sizes = 5, (1, 2, 4, 8, 16)
    memory = [StageMemory(100, sizes, 1000), StageMemory(200, sizes, 2000)]
    stages = [StageTimes((1.0,) * m, (1.0,) * m)] * 2
    transfers = [Transfer(0, 1, (0.0,) * m, (0.0,) * m)]
    held = {"gpipe": (1 + 2 + 4 + 8 + 16, 1 + 2 + 4 + 8 + 16), "1f1b": (8 + 16, 16)}
    for name, (first, last) in held.items():
        timeline = simulate(make_schedule(name, m, (1, 1)), stages, transfers, memory=memory)
        assert timeline.peak_memory == (1100 + first, 2200 + last)
    unused = simulate(
        make_schedule("gpipe", 1, (2,)), [StageTimes((1.0,), (1.0,))], [], memory=[StageMemory(7, (1,), 2)]
    )
    assert unused.peak_memory == (7 + 1 + 2, 7)


def test_a_deadlock_is_refused_with_what_each_slot_waits_for() -> None:
    with pytest.raises(ValueError, match=r"1f1b schedule deadlocks:\n.*B0\.0 waits for B1\.0\n.*B1\.0 waits for F0\.3"):
        uniform("1f1b", 4, 2, 1, 1, barrier=0.0)


@pytest.mark.parametrize(
    ("stages", "transfers", "message"),
    [
        ([StageTimes((1, 1), (1, 1))], [], "times of 1 stages for a schedule of 2"),
        ([StageTimes((1,), (1, 1))] * 2, [], "stage 0 has 1 forward times for 2 micro-batches"),
        ([StageTimes((1, 1), (1, -1))] * 2, [], "stage 0 has a backward time of -1"),
        ([StageTimes((1, 1), (1, 1), -1)] * 2, [], "stage 0 has a finish of -1"),
        ([StageTimes((1, 1), (1, 1))] * 2, [Transfer(1, 0, (1, 1), (1, 1))], "transfer from stage 1 to 0"),
        ([StageTimes((1, 1), (1, 1))] * 2, [Transfer(0, 1, (1, 1), (1,))], "transfer 0 -> 1 has 1 backward times"),
    ],
)
def test_times_that_do_not_fit_are_refused(stages: list[StageTimes], transfers: list[Transfer], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(make_schedule("gpipe", 2, (1, 1)), stages, transfers)


def test_memory_and_barrier_that_do_not_fit_are_refused() -> None:
    schedule, stages = make_schedule("gpipe", 2, (1,)), [StageTimes((1, 1), (1, 1))]
    for memory, message in (([], "memory of 0 stages"), ([StageMemory(1, (1,), 1)], "1 activation sizes")):
        with pytest.raises(ValueError, match=message):
            simulate(schedule, stages, [], memory=memory)
    with pytest.raises(ValueError, match="barrier is -1"):
        simulate(schedule, stages, [], barrier=-1)


def test_a_timeline_prints_one_row_a_slot_in_proportion_to_time() -> None:
    schedule = make_schedule("gpipe", 1, (1, 1))
    stages = [StageTimes((1.0,), (2.0,)), StageTimes((3.0,), (3.0,), 2.0)]
    lines = str(simulate(schedule, stages, [Transfer(0, 1, (1.0,), (1.0,))])).splitlines()
    second = 8  # columns, of 11 s in 88
    assert lines[0] == "gpipe: 1 micro-batches, step 11 s, bubble 50.0%"
    assert lines[1:3] == [
        "0.0 |" + "0" * second + " " * 8 * second + "a" * 2 * second + "|  27%",
        "1.0 |" + " " * 2 * second + "0" * 3 * second + "a" * 3 * second + "=" * 2 * second + " " * second + "|  73%",
    ]
    assert max(map(len, lines)) <= 100
