"""Exact partition of a graph of atoms into pipeline stages.

Objective, for m micro-batches and stages s with r_s replicas: the "sum of stages + (m - 1) x the slowest" of Alpa
(Zheng et al. 2022, eq. 2), generalised to replicas, where each replica runs at most ceil(m / r_s) micro-batches, and
to split backwards, whose weight parts w_s (with their overhead, a third) are delayed into the bubble (Qi et al. 2024;
w_s = 0 for other schedules):

    T = sum_s f_s + max_s p_s
    f_s = t_s - d_s,   d_s = min(2 w_s, backward)                  time of the first micro-batch
    p_s = (ceil(m / r_s) - 1) u_s + d_s - a_s + max(0, reduction(r_s, gradient bytes_s) + o_s - b_s)
    t_s = forward and backward of its atoms, forward twice if it recomputes, + overhead of its 2 actions
          + latency + bytes x seconds_per_byte of its lane, for each direction of its incoming values with bytes
    u_s = t_s, or where transfers run behind the passes of other micro-batches, the longer of passes and transfers:
          of its forward and of its backward under gpipe, of both together under other schedules
    a_s = accumulation of gradients, which the first micro-batch of a replica lacks (with m <= r_s, f_s lacks it)
    o_s = what happens once a step: collectives of its mesh, gradients of parameters that another stage has, too, and
          the optimizer's step
    b_s = the backward of all atoms before the stage, on its kind of devices, which runs meanwhile, less its weight
          part; 0 with d_s = 2 w_s, as split backwards end everywhere at about the same time
    d_s = w_s where there is one weight part to delay: with m <= r_s, when all of p_s may run meanwhile, and where all
          forwards come first, for a loss that the caller computes

With equal stages that is (m + p - 1) t for GPipe and 1F1B, and m t + (p - 1)(F + I - W) for ZB-H1. With v stages on a
device (interleaved schedules) every device counts as v of them, f_s = (t_s - d_s) / v and p_s = (m v - 1) t_s + d_s:
(m v + p - 1) t with equal stages. Split backwards delay three weight parts there, d_s = min(3 w_s, backward), as later
ranks delay theirs twice as long as under ZB-H1 (`builders._interleaved`): m v t + (p - 1) F where parts are equal. That
balances the stages one by one, which bounds the load of every device. On each device of each stage

    resident_s + transient_s + in_flight_s (saved_s + received_s) <= memory

(a stage that recomputes holds `received` in flight and `saved` once), and in_flight_s depends on how many replicas
the later stages have (`autopar.schedule.builders.in_flight_limit`), be they devices or meshes.

Method. Under a bound U on the max term the least sum g(U) is a dynamic program over chains of cuts (`sweep`). g never
rises with U, so that of the plans whose max term lies between L and U none is better than L + g(U). `_best` keeps such
intervals, splits the one that promises most, and stops when none promises more than the best plan found:

    T  |  x                        x  plan of least sum under a bound
       |     x                     |  plans in an interval are above L + g(U)
       |         x   x   x
       +--[------)[--)[--)[---->   max term

How many devices a bound on the max term needs (`needed_devices`) tells where plans begin, and which stages a sweep can
leave out; so do least sums of the fills around a stage (`Costs.least`).

Stopping early leaves the least promise as a proven lower bound. Where the sum does not count (`Problem.sum_counts`),
one sweep over max terms finds the plan whose largest is the least.

Complexity. One sweep takes O(cuts^2 x prod_k (count_k + 1)) operations, for each kind and each number of replicas that
memory makes different; about ten to thirty sweeps.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autopar.planner.inter_op.bounds import relaxed_bound
from autopar.planner.inter_op.dynamic_program import Following, Grid, Path, SweepStep, sweep
from autopar.planner.inter_op.needed_devices import Needs
from autopar.planner.inter_op.problem import Problem
from autopar.planner.inter_op.solution import Infeasibility, Solution, StageChoice
from autopar.planner.inter_op.stage_costs import Costs
from autopar.planner.inter_op.stage_tables import Mode, Stages, WantedStages

# Below this share of the best time, intervals are no longer halved but walked down from plan to plan.
_NARROW = 1e-3
_MOST_SWEEPS = 400
_CLOSE = 1e-3  # share of the bytes that a plan lacks, within which only a smaller lack is looked for
_MOST_INEXACT = 3  # sweeps after the first one that leaves something unproven
# Shares of the max term: between the bounds on the least one, and from there to where plans are looked for first, where
# meshes have one width and where they have several.
_LOW, _FIRST_STEP, _FIRST_STEP_OF_WIDTHS = 1e-3, 4e-3, 0.04
_ROUNDING = 1e-12  # share of a bound that may be due to rounding
# Up to this many states, a sweep over meshes of several widths counts the replicas that follow a stage.
_FEW_STATES = 700


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

    Bisects the bytes that could be lacking, with one run of the dynamic program each, until no plan lacks less than the
    one found.
    """
    found = _lacking(problem, math.inf)
    if found is None:
        raise ValueError("the hints allow no partition, even with unlimited memory")
    low = 0.0  # bytes: in every plan some stage lacks as much
    while True:
        high = found.needed - found.available
        if high <= low:
            return found if high > 0 else None
        # Far apart, by their logarithms; close together, whether any plan lacks less at all.
        close = high - low <= _CLOSE * high
        probe = math.nextafter(high, 0.0) if close else math.sqrt(max(low, _CLOSE * high) * high)
        better = _lacking(problem, probe)
        # Rounding may let the same plan pass again.
        if better is None or better.needed - better.available >= high:
            low = high if close else probe
        else:
            found = better


def _lacking(problem: Problem, lack: float) -> Infeasibility | None:
    """The stage that lacks most in a plan whose stages lack at most `lack` bytes each; None without such a plan."""
    costs = Costs(problem, problem.counts, extra_memory=lack)
    path = _Search(costs).least_sum(WantedStages(math.inf)).path
    if path is None:
        return None
    passing = [costs.passing(Mode(s.kind, s.recompute), s.replicas, s.after, s.start, s.stop) for s in path.steps]
    stepping = [costs.stepping(s.kind, s.start, s.stop) for s in path.steps]
    needed = list(map(max, passing, stepping))
    memory = [problem.kinds[s.kind].memory / problem.chunks for s in path.steps]
    index = max(range(len(needed)), key=lambda i: needed[i] - memory[i])
    steps = needed[index] <= stepping[index]
    return Infeasibility(index, _choice(costs, path.steps[index]), needed[index], passing[index], steps, memory[index])


class LeastSum(NamedTuple):
    """What one sweep says of the plans whose max term is at most a bound."""

    total: float  # s: no plan's sum of fills is smaller; inf where there is no plan
    path: Path | None  # a plan; its sum is `total` unless meshes of several widths share scarce memory


class _Interval(NamedTuple):
    """Plans whose max term lies in an interval. The most promising one is the least."""

    promise: float  # s: none takes less
    low: float  # s: none has a smaller max term
    high: float  # s: all have a smaller one
    least: float  # s: none has a smaller sum of fills

    @classmethod
    def of(cls, low: float, high: float, least: float) -> _Interval:
        return cls(least + low, low, high, least)

    @property
    def last(self) -> float:
        """The largest max term (s) in it."""
        return math.nextafter(self.high, -math.inf)

    def below(self, goal: float) -> _Interval:
        """The part in which plans may take less than `goal` seconds."""
        return self._replace(high=min(self.high, goal - self.least))


class _Search:
    """Branch and bound for one problem and one vector of device counts."""

    def __init__(self, costs: Costs, exactly: bool = False) -> None:
        self._costs = costs
        self._exactly = exactly
        self._places = _places(costs.problem)
        self._pinned = frozenset(place for _, place in costs.problem.space.pinned)

    def best(self, cutoff: float, tolerance: float) -> Solution | None:
        """Branch and bound over intervals of the max term; the picture is in the head of this file."""
        costs = self._costs
        if not costs.problem.sum_counts:
            # A plan whose max term is not below the cutoff is not below it either.
            least, first = self.least_sum(WantedStages(cutoff))
            return self._solution(first, first.total, least) if first is not None and first.total < cutoff else None
        best: Path | None = None
        best_time = math.inf
        intervals = [self._whole(cutoff, tolerance)]
        # Plans with a smaller sum than the one found under the same bound, which nothing rules out, are above `missed`.
        # Plans above `unwanted` are not looked at.
        missed = unwanted = math.inf
        inexact, step = 0, _FIRST_STEP if costs.one_width else _FIRST_STEP_OF_WIDTHS
        # One stage on one kind with its backward in one part: the least fill has the least time.
        one_stage = sum(costs.units) == 1 and len({m.kind for m in costs.modes}) == 1 and costs.problem.weight is None
        for _ in range(_MOST_SWEEPS):
            goal = min(math.inf if best is None else best_time * (1 - tolerance), cutoff, missed)
            if not intervals or intervals[0].promise >= goal or inexact > _MOST_INEXACT:
                break
            # With a larger max term, plans in the interval take too long.
            now = heapq.heappop(intervals).below(goal)
            unwanted = min(unwanted, goal)
            bound = self._bound(now, best_time, tolerance, step)
            step *= 2
            under, path = self.least_sum(WantedStages(bound, goal, now.low), enough=goal - now.low)
            if path is not None:
                top = self._max_term(path)
                if path.total + top < best_time:
                    best, best_time = path, path.total + top
                if under < path.total:
                    missed = min(missed, under + top)
                if now.low < top and not one_stage:
                    heapq.heappush(intervals, _Interval.of(now.low, top, under))
            elif under + now.low < goal:
                missed = min(missed, under + now.low)
            inexact += math.isfinite(missed)
            if bound < now.last:
                heapq.heappush(intervals, _Interval.of(bound, now.high, now.least))
        bound = min(best_time, missed, unwanted, intervals[0].promise if intervals else math.inf)
        return None if best is None or best_time >= cutoff else self._solution(best, best_time, bound)

    def _whole(self, cutoff: float, tolerance: float) -> _Interval:
        """The interval that all plans below the cutoff lie in."""
        needed, fills = self._costs.needed_devices, self._costs.least.fills
        low = self._costs.least.largest * (1 - _ROUNDING)
        if needed is not None:
            low = needed.least_max_term(low, cutoff - fills, max(tolerance, _LOW) / 2)
        return _Interval.of(low, math.inf, fills)

    def _bound(self, within: _Interval, best: float, tolerance: float, step: float) -> float:
        """The max term (s) to look at next. Where what plans need is known, plans begin hardly above the interval:
        the first one is looked for there, and the next ones from above, in steps of what they gain."""
        low, high, tells_needs = within.low, within.high, self._costs.needed_devices is not None
        if math.isinf(best):
            return min(low * (1 + step), within.last) if tells_needs and low > 0 else within.last
        narrow = tolerance > 0 if tells_needs else high - low < 4 * tolerance * best
        if narrow or high - low < _NARROW * best:
            return within.last
        return min(low + (high - low) / 2, within.last)

    def _solution(self, path: Path, objective: float, bound: float) -> Solution:
        used = tuple(n * unit for n, unit in zip(path.used, self._costs.unit, strict=True))
        return Solution(tuple(_choice(self._costs, s) for s in path.steps), objective, bound, used)

    def least_sum(self, wanted: WantedStages, enough: float = math.inf) -> LeastSum:
        """The wanted plan with the least sum of fills; where the sum does not count, with the least max term.

        Where meshes differ in width, devices do not tell how many replicas follow a stage, on which its memory depends
        (`Following`). If the plan of the relaxed sweep fits, it is the best there is. Otherwise replicas are counted
        where the states are few, and recorded where they are many. `enough`: no plan with this sum or more is wanted.
        """
        costs = self._costs
        needs = None
        if costs.needed_devices is not None and math.isfinite(wanted.most):
            needs = costs.needed_devices.under(wanted.most)
            if not costs.needed_devices.suffices(needs):
                return LeastSum(math.inf, None)
        stages = costs.stages(wanted, self._exactly, needs)
        relaxed = self._sweep(stages, Following.RELAXED, needs)
        if relaxed is None:
            return LeastSum(math.inf, None)
        if costs.one_width or self._fits(relaxed):
            return LeastSum(relaxed.total, relaxed)
        if relaxed.total >= enough:
            return LeastSum(relaxed.total, None)
        n_states = math.prod(n + 1 for n in costs.units) * (costs.most_groups + 1)
        if n_states <= _FEW_STATES:
            counted = self._sweep(stages, Following.COUNTED, needs)
            return LeastSum(math.inf if counted is None else counted.total, counted)
        return LeastSum(relaxed.total, self._sweep(stages, Following.RECORDED, needs))

    def _sweep(self, stages: Stages, following: Following, needs: Needs | None) -> Path | None:
        costs = self._costs
        widths = tuple(most // unit for (_, most), unit in zip(costs.widths, costs.unit, strict=True))
        grid = Grid.of(costs.units, widths, costs.most_groups, following is Following.COUNTED)
        return sweep(
            stages,
            costs.n_cuts,
            grid,
            self._places[stages.start, stages.stop],
            self._pinned,
            exactly=self._exactly,
            recorded=following is Following.RECORDED,
            combine=np.add if costs.problem.sum_counts else np.maximum,
            needs=needs,
        )

    def _fits(self, path: Path) -> bool:
        """Whether every stage has memory for its micro-batches in flight, with the replicas that do follow it."""
        return all(
            self._costs.fits(Mode(s.kind, s.recompute), s.replicas, s.after, s.start, s.stop) for s in path.steps
        )

    def _max_term(self, path: Path) -> float:
        costs = self._costs
        return max(costs.max_term_of(Mode(s.kind, s.recompute), s.replicas, s.start, s.stop) for s in path.steps)


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
    terms = costs.terms_of(Mode(step.kind, step.recompute), step.replicas)
    time = float(terms.time[costs.pair(step.start, step.stop)])
    return StageChoice(step.start, step.stop, step.kind, step.replicas, step.recompute, time)
