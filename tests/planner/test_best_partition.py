"""Partitions of any graph: never worse than along one order, and true bounds."""

from __future__ import annotations

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
from autopar.planner.inter_op.bounds import cut_bounds
from autopar.planner.inter_op.candidates import Searching
from autopar.planner.inter_op.cut_selection import best_partition, cuts_along_orders
from autopar.planner.inter_op.cuts import AtomGraph
from autopar.planner.inter_op.partition import solve
from autopar.planner.inter_op.problem import Problem
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
@settings(max_examples=examples(25), deadline=None)
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
    bounds = cut_bounds(problem, problem.counts, cuts)
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


@settings(max_examples=examples(10), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=24))
def test_the_usual_orders_are_by_number_depth_first_and_breadth_first(pairs: Sequence[tuple[int, int]]) -> None:
    edges = {(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]}
    found = cuts_along_orders(AtomGraph(12, frozenset(edges), np.ones(12), ()))
    expected = [cut_matrix(12, prefix_sets(order)).tolist() for order in orders(12, edges).values()]
    assert all(cuts.tolist() in expected for cuts in found)
    assert all(cuts in [f.tolist() for f in found] for cuts in expected)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b"])
def test_the_plan_of_a_model_is_never_worse_than_along_one_order(
    monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    for module in ("search_space", "candidates"):
        monkeypatch.setattr(f"autopar.planner.inter_op.{module}.most_cuts", lambda counts, most: min(most, 60))
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
