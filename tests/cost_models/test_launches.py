"""Launches: kernels and launches along one stream, against a host and a device that are played through."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import host_costs, pass_seconds
from cost_models.kernels.launches import (
    HOST_COSTS,
    MODES,
    MODULE_CALL,
    SOURCES,
    Clocks,
    HostCosts,
    launches_of,
    lay,
    operators_seconds,
    overlapped_seconds,
    waits,
)

seconds = st.floats(0, 1)
steps = st.lists(st.tuples(seconds, seconds), max_size=12)
modes = st.sampled_from(MODES)


@given(steps, seconds)
def test_the_last_kernel_ends_where_the_longest_way_to_it_does(pairs: list[tuple[float, float]], queued: float) -> None:
    """Oracle: every way follows launches up to some kernel and kernels from there on, or starts at the queued work."""
    kernels, launches = [k for k, _ in pairs], [launch for _, launch in pairs]
    ways = [sum(launches[: i + 1]) + sum(kernels[i:]) for i in range(len(pairs))]
    expected = max(sum(launches), queued + sum(kernels), *ways, 0.0)
    assert pass_seconds(kernels, launches, queued=queued) == pytest.approx(expected)


@given(steps, steps, seconds)
def test_a_pass_may_be_laid_in_parts(
    first: list[tuple[float, float]], second: list[tuple[float, float]], queued: float
) -> None:
    def columns(pairs: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
        return [k for k, _ in pairs], [launch for _, launch in pairs]

    whole = lay(*columns(first + second), Clocks(0.0, queued))
    parts = lay(*columns(second), lay(*columns(first), Clocks(0.0, queued)))
    assert (whole.host, whole.device) == pytest.approx((parts.host, parts.device))


@given(steps, seconds, st.integers(0, 11), seconds)
def test_longer_kernels_and_launches_never_make_a_pass_shorter(
    pairs: list[tuple[float, float]], queued: float, place: int, more: float
) -> None:
    kernels, launches = [k for k, _ in pairs], [launch for _, launch in pairs]
    before = pass_seconds(kernels, launches, queued=queued)
    assert before >= max(sum(kernels) + queued, sum(launches)) * (1 - 1e-12)
    assert before <= queued + sum(kernels) + sum(launches) + 1e-12
    assert pass_seconds(kernels, launches, queued=queued + more) >= before * (1 - 1e-12)
    if place < len(pairs):
        for slower in (kernels, launches):
            slower[place] += more
            assert pass_seconds(kernels, launches, queued=queued) >= before * (1 - 1e-12)


def test_large_kernels_hide_launches_and_small_ones_wait_for_them_in_one_pass() -> None:
    small, large, launch = 1.0, 100.0, 10.0
    assert pass_seconds([large] * 4, [launch] * 4) == launch + 4 * large
    assert pass_seconds([small] * 4, [launch] * 4) == 4 * launch + small
    # Half of each: neither the sum of the kernels nor that of the launches, whose larger is 404 here.
    assert pass_seconds([small] * 4 + [large] * 4, [launch] * 8) == 5 * launch + 4 * large
    assert pass_seconds([large] * 4 + [small] * 4, [launch] * 8) == launch + 4 * large + 4 * small


@given(st.lists(st.integers(0, 4), max_size=8), modes, st.booleans())
def test_every_kernel_has_one_launch_and_every_operator_its_time(counts: list[int], mode: str, backward: bool) -> None:
    costs = host_costs(mode)
    launches = launches_of(counts, costs, backward=backward)
    assert len(launches) == sum(counts)
    if counts and counts[-1]:
        each = costs.node if backward else costs.operator
        assert sum(launches) == pytest.approx(costs.start + len(counts) * each + sum(counts) * costs.kernel)


@given(st.lists(st.lists(st.floats(1e-7, 1e-3), min_size=1, max_size=3), min_size=1, max_size=60), st.booleans())
def test_a_cuda_graph_leaves_the_kernels_alone(operators: list[list[float]], backward: bool) -> None:
    eager, compiled, graphs = (
        operators_seconds(operators, host_costs(mode), backward=backward)
        for mode in ("eager", "compiled", "cuda-graphs")
    )
    gaps = sum(map(len, operators)) * HOST_COSTS["cuda-graphs"].gap
    assert graphs == pytest.approx(HOST_COSTS["cuda-graphs"].start + gaps + sum(map(sum, operators)))
    assert graphs <= min(eager, compiled)


def test_small_operators_take_less_time_compiled_and_large_ones_hide_their_launches() -> None:
    small, large = [[1e-6]] * 100, [[1e-3]] * 100
    eager, compiled, graphs = (
        operators_seconds(small, host_costs(mode)) for mode in ("eager", "compiled", "cuda-graphs")
    )
    assert graphs < compiled < eager < operators_seconds(small, host_costs("eager-functions"))
    assert eager > 4 * graphs
    alone = sum(map(sum, large))
    assert all(operators_seconds(large, host_costs(mode)) == pytest.approx(alone, rel=0.01) for mode in MODES)


@given(st.lists(st.lists(st.floats(1e-7, 1e-3), max_size=3), max_size=20), modes, st.floats(1, 10))
def test_a_slower_host_never_makes_a_pass_shorter(operators: list[list[float]], mode: str, factor: float) -> None:
    costs = host_costs(mode)
    less, more = (operators_seconds(operators, one) for one in (costs, costs.scaled(factor)))
    assert less <= more * (1 + 1e-12)
    assert costs.scaled(factor).gap == costs.gap


def test_python_between_small_operators_makes_a_pass_longer_and_between_large_ones_not() -> None:
    eager, python = host_costs("eager"), [100 * MODULE_CALL] * 50
    small, large = [[1e-6], []] * 25, [[1e-3], []] * 25
    assert operators_seconds(small, eager, python=python) == pytest.approx(
        operators_seconds(small, eager) + sum(python[:-1]), rel=1e-9
    )
    assert operators_seconds(large, eager, python=python) < operators_seconds(large, eager) + 2 * python[0]


@pytest.mark.parametrize("mode", MODES)
def test_every_constant_has_a_source(mode: str) -> None:
    for field in fields(HostCosts):
        assert SOURCES.get(f"{mode}.{field.name}", SOURCES.get(field.name))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'jit'.*eager, compiled, cuda-graphs"):
        host_costs("jit")
    with pytest.raises(ValueError, match="one launch"):
        pass_seconds([1.0], [])
    with pytest.raises(ValueError, match="1 for 2 operators"):
        launches_of([1, 1], host_costs("eager"), python=[0.0])
    with pytest.raises(ValueError, match="0 seconds or more"):
        pass_seconds([1.0], [-1.0])
    with pytest.raises(ValueError, match="positive factor"):
        host_costs("eager").scaled(0)


@given(steps, seconds)
def test_the_longer_of_both_sums_is_a_bound_that_parts_of_a_pass_share(
    pairs: list[tuple[float, float]], start: float
) -> None:
    """`lay` is between the longer sum and both sums; and no pass is longer than its parts one after another."""
    kernels, launches = [k for k, _ in pairs], [launch for _, launch in pairs]
    found = overlapped_seconds(sum(kernels), sum(launches), start)
    begun = [launch + start * (place == 0) for place, launch in enumerate(launches)]
    exact = pass_seconds(kernels, begun)
    if sum(kernels) > 1e-6:
        assert found <= exact * (1 + 1e-9)
        assert exact <= 2 * found * (1 + 1e-9)
    halves = [slice(None, len(pairs) // 2), slice(len(pairs) // 2, None)]
    parts = [overlapped_seconds(sum(kernels[half]), sum(launches[half]), start) for half in halves]
    assert found <= sum(parts) * (1 + 1e-9)


def test_a_pass_without_kernels_does_not_start() -> None:
    arrays = overlapped_seconds(np.array([0.0, 1.0, 3.0]), np.array([0.0, 1.0, 1.0]), 0.5)
    assert arrays.tolist() == [0.0, 1.5, 3.0]
    assert overlapped_seconds(0.0, 0.0, 0.5) == 0.0


@given(
    parts=st.lists(
        st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=6), min_size=1, max_size=5
    )
)
def test_with_its_waits_each_part_takes_what_it_takes_alone(parts: list[list[tuple[float, float]]]) -> None:
    every = [pair for part in parts for pair in part]
    kernels, launches = (np.array(column) for column in zip(*every, strict=True))
    starts = np.array([place == 0 for part in parts for place in range(len(part))])
    found = waits(kernels, launches, starts)
    assert (found >= 0).all()
    ends = np.cumsum([len(part) for part in parts])
    for part, end in zip(parts, ends, strict=True):
        inside = slice(end - len(part), end)
        alone = lay([kernel for kernel, _ in part], [launch for _, launch in part]).device
        assert (kernels + found)[inside].sum() == pytest.approx(alone)
