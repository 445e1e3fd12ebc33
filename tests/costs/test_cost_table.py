"""Cost tables between and beyond the measured micro-batch sizes, and which sizes are measured."""

from collections import defaultdict
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import autopar
from autopar.costs import measured
from autopar.costs.cost_table import CostTable
from autopar.costs.measured_tables import tables_of
from cost_models import parse_devices
from cost_models.hardware.devices import usable_cores
from cost_models.measuring.operator_times import GraphTimes

rows = st.lists(st.integers(1, 512), min_size=1, max_size=5, unique=True).map(sorted).map(tuple)
amounts = st.floats(0, 1)


def table_of(rows: tuple[int, ...], fixed: float, per_row: float) -> CostTable:
    """Operators whose seconds are a line: the forward of two, twice as much in the backward, and a loss."""
    line = fixed + per_row * np.array(rows, dtype=float)[:, None]
    return CostTable("a kind", 1, ("a", "b"), rows, line * [1, 3], line * [2, 6], line * [1, 2])


@given(rows, amounts, amounts, st.integers(1, 2000))
def test_costs_on_a_line_are_met_exactly_at_any_size(
    rows: tuple[int, ...], fixed: float, per_row: float, at: int
) -> None:
    fixed = fixed if len(rows) > 1 else 0.0  # one size tells no fixed part: costs are proportional to the samples
    forward, backward, loss = table_of(rows, fixed, per_row).at(at)
    expected = fixed + per_row * at
    assert forward == pytest.approx(np.array([1, 3]) * expected, abs=1e-9)
    assert backward == pytest.approx(np.array([2, 6]) * expected, abs=1e-9)
    assert loss == pytest.approx((expected, 2 * expected), abs=1e-9)


@given(st.data(), rows, st.integers(1, 2000), st.booleans())
def test_sizes_beyond_the_measured_ones_are_not_faster_than_these(
    data: st.DataObject, rows: tuple[int, ...], at: int, accumulates: bool
) -> None:
    """Fewer samples find more in the caches, and noise does the rest: a line through the sizes may fall below zero."""
    seconds = st.lists(amounts, min_size=2, max_size=2)
    forward, backward, loss = (
        np.array(data.draw(st.lists(seconds, min_size=len(rows), max_size=len(rows)))) for _ in range(3)
    )
    added = np.array(data.draw(seconds)) if accumulates else None
    table = CostTable("a kind", 1, ("a", "b"), rows, forward, backward, loss, accumulation=added)
    fixed = np.zeros(2) if added is None else np.minimum(added, backward.min(axis=0))
    found = table.at(at)
    for values, mine, once in zip((forward, backward, loss), map(np.array, found), (0, fixed, 0), strict=True):
        assert (mine >= once).all()
        if at < rows[0]:
            assert (mine - once >= (values[0] - once) * at / rows[0] - 1e-12).all()
        if at > rows[-1]:
            assert (mine >= values[-1] - 1e-12).all()
        if at in rows:
            assert mine == pytest.approx(values[rows.index(at)])


@pytest.mark.parametrize("wrong", [(), (4, 4), (8, 4), (0, 4)])
def test_a_table_needs_ascending_sizes(wrong: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascending micro-batch sizes"):
        table_of(wrong, 0.0, 1.0)


@given(st.integers(1, 4), st.integers(0, 100), st.booleans(), st.none() | st.integers(1, 100))
@example(n_devices=2, batch=6, splittable=True, n_microbatches=1)
def test_every_size_is_measured_once(n_devices: int, batch: int, splittable: bool, n_microbatches: int | None) -> None:
    """For each number of busy workers, the sizes differ, so that a line can be drawn between any two of them."""
    if n_microbatches is not None:
        n_microbatches = min(n_microbatches, max(batch, 1))
    program: Any = SimpleNamespace(batch_size=batch)
    batching: Any = SimpleNamespace(splittable=splittable, least_rows=1)
    jobs = measured._sizes(parse_devices(["cpu"] * n_devices), program, batching, n_microbatches)
    by_workers: dict[int, list[int]] = defaultdict(list)
    for workers, size in jobs:
        by_workers[workers].append(size)
    assert all(len(set(sizes)) == len(sizes) for sizes in by_workers.values())
    assert all(1 <= size <= max(batch, 1) for sizes in by_workers.values() for size in sizes)
    assert max(batch, 1) in by_workers[1]
    if splittable and n_microbatches is not None and batch > 1:
        size, busy = -(-batch // n_microbatches), min(n_devices, usable_cores())
        assert min(by_workers[busy]) <= size, "no size that is asked for is beyond those that are measured"
        if size >= batch // 16:
            assert jobs == measured._sizes(parse_devices(["cpu"] * n_devices), program, batching, None)


class Block(nn.Module):
    """An inverted residual as MobileNetV2 has it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 2 * channels
        self.layers = nn.Sequential(
            *(nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()),
            *(nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()),
            *(nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


@pytest.mark.slow
def test_batch_norm_in_training_runs_as_one_micro_batch() -> None:
    """Outputs, gradients and running statistics are those of the plain model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), Block(4), Block(4), nn.Flatten(), nn.Linear(4 * 36, 5)).train()
    plain, x = deepcopy(model), torch.randn(6, 3, 8, 8)
    pipelined = autopar.parallelize(model, ["cpu", "cpu"], n_microbatches=1, example_args=(x,))
    expected, y = plain(x), pipelined(x)
    torch.testing.assert_close(y, expected)
    expected.square().mean().backward()
    y.square().mean().backward()
    for (name, truth), mine in zip(plain.named_parameters(), pipelined.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, truth.grad, msg=name)
    buffers = dict(pipelined.named_buffers())
    for name, value in plain.named_buffers():
        torch.testing.assert_close(buffers[name], value, msg=name)


def test_accumulation_is_that_of_the_largest_size_and_no_more_than_its_backward() -> None:
    """Adding up gradients takes as long whatever the samples; measured more or less, it stays part of a backward."""
    (device,) = parse_devices(["cpu"])
    times = [
        GraphTimes(rows, 1, {"a": 1.0, "b": 1.0}, {"a": 2.0 * rows, "b": least}, accumulation={"a": a, "b": 3.0})
        for rows, a, least in ((1, 0.5, 2.0), (2, 0.7, 1.5), (4, 0.9, 2.5))
    ]
    (table,) = tables_of([(device, one) for one in times])
    assert table.accumulation is not None
    assert table.accumulation.tolist() == [0.9, 2.5]
    assert table.slower(2.0, 2).accumulation == pytest.approx(2 * table.accumulation)
    (unknown,) = tables_of([(device, GraphTimes(1, 1, {"a": 1.0}, {"a": 1.0}))])
    assert unknown.accumulation is None
