"""Lower bounds on plans: whatever their cuts, and whatever their other cuts if one of them is known.

Without memory, latencies and what is lost when work is divided: a stage on r devices has p_s >= (m / r - 1) t_s (the
terms of the objective are in the head of `partition`) and t_s is at least its share of the work w and of the transfers
c, so that stages on D devices in all, on at most R each, have

    max p_s >= (m - R) (w + c) / D,   sum_s f_s >= w + c - (delayed work)

where kinds of different speed count by the work that they do in a second; with v stages on a device m v for m. A cut
divides the devices, too. What crosses it is sent by a stage before it, and received by one after it:

    D devices:   D1 before | D2 after     max p_s >= (m - R) max((w1 + sent) / D1, (w2 + received) / D2)

The least of that over all ways to divide the devices is a bound on all plans with this cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from autopar.planner.inter_op.cuts import crossing
from autopar.planner.inter_op.problem import Problem


def relaxed_bound(problem: Problem, counts: Sequence[int]) -> float:
    """A lower bound in seconds on every plan on at most `counts` devices, whatever its cuts."""
    everything, nothing = np.ones((1, problem.n_atoms)), np.zeros(1)
    relaxed = _Relaxed(problem, counts)
    slowest = relaxed.busy(np.array(counts), everything, nothing, nothing)
    return float((relaxed.fills(nothing, nothing) + relaxed.rounds * slowest)[0])


def cut_bounds(problem: Problem, counts: Sequence[int], cuts: np.ndarray) -> np.ndarray:
    """[n_cuts] lower bounds in seconds on every plan on at most `counts` devices that has the cut, [n_cuts, n].

    `cuts` need not be those of the problem. O(n_cuts x n x vectors of device counts).
    """
    return _Relaxed(problem, counts).with_cuts(cuts)


class _Relaxed:
    """A problem without memory and latencies, where every atom and transfer takes the cheapest kind of a pool."""

    def __init__(self, problem: Problem, counts: Sequence[int]) -> None:
        self._problem = problem
        self._counts = np.array(counts)
        self._pools = np.array(problem.pools)
        self._every = problem.least_work
        n_pools = len(self._counts)
        self._work = np.array([self._every[self._pools == pool].min(axis=0) for pool in range(n_pools)])
        totals = self._work.sum(axis=1)
        self._speed = np.where(totals > 0, 1 / np.where(totals > 0, totals, 1.0), 1.0)
        kinds = problem.kinds
        self._send = self._cheapest([kind.send_seconds_per_byte for kind in kinds])  # [n_pools] s per byte
        self._receive = self._cheapest([kind.seconds_per_byte for kind in kinds])
        most_replicas = min(problem.max_replicas, problem.n_microbatches, int(self._counts.max()))
        self.rounds = max(problem.n_microbatches * problem.chunks - most_replicas, 0)
        # Where kinds differ in what they send, transfers count as free.
        self._values = () if any(kind.space for kind in kinds) else problem.space.values

    def with_cuts(self, cuts: np.ndarray) -> np.ndarray:
        """`cut_bounds`."""
        later, earlier = self._problem.bytes_share * crossing(self._values, cuts)
        before, after = cuts.astype(float), (~cuts).astype(float)
        slowest = np.full(len(cuts), np.inf)
        for first in itertools.product(*(range(count + 1) for count in self._counts)):
            early = self.busy(np.array(first), before, later[0], earlier.sum(axis=0))
            late = self.busy(self._counts - np.array(first), after, earlier[0], later.sum(axis=0))
            np.minimum(slowest, np.maximum(early, late), out=slowest)
        possible = np.isfinite(slowest)  # one device has no cut but those at its ends
        both = later + earlier
        seconds = self.fills(both[0], both.sum(axis=0)) + self.rounds * np.where(possible, slowest, 0.0)
        return np.where(possible, seconds, np.inf)

    def busy(self, counts: np.ndarray, atoms: np.ndarray, sent: np.ndarray, received: np.ndarray) -> np.ndarray:
        """[n] seconds a micro-batch that the slowest of `counts` devices is busy at least, with these atoms [n, atoms]
        and bytes [n].

        For any weights a_k of the pools with sum_k a_k count_k = 1, it is at least sum_i min_k a_k w_ki (duality);
        weights by speed make that tight where pools differ by a factor alone.
        """
        used = np.flatnonzero(counts)
        if not used.size:
            return np.where(atoms.any(axis=1), np.inf, 0.0)
        multiplier = self._speed[used] / (self._speed[used] @ counts[used])
        seconds = (multiplier[:, None] * self._work[used]).min(axis=0)
        transfers = (multiplier * self._send[used]).min() * sent + (multiplier * self._receive[used]).min() * received
        return np.asarray(atoms @ seconds + transfers)

    def fills(self, sent: np.ndarray, received: np.ndarray) -> np.ndarray:
        """[n] seconds of the first micro-batch at least."""
        problem, used = self._problem, np.flatnonzero(self._counts)
        if not problem.sum_counts:
            return np.zeros(len(sent))
        work = (self._every - 2 * problem.most_delayed)[np.isin(self._pools, used)].min(axis=0).sum()
        transfers = self._send[used].min() * sent + self._receive[used].min() * received
        return np.maximum(work + transfers, 0.0) / problem.chunks

    def _cheapest(self, seconds: Sequence[float]) -> np.ndarray:
        return np.array([np.array(seconds)[self._pools == pool].min() for pool in range(len(self._counts))])
