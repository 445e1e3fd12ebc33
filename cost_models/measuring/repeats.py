"""Repeated measurements: whether they agree, and what is kept of them.

Another program that takes the core for a moment disturbs some of many repeats, or all repeats that follow each other
closely. So repeats that disagree are taken again, a bounded number of times.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

# Measurements agree if the higher takes at most this much more time than the lower.
AGREEMENT = 1.25


def agree(seconds: Sequence[float]) -> bool:
    """Whether the typical one of some repeats took about as long as the undisturbed ones: the lower quartile."""
    return statistics.median_low(seconds) <= AGREEMENT * sorted(seconds)[(len(seconds) - 1) // 4]


def spread(seconds: Sequence[float]) -> float:
    """How far the middle half of some repeats lies apart, as a fraction of their median; 0 for one repeat."""
    if len(seconds) < 2:
        return 0.0
    lower, middle, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return (upper - lower) / middle if middle > 0 else 0.0


def until_two_agree(first: T, again: Callable[[], T], seconds: Callable[[T], float], most: int) -> tuple[T, bool]:
    """The lower of the first two measurements that agree, and True; without such, the lowest of `most`, and False.

    `first`: the measurement taken already. `again()` takes another one, at least once if `most` > 1.
    """
    taken = [first]
    while len(taken) < most:
        taken = sorted([*taken, again()], key=seconds)
        for low, high in itertools.pairwise(taken):
            if seconds(high) <= AGREEMENT * seconds(low):
                return low, True
    return taken[0], False
