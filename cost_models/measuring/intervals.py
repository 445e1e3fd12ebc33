"""How far medians of a few noisy times can be trusted: bootstrap intervals (Efron, 1979, percentile method).

The same rounds, drawn again with replacement, give other medians; the middle 95 % of them are the interval:

    rounds   1.02  1.00  1.31  1.01  1.05      median 1.02
    drawn    1.00  1.31  1.00  1.05  1.02      median 1.02
    drawn    1.05  1.31  1.05  1.31  1.01      median 1.05   ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
_DRAWS = 4999


@dataclass(frozen=True)
class Interval:
    """Where a median lies."""

    low: float  # in the unit of the samples
    high: float
    level: float  # of confidence. No interval of n samples holds their median with more than 1 - 2^(1 - n)

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


def median_interval(samples: Sequence[float], level: float = LEVEL) -> Interval:
    """Of the median of `samples`. Of a single sample it is that sample, with level 0."""
    values = np.asarray(samples, dtype=float)
    if values.ndim != 1 or not len(values):
        raise ValueError("an interval needs samples")
    medians = np.median(values[_draws(len(values), 0)], axis=1)
    return _middle(medians, level, len(values))


def paired_ratio_interval(numerators: Sequence[float], denominators: Sequence[float], level: float = LEVEL) -> Interval:
    """Of the median of the ratios of pairs, each taken in one round: what slows a whole round down cancels."""
    pairs = zip(numerators, denominators, strict=True)
    return median_interval([a / b for a, b in pairs], level)


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float], level: float = LEVEL) -> Interval:
    """Of the ratio of two medians whose samples have nothing to do with each other, such as those of two runs."""
    above, below = np.asarray(numerators, dtype=float), np.asarray(denominators, dtype=float)
    if not len(above) or not len(below):
        raise ValueError("an interval needs samples of both")
    medians = [np.median(x[_draws(len(x), seed)], axis=1) for seed, x in enumerate((above, below))]
    return _middle(medians[0] / medians[1], level, min(len(above), len(below)))


def _draws(n: int, seed: int) -> np.ndarray:
    """[draws, n] places of samples; the same in every run, so that a result can be repeated."""
    return np.random.default_rng(seed).integers(n, size=(_DRAWS, n))


def _middle(found: np.ndarray, level: float, n: int) -> Interval:
    """What few samples do not allow to claim is not claimed: all n of them are on one side of the true median with
    probability 2^(1 - n)."""
    low, high = np.quantile(found, ((1 - level) / 2, (1 + level) / 2))
    return Interval(float(low), float(high), min(level, 1 - 2.0 ** (1 - n)))
