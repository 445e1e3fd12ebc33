"""Planning under torchrun: measured by all ranks, decided by rank 0, the same on all."""

from __future__ import annotations

import itertools

import pytest
from rank_planning import links, plans
from rank_pool import RankPool


@pytest.mark.slow
def test_all_ranks_get_the_plan_of_rank_0(ranks: RankPool) -> None:
    (made, followed, _), other = ranks.run(plans, 2)
    assert (made, followed) == other[:2]
    assert made == followed  # the second time from the cache


@pytest.mark.slow
def test_links_between_all_pairs_of_ranks_are_measured(ranks: RankPool) -> None:
    for hosts in ([0, 0], [0, 1, 2], [0, 0, 1, 1]):
        (found, shared, _), *others = ranks.run(links, len(hosts), hosts)
        assert set(found) == set(itertools.permutations(range(len(hosts)), 2))
        assert all(other[:2] == (found, shared) for other in others)
        assert all(1e-6 < link.latency + 1e6 / link.bandwidth < 1 for link in found.values())
