"""Exact partition of a line of atoms into pipeline stages.

Objective, for m micro-batches and stages s with r_s replicas: the "sum of stages + (m - 1) x the slowest" of Alpa
(Zheng et al. 2022, eq. 2), generalised to replicas, each of which runs at most ceil(m / r_s) of the micro-batches:

    T = sum_s t_s + max_s p_s
    p_s = (ceil(m / r_s) - 1) t_s + (r_s - 1) gradient_bytes_s reduce_seconds_per_byte
    t_s = forward and backward of its atoms
          + latency + bytes x seconds_per_byte of its kind, for each direction of its incoming values that carries bytes

where, on each device of each stage,

    resident_s + in_flight_s (saved_s + received_s) + transient_s <= memory

and in_flight_s depends on how many devices serve stage s and all later ones (`autopar.schedule.in_flight_limit`).

Method. Under a bound U on the max term, the least sum g_U is a dynamic program over suffixes
(`autopar.search.suffixes`): the devices that a suffix uses are all that its stages depend on. The same program with
max in place of + gives the least max term of any plan. `_best` lowers U from plan to plan until no smaller max term
can pay for its larger sum; the argument is beside the loop. The programs of least max term also say where a plan that
meets U may cut, so that each g_U is a narrow one.

Complexity. One program takes O(states x moves x b^2) operations for b blocks between allowed cuts: states = prod_k
(count_k + 1), times max_stages where that binds; moves = sum_k min(count_k, max_replicas). Two run over all cuts for
the least max terms, then one over few cuts for each plan met on the Pareto front of sum and max term, between bound
and best.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np

from autopar.search.costs import Costs
from autopar.search.problem import Infeasibility, Problem, Solution
from autopar.search.suffixes import Cells, Edges, State, Suffixes, Used


def solve(problem: Problem) -> dict[Used, Solution]:
    """Return the optimal partition for every vector of device counts that has one, using exactly so many of each kind.

    Stages may take devices of the kinds in any order. Among plans of equal cost, fewer stages and earlier cuts are
    preferred. See the module for objective, method and complexity.
    """
    costs = Costs(problem)
    slowest = _suffixes(costs, costs.max_terms, np.maximum)
    heads = _heads(costs)
    return {
        used: _best(costs, used, slowest, heads) for used in _device_counts(problem) if slowest.optimum(used) < math.inf
    }


def explain_infeasible(problem: Problem) -> Infeasibility | None:
    """Return why no plan fits: the stage that lacks most memory, in the plan where that is least; None if one fits.

    The plan is the best over all device counts. One program, so cheaper than `solve`.
    """
    costs = Costs(problem)
    lacking = _suffixes(costs, costs.lacking, np.maximum)
    used = min(_device_counts(problem), key=lambda used: (lacking.optimum(used), sum(used), used))
    if lacking.optimum(used) <= 0:
        return None
    path = lacking.path(used)
    index = int(np.argmax([step.of(costs.lacking) for step in path]))
    step = path[index]
    available = problem.kinds[step.kind].memory
    return Infeasibility(index, costs.stages(path)[index], step.of(costs.needed), available)


def _best(costs: Costs, used: Used, slowest: Suffixes, heads: Suffixes) -> Solution:
    """The optimum over the plans that use exactly `used`, of which there is at least one.

    `slowest` and `heads` have the least max terms of suffixes and of prefixes (`_heads`).
    """
    least_max = slowest.optimum(used)
    best = costs.solution(slowest.path(used), used)
    bound = best.objective - costs.least_sum(used)
    # Invariant: no plan whose max term exceeds `bound` beats `best`. At first because no sum is below least_sum.
    while bound >= least_max:
        starts = _starts_within(bound, used, slowest, heads)
        within = _suffixes(costs, costs.times_within(bound), np.add, starts)
        path, least_sum = within.path(used), within.optimum(used)
        best = min(costs.solution(path, used), best, key=lambda solution: solution.objective)
        # All plans up to `bound` have a sum of least_sum or more. So one whose max term is not below that of `path`
        # does not beat `path`, and one whose max term is not below best - least_sum does not beat `best`.
        bound = math.nextafter(min(costs.max_term(path), best.objective - least_sum), -math.inf)
    return best


def _heads(costs: Costs) -> Suffixes:
    """Least max terms of prefixes, as the suffixes of the reversed line: [0, i) is its suffix from b - i.

    A lower bound: the devices after a prefix are not known, so its stages hold as few micro-batches as with none.
    """

    def reversed_max_terms(kind: int, replicas: int, devices: int, cells: Cells) -> np.ndarray:
        return costs.max_terms(kind, replicas, replicas, (slice(None), slice(None)))[::-1, ::-1].T[cells]

    return _suffixes(costs, reversed_max_terms, np.maximum)


def _starts_within(bound: float, used: Used, slowest: Suffixes, heads: Suffixes) -> Callable[[State], slice]:
    """Where suffixes may start in plans on `used` whose max term is at most `bound`."""

    def starts(state: State) -> slice:
        before = tuple(total - after for total, after in zip(used, state[0], strict=True))
        met = (slowest.best(state).costs <= bound) & (heads.best(heads.whole(before)).costs[::-1] <= bound)
        cuts = np.flatnonzero(met)
        return slice(int(cuts[0]), int(cuts[-1]) + 1) if cuts.size else slice(0, 0)

    return starts


def _suffixes(
    costs: Costs, edges: Edges, combine: np.ufunc, starts: Callable[[State], slice] | None = None
) -> Suffixes:
    problem = costs.problem
    return Suffixes(
        costs.n_blocks,
        edges,
        combine,
        max_replicas=min(problem.max_replicas, problem.n_microbatches),
        max_stages=problem.max_stages,
        starts=starts,
    )


def _device_counts(problem: Problem) -> Iterator[Used]:
    counts = itertools.product(*(range(kind.count + 1) for kind in problem.kinds))
    return (used for used in counts if any(used))
