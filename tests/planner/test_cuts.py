"""Which cuts of a graph are looked at."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_oracle import closed_sets

from autopar.planner.inter_op import cut_tables
from autopar.planner.inter_op.cut_selection import PartitionResult, cuts_worth_looking_at, refine
from autopar.planner.inter_op.cut_tables import CutBlocks, tables
from autopar.planner.inter_op.cuts import (
    AtomGraph,
    CyclicGraph,
    all_cuts,
    cuts_near,
    first_cuts,
    line_cuts,
    merged_graph,
)
from autopar.planner.inter_op.device_kind import DeviceKind
from autopar.planner.inter_op.partition import solve
from autopar.planner.inter_op.problem import Problem
from autopar.planner.inter_op.space import Space
from autopar.planner.inter_op.stage_bytes import Shared, Value


def graph_of(n: int, edges: set[tuple[int, int]], weight: list[float] | None = None) -> AtomGraph:
    values = tuple(Value(a, tuple(b for x, b in sorted(edges) if x == a), 1.0 + a, 0.0) for a in range(n))
    return AtomGraph(n, frozenset(edges), np.array(weight or [1.0] * n), values)


@st.composite
def graphs(draw: st.DrawFn, most: int = 7) -> AtomGraph:
    n = draw(st.integers(1, most))
    pairs = list(itertools.combinations(range(n), 2))
    edges = draw(st.lists(st.sampled_from(pairs), max_size=2 * n)) if pairs else []
    return graph_of(n, set(edges), [float(draw(st.integers(0, 5))) for _ in range(n)])


def as_sets(cuts: np.ndarray) -> list[frozenset[int]]:
    return [frozenset(np.flatnonzero(row).tolist()) for row in cuts]


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9))
def test_tables_along_an_order_are_those_of_any_cuts(seed: int, n: int) -> None:
    random = np.random.default_rng(seed)

    def atoms() -> tuple[int, ...]:
        return tuple(random.choice(n, size=random.integers(0, n + 1), replace=False).tolist())

    def shared() -> tuple[Shared, ...]:
        return tuple(Shared(float(nbytes), atoms()) for nbytes in random.exponential(1e9, 4))

    every = line_cuts(n)[:, random.permutation(n)]
    cuts = every[np.unique([0, *random.integers(0, n + 1, 5), n])]
    values = tuple(Value(a, atoms(), *random.choice([0.0, 0.3, 7.0], 2)) for a in range(n))
    weights = random.choice([0.0, 1.0, 5.5], n)
    fields = {"values": values, "transient": weights, "core": weights[::-1], "recomputed": atoms(), "unrepeatable": ()}
    fields |= {name: shared() for name in ("resident", "gradients", "saved", "rebuilt", "once")}
    found = tables(CutBlocks(cuts), **fields)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut_tables, "_is_order", lambda cuts: False)
        expected = tables(CutBlocks(cuts), **fields)
    for name in ("received", "received_gradient", "sent", "tied_gradients", "transient", "core", *fields):
        if name in vars(expected):
            assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-9, abs=1e-3), name
    assert (found.must_recompute == expected.must_recompute).all()


def assert_cuts(graph: AtomGraph, cuts: np.ndarray) -> None:
    found = as_sets(cuts)
    assert len(set(found)) == len(found)
    assert [len(s) for s in found] == sorted(len(s) for s in found)
    assert found[0] == frozenset()
    assert found[-1] == frozenset(range(graph.n))
    assert all(a in s for s in found for a, b in graph.edges if b in s)


@settings(max_examples=examples(40), deadline=None)
@given(graphs())
def test_all_cuts_are_the_sets_closed_under_predecessors(graph: AtomGraph) -> None:
    expected = closed_sets(graph.n, set(graph.edges))
    found = all_cuts(graph, 10_000)
    assert found is not None
    assert set(as_sets(found)) == set(expected)
    assert_cuts(graph, found)
    assert all_cuts(graph, len(expected)) is not None
    if len(expected) > 2:
        assert all_cuts(graph, len(expected) - 1) is None


@settings(max_examples=examples(40), deadline=None)
@given(graphs(12), st.integers(4, 40), st.data())
def test_the_promising_cuts_are_cuts(graph: AtomGraph, limit: int, data: st.DataObject) -> None:
    first = first_cuts(graph, limit)
    assert_cuts(graph, first)
    inner = data.draw(st.lists(st.integers(1, len(first) - 1), max_size=3, unique=True)) if len(first) > 2 else []
    chain = [first[0]]
    for row in sorted(inner):
        if (first[row] >= chain[-1]).all() and not first[row].all():
            chain.append(first[row])
    plan = np.array([*chain, first[-1]])
    near = cuts_near(graph, plan, limit)
    assert_cuts(graph, near)
    assert set(as_sets(plan)) <= set(as_sets(near))


@settings(max_examples=examples(25), deadline=None)
@given(graphs(9))
def test_crossing_bytes_are_those_made_before_a_cut_and_read_after_it(graph: AtomGraph) -> None:
    cuts = all_cuts(graph, 10_000)
    assert cuts is not None
    for inside, nbytes in zip(as_sets(cuts), graph.crossing(cuts), strict=True):
        expected = sum(v.nbytes for v in graph.values if v.producer in inside and set(v.consumers) - inside)
        assert nbytes == expected


def test_the_narrow_place_of_a_line_is_among_the_first_cuts() -> None:
    n = 60
    values = tuple(Value(a, (a + 1,), 1.0 if a == 31 else 100.0, 0.0) for a in range(n - 1))
    graph = AtomGraph(n, frozenset((a, a + 1) for a in range(n - 1)), np.ones(n), values)
    assert frozenset(range(32)) in as_sets(first_cuts(graph, 8))


@settings(max_examples=examples(20), deadline=None)
@given(
    st.integers(20, 80),
    st.lists(st.tuples(st.floats(0.2, 1.0), st.sampled_from([1.0, 1.0, 4.0])), min_size=2, max_size=6),
    st.floats(0.0, 3.0),
    st.floats(1.0, 1.9),
)
def test_all_layers_of_a_long_chain_are_cut_at_the_same_places(
    layers: int, parts: list[tuple[float, float]], head: float, room: float
) -> None:
    """Each layer has parts of different weights, with wide tensors within some. Stages of equally many layers need cuts
    at the same place of every layer."""
    parts = [*parts, (0.05, 1.0)]  # a narrow tensor leaves the layer; its last part is unlike the others
    each = [*(layers * [weight for weight, _ in parts]), head]
    n = len(each)
    values = tuple(Value(i, (i + 1,), parts[i % len(parts)][1], 0.0) for i in range(n - 1))
    graph = AtomGraph(n, frozenset(itertools.pairwise(range(n))), np.array(each), values)
    cuts = first_cuts(graph, int(2 * room * layers) + 2)
    places = set(cuts.sum(axis=1).tolist())
    assert any({k * len(parts) + offset for k in range(1, layers)} <= places for offset in range(len(parts)))


def test_atoms_that_wait_for_each_other_are_reported() -> None:
    with pytest.raises(CyclicGraph, match=r"atoms \[1, 2\] depend on each other in a cycle"):
        graph_of(4, {(0, 1), (1, 2), (2, 1), (2, 3)})


def test_merging_makes_one_atom_of_what_waits_for_each_other() -> None:
    graph, atom_of = merged_graph(
        5, [(0, 1), (1, 2), (2, 1), (2, 3), (0, 4)], np.arange(5.0), [Value(0, (1, 2, 4), 3.0, 0.0)]
    )
    assert atom_of.tolist() == [0, 1, 1, 2, 3]
    assert graph.weight.tolist() == [0.0, 3.0, 3.0, 4.0]
    assert graph.edges == {(0, 1), (1, 2), (0, 3)}
    assert graph.values[0].consumers == (1, 3)


@pytest.mark.slow
@settings(max_examples=examples(10), deadline=None)
@given(graphs(11), st.integers(2, 3))
def test_refining_ends_between_the_first_plan_and_the_best_of_all(graph: AtomGraph, devices: int) -> None:
    def problem_of(cuts: np.ndarray) -> Problem:
        space = Space(cuts, graph.values, (), (), (), np.zeros(graph.n))
        kinds = (DeviceKind("", devices, float("inf"), 0.1, 0.05, 0.0),)
        times = graph.weight[None, :]
        return Problem(space, times, np.zeros_like(times), 8, "1f1b", kinds, max_replicas=1)

    cuts = first_cuts(graph, 6)
    solution = solve(problem_of(cuts))
    everything, complete = cuts_worth_looking_at(graph, 5000)
    best = solve(problem_of(everything))
    assert complete
    assert solution is not None
    assert best is not None
    found = refine(
        graph, PartitionResult(problem_of(cuts), solution, False), problem_of, counts=[devices], limit=12, rounds=4
    )
    assert best.objective - 1e-9 <= found.solution.objective <= solution.objective
    assert sum(stage.sum() for stage in found.stages()) == graph.n
