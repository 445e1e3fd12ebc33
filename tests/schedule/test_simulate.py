from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulations import Case, cases, chunk_counts, seconds, uniform

from autopar.schedule.builders import INTERLEAVED, SCHEDULES, make_schedule
from autopar.schedule.clock import Action, Phase, Transfer
from autopar.schedule.simulate import StageTimes, simulate
from autopar.schedule.table import phased
from autopar.schedule.timeline import StageMemory

F, B, I, W = Phase.FORWARD, Phase.BACKWARD, Phase.INPUT, Phase.WEIGHT  # noqa: E741

names = st.sampled_from(SCHEDULES)
plain_names = st.sampled_from(["gpipe", "1f1b"])


def longest_path(case: Case) -> float:
    """The step time from a graph of the same dependencies: a node an action or a transfer that takes time, weights in
    seconds from start to start. A transfer starts after the one before it on the link of its slots."""
    schedule = case.schedule if case.barrier is None else phased(case.schedule)
    graph = nx.DiGraph()

    def after(before: Action, node: object, delay: float = 0.0) -> None:
        weight = max(case.seconds_of(before) + delay, graph.edges.get((before, node), {}).get("weight", 0))
        graph.add_edge(before, node, weight=weight)

    back = I if schedule.splits_backward else B
    for table in schedule.actions:
        for before, action in pairwise(table):
            after(before, action)
        for action in table:
            after(action, ("through", schedule.placement[action.stage]))
            if action.phase is W:
                after(action._replace(phase=I), action)
            if action.phase is back:
                after(action._replace(phase=F), action)
            if action.phase is not F:
                graph.add_edge("all forwards", action, weight=0.0)
            elif case.barrier is not None:
                after(action, "all forwards", case.barrier)
                graph.add_edge("all forwards", "end", weight=0.0)
    carried: dict[tuple[int, int], tuple[object, float]] = {}  # by link: its last transfer so far
    for slot, table in enumerate(schedule.actions):
        for action in table:
            for transfer in case.transfers if action.phase in (F, back) else ():
                ends, seconds = (transfer.source, transfer.target), transfer.forward
                if action.phase is back:
                    ends, seconds = ends[::-1], transfer.backward
                reader, i = action._replace(stage=ends[1]), action.microbatch
                if action.stage != ends[0]:
                    continue
                if not seconds[i]:
                    after(action, reader)
                    continue
                sent, link = (action, ends), (slot, schedule.slot_of(ends[1], i))
                after(action, sent)
                if link in carried:
                    before, taken = carried[link]
                    graph.add_edge(before, sent, weight=taken)
                carried[link] = sent, seconds[i]
                graph.add_edge(sent, reader, weight=seconds[i])
    for group in set(schedule.placement):
        ends = [
            times.finish + times.optimizer
            for times, slots in zip(case.stages, schedule.placement, strict=True)
            if slots == group
        ]
        graph.add_edge(("through", group), "end", weight=sum(ends) if schedule.training else 0.0)
    return nx.dag_longest_path_length(graph)


@dataclass
class Ticker:
    """The same clock second by second, for whole seconds and actions that take at least one: what a person would do
    with a stopwatch and a list."""

    case: Case
    now: int = 0
    starts: dict[Action, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        schedule = self.case.schedule
        if self.case.barrier is not None:
            schedule = phased(schedule)
        self.todo = [deque(table) for table in schedule.actions]
        self.until: list[int | None] = [0] * len(self.todo)  # when a slot ends what it does; None: waits for a link
        self.doing: list[Action | None] = [None] * len(self.todo)
        self.outbox: list[deque[tuple[Action, Transfer]]] = [deque() for _ in self.todo]
        self.queue: dict[object, deque[tuple[int, Action, Transfer]]] = defaultdict(deque)
        self.link_until: dict[object, int] = defaultdict(int)
        self.ended: dict[Action, int] = {}
        self.arrived: dict[tuple[Action, int], int] = {}  # (result, stage that receives it) -> when
        self.sends: set[tuple[int, Action, int, int, int]] = set()
        while any(self.todo):
            self.tick()

    def tick(self) -> None:
        for slot in range(len(self.todo)):
            if self.until[slot] == self.now:
                self.end(slot)
        for name, queue in self.queue.items():
            while queue and self.link_until[name] <= self.now:
                slot, action, transfer = queue.popleft()
                self.link_until[name] = self.send(slot, action, transfer)
        for slot, table in enumerate(self.todo):
            if self.until[slot] is not None and self.until[slot] <= self.now and table and self.ready(table[0]):
                self.doing[slot] = action = table.popleft()
                self.starts[action] = self.now
                self.until[slot] = self.now + int(self.case.seconds_of(action))
        self.now += 1

    def end(self, slot: int) -> None:
        action, self.doing[slot] = self.doing[slot], None
        if action is not None:
            self.ended[action] = self.now
            for transfer in self.case.transfers:
                if action.phase is W or action.stage != (transfer.source if action.phase is F else transfer.target):
                    continue
                if not self.duration(action, transfer):
                    self.arrived[action, self.receiver(action, transfer)] = self.now
                elif not transfer.overlap:
                    self.outbox[slot].append((action, transfer))
                else:
                    self.queue[self.link(slot, action, transfer)].append((slot, action, transfer))
        if self.outbox[slot]:
            action, transfer = self.outbox[slot].popleft()
            self.until[slot] = None
            self.queue[self.link(slot, action, transfer)].append((slot, action, transfer))

    def link(self, slot: int, action: Action, transfer: Transfer) -> object:
        """That of the two slots, unless the transfer shares one."""
        return transfer.link or (slot, self.case.schedule.slot_of(self.receiver(action, transfer), action.microbatch))

    def send(self, slot: int, action: Action, transfer: Transfer) -> int:
        end = self.now + self.duration(action, transfer)
        self.arrived[action, self.receiver(action, transfer)] = end
        self.sends.add((slot, action, self.receiver(action, transfer), self.now, end))
        if not transfer.overlap:
            self.until[slot] = end
        return end

    def duration(self, action: Action, transfer: Transfer) -> int:
        return int((transfer.forward if action.phase is F else transfer.backward)[action.microbatch])

    def receiver(self, action: Action, transfer: Transfer) -> int:
        return transfer.target if action.phase is F else transfer.source

    def ready(self, action: Action) -> bool:
        phase, stage, i = action
        own = {F: None, B: F, I: F, W: I}[phase]
        there = own is None or self.ended.get(Action(own, stage, i), self.now + 1) <= self.now
        for t in self.case.transfers:
            if phase is not W and stage == (t.target if phase is F else t.source):
                result = Action(phase, t.source if phase is F else t.target, i)
                there = there and self.arrived.get((result, stage), self.now + 1) <= self.now
        if phase is not F and self.case.barrier is not None:
            left = any(a.phase is F for table in self.todo for a in table)
            running = any(a is not None and a.phase is F for a in self.doing)
            last = max(end for a, end in self.ended.items() if a.phase is F)
            there = there and not left and not running and self.now >= last + self.case.barrier
        return there


@given(plain_names, st.integers(1, 12), st.integers(1, 6), st.integers(1, 9), st.integers(1, 9))
def test_equal_stages_take_the_textbook_time_under_gpipe_and_1f1b(name: str, m: int, p: int, f: int, b: int) -> None:
    timeline = uniform(name, m, p, f, b)
    assert timeline.step_time == (m + p - 1) * (f + b)
    assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert timeline.busy == (m * (f + b),) * p
    in_flight = [m if name == "gpipe" else min(m, p - s) for s in range(p)]
    assert list(timeline.in_flight) == in_flight
    assert timeline.peak_memory == tuple(1000 + 10 * n + 3 for n in in_flight)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))
def test_interleaving_v_stages_divides_the_bubble_by_v(groups: int, p: int, v: int, f: int, b: int) -> None:
    m = groups * p
    timeline = uniform("interleaved-1f1b", m, p, f, b, chunks=v)
    assert timeline.step_time == (m * v + p - 1) * (f + b)
    assert timeline.bubble == pytest.approx((p - 1) / (v * m + p - 1))
    in_flight = [min(m * v, 2 * (p - g - 1) + (v - 1) * p + 1) for g in range(p)]
    assert list(timeline.in_flight) == in_flight
    assert timeline.peak_memory == tuple(1000 * v + 10 * n + 3 for n in in_flight)


@given(st.integers(0, 12), st.integers(1, 6), st.integers(1, 9))
def test_zb_h1_keeps_a_third_of_the_bubble_on_equal_parts(more: int, p: int, unit: int) -> None:
    m = p + more
    timeline = uniform("zb-h1", m, p, unit, 2 * unit, weight=unit)
    assert timeline.step_time == (3 * m + p - 1) * unit
    assert max(timeline.in_flight) == p
    assert timeline.bubble == pytest.approx((p - 1) / (3 * m + p - 1))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))
def test_interleaved_zb_waits_for_the_first_forwards_alone(groups: int, p: int, v: int, f: int, w: int) -> None:
    m = groups * p
    equal = uniform("interleaved-zb", m, p, f, 2 * f, weight=f, chunks=v)
    assert equal.step_time == (3 * m * v + p - 1) * f, "nothing can be shorter: the last rank waits for p - 1 forwards"
    h1, interleaved = (
        uniform("zb-h1", m, p, v * f, v * (f + w), weight=v * w),
        uniform("interleaved-1f1b", m, p, f, f + w, chunks=v),
    )
    timeline = uniform("interleaved-zb", m, p, f, f + w, weight=w, chunks=v)
    assert timeline.step_time <= min(h1.step_time, interleaved.step_time)
    assert max(timeline.in_flight) == max(interleaved.in_flight)


@given(st.integers(0, 12), st.integers(1, 5), st.integers(1, 9), st.integers(0, 9), st.integers(0, 9))
def test_zb_v_waits_for_the_first_forwards_alone_and_holds_what_1f1b_does(
    more: int, p: int, unit: int, b: int, w: int
) -> None:
    m = 2 * p + more
    equal = uniform("zb-v", m, p, unit, 2 * unit, weight=unit, chunks=2)
    assert equal.step_time == (6 * m + p - 1) * unit, "nothing can be shorter: the last rank waits for p - 1 forwards"
    assert equal.in_flight == (2 * p,) * p, "of stages half as large: p micro-batches"
    timeline = uniform("zb-v", m, p, unit, b + w, weight=w, chunks=2)
    if w <= b:
        assert timeline.step_time <= uniform("1f1b", m, p, 2 * unit, 2 * (b + w)).step_time


@given(plain_names, st.integers(1, 12), st.integers(1, 6), st.integers(1, 9))
def test_forwards_alone_hold_one_activation_and_do_without_backward_times(name: str, m: int, p: int, f: int) -> None:
    timeline = uniform(name, m, p, f, 7, training=False)
    assert timeline.step_time == (m + p - 1) * f
    assert timeline.peak_memory == (1013,) * p
    schedule = make_schedule(name, m, (1,), training=False)
    assert simulate(schedule, [StageTimes((f,) * m, (), finish=5.0, optimizer=2.0)], []).step_time == m * f


@settings(deadline=None)
@given(cases())
def test_step_time_is_the_longest_path_through_the_dependencies(case: Case) -> None:
    assert case.run().step_time == longest_path(case)


@settings(deadline=None)
@given(cases(links=True))
def test_shared_links_and_busy_senders_follow_a_stopwatch(case: Case) -> None:
    timeline, ticker = case.run(), Ticker(case)
    assert {event.action: event.start for event in timeline.events} == ticker.starts
    sends = {
        (send.slot, send.action, ticker.receiver(send.action, send.transfer), send.start, send.end)
        for send in timeline.sends
    }
    assert sends == ticker.sends


@settings(deadline=None)
@given(cases(links=True))
def test_a_link_carries_one_transfer_at_a_time(case: Case) -> None:
    sends = case.run().sends
    for name in ("a", "b"):
        carried = [send for send in sends if send.transfer.link == name]
        assert all(before.end <= after.start for before, after in pairwise(carried))


@settings(deadline=None)
@given(cases(links=True))
def test_neither_sharing_a_link_nor_waiting_for_it_ever_starts_anything_earlier(case: Case) -> None:
    case = replace(case, transfers=[replace(t, link="a") for t in case.transfers])
    shared = {event.action: event.start for event in case.run().events}
    for change in ({"link": None}, {"link": None, "overlap": True}):
        alone = replace(case, transfers=[replace(t, **change) for t in case.transfers]).run()
        assert all(event.start <= shared[event.action] for event in alone.events)


@settings(deadline=None)
@given(st.booleans().flatmap(lambda links: cases(links=links)))
def test_events_are_all_actions_in_table_order_without_overlap(case: Case) -> None:
    timeline = case.run()
    schedule = case.schedule if case.barrier is None else phased(case.schedule)
    assert timeline.schedule == schedule
    for slot, table in enumerate(schedule.actions):
        events = [event for event in timeline.events if event.slot == slot]
        assert tuple(event.action for event in events) == table
        sends = [s for s in timeline.sends if s.slot == slot and not s.transfer.overlap]
        finishes = [finish for finish in timeline.finishes if finish.slot == slot]
        assert sorted(finish.stage for finish in finishes) == list(schedule.stages_of(slot))
        spans = sorted((x.start, x.end) for x in [*events, *sends, *finishes])
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
        assert spans[-1][1] <= timeline.step_time
        own = case.barrier or 0.0 if slot in schedule.slots_of(schedule.n_stages - 1) else 0.0
        assert timeline.busy[slot] == sum(end - start for start, end in spans) + own
    assert 0 <= timeline.bubble <= 1
    assert list(timeline.events) == sorted(timeline.events, key=lambda event: (event.start, event.slot))


@settings(deadline=None)
@given(cases(), st.integers(0, 99), seconds)
def test_a_longer_transfer_never_shortens_the_step(case: Case, which: int, extra: float) -> None:
    if not case.transfers:
        return
    chosen = case.transfers[which % len(case.transfers)]
    longer = replace(
        chosen, forward=tuple(t + extra for t in chosen.forward), backward=tuple(t + extra for t in chosen.backward)
    )
    slower = replace(case, transfers=[longer if transfer is chosen else transfer for transfer in case.transfers])
    assert slower.run().step_time >= case.run().step_time


@given(names, st.integers(1, 20), st.integers(1, 5), st.integers(1, 9), st.integers(1, 9), st.integers(0, 9))
def test_one_stage_with_replicas_is_data_parallel(name: str, m: int, r: int, f: int, b: int, finish: int) -> None:
    timeline = simulate(make_schedule(name, m, (r,)), [StageTimes((f,) * m, (b,) * m, finish=finish, optimizer=2)], [])
    assert timeline.step_time == -(-m // r) * (f + b) + finish + 2
    assert all(x.reduced - x.start == finish and x.end - x.reduced == 2 for x in timeline.finishes)


def test_replicas_reduce_together_and_a_device_finishes_its_stages_one_by_one() -> None:
    times = StageTimes((1.0,) * 3, (2.0,) * 3, finish=4.0, optimizer=8.0)
    timeline = simulate(make_schedule("gpipe", 3, (2,)), [times], [])
    assert [(x.slot, x.start, x.end) for x in timeline.finishes] == [(0, 6.0, 18.0), (1, 6.0, 18.0)]
    chunked = simulate(
        make_schedule("interleaved-1f1b", 1, (1,), chunks=2),
        [StageTimes((1.0,), (2.0,), finish=4.0, optimizer=8.0)] * 2,
        [Transfer(0, 1, (0.0,), (0.0,))],
    )
    assert [(x.stage, x.start, x.reduced, x.end) for x in chunked.finishes] == [(1, 6, 10, 18), (0, 18, 22, 30)]


@given(names, st.integers(1, 12), st.integers(1, 6), st.integers(1, 9), st.integers(1, 9), seconds)
def test_no_backward_starts_before_the_barrier(name: str, m: int, p: int, f: int, b: int, loss: float) -> None:
    chunks = chunk_counts(name, p)[0]
    timeline = uniform(name, m, p, f, b, barrier=loss, chunks=chunks)
    last = max(event.end for event in timeline.events if event.action.phase is F)
    assert min(event.start for event in timeline.events if event.action.phase is not F) == last + loss
    assert timeline.in_flight == (chunks * m,) * p
    if name not in INTERLEAVED:  # its groups of p forwards need p micro-batches to be back in time
        assert timeline.step_time == (m + p - 1) * (f + b) + loss


def test_two_transfers_ready_at_once_share_a_link_one_after_the_other() -> None:
    #     0: F0 |---0->2---|
    #     1: F0            |---1->2---|
    #     2:                           F0
    schedule = make_schedule("gpipe", 1, (1, 1, 1), training=False)
    stages = [StageTimes((1.0,), ())] * 3
    transfers = [Transfer(0, 2, (3.0,), (), "bus"), Transfer(1, 2, (4.0,), (), "bus")]
    timeline = simulate(schedule, stages, transfers)
    assert [(send.slot, send.start, send.end) for send in timeline.sends] == [(0, 1, 4), (1, 4, 8)]
    assert timeline.step_time == 9
    assert simulate(schedule, stages, [replace(t, link=None) for t in transfers]).step_time == 6


def test_a_sender_that_cannot_overlap_computes_nothing_while_it_sends() -> None:
    schedule = make_schedule("gpipe", 2, (1, 1), training=False)
    stages = [StageTimes((1.0, 1.0), ())] * 2
    overlapped = Transfer(0, 1, (3.0, 3.0), ())
    assert simulate(schedule, stages, [overlapped]).step_time == 1 + 3 + 3 + 1
    timeline = simulate(schedule, stages, [replace(overlapped, overlap=False)])
    assert timeline.step_time == 1 + 3 + 1 + 3 + 1
    assert timeline.busy == (8, 2)


def test_the_link_of_two_slots_carries_one_transfer_at_a_time_in_each_direction() -> None:
    schedule = make_schedule("gpipe", 3, (1, 1))
    stages = [StageTimes((1.0,) * 3, (1.0,) * 3)] * 2
    timeline = simulate(schedule, stages, [Transfer(0, 1, (3.0,) * 3, (2.0,) * 3)])
    assert [(s.start, s.end) for s in timeline.sends] == [(1, 4), (4, 7), (7, 10), (12, 14), (14, 16), (16, 18)]


def test_a_deadlock_is_refused_with_what_each_slot_waits_for() -> None:
    schedule = make_schedule("1f1b", 2, (1, 1))
    early = (Action(F, 0, 1), Action(B, 0, 1), Action(F, 0, 0), Action(B, 0, 0))
    stuck = replace(schedule, actions=(early, schedule.actions[1]))
    times, transfer = StageTimes((1.0, 1.0), (1.0, 1.0)), Transfer(0, 1, (0.0, 0.0), (0.0, 0.0))
    with pytest.raises(ValueError, match=r"1f1b schedule deadlocks:\n.*B0\.1 waits for B1\.1\n.*F1\.0 waits for F0\.0"):
        simulate(schedule=stuck, stages=[times] * 2, transfers=[transfer])


@pytest.mark.parametrize(
    ("stages", "transfers", "message"),
    [
        ([StageTimes((1, 1), (1, 1))], [], "times of 1 stages for a schedule of 2"),
        ([StageTimes((1,), (1, 1))] * 2, [], "stage 0 has 1 forward times for 2 micro-batches"),
        ([StageTimes((1, 1), (1, -1))] * 2, [], "stage 0 has a backward time of -1"),
        ([StageTimes((1, 1), (1, float("nan")))] * 2, [], "stage 0 has a backward time of nan"),
        ([StageTimes((1, 1), (1, 1), finish=-1)] * 2, [], "stage 0 has -1 s of finish"),
        ([StageTimes((1, 1), (1, 1), optimizer=-1)] * 2, [], "stage 0 has -1 s of optimizer"),
        ([StageTimes((1, 1), (1, 1), (1,))] * 2, [], "stage 0 has 1 weight times for 2 micro-batches"),
        ([StageTimes((1, 1), (1, 1), (1, 2))] * 2, [], "stage 0 has a weight time that is no part of its backward"),
        ([StageTimes((1, 1), (1, 1))] * 2, [Transfer(1, 0, (1, 1), (1, 1))], "transfer from stage 1 to 0"),
        ([StageTimes((1, 1), (1, 1))] * 2, [Transfer(0, 1, (1, 1), (1,))], "transfer 0 -> 1 has 1 backward times"),
    ],
)
def test_times_that_do_not_fit_are_refused(stages: list[StageTimes], transfers: list[Transfer], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(make_schedule("gpipe", 2, (1, 1)), stages, transfers)


def test_everything_that_does_not_fit_is_listed() -> None:
    schedule, stages = make_schedule("gpipe", 2, (1,)), [StageTimes((1, 1), (1,))]
    with pytest.raises(ValueError) as error:
        simulate(schedule, stages, [], memory=[StageMemory(1, 1, 1, (1,), 1)], barrier=-1)
    for line in ("1 backward times", "1 activation sizes", "barrier is -1"):
        assert line in str(error.value)
    with pytest.raises(ValueError, match="memory of 0 stages"):
        simulate(schedule, [StageTimes((1, 1), (1, 1))], [], memory=[])
