"""A model whose code asks about the call computes in every call what the plain model does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Plan
from autopar.runtime.signatures import captures

Asks = Callable[["Branching", Tensor, Tensor], bool]


class Branching(nn.Module):
    def __init__(self, asks: Asks) -> None:
        super().__init__()
        self.a, self.b, self.asks = nn.Linear(8, 8), nn.Linear(8, 8), asks

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z: Tensor = self.b(y)
        return z.softmax(-1) if self.asks(self, x, y) else z


ASKED: dict[str, Asks] = {
    "grad mode": lambda model, x, y: torch.is_grad_enabled(),
    "grad mode inside of no_grad": lambda model, x, y: _without_gradients(torch.is_grad_enabled),
    "inference mode": lambda model, x, y: torch.is_inference_mode_enabled(),
    "requires_grad of an input": lambda model, x, y: x.requires_grad,
    "requires_grad of a value": lambda model, x, y: y.requires_grad,
    "requires_grad of a parameter": lambda model, x, y: model.a.weight.requires_grad,
    "grad_fn of a value": lambda model, x, y: y.grad_fn is not None,
    "is_leaf of a value": lambda model, x, y: y.is_leaf,
    "is_contiguous": lambda model, x, y: x.is_contiguous(),
    "stride": lambda model, x, y: x.stride(0) == 1,
    "deterministic algorithms": lambda model, x, y: torch.are_deterministic_algorithms_enabled(),
}


def _without_gradients(asks: Callable[[], bool]) -> bool:
    with torch.no_grad():
        return asks()


def _modes() -> list[AbstractContextManager[object]]:
    return [nullcontext(), torch.no_grad(), torch.inference_mode()]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("asks", ASKED.values(), ids=ASKED)
def test_a_branch_is_taken_as_in_the_plain_model(asks: Asks, order: int) -> None:
    torch.manual_seed(0)
    original = Branching(asks)
    model = copy.deepcopy(original)
    pm = autopar.parallelize(model, ["cpu"] * 2, plan=Plan.from_split({"a": 0, "b": 1}, n_microbatches=2), cache=False)
    x = torch.randn(6, 8)
    inputs = [x, x.clone().requires_grad_(), torch.randn(8, 6).t()][::order]
    for frozen in (False, True):
        for one in (model, original):
            one.requires_grad_(not frozen)
        for mode in _modes()[::order]:
            with mode:
                for value in inputs:
                    torch.testing.assert_close(pm(value), original(value))


def test_deterministic_algorithms_may_change_between_calls() -> None:
    original = Branching(ASKED["deterministic algorithms"])
    pm = autopar.parallelize(
        copy.deepcopy(original), ["cpu"] * 2, plan=Plan.from_split({"a": 0, "b": 1}, n_microbatches=2), cache=False
    )
    x = torch.randn(6, 8)
    try:
        for deterministic in (False, True, False):
            torch.use_deterministic_algorithms(deterministic)
            torch.testing.assert_close(pm(x), original(x))
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_training_step_records_gradients_in_any_mode_and_says_so() -> None:
    original = Branching(ASKED["grad mode"])
    model = copy.deepcopy(original)
    pm = autopar.parallelize(model, ["cpu"] * 2, plan=Plan.from_split({"a": 0, "b": 1}, n_microbatches=2), cache=False)
    x, target = torch.randn(6, 8), torch.randn(6, 8)
    expected = nn.functional.mse_loss(original(x), target)
    expected.backward()
    with torch.no_grad():
        loss = pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(model.a.weight.grad, original.a.weight.grad)


def test_what_nobody_asks_makes_no_new_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = []
    real = captures.examine
    monkeypatch.setattr(captures, "examine", lambda *args, **kwargs: captured.append(1) or real(*args, **kwargs))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    pm = autopar.parallelize(model, ["cpu"] * 2, plan=Plan.from_split({"0": 0, "1": 1}, n_microbatches=2), cache=False)
    for mode in _modes():
        with mode:
            for value in (torch.randn(6, 8), torch.randn(8, 6).t()):
                pm(value)
    assert len(captured) == 1
