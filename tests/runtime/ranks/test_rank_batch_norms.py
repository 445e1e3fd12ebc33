"""Batch norm on ranks: the running statistics of one process, bit for bit, on every rank that keeps them."""

from __future__ import annotations

import re

import pytest
from rank_batch_norms import normed, written_elsewhere
from rank_cases import Job
from rank_pool import RankPool

slow = pytest.mark.slow


@slow
@pytest.mark.parametrize(
    ("n", "job"),
    [
        (2, Job("norms", "chain", n_microbatches=3)),
        (3, Job("norms", "chain", call="backward")),
        (2, Job("norms", "replicas 2")),
        (3, Job("norms", "replicas 2,1", call="forward")),
        (2, Job("cnn", "chain stage")),
        (2, Job("cnn", "chain", "zb-h1")),
    ],
    ids=str,
)
def test_running_statistics_are_those_of_one_process(ranks: RankPool, n: int, job: Job) -> None:
    results = ranks.run(normed, n, job, (8, 7, 9), False)
    first = "a" if job.model == "norms" else "norm1"  # sees of a batch what the plain model's sees
    for result in results:
        assert all(result["same"].values()), result["same"]
        assert max((e for name, e in result["from plain"].items() if name.startswith(f"{first}.")), default=0.0) < 1e-12
        assert result["losses"] == results[0]["losses"], "ranks differ in a loss"
        for here, there in result["losses"]:
            assert here == pytest.approx(there, rel=1e-9)
    names = {name for result in results for name in result["same"]}
    assert len(names) == 3 * (3 if job.model == "norms" else 2), "some rank keeps each statistic"


@slow
@pytest.mark.parametrize("plan", ["chain", "replicas 2"])
def test_ranks_that_do_not_keep_a_statistic_go_on_without_it(ranks: RankPool, plan: str) -> None:
    """An evaluation comes first: its stages read the running statistics, so only their ranks keep them."""
    results = ranks.run(normed, 2, Job("norms", plan), (8, 8), True)
    for result in results:
        assert all(result["same"].values()), result["same"]
    kept = [{name for name in result["same"] if name.endswith("running_mean")} for result in results]
    assert (kept[0] == kept[1]) == (plan == "replicas 2")
    assert kept[0] | kept[1] == {"a.running_mean", "b.running_mean", "twice.running_mean"}


@slow
@pytest.mark.parametrize("batch_norm", ["deferred", "per-microbatch"])
def test_another_stage_reads_in_evaluation_what_training_wrote(ranks: RankPool, batch_norm: str) -> None:
    """In evaluation, norm `a` has no operator of its own in stage 0: stage 1 reads its running statistics."""
    for result in ranks.run(normed, 3, Job("norms", "chain"), (8, 8), False, batch_norm):
        assert all(result["same"].values()), result["same"]
        here, there = result["losses"][-1]
        assert here == pytest.approx(there, rel=1e-9)


@slow
def test_a_stage_that_writes_what_another_rank_keeps_is_refused(ranks: RankPool) -> None:
    first, *others = ranks.run(written_elsewhere, 3)
    assert re.match(r"PlanError: stage 0 writes the buffer 'a\.\w+', which .* on rank 1: make the first call", first), (
        first
    )
    assert all(one == first for one in others)


@slow
@pytest.mark.parametrize("plan", ["shards 2 1", "hand data=2"])
def test_a_mesh_puts_the_statistics_of_whole_micro_batches_aside(ranks: RankPool, plan: str) -> None:
    n, job = (3, Job("cnn", plan)) if plan.startswith("shards") else (2, Job("norms", plan))
    for result in ranks.run(normed, n, job, (8, 8), False):
        assert result["same"]
        assert all(result["same"].values()), result["same"]
