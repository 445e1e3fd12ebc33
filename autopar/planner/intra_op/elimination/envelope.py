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

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autopar.errors import InfeasibleError
from autopar.planner.intra_op.elimination.choices import SelectionProblem, cost, sizes
from autopar.planner.intra_op.elimination.effort import Effort
from autopar.planner.intra_op.elimination.order import Price, counted, planned
from autopar.planner.intra_op.elimination.reduction import reduced
from autopar.planner.intra_op.elimination.solve import select

# How much less than the line between two choices, relative, is rounding.
_ON_THE_LINE = 1e-11
# Entries of the largest table, as in `select`.
_ENTRIES = 2e7
# Prices that are tried at once, and entries of all their tables.
_AT_ONCE, _ENTRIES_AT_ONCE = 16, 4e6


Direction = tuple[float, ...]  # how much a byte of every kind counts


class EnvelopePoint(NamedTuple):
    """A choice that is the best one at some price of memory."""

    options: tuple[int, ...]  # of every variable
    seconds: float  # s
    bytes: tuple[float, ...]  # of every kind

    def held(self, direction: Direction) -> float:
        """Bytes, as a direction counts them."""
        return math.fsum(nbytes * counts for nbytes, counts in zip(self.bytes, direction, strict=True))


class _Gap(NamedTuple):
    """Two neighbours on the envelope of a direction, as far as it is known. The most promising gap is the least."""

    outside: bool  # no limit lies between the two
    area: float  # minus (s x bytes) between the two
    number: int  # in the order found
    direction: Direction
    large: EnvelopePoint
    small: EnvelopePoint

    @property
    def price(self) -> Price:
        saved = self.large.held(self.direction) - self.small.held(self.direction)
        return Price(max(0.0, self.small.seconds - self.large.seconds) / saved, self.direction)

    def is_split_by(self, point: EnvelopePoint) -> bool:
        """Whether it lies below the line between the two, rounding aside."""
        price = self.price.seconds
        line = self.small.seconds + price * self.small.held(self.direction)
        return point.seconds + price * point.held(self.direction) < line * (1 - _ON_THE_LINE)


def envelope(
    choices: SelectionProblem, directions: Sequence[Direction] = ((1.0,),), effort: float = math.inf
) -> tuple[EnvelopePoint, ...]:
    """The choices on the envelopes of all directions, by seconds, without those that others beat in everything.

    choices: its `bytes` are [options, kinds], or [options] for one kind.
    directions: how much a byte of every kind counts. Without any, the fastest choice is all that is found.
    effort: entries that may be computed, see `Effort`; the fastest choice is always found.
    The same input gives the same choices. Raises InfeasibleError if the edges allow no choice.
    """
    prices = Prices(choices, effort)
    found = [prices.fastest, *prices.envelopes(directions)]
    kept = [point for point in found if not any(_beats(other, point) for other in found)]
    return tuple(sorted(dict.fromkeys(kept), key=lambda point: (point.seconds, point.bytes)))


def _beats(one: EnvelopePoint, other: EnvelopePoint) -> bool:
    costs = [(one.seconds, other.seconds), *zip(one.bytes, other.bytes, strict=True)]
    return all(a <= b for a, b in costs) and any(a < b for a, b in costs)


class Prices:
    """The best choices at any price, with one order of elimination for all of them."""

    def __init__(self, choices: SelectionProblem, effort: float = math.inf) -> None:
        """`effort`: entries that may be computed, see `Effort`, for all that is asked of this object."""
        self._choices, self._effort = choices, Effort(effort)
        self._plan = planned(reduced(choices, with_bytes=True), _ENTRIES)
        (self.fastest,) = self.best([Price(0.0)])

    @property
    def exact(self) -> bool:
        """Whether all choices are proven the best ones at their prices."""
        return self._plan.exact

    @property
    def width(self) -> int:
        return self._plan.width

    def envelopes(
        self,
        directions: Sequence[Direction],
        most: float = math.inf,
        limits: Mapping[Direction, Sequence[float]] | None = None,
        tolerance: float = 0.0,
    ) -> list[EnvelopePoint]:
        """The points of all directions' envelopes beside the fastest one, in the order in which they are found.

        most: prices to try. The smallest point of every direction comes first, then the points that split gaps in which
        a limit lies (bytes, as the direction counts them), the largest gaps first.
        tolerance: gaps that are smaller than this part of the seconds, or of the bytes, are not split.
        """
        if not directions or self._effort.is_spent or most < len(directions):
            return []
        numbers = itertools.count()

        def gap(direction: Direction, large: EnvelopePoint, small: EnvelopePoint) -> Iterator[_Gap]:
            slower, saved = small.seconds - large.seconds, large.held(direction) - small.held(direction)
            if saved > tolerance * small.held(direction) and slower >= tolerance * large.seconds:
                within = (small.held(direction) < limit < large.held(direction) for limit in known.get(direction, ()))
                yield _Gap(not any(within), -slower * saved, next(numbers), direction, large, small)

        known = limits or {}
        found = self.best([Price(math.inf, direction) for direction in directions])
        gaps = [g for d, smallest in zip(directions, found, strict=True) for g in gap(d, self.fastest, smallest)]
        tried = len(found)
        while gaps and tried < most and not self._effort.is_spent:
            gaps.sort()
            now, gaps = gaps[:_AT_ONCE], gaps[_AT_ONCE:]
            tried += len(now)
            for one, point in zip(now, self.best([g.price for g in now]), strict=True):
                if one.is_split_by(point):
                    found.append(point)
                    gaps += [*gap(one.direction, one.large, point), *gap(one.direction, point, one.small)]
        return found

    def best(self, prices: Sequence[Price]) -> list[EnvelopePoint]:
        """The least seconds + price x bytes at each price, all finite or none."""
        self._effort.spend(self._plan.entries * len(prices))
        if not self._plan.exact:
            return [self._point(self._selected(price)) for price in prices]
        at_once = max(1, int(_ENTRIES_AT_ONCE / max(1, self._plan.entries)))
        return [p for start in range(0, len(prices), at_once) for p in self._best(prices[start : start + at_once])]

    def _best(self, prices: Sequence[Price]) -> Iterator[EnvelopePoint]:
        eliminations = self._plan.eliminate_at(prices)
        if any(map(math.isinf, eliminations.values)):
            raise InfeasibleError("no choice of options is allowed by all edges, whatever its memory")
        for chosen in self._plan.choose_at(eliminations).T:
            kept = zip(self._plan.reduced.options, chosen, strict=True)
            yield self._point(tuple(int(numbers[option]) for numbers, option in kept))

    def _selected(self, price: Price) -> tuple[int, ...]:
        """The same where tables would be too large to eliminate."""
        own, edges = self._choices.seconds, self._choices.edges
        held = [counted(size, price.kinds) for size in self._choices.bytes]
        if math.isinf(price.seconds):
            seconds = [np.where(np.isinf(s), np.inf, size) for s, size in zip(own, held, strict=True)]
            edges = [edge.allowed_alone for edge in edges]
        else:
            seconds = [s + price.seconds * size for s, size in zip(own, held, strict=True)]
        nothing = [np.zeros(len(s)) for s in own]
        return select(SelectionProblem(seconds, nothing, edges, self._choices.fixed)).options

    def _point(self, options: tuple[int, ...]) -> EnvelopePoint:
        return EnvelopePoint(options, cost(self._choices, options)[0], sizes(self._choices, options))
