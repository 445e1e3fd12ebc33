"""batch_norm="deferred": running statistics are those of whole batches, whatever micro-batches they came in."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from losses import in_worker
from models import assert_same_gradients, gradients
from torch import nn

import autopar
from autopar import AutoparWarning, Cluster, InputError, PipelinedModule, Plan
from autopar.lower.deferred_batch_norm import merged


class Convolutions(nn.Module):
    """The norms stand before anything else, so that what they see of a batch is the same in the original: the second
    has no scale, the third another momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.BatchNorm2d(3), nn.BatchNorm1d(5, affine=False)
        self.c = nn.BatchNorm2d(3, momentum=0.3, eps=1e-3)
        self.left, self.right = nn.Linear(3, 4), nn.Linear(5, 4)

    def forward(self, image: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        left = self.left((self.a(image) + self.c(2 * image)).mean((2, 3)))
        return left + self.right(self.b(row))


def inputs(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return 5 + 2 * torch.randn(rows, 3, 4, 4), torch.randn(rows, 5) - 3


def pipelined(model: nn.Module, n_microbatches: int, **more: Any) -> PipelinedModule:
    devices = ["cpu:0", ("cpu:1", "cpu:2")]
    plan = Plan.from_split({"a": 0, "b": 1, "c": 1}, n_microbatches=n_microbatches, devices=devices, **more)
    return autopar.parallelize(model, ["cpu"] * 3, plan=plan, batch_norm="deferred")


def statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_same_statistics(model: nn.Module, original: nn.Module) -> None:
    torch.testing.assert_close(statistics(model), statistics(original), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["call", "call without grad", "train_step"])
@pytest.mark.parametrize("sizes", [(6, 6), (7, 5, 11), (3, 2)])
def test_running_statistics_are_the_originals_over_uneven_batches_and_micro_batches(
    way: str, sizes: tuple[int, ...]
) -> None:
    original = Convolutions()
    model = copy.deepcopy(original)
    pm = pipelined(model, 3)
    for rows in sizes:
        batch = inputs(rows)
        original(*batch)
        if way == "train_step":
            pm.train_step(*batch, target=torch.zeros(rows, 4), loss_fn=nn.functional.mse_loss)
        else:
            with torch.set_grad_enabled(way == "call"):
                pm(*batch)
    assert_same_statistics(model, original)
    assert model.a.num_batches_tracked == len(sizes)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("recompute", [(), ("a",)])
def test_every_schedule_and_recomputation_move_them_once(schedule: str, recompute: tuple[str, ...]) -> None:
    original = Convolutions()
    model = copy.deepcopy(original)
    stages = [0] if recompute else []
    pm = pipelined(model, 4, schedule=schedule, recompute=stages)
    batch = inputs(9)
    original(*batch)
    pm.train_step(*batch, target=torch.zeros(9, 4), loss_fn=nn.functional.mse_loss)
    assert_same_statistics(model, original)


def test_outputs_and_gradients_are_those_of_each_micro_batch_by_itself() -> None:
    model = Convolutions()
    original = copy.deepcopy(model)
    batch, target = inputs(6), torch.randn(6, 4)
    pm = pipelined(model, 3)
    pm.train_step(*batch, target=target, loss_fn=nn.functional.mse_loss)
    for image, row, wanted in zip(*(t.split(2) for t in (*batch, target)), strict=True):
        (nn.functional.mse_loss(original(image, row), wanted) / 3).backward()
    assert_same_gradients(gradients(model), gradients(original))


def test_a_step_that_fails_moves_no_statistics() -> None:
    model = Convolutions()
    before = statistics(model)
    pm = pipelined(model, 3)

    def refuse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if in_worker():
            raise ValueError("not today")
        return F.mse_loss(output, target)

    with pytest.raises(ValueError, match="not today"):
        pm.train_step(*inputs(6), target=torch.zeros(6, 4), loss_fn=refuse)
    assert all(torch.equal(before[name], buffer) for name, buffer in statistics(model).items())


def test_a_norm_called_twice_moves_twice_as_the_original_does() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.last = nn.BatchNorm1d(4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.norm(x) + self.norm(x * x))

    model = Twice()
    original = copy.deepcopy(model)
    plan = Plan.from_split({"norm": 0, "last": 1}, n_microbatches=2)
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan, batch_norm="deferred")
    x = torch.randn(8, 4)
    original(x)
    pm(x)
    assert_same_statistics(model, original)


@pytest.mark.parametrize("affine", [True, False])
def test_a_cumulative_mean_over_batches_is_one(affine: bool) -> None:
    """momentum=None: what torch.export refuses to capture."""
    model = nn.Sequential(nn.BatchNorm1d(4, momentum=None, affine=affine), nn.Linear(4, 2))
    original = copy.deepcopy(model)
    plan = Plan.from_split({"0": 0, "1": 1}, n_microbatches=2)
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan, batch_norm="deferred")
    for rows in (8, 5, 7):
        x = torch.randn(rows, 4)
        original(x)
        pm(x).sum().backward()
    assert_same_statistics(model, original)
    assert not affine or model[0].weight.grad is not None


@pytest.mark.slow
def test_a_cumulative_mean_is_planned_at_hand_ahead_and_by_hand() -> None:
    """torch refuses one value per channel, also where the graph does not record that a sample has no more."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 2))
    original, x, y = copy.deepcopy(model), torch.randn(8, 4), torch.randn(8, 2)
    call = {"example_args": (x,), "target": y, "loss_fn": nn.functional.mse_loss}
    found = autopar.parallelize(copy.deepcopy(model), ["cpu", "cpu"], **call).plan
    assert found is not None
    assert found.n_microbatches <= 4
    assert autopar.plan(model, Cluster.preset("2xH100"), **call).predicted_step_time
    plan = Plan.by_hand(model, ["cpu", "cpu"], pipeline=2, micro_batch=8, example_args=(x,))
    assert len(plan.stages) == 2
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan)
    torch.testing.assert_close(pm(x), original(x))
    assert_same_statistics(model, original)


def test_evaluation_uses_and_does_not_move_them() -> None:
    model = Convolutions()
    pm = pipelined(model, 2)
    batch = inputs(6)
    pm(*batch)
    pm.eval()
    before = statistics(model)
    torch.testing.assert_close(pm(*batch), copy.deepcopy(model)(*batch))
    assert all(torch.equal(before[name], buffer) for name, buffer in statistics(model).items())


def test_it_is_not_warned_of_and_the_warning_of_the_default_names_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", AutoparWarning)
        pipelined(Convolutions(), 2)(*inputs(6))
    plan = Plan.from_split({"a": 0, "b": 1, "c": 1}, n_microbatches=2)
    with pytest.warns(AutoparWarning, match="batch_norm='deferred'"):
        autopar.parallelize(Convolutions(), ["cpu", "cpu"], plan=plan)(*inputs(6))
    with pytest.raises(InputError, match="per-microbatch, deferred, exact"):
        autopar.parallelize(Convolutions(), ["cpu"], batch_norm="late")


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 2**31))
def test_moments_of_parts_merge_to_those_of_all(sizes: list[int], seed: int) -> None:
    values = 100 + torch.randn(sum(sizes), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    parts = [(len(p), p.mean(0), p.var(0) if len(p) > 1 else torch.full((3,), torch.nan)) for p in values.split(sizes)]
    n, mean, var = merged(parts)
    assert n == len(values)
    torch.testing.assert_close(mean, values.mean(0))
    if n > 1:
        torch.testing.assert_close(var, values.var(0))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_a_batch_is_counted_once_whichever_stage_has_the_counting_operator(stage: int) -> None:
    original = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    model, x = copy.deepcopy(original), torch.randn(8, 4)
    whole = Plan.from_split({"0": 0, "1": 0, "2": 1, "3": 1}, n_microbatches=4)
    priced = autopar.plan(model, ["cpu", "cpu"], example_args=(x,), plan=whole, batch_norm="deferred", cache=False)
    counter = "1/add_#0"
    assert any(counter in s.operators for s in priced.stages)
    operators = [tuple(key for key in s.operators if key != counter) for s in priced.stages]
    operators[stage] += (counter,)
    norm_on_last = [tuple(k for k in operators[0] if not k.startswith("1/b")), ("1/batch_norm#0", *operators[1])]
    stages = [dataclasses.replace(s, operators=o) for s, o in zip(priced.stages, norm_on_last, strict=True)]
    plan = dataclasses.replace(priced, stages=tuple(stages), split=())
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan, batch_norm="deferred")
    for _ in range(3):
        pm(x)
        original(x)
    assert int(model[1].num_batches_tracked) == 3  # type: ignore[arg-type]
    assert int(original[1].num_batches_tracked) == 3  # type: ignore[arg-type]
