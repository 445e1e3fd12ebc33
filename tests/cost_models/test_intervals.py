"""Bootstrap intervals, against scipy's and against distributions whose median is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from cost_models.measuring.intervals import median_interval, paired_ratio_interval, ratio_interval

times = st.lists(st.floats(0.1, 10), min_size=1, max_size=12)


@pytest.mark.parametrize("n", [7, 20, 61])
def test_the_interval_of_a_median_is_scipys(n: int) -> None:
    samples = np.random.default_rng(n).lognormal(0, 0.2, n)
    oracle = stats.bootstrap((samples,), np.median, method="percentile", n_resamples=4999, rng=1).confidence_interval
    found = median_interval(samples)
    spread = np.subtract(*np.quantile(samples, (0.75, 0.25)))
    assert found.low == pytest.approx(oracle.low, abs=0.1 * spread)
    assert found.high == pytest.approx(oracle.high, abs=0.1 * spread)


def test_the_interval_of_a_ratio_of_two_runs_is_scipys() -> None:
    random = np.random.default_rng(0)
    after, before = random.lognormal(0.1, 0.1, 15), random.lognormal(0, 0.1, 21)

    def ratio(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.median(a, axis=axis) / np.median(b, axis=axis)

    oracle = stats.bootstrap((after, before), ratio, method="percentile", n_resamples=4999, rng=1).confidence_interval
    found = ratio_interval(after, before)
    assert (found.low, found.high) == pytest.approx((oracle.low, oracle.high), abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("n", [5, 9, 25])
def test_it_holds_the_true_median_as_often_as_it_says(n: int) -> None:
    """Of an exponential distribution, whose median is log 2. The percentile method falls short by some per cent."""
    random, trials = np.random.default_rng(n), 300
    found = [median_interval(random.exponential(size=n)) for _ in range(trials)]
    held = sum(one.holds(np.log(2)) for one in found) / trials
    assert found[0].level - 0.05 < held < 1


def test_few_samples_claim_no_more_than_they_can() -> None:
    """n samples lie on one side of their median with probability 2^(1 - n)."""
    assert [median_interval([1.0] * n).level for n in (1, 2, 5, 6)] == [0, 0.5, 0.9375, 0.95]
    found = median_interval([3.0, 1.0, 2.0, 5.0, 4.0])
    assert (found.low, found.high) == (1, 5)


@given(times)
def test_it_lies_within_the_samples_and_holds_their_median(samples: list[float]) -> None:
    found = median_interval(samples)
    assert min(samples) <= found.low <= np.median(samples) <= found.high <= max(samples)


def test_what_slows_a_whole_round_down_cancels_in_pairs() -> None:
    slow = np.random.default_rng(0).uniform(1, 3, 9)
    found = paired_ratio_interval(1.1 * slow, slow)
    assert (found.low, found.high) == pytest.approx((1.1, 1.1))
    assert ratio_interval(1.1 * slow, slow).holds(1.0)


def test_no_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="samples"):
        median_interval([])
    with pytest.raises(ValueError, match="samples"):
        ratio_interval([1.0], [])
