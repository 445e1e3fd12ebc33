"""Buffers that a forward assigns anew change as in the original model, whichever module holds them."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from assigned_buffers import USES, WIDTH, Assigning, Use, counted, observed, read_before
from models import assert_same_gradients, gradients
from torch import nn
from torch.nn import functional as F

import autopar
from autopar import Plan

DEVICES = ["cpu", "cpu"]


def chain(use: Use) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Assigning(use), nn.Tanh(), Assigning(use), nn.Linear(WIDTH, 3))


class Twice(nn.Module):
    """Calls one module with a buffer twice, under two names, and assigns a buffer of another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = Assigning(observed), nn.Linear(WIDTH, 3)
        self.again, self.inner = self.first, Assigning(read_before)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.again(self.first(x).tanh())
        self.inner.other = self.inner.other * 0.5 + x.detach().mean(0)
        found: torch.Tensor = self.head(self.inner(x) + self.inner.other)
        return found


class OfTheRoot(nn.Module):
    def __init__(self, use: Use) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.head, self.use = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), use
        self.register_buffer("mean", torch.linspace(0.5, 1, WIDTH))
        self.register_buffer("other", torch.linspace(1, 2, WIDTH))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.use(self, x))
        return found


def assert_trains_like(original: nn.Module, **options: Any) -> None:
    """Training with calls and train steps, and evaluation between and after, give the original's results."""
    model = copy.deepcopy(original)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autopar.AutoparWarning)
        pm = autopar.parallelize(model, DEVICES, cache=False, **options)
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (pm, original)]
        for step in range(4):
            x, target = torch.randn(6, WIDTH), torch.randn(6, 3)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = F.mse_loss(original(x), target)
            loss.backward()
            if step % 2:
                found = pm.train_step(x, target=target, loss_fn=F.mse_loss)
            else:
                found = F.mse_loss(pm(x), target)
                found.backward()
            torch.testing.assert_close(found.detach(), loss.detach())
            assert_same_gradients(gradients(model), gradients(original))
            for optimizer in optimizers:
                optimizer.step()
            if step > 1:
                with torch.no_grad():
                    torch.testing.assert_close(pm.eval()(x), original.eval()(x))
                pm.train()
                original.train()
            for name, buffer in original.named_buffers():
                torch.testing.assert_close(model.get_buffer(name), buffer, msg=name)
            torch.testing.assert_close(pm.state_dict(), original.state_dict())
        pm.close()


@pytest.mark.parametrize("n_microbatches", [1, 2])
@pytest.mark.parametrize("use", USES)
def test_buffers_of_inner_modules_change_as_in_the_original(use: Use, n_microbatches: int) -> None:
    assert_trains_like(chain(use), plan=Plan.from_split({"0": 0, "2": 1, "3": 1}, n_microbatches=n_microbatches))


@pytest.mark.parametrize("use", [counted, read_before])
def test_buffers_of_inner_modules_change_as_in_the_original_under_a_searched_plan(use: Use) -> None:
    assert_trains_like(chain(use), tune=0)


@pytest.mark.parametrize("use", USES)
def test_buffers_of_the_root_change_as_in_the_original(use: Use) -> None:
    assert_trains_like(OfTheRoot(use), plan=Plan.from_split({"linear": 0, "head": 1}, n_microbatches=2))


@pytest.mark.parametrize("split", [{"first": 0, "head": 1}, {"first": 0, "inner": 1}])
def test_a_module_that_is_called_twice_or_whose_buffer_another_assigns_trains_like_the_original(
    split: dict[str, int],
) -> None:
    assert_trains_like(Twice(), plan=Plan.from_split(split, n_microbatches=2))


def test_a_buffer_that_a_plain_call_has_filled_changes_as_in_the_original() -> None:
    def last(m: Any, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = m.linear(x)
        if m.mean is not None:
            y = y + m.mean
        m.mean = y.detach().mean(0)
        return y

    model = chain(last)
    for part in (model[0], model[2]):  # type: ignore[index]
        part.mean = None
    model(torch.randn(6, WIDTH))
    assert_trains_like(model, plan=Plan.from_split({"0": 0, "2": 1, "3": 1}, n_microbatches=2))


def test_equal_layers_that_assign_buffers_train_like_the_original_where_planning_traces_one_of_them() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Assigning(observed) for _ in range(4))
            self.head = nn.Linear(WIDTH, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            found: torch.Tensor = self.head(x)
            return found

    example = {"example_args": (torch.randn(6, WIDTH),), "target": torch.randn(6, 3), "loss_fn": F.mse_loss}
    assert_trains_like(Layers(), tune=0, **example)


def test_the_batch_stays_whole_with_the_warning_of_a_write_in_place() -> None:
    plan = Plan.from_split({"0": 0, "2": 1, "3": 1}, n_microbatches=2)
    pm = autopar.parallelize(chain(counted), DEVICES, plan=plan, cache=False)
    with pytest.warns(
        autopar.AutoparWarning, match=r"module '0' \(.*assigned_buffers.py:\d+\) writes buffer '0\.count', once for"
    ):
        pm(torch.randn(6, WIDTH))
    pm.close()
