"""Lower bounds on plans: whatever their cuts, and whatever their other cuts if one of them is known.

Without memory, latencies and what is lost when work is divided: a stage on r devices has p_s >= (m / r - 1) t_s (the
terms of the objective are in the head of `partition`) and t_s is at least its share of the work w and of the transfers
c, so that stages on D devices in all, on at most R each, have

    max p_s >= (m - R) (w + c) / D,   sum_s f_s >= w + c - (delayed work)

where kinds of different speed count by the work that they do in a second; with v stages on a device m v for m. On
meshes of several devices all devices of a mesh are busy with the stage: w and c count once for each of them. As
f_s + p_s >= m / r t_s, too, the objective is at least m (w + c) / D, which is more where replicas are many. A cut
divides the devices, too. The first micro-batch of a replica lacks the accumulation of gradients, at most that of the
whole model. What crosses a cut is sent by a stage before it, and received by one after it:

    D devices:   D1 before | D2 after     max p_s >= (m - R) max((w1 + sent) / D1, (w2 + received) / D2)

The least of that over all ways to divide the devices is a bound on all plans with this cut. Where transfers run behind
passes, c counts in the sum of the fills alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autopar.planner.inter_op.cuts import crossing
from autopar.planner.inter_op.problem import Problem


def relaxed_bound(problem: Problem, counts: Sequence[int]) -> float:
    """A lower bound in seconds on every plan on at most `counts` devices, whatever its cuts."""
    everything, nothing = np.ones((1, problem.n_atoms)), np.zeros(1)
    relaxed = _Relaxed(problem, counts)
    slowest = relaxed.busy(np.array(counts), everything, nothing, nothing)
    return float(relaxed.seconds(relaxed.fills(nothing, nothing), slowest)[0])


def work_bound(problem: Problem, counts: Sequence[int]) -> float:
    """Seconds in which `counts` devices of each pool can do the work of all micro-batches at best, however they are
    scheduled; a bound on every simulated step, too."""
    everything, nothing = np.ones((1, problem.n_atoms)), np.zeros(1)
    relaxed = _Relaxed(problem, counts)
    busy = relaxed.busy(np.array(counts), everything, nothing, nothing)
    return max(0.0, float(problem.n_microbatches * busy[0] - relaxed.lacking))


class LeastTerms(NamedTuple):
    """What no plan is below, in seconds."""

    largest: float  # its largest max term
    fills: float  # the sum of its fills
    before: np.ndarray  # [n_cuts] the fills of the stages before each cut
    after: np.ndarray  # [n_cuts] of those after it


def least_terms(problem: Problem, counts: Sequence[int]) -> LeastTerms:
    """Bounds on all plans on at most `counts` devices. All that is 0 where fills do not count."""
    relaxed, nothing = _Relaxed(problem, counts), np.zeros(1)
    slowest = relaxed.busy(np.array(counts), np.ones((1, problem.n_atoms)), nothing, nothing)
    cuts, each = problem.space.cuts_as_numbers, relaxed.fill_of_atoms()
    before, after = np.maximum(cuts @ each, 0.0), np.maximum((1 - cuts) @ each, 0.0)
    largest = max(0.0, float(relaxed.rounds * slowest[0] - relaxed.lacking))
    return LeastTerms(largest, float(after[0]), before, after)


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
        self._widths = np.array([kind.width for kind in problem.kinds])
        device_seconds = self._every * self._widths[:, None]
        self._work = np.array([device_seconds[self._pools == pool].min(axis=0) for pool in range(n_pools)])
        totals = self._work.sum(axis=1)
        self._speed = np.where(totals > 0, 1 / np.where(totals > 0, totals, 1.0), 1.0)
        kinds = problem.kinds
        send, receive = (
            np.array([getattr(kind, name) for kind in kinds]) for name in ("send_seconds_per_byte", "seconds_per_byte")
        )
        self._send, self._receive = self._cheapest(send), self._cheapest(receive)  # [n_pools] s per byte
        # The same, counted for each device of a mesh.
        self._busy_send, self._busy_receive = (
            self._cheapest(send * self._widths),
            self._cheapest(receive * self._widths),
        )
        most_meshes = int((self._counts[self._pools] // self._widths).max())
        most_replicas = min(problem.max_replicas, problem.n_microbatches, most_meshes)
        self.rounds = max(problem.n_microbatches * problem.chunks - most_replicas, 0)
        self.lacking = problem.chunks * float(problem.most_lacking.sum())  # s that a device needs less at most
        self._one_round = most_replicas >= problem.n_microbatches * problem.chunks
        # Where kinds differ in what they send, and for values that may be scattered, transfers count as free.
        values = () if any(kind.space for kind in kinds) else problem.space.values
        self._values = tuple(value for value in values if value.copies == 1)

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
        seconds = self.seconds(self.fills(both[0], both.sum(axis=0)), np.where(possible, slowest, 0.0))
        return np.where(possible, seconds, np.inf)

    def seconds(self, fills: np.ndarray, slowest: np.ndarray) -> np.ndarray:
        """[n] seconds of a step at least, with the sum of the fills and what the slowest device does for a
        micro-batch."""
        found = fills + np.maximum(self.rounds * slowest - self.lacking, 0.0)
        problem = self._problem
        if problem.sum_counts and problem.chunks == 1:
            found = np.maximum(found, problem.n_microbatches * slowest - self.lacking)
        return np.asarray(found)

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
        send, receive = (multiplier * each[used] for each in (self._busy_send, self._busy_receive))
        if self._problem.sends_behind:
            return np.asarray(atoms @ seconds)
        return np.asarray(atoms @ seconds + send.min() * sent + receive.min() * received)

    def fills(self, sent: np.ndarray, received: np.ndarray) -> np.ndarray:
        """[n] seconds of the first micro-batch at least."""
        problem, used = self._problem, np.flatnonzero(self._counts)
        if not problem.sum_counts:
            return np.zeros(len(sent))
        transfers = self._send[used].min() * sent + self._receive[used].min() * received
        return np.maximum(self.fill_of_atoms().sum() + transfers / problem.chunks, 0.0)

    def fill_of_atoms(self) -> np.ndarray:
        """[atoms] s that add up to no more than the fills of any stages; fewer than 0 where much may be delayed."""
        problem, used = self._problem, np.flatnonzero(self._counts)
        if not problem.sum_counts:
            return np.zeros(problem.n_atoms)
        work = (self._every - 2 * problem.most_delayed)[np.isin(self._pools, used)].min(axis=0)
        return np.asarray(work / problem.chunks - (problem.most_lacking if self._one_round else 0.0))

    def _cheapest(self, seconds: np.ndarray) -> np.ndarray:
        return np.array([seconds[self._pools == pool].min() for pool in range(len(self._counts))])
