"""Which cuts a search looks at, and improving a partition over more cuts.

1. first       all cuts of a small graph, the most promising ones of another     `cuts_worth_looking_at`
2. orders      all prefixes of one topological order after the other             `along_orders`
3. near        cuts near those of the plan                                       `refine`
4. all         whatever cuts a better plan could have                            `over_all_cuts`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.planner.inter_op.bounds import Splits, cut_bounds, relaxed_bound
from autopar.planner.inter_op.chain_bounds import chain_bounds
from autopar.planner.inter_op.cuts import (
    AtomGraph,
    Mask,
    all_cuts,
    cut_matrix,
    cut_rows,
    cuts_near,
    every_mask,
    first_cuts,
    prefixes,
)
from autopar.planner.inter_op.orders import usual_orders
from autopar.planner.inter_op.partition import solve
from autopar.planner.inter_op.problem import Problem
from autopar.planner.inter_op.solution import Solution

# Most entries in the tables of one dynamic program: cuts^2 / 2 x vectors of device counts x kinds.
_WORK = 2e7
_FEWEST_CUTS = 48
# A round that gains less than this share is the last.
_GAIN = 1e-4
# Cuts of a graph that are listed at most, to find those that a better plan could have.
_LISTED = 100_000
_CHUNK = 4096
_FEW = 4000
_FIRST_STEP = 0.005  # of more than `_FEW` cuts: share above a bound up to which partitions are first looked for
_LAST_STEP = 1.0  # from this share on, up to the best one that is known
_ROUNDING = 1e-9  # share of an objective or a bound that may be due to rounding

ProblemOf = Callable[[np.ndarray], Problem]  # the problem over given cuts


@dataclass(frozen=True)
class PartitionResult:
    """A partition and the problem that it solves."""

    problem: Problem
    solution: Solution
    complete: bool  # every cut of the graph was looked at
    bound: float = 0.0  # s: no partition has a smaller objective, whatever its cuts

    @property
    def proven(self) -> bool:
        """No partition of the graph is better."""
        return self.bound >= self.solution.objective * (1 - 2 * _ROUNDING)

    def stages(self) -> list[np.ndarray]:
        """The atoms of each stage, as masks [n]."""
        cuts = self.problem.space.cuts
        return [cuts[s.stop] & ~cuts[s.start] for s in self.solution.stages]

    def chain(self) -> np.ndarray:
        """The plan's cuts [n_stages + 1, n]."""
        cuts = self.problem.space.cuts
        return cuts[[0, *(s.stop for s in self.solution.stages)]]


def cuts_worth_looking_at(graph: AtomGraph, limit: int) -> tuple[np.ndarray, bool]:
    """(cuts, whether they are all): every cut of a graph with at most about `limit`, otherwise the most promising."""
    every = all_cuts(graph, limit) if graph.n < limit else None
    return (first_cuts(graph, limit), False) if every is None else (every, True)


def cuts_along_orders(graph: AtomGraph) -> list[np.ndarray]:
    """The prefixes of each of the usual topological orders, [n + 1, n]."""
    return [prefixes(order) for order in usual_orders(graph.before, graph.after)]


def most_cuts(counts: Sequence[int], most: int) -> int:
    """The number of cuts that a dynamic program over `counts` devices of each kind can afford, at most `most`."""
    states = math.prod(c + 1 for c in counts)
    return int(min(most, max(_FEWEST_CUTS, math.sqrt(2 * _WORK / (states * len(counts))))))


def best_partition(
    graph: AtomGraph, problem_of: ProblemOf, *, counts: Sequence[int], limit: int, rounds: int
) -> PartitionResult | None:
    """The best partition found over all cuts of the graph; None if none fits.

    It is never worse than the best one along any of the usual orders. `limit`: cuts in one dynamic program, except for
    those along an order. `rounds`: times that the partition is improved over cuts near its own.
    """
    every = all_cuts(graph, limit)
    if every is not None:
        problem = problem_of(every)
        solution = solve(problem, counts)
        return None if solution is None else PartitionResult(problem, solution, True, solution.bound)
    found = along_orders(None, map(problem_of, cuts_along_orders(graph)), counts=counts)
    found = over_all_cuts(graph, found, problem_of, counts=counts, limit=limit // 2)
    if found is not None and found.proven:
        return found
    problem = problem_of(first_cuts(graph, limit))
    best = along_orders(found, [problem], counts=counts)
    if best is None:
        return None
    best = refine(graph, best, problem_of, counts=counts, limit=limit, rounds=rounds)
    return replace(best, bound=relaxed_bound(problem, counts) if found is None else found.bound)


def along_orders(
    found: PartitionResult | None,
    problems: Iterable[Problem],
    *,
    counts: Sequence[int],
    tolerance: float = 0.0,
    exactly: bool = False,
) -> PartitionResult | None:
    """`found`, or a better partition of one of `problems`, each over the prefixes of one order."""
    for problem in problems:
        cutoff = math.inf if found is None else found.solution.objective * (1 - _ROUNDING)
        solution = solve(problem, counts, cutoff=cutoff, tolerance=tolerance, exactly=exactly)
        if solution is not None:
            found = PartitionResult(problem, solution, False)
    return found


def refine(
    graph: AtomGraph,
    found: PartitionResult,
    problem_of: ProblemOf,
    *,
    counts: Sequence[int],
    limit: int,
    rounds: int,
    tolerance: float = 0.0,
) -> PartitionResult:
    """Solve again over about `limit` cuts near those of the plan, at most `rounds` times or until nothing is gained."""
    for _ in range(0 if found.complete else rounds):
        problem = problem_of(cuts_near(graph, found.chain(), limit))
        solution = solve(problem, counts, tolerance=tolerance)
        if solution is None or solution.objective >= found.solution.objective:
            break
        gain = 1 - solution.objective / found.solution.objective
        found = PartitionResult(problem, solution, False)
        if gain < _GAIN:
            break
    return found


def over_all_cuts(
    graph: AtomGraph,
    found: PartitionResult | None,
    problem_of: ProblemOf,
    *,
    counts: Sequence[int],
    limit: int,
    tolerance: float = 0.0,
) -> PartitionResult | None:
    """`found`, or a better partition, with a bound on all others.

    Of all cuts of the graph, only those count whose bound is below the partition found. If they are at most `limit`,
    the result is the best there is; otherwise those with the lowest bounds are looked at, and the lowest bound of the
    others is one for all partitions with any of these.
    """
    problem = problem_of(cut_matrix([0, (1 << graph.n) - 1], graph.n))
    bound = relaxed_bound(problem, counts)
    masks = every_mask(graph, _LISTED)
    bounds, splits = _bounds(masks or [], graph, problem, counts)
    step = _FIRST_STEP if masks is not None and len(masks) > _FEW else math.inf
    while masks is not None:
        best = math.inf if found is None else found.solution.objective * (1 - _ROUNDING)
        goal = min(best, bound * (1 + step)) if bound > 0 and step < _LAST_STEP else best
        step *= 4
        promising, rest = _below(masks, bounds, splits, graph, problem, counts, goal, limit)
        kept = problem_of(cut_matrix([0, *promising, (1 << graph.n) - 1], graph.n))
        solution = solve(kept, counts, cutoff=goal, tolerance=tolerance)
        # No partition has a smaller objective.
        bound = max(bound, min(rest, goal * (1 - tolerance) if solution is None else solution.bound))
        if rest < goal and len(masks) > _FEW:
            step = math.inf  # no goal is proven: the cuts with the lowest bounds are searched once, up to the best
        if solution is not None:
            found = PartitionResult(kept, solution, False)
            if bound >= solution.objective * (1 - tolerance - _ROUNDING):
                break
        if goal == best and (solution is None or len(masks) > _FEW):
            break
    return None if found is None else replace(found, bound=min(bound, found.solution.objective))


def _bounds(masks: list[Mask], graph: AtomGraph, problem: Problem, counts: Sequence[int]) -> tuple[np.ndarray, Splits]:
    """`cut_bounds` of the masks."""
    starts = range(0, len(masks), _CHUNK)
    parts = [cut_bounds(problem, counts, cut_rows(masks[at : at + _CHUNK], graph.n)) for at in starts]
    if not parts:
        return np.zeros(0), {}
    splits = {}
    for state in parts[0][1]:
        early, late = (np.concatenate(each) for each in zip(*(part[state] for _, part in parts), strict=True))
        splits[state] = early, late
    return np.concatenate([bounds for bounds, _ in parts]), splits


def _below(
    masks: list[Mask],
    bounds: np.ndarray,
    splits: Splits,
    graph: AtomGraph,
    problem: Problem,
    counts: Sequence[int],
    goal: float,
    limit: int,
) -> tuple[list[Mask], float]:
    """(the most promising `limit` of the cuts that a partition with an objective below `goal` may have, a bound on the
    partitions with any of the others)."""
    order = _lowest(bounds, goal)
    promising, tight, rest = [masks[i] for i in order], bounds[order], math.inf
    own = {state: (early[order], late[order]) for state, (early, late) in splits.items()}
    chains = chain_bounds(problem, counts, cut_rows(promising, graph.n), own, goal) if promising else None
    if chains is not None:
        if len(chains) < len(promising):
            rest = float(tight[len(chains)])
        best = _lowest(chains, goal)
        promising, tight = [promising[i] for i in best], chains[best]
    if len(promising) > limit:
        rest = min(rest, float(tight[limit]))
    return promising[:limit], rest


def _lowest(bounds: np.ndarray, goal: float) -> np.ndarray:
    """Where bounds are below `goal`, lowest first."""
    order = np.argsort(bounds, kind="stable")
    return np.asarray(order[bounds[order] < goal])
