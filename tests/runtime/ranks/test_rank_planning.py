"""Planning under torchrun: measured by all ranks, decided by rank 0, the same on all."""

from __future__ import annotations

import itertools
import re

import pytest
from rank_planning import (
    followed,
    handled,
    links,
    modes_after_planning,
    passes_fail,
    plan_by_hand_of_uncaptured_code,
    plans,
    too_large_a_plan,
    wrapped_in_ddp,
)
from rank_pool import RankPool


@pytest.mark.slow
def test_all_ranks_get_the_plan_of_rank_0(ranks: RankPool) -> None:
    (made, followed, _), other = ranks.run(plans, 2)
    assert (made, followed) == other[:2]
    assert made == followed  # the second time from the cache


@pytest.mark.slow
@pytest.mark.slow
def test_planning_leaves_the_callers_grad_mode(ranks: RankPool) -> None:
    assert ranks.run(modes_after_planning, 2) == [(False, False, False)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [[0, 0], [0, 1, 2], [0, 0, 1, 1]])
def test_links_between_all_pairs_of_ranks_are_measured(ranks: RankPool, hosts: list[int]) -> None:
    (found, shared, factor), *others = ranks.run(links, len(hosts), hosts)
    assert factor >= 1
    assert set(found) == set(itertools.permutations(range(len(hosts)), 2))
    assert all(other[:2] == (found, shared) for other in others)
    assert all(1e-6 < link.latency + 1e6 / link.bandwidth < 1 for link in found.values())


@pytest.mark.slow
def test_the_first_two_ranks_measure_what_a_message_takes(ranks: RankPool) -> None:
    *first, third = ranks.run(handled, 3)
    assert all(0 < seconds < 0.1 for seconds in first)
    assert third == 0.0


@pytest.mark.slow
def test_a_plan_made_ahead_is_followed_by_ranks_and_theirs_in_one_process(ranks: RankPool) -> None:
    for n in (2, 3):
        for plain, on_ranks, in_threads in ranks.run(followed, n):
            assert on_ranks == pytest.approx(plain, rel=1e-6)
            assert in_threads == on_ranks


@pytest.mark.slow
def test_a_plan_for_more_devices_than_ranks_is_refused(ranks: RankPool) -> None:
    for message in ranks.run(too_large_a_plan, 2):
        assert "the plan uses 3 devices, but 2 are given" in message
        assert "one rank for each device, 2 of them" in message
        assert re.search(r"; start 3 with `torchrun --nproc-per-node 3 \S+`$", message)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "module"), [(0, "DoubledSwish"), (2, "NumpyGate")])
def test_a_plan_by_hand_of_uncaptured_code_says_that_one_process_runs_it(
    ranks: RankPool, number: int, module: str
) -> None:
    """Whether the code has a price without values or not."""
    for message in ranks.run(plan_by_hand_of_uncaptured_code, 2, number):
        assert re.match(rf"PlanError: one process a device runs captured code alone, and .*{module}", message), message
        assert "or give devices=, so that one process runs the plan" in message


@pytest.mark.slow
@pytest.mark.parametrize("where", ["before", "amid", "at the end"])
def test_an_error_while_measuring_or_planning_is_raised_on_all_ranks(ranks: RankPool, where: str) -> None:
    for rank, (measured, planned, sent) in enumerate(ranks.run(passes_fail, 3, where)):
        assert measured.startswith("AutoparError: measuring the passes for a plan failed: ")
        assert "rank 1: MemoryError: no memory left" in measured
        assert "rank 2: AutoparError: another rank could not run" in measured
        assert planned == ("AutoparError: ValueError: of rank 0" if rank else "ValueError: of rank 0")
        assert re.match(r"CheckpointError: it fails: (Attribute|Pickling)Error: .* \(rank 0\)", sent)


@pytest.mark.slow
def test_distributed_data_parallel_around_ranks_is_refused(ranks: RankPool) -> None:
    """As Accelerate and transformers' Trainer wrap it under torchrun."""
    for message in ranks.run(wrapped_in_ddp, 2):
        assert message.startswith("the pipelined module is wrapped in DistributedDataParallel")
