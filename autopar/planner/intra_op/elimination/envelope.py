"""The fastest choices at every price of memory: the lower convex envelope of (seconds, bytes) over all choices.

    seconds
       |        o                     A choice on the envelope is the best one for some price of a byte, which is minus
       |  small *    o                the slope of a line that touches it. Between two known choices, the price at which
       |         `.    o              both cost the same gives the choice furthest below their line. It splits the line
       |      o    `*.      o         in two; where nothing lies below, the line belongs to the envelope.
       |              ` - * fastest
       +-------------------------- - bytes

Bytes may be of several kinds. A direction says how much a byte of each kind counts; each direction has an envelope.
All prices share the order of elimination, so that one more price takes one more elimination.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from autopar.errors import InfeasibleError
from autopar.planner.intra_op.elimination.choices import SelectionProblem, cost, sizes
from autopar.planner.intra_op.elimination.effort import Effort
from autopar.planner.intra_op.elimination.order import counted, planned
from autopar.planner.intra_op.elimination.reduction import reduced
from autopar.planner.intra_op.elimination.solve import select

# How much less than the line between two choices, relative, is rounding.
_ON_THE_LINE = 1e-11
# Entries of the largest table, as in `select`.
_ENTRIES = 2e7


class EnvelopePoint(NamedTuple):
    """A choice that is the best one at some price of memory."""

    options: tuple[int, ...]  # of every variable
    seconds: float  # s
    bytes: tuple[float, ...]  # of every kind


def envelope(
    choices: SelectionProblem,
    directions: Sequence[Sequence[float]] = ((1.0,),),
    *,
    most: float = math.inf,
    effort: float = math.inf,
) -> tuple[EnvelopePoint, ...]:
    """The choices on the envelopes of all directions, by seconds, without those that others beat in everything.

    choices: its `bytes` are [options, kinds], or [options] for one kind.
    directions: how much a byte of every kind counts. Without any, the fastest choice is all that is found.
    most: choices of every direction beside the fastest one; the largest gaps are looked into first.
    effort: entries that may be computed, see `Effort`; the fastest choice is always found.
    The same input gives the same choices. Raises InfeasibleError if the edges allow no choice.
    """
    prices = _Prices(choices, Effort(effort))
    found = dict.fromkeys([prices.fastest()])
    for direction in directions:
        found |= dict.fromkeys(_walk(prices, next(iter(found)), np.array(direction, dtype=float), most))
    kept = [point for point in found if not any(_beats(other, point) for other in found)]
    return tuple(sorted(kept, key=lambda point: (point.seconds, point.bytes)))


def _beats(one: EnvelopePoint, other: EnvelopePoint) -> bool:
    costs = [(one.seconds, other.seconds), *zip(one.bytes, other.bytes, strict=True)]
    return all(a <= b for a, b in costs) and any(a < b for a, b in costs)


def _walk(prices: _Prices, fastest: EnvelopePoint, direction: np.ndarray, most: float) -> Iterator[EnvelopePoint]:
    """The points of one direction's envelope beside the fastest, at most `most`."""
    if most < 1 or prices.effort.is_spent:
        return

    def held(point: EnvelopePoint) -> float:
        return float(np.dot(point.bytes, direction))

    def gap(large: EnvelopePoint, small: EnvelopePoint) -> tuple[float, int, EnvelopePoint, EnvelopePoint]:
        area = (small.seconds - large.seconds) * (held(large) - held(small))
        return -area, next(numbers), large, small

    numbers = itertools.count()
    smallest = prices.best(math.inf, direction)
    yield smallest
    gaps, n_found = [gap(fastest, smallest)], 1
    while gaps and n_found < most and not prices.effort.is_spent:
        _, _, large, small = heapq.heappop(gaps)
        saved = held(large) - held(small)
        if not saved > 0:
            continue
        price = max(0.0, small.seconds - large.seconds) / saved
        point = prices.best(price, direction)
        line = small.seconds + price * held(small)
        if point.seconds + price * held(point) >= line * (1 - _ON_THE_LINE):
            continue
        yield point
        n_found += 1
        heapq.heappush(gaps, gap(large, point))
        heapq.heappush(gaps, gap(point, small))


class _Prices:
    """The best choice at any price, with one order of elimination for all of them."""

    def __init__(self, choices: SelectionProblem, effort: Effort) -> None:
        self._choices, self.effort = choices, effort
        self._plan = planned(reduced(choices, with_bytes=True), _ENTRIES)

    def fastest(self) -> EnvelopePoint:
        return self.best(0.0, np.ones(1))

    def best(self, price: float, direction: np.ndarray) -> EnvelopePoint:
        """The least seconds + price x bytes. `price`: s per byte; inf: bytes alone count."""
        self.effort.spend(self._plan.entries)
        if not self._plan.exact:
            return self._point(self._selected(price, direction))
        elimination = self._plan.eliminate(price, direction if price else None)
        if math.isinf(elimination.value):
            raise InfeasibleError("no choice of options is allowed by all edges, whatever its memory")
        options = zip(self._plan.reduced.options, self._plan.choose(elimination), strict=True)
        return self._point(tuple(int(kept[option]) for kept, option in options))

    def _selected(self, price: float, direction: np.ndarray) -> tuple[int, ...]:
        """The same where tables would be too large to eliminate."""
        own, edges = self._choices.seconds, self._choices.edges
        held = [counted(size, direction if price else None) for size in self._choices.bytes]
        if math.isinf(price):
            seconds = [np.where(np.isinf(s), np.inf, size) for s, size in zip(own, held, strict=True)]
            edges = [edge.allowed_alone for edge in edges]
        else:
            seconds = [s + price * size for s, size in zip(own, held, strict=True)] if price else list(own)
        nothing = [np.zeros(len(s)) for s in own]
        return select(SelectionProblem(seconds, nothing, edges, self._choices.fixed)).options

    def _point(self, options: tuple[int, ...]) -> EnvelopePoint:
        return EnvelopePoint(options, cost(self._choices, options)[0], sizes(self._choices, options))
