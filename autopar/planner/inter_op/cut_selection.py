"""Which cuts a search looks at, and improving a partition over more cuts near its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.planner.inter_op.cuts import AtomGraph, all_cuts, cuts_near, first_cuts
from autopar.planner.inter_op.partition import solve
from autopar.planner.inter_op.problem import Problem, Solution

# Most entries in the tables of one dynamic program: cuts^2 / 2 x vectors of device counts x kinds.
_WORK = 2e7
_FEWEST_CUTS = 48
# A round that gains less than this share is the last.
_GAIN = 1e-4


@dataclass(frozen=True)
class PartitionResult:
    """A partition and the problem that it solves."""

    problem: Problem
    solution: Solution
    complete: bool  # every cut of the graph was looked at

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


def most_cuts(counts: Sequence[int], most: int) -> int:
    """The number of cuts that a dynamic program over `counts` devices of each kind can afford, at most `most`."""
    states = math.prod(c + 1 for c in counts)
    return int(min(most, max(_FEWEST_CUTS, math.sqrt(2 * _WORK / (states * len(counts))))))


def refine(
    graph: AtomGraph,
    found: PartitionResult,
    problem_of: Callable[[np.ndarray], Problem],
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
