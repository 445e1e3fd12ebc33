from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulations import Case, cases, uniform

from autopar.schedule import timeline
from autopar.schedule.builders import make_schedule
from autopar.schedule.clock import Phase, Transfer
from autopar.schedule.simulate import StageTimes, simulate
from autopar.schedule.timeline import StageMemory


@pytest.fixture(autouse=True)
def _columns_that_the_times_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "CHART_COLUMNS", 88)


F, B, W = Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT


def test_peak_memory_follows_the_sizes_of_the_microbatches_in_flight() -> None:
    m, sizes = 5, (1, 2, 4, 8, 16)
    memory = [StageMemory(50, 20, 30, sizes, 1000), StageMemory(100, 40, 60, sizes, 2000)]
    stages = [StageTimes((1.0,) * m, (1.0,) * m)] * 2
    transfers = [Transfer(0, 1, (0.0,) * m, (0.0,) * m)]
    everything = 1 + 2 + 4 + 8 + 16
    held = {"gpipe": (everything, everything), "1f1b": (8 + 16, 16), "zb-h1": (8 + 16, 8 + 16)}
    for name, (first, last) in held.items():
        timeline = simulate(make_schedule(name, m, (1, 1)), stages, transfers, memory=memory)
        assert timeline.peak_memory == (1100 + first, 2200 + last)
        assert timeline.memory_parts(0) == {
            "parameters": 50,
            "gradients": 20,
            "optimizer": 30,
            "activations": first,
            "transient": 1000,
        }
    unused = simulate(
        make_schedule("gpipe", 1, (2,)), [StageTimes((1.0,), (1.0,))], [], memory=[StageMemory(4, 2, 1, (1,), 2)]
    )
    assert unused.peak_memory == (7 + 1 + 2, 7)
    assert unused.memory(1) == [(0.0, 7)]


@settings(deadline=None)
@given(st.booleans().flatmap(lambda links: cases(links=links)), st.data())
def test_memory_over_time_is_what_the_events_hold(case: Case, data: st.DataObject) -> None:
    m = case.schedule.n_microbatches
    sizes = st.integers(0, 50)
    memory = [
        StageMemory(
            *[data.draw(sizes) for _ in range(3)],
            tuple(data.draw(sizes) for _ in range(m)),
            *[data.draw(sizes) for _ in range(2)],
        )
        for _ in case.stages
    ]
    timeline = simulate(case.schedule, case.stages, case.transfers, memory=memory, barrier=case.barrier)
    last = W if case.schedule.splits_backward else B if case.schedule.training else F
    events = {event.action: event for event in timeline.events}
    assert timeline.peak_memory is not None
    for slot in range(case.schedule.n_slots):
        steps = timeline.memory(slot)
        stages = case.schedule.stages_of(slot)
        resident = sum(memory[s].parameters + memory[s].gradients + memory[s].optimizer for s in stages)
        finishes = [finish for finish in timeline.finishes if finish.slot == slot]
        steps_at = [max(getattr(f, end) for f in finishes) for end in ("reduced", "end")] if finishes else [0.0, 0.0]
        assert steps[0][0] == 0
        assert steps[-1][1] == resident
        assert [time for time, _ in steps] == sorted(time for time, _ in steps)
        assert max(nbytes for _, nbytes in steps) == timeline.peak_memory[slot]
        assert sum(timeline.memory_parts(slot).values()) == timeline.peak_memory[slot]
        for (now, nbytes), (then, _) in pairwise(steps):
            if now == then:
                continue
            expected = resident
            if steps_at[0] <= now < steps_at[1]:
                expected += sum(memory[s].step for s in stages)
            for action, event in events.items():
                if event.slot != slot:
                    continue
                if action.phase is F and event.start <= now < events[action._replace(phase=last)].end:
                    expected += memory[action.stage].activation[action.microbatch]
                if event.start <= now < event.end:
                    expected += memory[action.stage].transient
            assert nbytes == expected


def test_a_timeline_without_memory_says_so() -> None:
    timeline = simulate(make_schedule("gpipe", 1, (1,)), [StageTimes((1.0,), (1.0,))], [])
    assert timeline.peak_memory is None
    with pytest.raises(ValueError, match="memory="):
        timeline.memory(0)


def test_a_timeline_prints_one_row_a_slot_in_proportion_to_time() -> None:
    schedule = make_schedule("gpipe", 1, (1, 1))
    stages = [StageTimes((1.0,), (2.0,)), StageTimes((3.0,), (3.0,), finish=2.0)]
    lines = str(simulate(schedule, stages, [Transfer(0, 1, (1.0,), (1.0,))])).splitlines()
    second = 8  # columns, of 11 s in 88
    assert lines[0] == "gpipe: 1 micro-batch, step 11 s, bubble 50.0%"
    assert lines[1:3] == [
        "0.0 |" + "0" * second + " " * 8 * second + "a" * 2 * second + "|  27%",
        "1.0 |" + " " * 2 * second + "0" * 3 * second + "a" * 3 * second + "=" * 2 * second + " " * second + "|  73%",
    ]
    assert max(map(len, lines)) <= 100


def test_a_timeline_counts_its_micro_batches_and_gives_short_steps_in_microseconds() -> None:
    stages = [StageTimes((1e-4,) * 3, (7.5e-5,) * 3)]
    text = str(simulate(make_schedule("1f1b", 3, (1,)), stages, []))
    assert text.startswith("1f1b: 3 micro-batches, step 525 us, bubble 0.0%\n")


def test_a_drawing_tells_the_parts_of_a_backward_sending_and_the_optimizer_apart() -> None:
    schedule = make_schedule("zb-h1", 1, (1, 1))
    stages = [StageTimes((1.0,), (3.0,), (2.0,), optimizer=1.0), StageTimes((1.0,), (2.0,), (1.0,))]
    lines = str(simulate(schedule, stages, [Transfer(0, 1, (1.0,), (1.0,), overlap=False)])).splitlines()
    assert lines[1].replace("|", "")[4:-5].split() == ["0" * 10 + ">" * 10 + "", "a" * 10 + "A" * 19 + "+" * 10]
    for word in ("to inputs a-j, to parameters A-J", "> sending", "+ optimizer"):
        assert word in lines[-1]


def test_a_drawing_gives_each_stage_of_a_slot_its_row() -> None:
    lines = str(uniform("interleaved-1f1b", 1, 2, 1, 1, chunks=2)).splitlines()
    eighth = 11  # columns, of 8 s in 88
    assert [line.rstrip() for line in lines[1:5]] == [
        "0.0 |" + "0" * eighth + " " * 6 * eighth + "a" * eighth + "|  50%",
        "2.0 |" + " " * 2 * eighth + "0" * eighth + " " * 2 * eighth + "a" * eighth + " " * 2 * eighth + "|",
        "1.0 |" + " " * eighth + "0" * eighth + " " * 4 * eighth + "a" * eighth + " " * eighth + "|  50%",
        "3.0 |" + " " * 3 * eighth + "0" * eighth + "a" * eighth + " " * 3 * eighth + "|",
    ]
