"""A profiled step on ranks shows the actions of all of them, as the same plan does in threads."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rank_cases import Job
from rank_pool import RankPool
from rank_profiles import AHEAD, clocks, profiled, profiled_on_machines
from trace_format import assert_well_formed

from autopar.runtime.step_profile import StepProfile

slow = pytest.mark.slow

JOBS = [
    (2, Job("mlp", "chain")),
    (3, Job("skips", "chain")),
    (2, Job("mlp", "chunks 2")),
    (3, Job("mlp", "chain", "zb-h1")),
    (3, Job("mlp", "replicas 2,1")),
    (2, Job("mlp", "replicas 2", "gpipe")),
    (2, Job("mlp", "chain stage")),
]


def actions_of(profile: StepProfile) -> Counter[tuple[Any, ...]]:
    return Counter((one.device, one.phase, one.stage, one.microbatch) for one in profile.actions)


def sends_of(profile: StepProfile) -> Counter[tuple[Any, ...]]:
    """Those between devices and, in a schedule of chunks, between stages of one device."""
    sends = profile.sends
    return Counter((one.stage, one.to, one.microbatch, one.gradient, one.device, one.to_device) for one in sends)


def check_times(profile: StepProfile) -> None:
    """Nothing is received before it is sent, and actions of a device follow each other."""
    for send in profile.sends:
        assert send.sent <= send.received + profile.clock_error, send
    for device in {one.device for one in profile.actions}:
        edges = [t for one in profile.actions if one.device == device for span in one.spans for t in span]
        assert edges == sorted(edges)
        assert edges[0] >= -profile.clock_error
        assert edges[-1] <= profile.seconds + profile.clock_error


@slow
@pytest.mark.parametrize(("n", "job"), JOBS, ids=str)
def test_a_profiled_step_has_the_actions_of_the_same_plan_in_threads(
    ranks: RankPool, tmp_path: Path, n: int, job: Job
) -> None:
    results = ranks.run(profiled, n, job, str(tmp_path))
    for result in results:
        found, wanted = result["found"], result["wanted"]
        assert found == results[0]["found"], "ranks differ in the profile"
        assert actions_of(found) == actions_of(wanted)
        assert sends_of(found) == sends_of(wanted)
        assert [(s.stage, s.device, s.microbatches) for s in found.stages] == [
            (s.stage, s.device, s.microbatches) for s in wanted.stages
        ]
        assert (found.batch_size, found.n_microbatches, found.schedule) == (8, 4, wanted.schedule)
        assert [s.loss > 0 for s in found.stages] == [s.loss > 0 for s in wanted.stages]
        assert (found.clock_error, found.one_worker) == (0.0, False)
        check_times(found)
        assert math.isclose(result["loss"], result["wanted loss"], rel_tol=1e-6)
        trace = result["trace"]
        assert_well_formed(trace)
        assert {event["pid"] for event in trace["traceEvents"]} == set(range(n))
        assert len([event for event in trace["traceEvents"] if event["ph"] == "s"]) == len(found.sends)
        assert result["again"] == results[0]["again"]
    assert len({result["report"] for result in results}) == 1


@slow
def test_a_profiled_step_of_a_mesh_has_the_actions_of_each_of_its_ranks(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(profiled, 4, Job("gpt2", "hand tensor=2 pipeline=2"), str(tmp_path))
    found, wanted = results[0]["found"], results[0]["wanted"]
    assert all(result["found"] == found for result in results)
    check_times(found)
    on_first = {tuple(key) for key in actions_of(wanted)}
    pairs = {"cpu:0": "cpu:1", "cpu:2": "cpu:3"}
    assert actions_of(found) == Counter({*on_first, *((pairs[device], *rest) for device, *rest in on_first)})
    assert {(send.device, send.to_device) for send in found.sends} == {
        ("cpu:0", "cpu:2"),
        ("cpu:1", "cpu:3"),
        ("cpu:2", "cpu:0"),
        ("cpu:3", "cpu:1"),
    }


@slow
def test_the_clock_of_another_machine_is_found_within_the_error_that_is_said(ranks: RankPool) -> None:
    for rank, ahead in enumerate(ranks.run(clocks, 3, 1)):
        assert abs(ahead.seconds - (AHEAD if rank == 1 else 0.0)) <= ahead.error + 1e-9
        assert (ahead.error > 0) == (rank == 1)


@slow
def test_a_profile_over_machines_has_one_clock(ranks: RankPool) -> None:
    first, *others = ranks.run(profiled_on_machines, 3, Job("mlp", "chain"))
    assert all(one == first for one in others)
    assert first.clock_error > 0
    check_times(first)
    assert first.actions[-1].spans[-1][1] < AHEAD / 2
    assert "Devices are on several machines, whose clocks were compared" in " ".join(str(first).split())
