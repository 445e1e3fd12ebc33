"""A step of several equal pipelines takes as long, and holds as much, as that of one of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from simulations import chunk_counts

from autopar.plan.recompute import Recompute
from autopar.planner.predicted_step import PredictedStage, PredictedStep
from autopar.schedule.builders import INTERLEAVED, SCHEDULES
from autopar.schedule.clock import Transfer
from autopar.schedule.timeline import StageMemory

SECONDS = st.floats(0.0, 2.0)


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, PredictedStep]:
    """How many times as many micro-batches and replicas, and a step that has so many more."""
    schedule = draw(st.sampled_from(SCHEDULES))
    interleaved = schedule in INTERLEAVED
    ranks, copies = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    replicas = [draw(st.integers(1, 1 if interleaved else 3)) for _ in range(ranks)]
    chunks = draw(st.sampled_from(chunk_counts(schedule, ranks))) if ranks > 1 else 1
    m = copies * draw(st.integers(1, 6))
    stages, n, nbytes = [], ranks * chunks, st.integers(0, 100)
    for number in range(n):
        backward = draw(SECONDS)
        stages.append(
            PredictedStage(
                (draw(SECONDS),) * m,
                (backward,) * m,
                (backward * draw(st.floats(0.0, 1.0)),) * m,
                draw(st.sampled_from([Recompute.NONE, Recompute.STAGE])),
                draw(SECONDS),
                number > 0,
                draw(SECONDS),
                StageMemory(7, 5, 3, (draw(nbytes),) * m, transient=draw(nbytes), step=draw(nbytes)),
                accumulation=backward * draw(st.floats(0.0, 0.5)),
            )
        )
    links = [(i, i + 1) for i in range(n - 1)]
    overlap = draw(st.booleans())
    sends = [Transfer(*link, (draw(SECONDS),) * m, (draw(SECONDS),) * m, overlap=overlap) for link in links]
    step = PredictedStep(
        tuple(stages),
        tuple(sends),
        schedule,
        m,
        tuple(copies * n for n in replicas),
        chunks,
        training=draw(st.booleans()),
        plain=False,
        barrier=draw(st.none() | SECONDS),
        overhead=1e-3,
    )
    return copies, step


@settings(max_examples=examples(60), deadline=None)
@given(steps())
def test_one_of_several_equal_pipelines_has_their_step_and_peaks(drawn: tuple[int, PredictedStep]) -> None:
    copies, step = drawn
    copy = step.one_copy()
    assert step.n_microbatches % copy.n_microbatches == 0
    assert step.n_microbatches // copy.n_microbatches >= copies
    whole, one = step.timeline(), copy.timeline()
    assert one.step_time == pytest.approx(whole.step_time, rel=1e-9)
    assert one.bubble == pytest.approx(whole.bubble, abs=1e-9)
    assert one.peak_memory is not None
    assert whole.peak_memory is not None
    for stage in range(len(step.stages)):
        mine, all_of_it = (
            {timeline.peak_memory[slot] for slot in timeline.schedule.slots_of(stage)}  # type: ignore[index]
            for timeline in (one, whole)
        )
        assert mine == all_of_it


def test_pipelines_that_differ_or_share_hardware_are_simulated_whole() -> None:
    times = (1.0, 1.0, 1.0, 2.0)
    stage = PredictedStage(times, times, times, Recompute.NONE, 0.0, sends_gradient=False)
    step = PredictedStep((stage,), (), "1f1b", 4, (2,), 1, training=True, plain=False)
    assert step.one_copy() is step
    even = replace(step, stages=(replace(stage, forward=times[:1] * 4, backward=times[:1] * 4, weight=times[:1] * 4),))
    assert even.one_copy().n_microbatches == 2
    shared = replace(even, hardware=(0, 0))
    assert shared.one_copy() is shared
