"""Exact partition of a graph of atoms into pipeline stages.

Objective, for m micro-batches and stages s with r_s replicas: the "sum of stages + (m - 1) x the slowest" of Alpa
(Zheng et al. 2022, eq. 2), generalised to replicas, each of which runs at most ceil(m / r_s) of the micro-batches, and
to split backwards, whose weight parts w_s (with their overhead, a third) are delayed into the bubble (Qi et al. 2024;
w_s = 0 for other schedules):

    T = sum_s f_s + max_s p_s
    f_s = t_s - d_s,   d_s = min(2 w_s, t_s)                       time of the first micro-batch
    p_s = (ceil(m / r_s) - 1) t_s + d_s + reduction(r_s, gradient bytes_s) + o_s
    t_s = forward and backward of its atoms, forward twice if it recomputes, + overhead of its 2 actions
          + latency + bytes x seconds_per_byte of its kind, for each direction of its incoming values that carries bytes
    o_s = what happens once a step: collectives of its mesh, gradients of parameters that another stage has, too

With equal stages that is (m + p - 1) t for GPipe and 1F1B, and m t + (p - 1)(F + I - W) for ZB-H1. With v stages on a
device (interleaved 1F1B) every device counts as v of them, f_s = t_s / v and p_s = (m v - 1) t_s: (m v + p - 1) t with
equal stages. That balances the stages one by one, which bounds the load of every device. On each device of each stage

    resident_s + transient_s + in_flight_s (saved_s + received_s) <= memory

(a stage that recomputes holds `received` in flight and `saved` once), and in_flight_s depends on how many devices serve
the later stages (`autopar.schedule.builders.in_flight_limit`).

Method. Under a bound U on the max term the least sum g(U) is a dynamic program over chains of cuts (`sweep`). g never
rises with U, so that of the plans whose max term lies between L and U none is better than L + g(U). `_best` keeps such
intervals, splits the one that promises most, and stops when none promises more than the best plan found:

    T  |  x                        x  plan of least sum under a bound
       |     x                     |  plans in an interval are above L + g(U)
       |         x   x   x
       +--[------)[--)[--)[---->   max term

Stopping early leaves the least promise as a proven lower bound. Where the sum does not count (`Problem.sum_counts`),
one sweep over max terms finds the plan whose largest is the least.

Complexity. One sweep takes O(cuts^2 x prod_k (count_k + 1)) operations, for each kind and each number of replicas that
memory makes different; about ten to thirty sweeps.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from autopar.planner.inter_op.bounds import relaxed_bound
from autopar.planner.inter_op.dynamic_program import Path, SweepStep, sweep
from autopar.planner.inter_op.problem import Infeasibility, Problem, Solution, StageChoice
from autopar.planner.inter_op.stage_costs import Costs, Mode

# Below this share of the best time, intervals are no longer halved but walked down from plan to plan.
_NARROW = 1e-3
_MOST_SWEEPS = 400


def solve(
    problem: Problem,
    counts: Sequence[int] | None = None,
    *,
    cutoff: float = math.inf,
    tolerance: float = 0.0,
    exactly: bool = False,
) -> Solution | None:
    """The best partition on at most `counts` devices of each pool (default: all there are); None if there is none.

    Args:
        exactly: use exactly `counts` devices.
        cutoff: seconds; return None as soon as no plan can be faster.
        tolerance: share of the objective that may stay unproven; with 0 the solution is proven optimal.

    Among equally fast plans that the search meets it prefers the one with fewest devices. See the module for objective,
    method and complexity.
    """
    counts = problem.counts if counts is None else tuple(counts)
    if not any(counts):
        raise ValueError(f"counts are {counts}: a plan needs at least one device")
    if relaxed_bound(problem, counts) >= cutoff:
        return None
    return _Search(Costs(problem, counts), exactly).best(cutoff, tolerance)


def explain_infeasible(problem: Problem) -> Infeasibility | None:
    """The stage that lacks most memory, in the plan that lacks least; None if some plan fits.

    Bisects all numbers of bytes that could be lacking, with one run of the dynamic program each.
    """
    counts = problem.counts
    lacks = [0.0, *(float(x) for x in Costs(problem, counts).lacks() if x > 0)]
    found: tuple[Path, Costs] | None = None
    low, high = 0, len(lacks)
    while low < high:
        middle = (low + high) // 2
        # The factor covers rounding: the same products are computed in another order.
        costs = Costs(problem, counts, extra_memory=lacks[middle] * (1 + 1e-12))
        path = _Search(costs).least_sum(math.inf)
        if path is None:
            low = middle + 1
        else:
            found, high = (path, costs), middle
    if found is None:
        raise ValueError("the hints allow no partition, even with unlimited memory")
    if low == 0:
        return None
    path, costs = found
    needed = [costs.needed(Mode(s.kind, s.recompute), s.replicas, s.after, s.start, s.stop) for s in path.steps]
    memory = [problem.kinds[s.kind].memory / problem.chunks for s in path.steps]
    index = max(range(len(needed)), key=lambda i: needed[i] - memory[i])
    stage = _choice(costs, path.steps[index])
    return Infeasibility(index, stage, needed[index], memory[index])


class _Search:
    """Branch and bound for one problem and one vector of device counts."""

    def __init__(self, costs: Costs, exactly: bool = False) -> None:
        self._costs = costs
        self._exactly = exactly
        self._places = _places(costs.problem)
        self._pinned = frozenset(place for _, place in costs.problem.space.pinned)

    def best(self, cutoff: float, tolerance: float) -> Solution | None:
        """Branch and bound over intervals of the max term; the picture is in the head of this file."""
        first = self.least_sum(math.inf)
        if first is None:
            return None
        if not self._costs.problem.sum_counts:
            return self._solution(first, first.total, first.total) if first.total < cutoff else None
        top = self._max_term(first)
        best, best_time = first, first.total + top
        # (promise, no plan's max term is at or below, plans are below, least sum of those)
        intervals = [(first.total, 0.0, top, first.total)]
        if self._costs.n_devices == 1 and len({mode.kind for mode in self._costs.modes}) == 1:
            # One stage on one kind: the least fill has the least time.
            intervals.clear()
        for _ in range(_MOST_SWEEPS):
            if not intervals or intervals[0][0] >= min(best_time, cutoff) * (1 - tolerance):
                break
            _, low, high, least = heapq.heappop(intervals)
            below = math.nextafter(high, -math.inf)
            narrow = high - low < _NARROW * best_time
            bound = below if narrow and tolerance == 0 else min(low + (high - low) / 2, below)
            path = self.least_sum(bound)
            if path is not None:
                top = self._max_term(path)
                if path.total + top < best_time:
                    best, best_time = path, path.total + top
                if low < top:
                    heapq.heappush(intervals, (path.total + low, low, top, path.total))
            if bound < below:
                heapq.heappush(intervals, (least + bound, bound, high, least))
        bound = min(best_time, intervals[0][0]) if intervals else best_time
        if best_time >= cutoff:
            return None
        return self._solution(best, best_time, bound)

    def _solution(self, path: Path, objective: float, bound: float) -> Solution:
        return Solution(tuple(_choice(self._costs, s) for s in path.steps), objective, bound, path.used)

    def least_sum(self, bound: float) -> Path | None:
        """The plan with the least sum of fills among those whose max term is at most `bound`; where the sum does not
        count, the plan with the least max term."""
        stages = self._costs.stages(bound)
        places, pinned = self._places[stages.start, stages.stop], self._pinned
        axes = np.array(self._costs.problem.pools)
        combine = np.add if self._costs.problem.sum_counts else np.maximum
        return sweep(stages, axes, self._costs.n_cuts, self._costs.counts, places, pinned, self._exactly, combine)

    def _max_term(self, path: Path) -> float:
        costs = self._costs
        return max(float(costs.max_term(Mode(s.kind, s.recompute), s.replicas)[s.start, s.stop]) for s in path.steps)


def _places(problem: Problem) -> np.ndarray:
    """[n_cuts, n_cuts]: the place in the plan that a stage is pinned to, -1 for none, -2 for contradicting pins.

    A stage that has only some of the atoms pinned to a place contradicts them.
    """
    cuts, pinned = problem.space.cuts, problem.space.pinned
    places = np.full((len(cuts), len(cuts)), -1)
    for place in sorted({place for _, place in pinned}):
        atoms = sorted({atom for atom, p in pinned if p == place})
        before = cuts[:, atoms].sum(axis=1)
        inside = before[None, :] - before[:, None]
        whole = inside == len(atoms)
        places[(inside > 0) & ((places != -1) | ~whole)] = -2
        places[whole & (places == -1)] = place
    return places


def _choice(costs: Costs, step: SweepStep) -> StageChoice:
    time = float(costs.terms[Mode(step.kind, step.recompute)].time[step.start, step.stop])
    return StageChoice(step.start, step.stop, step.kind, step.replicas, step.recompute, time)
