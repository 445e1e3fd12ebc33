"""Lower bounds on plans: whatever their cuts, and whatever their other cuts if one of them is known.

Without memory, latencies and what is lost when work is divided: a stage on r devices has p_s >= (m / r - 1) t_s (the
terms of the objective are in the head of `partition`) and t_s is at least its share of the work w and of the transfers
c, so that stages on D devices in all, on at most R each, have

    max p_s >= (m - R) (w + c) / D,   sum_s f_s >= w + c - (delayed work)

where kinds of different speed count by the work that they do in a second; with v stages on a device m v for m. On
meshes of several devices all devices of a mesh are busy with the stage: w and c count once for each of them. As
f_s + p_s >= m / r t_s, too, the objective is at least m (w + c) / D, which is more where replicas are many. That does
not hold for a single micro-batch whose delayed work runs behind earlier stages. A cut divides the devices, too. The
first micro-batch of a replica lacks the accumulation of gradients, at most that of the whole model. What crosses a cut
is sent by a stage before it, and received by one after it:

    D devices:   D1 before | D2 after     max p_s >= (m - R) max((w1 + sent) / D1, (w2 + received) / D2)

The least of that over all ways to divide the devices is a bound on all plans with this cut. Where transfers run behind
passes, c counts in the sum of the fills alone.

There is no plan at all where parameters, gradients and states need more than all devices have, each of them on the kind
that holds it in the fewest bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autopar.planner.inter_op.cuts import crossing
from autopar.planner.inter_op.problem import Problem

_ROUNDING = 1e-9  # share of a number of bytes that may be due to rounding


def relaxed_bound(problem: Problem, counts: Sequence[int]) -> float:
    """A lower bound in seconds on every plan on at most `counts` devices, whatever its cuts; inf where none fits."""
    if _least_resident(problem) > _all_memory(problem, counts) * (1 + _ROUNDING):
        return math.inf
    everything, nothing = np.ones((1, problem.n_atoms)), np.zeros(1)
    relaxed = _Relaxed(problem, counts)
    slowest = relaxed.busy(np.array(counts), everything, nothing, nothing)
    return float(relaxed.seconds(relaxed.fills(nothing, nothing), slowest)[0])


def _least_resident(problem: Problem) -> float:
    """Bytes of parameters, gradients and states that any plan holds at least, on all devices together; each counts
    once."""
    of_kinds = [(kind.width, (kind.space or problem.space).resident) for kind in problem.kinds]
    if len({tuple(item.atoms for item in items) for _, items in of_kinds}) > 1:
        return 0.0  # the sum does not distinguish parameters
    held = [[width * item.nbytes for item in items] for width, items in of_kinds]
    return float(np.min(held, axis=0).sum())


def _all_memory(problem: Problem, counts: Sequence[int]) -> float:
    """Bytes of at most `counts` devices; one counts for each of its chunks."""
    most = [
        max(k.memory for k, p in zip(problem.kinds, problem.pools, strict=True) if p == pool)
        for pool in range(len(counts))
    ]
    return sum(count * memory for count, memory in zip(counts, most, strict=True) if count) / problem.chunks


def work_bound(problem: Problem, counts: Sequence[int]) -> float:
    """Seconds in which `counts` devices of each pool can do the work of all micro-batches at best, however they are
    scheduled; a bound on every simulated step, too."""
    everything, nothing = np.ones((1, problem.n_atoms)), np.zeros(1)
    relaxed = _Relaxed(problem, counts)
    busy = relaxed.busy(np.array(counts), everything, nothing, nothing)
    return max(0.0, float(problem.n_microbatches * busy[0] - relaxed.lacking))


# By the number of devices of each pool before cuts, bounds for these devices and for the others; see `cut_bounds`.
Splits = dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]]


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
    cuts, each = problem.space.cut_blocks.cuts_as_numbers, relaxed.fill_of_atoms()
    before, after = np.maximum(cuts @ each, 0.0), np.maximum((1 - cuts) @ each, 0.0)
    largest = max(0.0, float(relaxed.rounds * slowest[0] - relaxed.lacking))
    return LeastTerms(largest, float(after[0]), before, after)


def cut_bounds(problem: Problem, counts: Sequence[int], cuts: np.ndarray) -> tuple[np.ndarray, Splits]:
    """[n_cuts] lower bounds in seconds on every plan on at most `counts` devices that has the cut, [n_cuts, n]; and the
    same by how many devices of each pool come before it: [n_cuts] seconds of the slowest of these devices at least, and
    of the slowest of the others; {} where the sum of fills counts, which is in neither.

    `cuts` need not be those of the problem. O(n_cuts x (n x values + vectors of device counts)).
    """
    return _Relaxed(problem, counts).with_cuts(cuts)


def _crossing(problem: Problem, cuts: np.ndarray) -> np.ndarray:
    """`crossing` of what counts. Where kinds differ in what they send, and for values that may be scattered, transfers
    count as free."""
    values = () if any(kind.space for kind in problem.kinds) else problem.space.values
    return np.asarray(problem.bytes_share * crossing([value for value in values if value.copies == 1], cuts))


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

    def with_cuts(self, cuts: np.ndarray) -> tuple[np.ndarray, Splits]:
        """`cut_bounds`."""
        later, earlier = _crossing(self._problem, cuts)
        slowest, splits = np.full(len(cuts), np.inf), Splits()
        for first, early, late in self._splits(cuts, later, earlier):
            np.minimum(slowest, np.maximum(early, late), out=slowest)
            if not self._problem.sum_counts:
                splits[first] = self._in_all_rounds(early), self._in_all_rounds(late)
        possible = np.isfinite(slowest)  # one device has no cut but those at its ends
        both = later + earlier
        seconds = self.seconds(self.fills(both[0], both.sum(axis=0)), np.where(possible, slowest, 0.0))
        return np.where(possible, seconds, np.inf), splits

    def _in_all_rounds(self, busy: np.ndarray) -> np.ndarray:
        """Seconds of all rounds at least; inf also where there is none."""
        seconds = np.multiply(self.rounds, busy, where=np.isfinite(busy), out=busy.copy())
        return np.maximum(seconds - self.lacking, 0.0)

    def _splits(
        self, cuts: np.ndarray, later: np.ndarray, earlier: np.ndarray
    ) -> Iterator[tuple[tuple[int, ...], np.ndarray, np.ndarray]]:
        """By the number of devices before each cut, what `busy` says of them and of the others. `later`, `earlier`:
        what crosses the cuts."""
        numbers, sizes = cuts.astype(float), cuts.sum(axis=1)
        pools = range(len(self._counts))
        every = [used for n in range(1, len(pools) + 1) for used in itertools.combinations(pools, n)]
        # The seconds of all atoms where these pools have devices that make up one of the speed of 1.
        each = {used: (self._speed[list(used), None] * self._work[list(used)]).min(axis=0) for used in every}
        before = {used: numbers @ seconds for used, seconds in each.items()}
        after = {used: np.maximum(each[used].sum() - before[used], 0.0) for used in every}
        for first in itertools.product(*(range(count + 1) for count in self._counts)):
            early = self._busy(np.array(first), before, sizes == 0, later[0], earlier.sum(axis=0))
            rest = self._counts - np.array(first)
            late = self._busy(rest, after, sizes == self._problem.n_atoms, earlier[0], later.sum(axis=0))
            yield first, early, late

    def seconds(self, fills: np.ndarray, slowest: np.ndarray) -> np.ndarray:
        """[n] seconds of a step at least, with the sum of the fills and what the slowest device does for a
        micro-batch."""
        found = fills + np.maximum(self.rounds * slowest - self.lacking, 0.0)
        problem = self._problem
        if problem.sum_counts and problem.chunks == 1 and not (problem.weight is not None and self._one_round):
            found = np.maximum(found, problem.n_microbatches * slowest - self.lacking)
        return np.asarray(found)

    def busy(self, counts: np.ndarray, atoms: np.ndarray, sent: np.ndarray, received: np.ndarray) -> np.ndarray:
        """[n] seconds a micro-batch that the slowest of `counts` devices is busy at least, with these atoms [n, atoms]
        and bytes [n].

        For any weights a_k of the pools with sum_k a_k count_k = 1, it is at least sum_i min_k a_k w_ki (duality);
        weights by speed make that tight where pools differ by a factor alone.
        """
        used = tuple(np.flatnonzero(counts).tolist())
        seconds = (self._speed[list(used), None] * self._work[list(used)]).min(axis=0) if used else None
        work = {} if seconds is None else {used: atoms @ seconds}
        return self._busy(counts, work, np.asarray(~atoms.any(axis=1)), sent, received)

    def _busy(
        self,
        counts: np.ndarray,
        work: Mapping[tuple[int, ...], np.ndarray],
        idle: np.ndarray,
        sent: np.ndarray,
        received: np.ndarray,
    ) -> np.ndarray:
        """`busy`. `work`: by the pools with devices, seconds of the atoms on devices that make up one of the speed of
        1. `idle`: where there are no atoms."""
        used = np.flatnonzero(counts)
        if not used.size:
            return np.where(idle, 0.0, np.inf)
        speed = self._speed[used]
        seconds = work[tuple(used.tolist())]
        if not self._problem.sends_behind:
            send, receive = (speed * each[used] for each in (self._busy_send, self._busy_receive))
            seconds = seconds + send.min() * sent + receive.min() * received
        return np.asarray(seconds / (speed @ counts[used]))

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
        parts = min(problem.most_delayed_parts, problem.n_microbatches * problem.chunks)
        undelayed = self._every - parts * problem.most_delayed
        work = undelayed[np.isin(self._pools, used)].min(axis=0)
        return np.asarray(work / problem.chunks - (problem.most_lacking if self._one_round else 0.0))

    def _cheapest(self, seconds: np.ndarray) -> np.ndarray:
        return np.array([seconds[self._pools == pool].min() for pool in range(len(self._counts))])
