"""Losses whose formula, or whose own count of calls, changes between steps: the plain model is the oracle."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar import Plan
from autopar.runtime.signatures import loss_splits

SETTINGS = {"reduction": "mean"}


class Trainer:
    """Its loss is another one from the second epoch on."""

    def __init__(self) -> None:
        self.epoch = self.steps = 0

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        loss = functional.mse_loss(output, target)
        return loss if self.epoch < 1 else loss.sqrt()


class CountingBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.step += 1
        return functional.mse_loss(output, target) * torch.clamp(self.step / 10, max=1)


class CountingModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.step += 1
        return functional.mse_loss(output, target) * min(self.step / 10, 1)


class CountingObject:
    def __init__(self) -> None:
        self.step = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.step += 1
        return functional.mse_loss(output, target) * min(self.step / 10, 1)


def counting_closure() -> Any:
    step = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal step
        step += 1
        return functional.mse_loss(output, target) * min(step / 10, 1)

    return loss


def by_global_dict(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target, reduction=SETTINGS["reduction"])


SHARED = Trainer()


def by_global_object(output: Tensor, target: Tensor) -> Tensor:
    loss = functional.mse_loss(output, target)
    return loss if SHARED.epoch < 1 else loss.sqrt()


def steps(loss_of_step: Callable[[int], tuple[Any, Any]], n: int = 3) -> Any:
    """Train a pipeline and the plain model for a few steps. `loss_of_step`: the losses of both."""
    torch.manual_seed(0)
    original, x, target = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5)), torch.randn(7, 8), torch.randn(7, 5)
    model = copy.deepcopy(original)
    pm = autopar.parallelize(
        model, ["cpu", "cpu"], plan=Plan.from_split({"0": 0, "1": 1}, n_microbatches=3), cache=False
    )
    for step in range(n):
        mine, plain = loss_of_step(step)
        loss = plain(original(x), target)
        loss.backward()
        torch.testing.assert_close(torch.as_tensor(pm.train_step(x, target=target, loss_fn=mine)), loss.detach())
        for parameter, wanted in zip(model.parameters(), original.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, wanted.grad)
    return pm


def test_a_method_whose_formula_depends_on_its_object_is_studied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    studied: list[None] = []
    study = loss_splits.study_loss
    monkeypatch.setattr(loss_splits, "study_loss", lambda *a, **k: studied.append(None) or study(*a, **k))
    trainer = Trainer()

    def of_step(step: int) -> tuple[Any, Any]:
        trainer.epoch, trainer.steps = step // 2, step
        return trainer.loss, trainer.loss

    steps(of_step, 4)
    assert len(studied) == 2  # what the loss does not read makes no difference


def test_the_number_of_a_global_object_may_change() -> None:
    def of_step(step: int) -> tuple[Any, Any]:
        SHARED.epoch = step
        return by_global_object, by_global_object

    steps(of_step)


@pytest.mark.parametrize("in_closure", [False, True])
def test_settings_in_a_dict_may_change(in_closure: bool) -> None:
    own = {"reduction": "mean"}

    def of_step(step: int) -> tuple[Any, Any]:
        own["reduction"] = SETTINGS["reduction"] = ("mean", "sum", "mean")[step]
        loss = by_global_dict
        if in_closure:
            loss = lambda output, target: functional.mse_loss(output, target, reduction=own["reduction"])  # noqa: E731
        return loss, loss

    steps(of_step)


@pytest.mark.parametrize("make", [CountingBuffer, CountingModule, CountingObject, counting_closure])
def test_a_loss_that_counts_its_calls_is_called_once_a_step(make: Callable[[], Any]) -> None:
    mine, plain = make(), make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", autopar.AutoparWarning)
        steps(lambda _: (mine, plain))
    assert any("step'" in str(w.message) and "once for every batch" in str(w.message) for w in caught)
    if hasattr(mine, "step"):
        assert mine.step == plain.step
