"""How many devices plans need at least, so that no stage takes too long.

Under a bound on the max term, a stage between two cuts needs some number of devices at least, by the fastest of its
kinds, replicas and ways to recompute. The least numbers for all stages before a cut and for all after it are shortest
paths over the cuts:

    after(I) = min over J of  devices of the stage from I to J  +  after(J)

Whatever the memory and the sum of the fills, there is no plan where after(first cut) is more than there are, and a
stage from I to J on e devices is in none where before(I) + e + after(J) is. Under a bound hardly above the least
possible one, hardly any stages and states are left.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autopar.planner.inter_op.cut_tables import Pairs

# With fewer units of devices, or fewer cuts, sweeps take no longer than finding out what plans need.
_FEWEST_UNITS, _FEWEST_CUTS = 3, 32
_MOST_HALVINGS = 30


class Needs(NamedTuple):
    """Units of the devices of the only pool that plans need at least."""

    before: np.ndarray  # [n_cuts] for the stages before each cut; inf where there can be none
    after: np.ndarray  # [n_cuts] for those after it


@dataclass(frozen=True, eq=False)
class NeededDevices:
    """The stages of all plans, by the devices that they need."""

    pairs: Pairs
    total: int  # units of the pool
    units: np.ndarray  # [n] numbers of units that stages may have, ascending
    max_term: np.ndarray  # [n, n_pairs] s at least, on at most that number of units

    @classmethod
    def of(
        cls, pairs: Pairs, units: tuple[int, ...], choices: Iterable[tuple[int, np.ndarray]]
    ) -> NeededDevices | None:
        """`units`: of every pool. `choices`: (units of a stage, its max terms [n_pairs]). None where there are several
        pools, or so few states that it does not help."""
        if len(units) != 1 or units[0] < _FEWEST_UNITS or len(pairs.number) < _FEWEST_CUTS:
            return None
        least: dict[int, np.ndarray] = {}
        for number, max_term in choices:
            least[number] = np.minimum(least[number], max_term) if number in least else max_term
        numbers = sorted(least)
        if not numbers:
            return None
        stacked = np.minimum.accumulate(np.stack([least[number] for number in numbers]), axis=0)
        return cls(pairs, units[0], np.array(numbers, dtype=float), stacked)

    def under(self, bound: float) -> Needs:
        """Of plans whose max term is at most `bound` (s)."""
        needed, stop = self._needed(bound), self.pairs.stop
        before = np.full(len(self.pairs.number), math.inf)
        before[0] = 0.0
        for cut, mine in enumerate(self._from_cuts):
            before[stop[mine]] = np.minimum(before[stop[mine]], before[cut] + needed[mine])
        return Needs(before, self._after(needed))

    def suffices(self, needs: Needs) -> bool:
        """Whether there are as many devices."""
        return bool(needs.after[0] <= self.total)

    def _suffices_under(self, bound: float) -> bool:
        return bool(self._after(self._needed(bound))[0] <= self.total)

    def _needed(self, bound: float) -> np.ndarray:
        """Units that a stage with a max term of at most `bound` needs, [n_pairs]; inf where there is none."""
        allowed = self.max_term <= bound
        return np.where(allowed[-1], self.units[allowed.argmax(axis=0)], math.inf)

    def _after(self, needed: np.ndarray) -> np.ndarray:
        """`Needs.after`, from `_needed`."""
        after, stop = np.full(len(self.pairs.number), math.inf), self.pairs.stop
        after[-1] = 0.0
        for cut, mine in reversed(list(enumerate(self._from_cuts))):
            after[cut] = (needed[mine] + after[stop[mine]]).min(initial=math.inf)
        return after

    @cached_property
    def _from_cuts(self) -> list[slice]:
        """For each cut except the last, the pairs that begin at it."""
        first = np.searchsorted(self.pairs.start, np.arange(len(self.pairs.number) + 1)).tolist()
        return [slice(*ends) for ends in itertools.pairwise(first[:-1])]

    def least_max_term(self, low: float, most: float, tolerance: float) -> float:
        """A max term (s) between `low` and `most` that no plan is below, to a share `tolerance`; inf if all plans are
        above `most`."""
        high = min(most, float(self.max_term.max(where=np.isfinite(self.max_term), initial=0.0)))
        if not self._suffices_under(high):
            return math.inf
        for _ in range(_MOST_HALVINGS):
            if high - low <= tolerance * high:
                break
            middle = math.sqrt(low * high) if 16 * low > high else high / 4
            low, high = (low, middle) if self._suffices_under(middle) else (middle, high)
        return low
