"""Partitions of any graph: never worse than along one order, and true bounds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from order_oracle import orders, prefix_sets
from partition_oracle import all_partitions, cut_matrix, lacking, objective, problems

from autopar.planner.inter_op import cut_selection
from autopar.planner.inter_op.bounds import cut_bounds, relaxed_bound
from autopar.planner.inter_op.candidates import Searching
from autopar.planner.inter_op.chain_bounds import chain_bounds
from autopar.planner.inter_op.cut_selection import best_partition, cuts_along_orders
from autopar.planner.inter_op.cuts import AtomGraph
from autopar.planner.inter_op.device_kind import DeviceKind
from autopar.planner.inter_op.partition import solve
from autopar.planner.inter_op.problem import Problem
from autopar.planner.inter_op.space import Space
from autopar.planner.inter_op.stage_bytes import Value
from autopar.planner.search import make_plan
from autopar.planner.search_options import SearchOptions
from benchmarks.planning import Case, synthetic_costs


def over(problem: Problem, cuts: np.ndarray) -> Problem:
    kinds = tuple(k if k.space is None else replace(k, space=replace(k.space, cuts=cuts)) for k in problem.kinds)
    return replace(problem, space=replace(problem.space, cuts=cuts), kinds=kinds)


def edges_of(problem: Problem) -> set[tuple[int, int]]:
    return {(v.producer, c) for v in problem.space.values for c in v.consumers}


def graph_of(problem: Problem) -> AtomGraph:
    weight = problem.forward[0] + problem.backward[0]
    return AtomGraph(problem.n_atoms, frozenset(edges_of(problem)), weight, problem.space.values)


def least(problem: Problem, counts: tuple[int, ...]) -> float:
    """By trying all partitions over the problem's cuts."""
    fitting = (s for s in all_partitions(problem, counts) if lacking(problem, s, counts) <= 0)
    return min((objective(problem, s) for s in fitting), default=math.inf)


@pytest.mark.slow
@settings(max_examples=examples(5, 250), deadline=None)
@given(problems(most=6), st.booleans(), st.integers(4, 8), st.sampled_from([0, 100_000]))
def test_a_partition_is_never_worse_than_along_one_order_and_its_bound_is_true(
    problem: Problem, sum_counts: bool, limit: int, listed: int
) -> None:
    blocks = problem.blocks if sum_counts or problem.weight is None else None  # see `test_partition`
    problem = replace(problem, sum_counts=sum_counts, blocks=blocks)
    counts = problem.counts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut_selection, "_LISTED", listed)
        found = best_partition(
            graph_of(problem), lambda cuts: over(problem, cuts), counts=counts, limit=limit, rounds=0
        )
    best = least(problem, counts)
    reached = math.inf if found is None else found.solution.objective
    assert reached >= best * (1 - 1e-9)
    for order in orders(problem.n_atoms, edges_of(problem)).values():
        along = over(problem, cut_matrix(problem.n_atoms, prefix_sets(order)))
        assert reached <= least(along, counts) * (1 + 1e-9)
    if found is not None:
        assert found.bound <= best * (1 + 1e-9)
        if found.proven:
            assert reached == pytest.approx(best)


@settings(max_examples=examples(25), deadline=None)
@given(problems(most=5), st.booleans())
@pytest.mark.slow
def test_no_partition_with_a_cut_is_better_than_the_bound_of_the_cut(problem: Problem, sum_counts: bool) -> None:
    blocks = problem.blocks if sum_counts or problem.weight is None else None  # see `test_partition`
    problem = replace(problem, sum_counts=sum_counts, blocks=blocks)
    cuts = problem.space.cuts
    bounds, _ = cut_bounds(problem, problem.counts, cuts)
    sets = [frozenset(np.flatnonzero(row).tolist()) for row in cuts]
    best = dict.fromkeys(sets, math.inf)
    for stages in all_partitions(problem, problem.counts):
        done = frozenset[int]()
        seconds = objective(problem, stages)
        for stage in stages:
            best[done] = min(best[done], seconds)
            done = done | stage.atoms
        best[done] = min(best[done], seconds)
    for inside, bound in zip(sets, bounds, strict=True):
        assert bound <= best[inside] * (1 + 1e-9)


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(problems(most=5), st.sampled_from([1.0, 0.7, math.inf]))
def test_chains_bound_each_cut_by_the_best_plan_that_has_it(problem: Problem, share: float) -> None:
    """Under a limit, cuts of plans below it keep their bounds, and others may have none."""
    kinds = tuple(replace(kind, memory=math.inf, pool=None, space=None, width=1) for kind in problem.kinds)
    problem = replace(
        problem,
        kinds=kinds,
        sum_counts=False,
        max_replicas=1,
        weight=None,
        blocks=None,
        cores=None,
        schedule="gpipe",
        accumulation=None,
    )
    counts, cuts = problem.counts, problem.space.cuts
    best = dict.fromkeys((frozenset(np.flatnonzero(row).tolist()) for row in cuts), math.inf)
    for stages in all_partitions(problem, counts):
        done, seconds = frozenset[int](), objective(problem, stages)
        for inside in [done, *(done := done | stage.atoms for stage in stages)]:
            best[inside] = min(best[inside], seconds)
    limit = share * max((least for least in best.values() if math.isfinite(least)), default=1.0) * (1 + 1e-9)
    bounds = chain_bounds(problem, counts, cuts, cut_bounds(problem, counts, cuts)[1], limit)
    assert bounds is not None
    for (inside, least), bound in zip(best.items(), bounds, strict=True):
        if least < limit:
            assert bound <= least * (1 + 1e-9), inside


@pytest.mark.slow
def test_parallel_branches_are_split_as_well_as_possible_and_proven_so() -> None:
    """Thousands of cuts: each of the modules has 125, and only those near equal parts of the work matter."""
    rng = np.random.default_rng(0)
    edges, values, n = set[tuple[int, int]](), [], 1
    for _ in range(40):
        entry, join = n - 1, n + 12
        for branch in range(3):
            line = [entry, *range(n + 4 * branch, n + 4 * branch + 4), join]
            edges |= set(itertools.pairwise(line))
        n = join + 1
    for atom in range(n):
        readers = tuple(sorted(b for a, b in edges if a == atom))
        if readers:
            values.append(Value(atom, readers, float(rng.uniform(0.01, 0.3)), 0.0))
    times = rng.uniform(0.1, 2.0, (1, n))
    device = DeviceKind("device", 5, math.inf, 0.0, 1.0, 0.0, 1.0)

    def problem_of(cuts: np.ndarray) -> Problem:
        space = Space(cuts, tuple(values), (), (), (), np.zeros(n))
        return Problem(
            space, times, np.zeros((1, n)), 2, "gpipe", (device,), max_replicas=1, sum_counts=False, share=1.0
        )

    graph = AtomGraph(n, frozenset(edges), times[0], tuple(values))
    found = best_partition(graph, problem_of, counts=(5,), limit=400, rounds=3)
    assert found is not None
    assert found.proven
    whole = problem_of(np.array([np.zeros(n, dtype=bool), np.ones(n, dtype=bool)]))
    assert relaxed_bound(whole, (5,)) < found.solution.objective
    for cuts in cuts_along_orders(graph):
        along = solve(problem_of(cuts), (5,))
        assert along is not None
        assert found.solution.objective <= along.objective * (1 + 1e-9)


@settings(max_examples=examples(10), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=24))
def test_the_usual_orders_are_by_number_depth_first_and_breadth_first(pairs: Sequence[tuple[int, int]]) -> None:
    edges = {(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]}
    found = cuts_along_orders(AtomGraph(12, frozenset(edges), np.ones(12), ()))
    expected = [cut_matrix(12, prefix_sets(order)).tolist() for order in orders(12, edges).values()]
    assert all(cuts.tolist() in expected for cuts in found)
    assert all(cuts in [f.tolist() for f in found] for cuts in expected)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zb"])
def test_the_plan_of_a_model_is_never_worse_than_along_one_order(
    monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    for module in ("search_space", "candidates"):
        monkeypatch.setattr(f"autopar.planner.inter_op.{module}.most_cuts", lambda counts, most: min(most, 60))
    # Boundaries are moved to where the step is shorter, even if the objective is larger there.
    monkeypatch.setattr("autopar.planner.inter_op.candidates._ACTIONS_MOVED", 0)
    options = SearchOptions(loss_inside=True, schedule=schedule, n_microbatches=8, max_replicas=1)
    for seed in range(2):
        costs = synthetic_costs(Case(4, (3,), 16), seed)
        plan = make_plan(costs, options)
        searching = Searching(costs, options)
        assert not searching.complete
        chunks = plan.chunks
        problem = searching.problem(8, schedule, (3,), chunks)
        assert plan.objective is not None
        for order in orders(searching.graph.n, set(searching.graph.edges)).values():
            cuts = cut_matrix(searching.graph.n, prefix_sets(order))
            along = solve(over(problem, cuts), (3 * chunks,), exactly=chunks > 1)
            assert along is not None
            assert plan.objective <= along.objective * 1.001


@pytest.mark.parametrize("seed", range(3))
def test_steps_towards_the_best_partition_miss_none_that_a_search_at_once_finds(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parallel branches have more cuts than one search looks at, and the sum of fills counts, so that no cut can be
    left out by its bound alone."""
    monkeypatch.setattr(cut_selection, "_FEW", 50)
    random = np.random.default_rng(seed)
    edges: set[tuple[int, int]] = set()
    n = 1
    for _ in range(2):
        entry, join = n - 1, n + 12
        for branch in range(3):
            first = n + 4 * branch
            edges |= set(itertools.pairwise([entry, *range(first, first + 4), join]))
        n = join + 1
    work = random.uniform(1, 10, n)
    readers = [tuple(sorted(y for x, y in edges if x == a)) for a in range(n)]
    values = tuple(Value(a, readers[a], *random.uniform(5, 80, 1).repeat(2)) for a in range(n - 1))
    graph = AtomGraph(n, frozenset(edges), work, values)

    def problem_of(cuts: np.ndarray) -> Problem:
        space = Space(cuts, values, resident=(), gradients=(), saved=(), transient=np.zeros(n))
        kinds = (DeviceKind("d", 4, math.inf, 0.1, 0.05, 0.02),)
        forward = work[None] / 3
        return Problem(space, forward, 2 * forward, n_microbatches=8, schedule="1f1b", kinds=kinds, max_replicas=1)

    def best() -> float:
        found = cut_selection.over_all_cuts(graph, None, problem_of, counts=(4,), limit=40)
        assert found is not None
        assert found.bound <= found.solution.objective * (1 + 1e-9)
        return found.solution.objective

    in_steps = best()
    monkeypatch.setattr(cut_selection, "_FIRST_STEP", math.inf)
    assert in_steps <= best() * (1 + 1e-9)
