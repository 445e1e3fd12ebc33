"""The choices at every price of memory: against the convex hull of all choices."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_elimination import random_choices, transformer

from autopar.errors import InfeasibleError
from autopar.planner.intra_op.elimination import envelope as module
from autopar.planner.intra_op.elimination.choices import Edge, SelectionProblem, cost, sizes
from autopar.planner.intra_op.elimination.envelope import Direction, Prices, envelope
from autopar.planner.intra_op.elimination.solve import select

Costs = tuple[float, float]  # seconds, bytes
DIRECTIONS: list[Direction] = [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (1.0, 4.0)]


def every_choice(choices: SelectionProblem) -> list[tuple[float, tuple[float, ...]]]:
    """(seconds, bytes of every kind) of all choices that the edges allow."""
    found = []
    for options in itertools.product(*(range(len(own)) for own in choices.seconds)):
        seconds = cost(choices, options)[0]
        if math.isfinite(seconds) and all(options[i] == option for i, option in choices.fixed.items()):
            found.append((seconds, sizes(choices, options)))
    return found


def corners(points: list[Costs]) -> set[Costs]:
    """Of the lower convex hull from the fastest to the smallest (A. Andrew, 1979), without points on its lines."""
    hull: list[Costs] = []
    fewest = min(points)[0]
    smallest = min((size, seconds) for seconds, size in points)
    for seconds, size in sorted(set(points)):
        if seconds == fewest and hull:
            continue  # as fast, with more bytes
        while len(hull) > 1:
            (s0, b0), (s1, b1) = hull[-2:]
            if (b1 - b0) * (seconds - s0) < (size - b0) * (s1 - s0):
                break
            hull.pop()
        hull.append((seconds, size))
        if (size, seconds) == smallest:
            break
    return set(hull)


@st.composite
def small(draw: st.DrawFn) -> SelectionProblem:
    """Any graph of up to 5 variables, with two kinds of bytes."""
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    variable = st.integers(0, len(counts) - 1)
    ends = draw(st.lists(st.tuples(variable, variable), max_size=8))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    choices = random_choices(random, counts, ends, draw(st.integers(1, 3)), draw(st.sampled_from([0.7, 1.0])))
    held = [random.integers(0, 9, (n, 2)).astype(float) for n in counts]
    fixed = {i: draw(st.integers(0, counts[i] - 1)) for i in draw(st.sets(variable, max_size=1))}
    return SelectionProblem(choices.seconds, held, choices.edges, fixed)


@settings(max_examples=examples(60), deadline=None)
@given(small(), st.lists(st.sampled_from(DIRECTIONS), min_size=1, max_size=3, unique=True), st.booleans())
def test_every_corner_of_the_envelope_is_found(
    choices: SelectionProblem, directions: list[Direction], tables_are_small: bool
) -> None:
    every = every_choice(choices)
    entries, module._ENTRIES = module._ENTRIES, 1.0 if tables_are_small else module._ENTRIES
    try:
        if not every:
            with pytest.raises(InfeasibleError):
                envelope(choices, directions)
            return
        found = envelope(choices, directions)
    finally:
        module._ENTRIES = entries
    assert [(p.seconds, p.bytes) for p in found] == [
        (cost(choices, p.options)[0], sizes(choices, p.options)) for p in found
    ]
    for direction in directions:
        wanted = corners([(seconds, float(np.dot(held, direction))) for seconds, held in every])
        assert wanted <= {(p.seconds, float(np.dot(p.bytes, direction))) for p in found}
    for one, other in itertools.permutations(found, 2):
        assert one.seconds < other.seconds or any(a < b for a, b in zip(one.bytes, other.bytes, strict=True))
    assert [p.seconds for p in found] == sorted(p.seconds for p in found)
    assert found[0].seconds == min(seconds for seconds, _ in every)


@pytest.mark.slow
def test_no_choice_within_a_limit_is_faster_than_the_line_between_two_neighbours() -> None:
    """On equal layers, against the exact choice under a limit."""
    choices = transformer(3, options=6, labels=3)
    found = envelope(choices)
    assert len(found) > 4
    for fast, slow in itertools.pairwise(found):
        memory = (fast.bytes[0] + slow.bytes[0]) / 2
        assert select(choices, memory).seconds >= (fast.seconds + slow.seconds) / 2 * (1 - 1e-9)
        assert select(choices, slow.bytes[0]).seconds == pytest.approx(slow.seconds)


def test_fewer_prices_give_points_of_the_same_envelope_those_near_a_limit_first() -> None:
    prices = Prices(transformer(3, options=6, labels=3))
    every = {prices.fastest, *prices.envelopes([(1.0,)])}
    held = sorted(point.bytes[0] for point in every)
    assert len(every) > 6
    assert prices.envelopes([(1.0,)], most=0) == []
    (smallest,) = prices.envelopes([(1.0,)], most=1)
    assert smallest.bytes[0] == held[0]
    for place in (1, len(held) // 2, len(held) - 2):
        limit = (held[place] + held[place + 1]) / 2
        near = {p.bytes[0] for p in prices.envelopes([(1.0,)], most=40, limits={(1.0,): [limit]})}
        assert near <= set(held)
        assert {held[place], held[place + 1]} <= {*near, prices.fastest.bytes[0]}


def test_a_tolerance_leaves_out_what_differs_by_less() -> None:
    prices = Prices(transformer(3, options=6, labels=3))
    every, coarse = ({prices.fastest, *prices.envelopes([(1.0,)], tolerance=part)} for part in (0.0, 0.05))
    assert coarse < every
    for point in every:  # the line between two of the coarse ones is at most so far above
        assert any(c.seconds <= 1.05 * point.seconds or c.bytes[0] <= 1.05 * point.bytes[0] for c in coarse)


def test_little_effort_finds_the_fastest_choice_and_the_same_one_each_time() -> None:
    choices = transformer(3, options=6, labels=3)
    every = envelope(choices)
    assert envelope(choices, effort=0) == envelope(choices, ()) == every[:1]
    assert envelope(choices) == every


def test_all_prices_share_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []
    original = module.planned
    monkeypatch.setattr(module, "planned", lambda *args: calls.append(1) or original(*args))
    assert len(envelope(transformer(3, options=6, labels=3), [(1.0,), (2.0,)])) > 4
    assert len(calls) == 1


def test_choices_that_exclude_each_other_have_no_envelope() -> None:
    differ = np.array([[math.inf, 0.0], [0.0, math.inf]])  # no two colours for three neighbours
    edges = [Edge(i, j, np.arange(2), np.arange(2), differ) for i, j in [(0, 1), (1, 2), (2, 0)]]
    with pytest.raises(InfeasibleError, match="allowed by all edges"):
        envelope(SelectionProblem([np.zeros(2)] * 3, [np.zeros(2)] * 3, edges))
