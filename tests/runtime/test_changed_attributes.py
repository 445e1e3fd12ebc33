"""Attributes that the caller changes between calls count in the next; those that the model's code changes are named.

The plain model is the oracle.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from models import assert_same_gradients
from torch import Tensor, nn
from torch.nn.utils import prune

import autopar
from autopar import Plan
from autopar.runtime.signatures import captures

DEVICES = ["cpu", "cpu"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(8, 8), nn.Dropout(0.0), nn.Linear(8, 5)
        self.temperature, self.act, self.table = 1.0, torch.tanh, {"scale": 2}
        self.register_buffer("mask", None)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.drop(self.first(x)) / self.temperature) * self.table["scale"]
        result: Tensor = self.last(hidden if self.mask is None else hidden * self.mask)
        return result


class Collecting(nn.Module):
    """Keeps an auxiliary loss of each call in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 5)
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        self.losses.append(hidden.square().mean())
        result: Tensor = self.last(hidden)
        return result


def pipelined(model: nn.Module, **options: Any) -> Any:
    plan = Plan.from_split({"first": 0, "last": 1}, n_microbatches=3)
    return autopar.parallelize(model, DEVICES, plan=plan, cache=False, **options)


CHANGES: dict[str, Callable[[Model], object]] = {
    "temperature": lambda m: setattr(m, "temperature", 0.5),
    "drop.p": lambda m: setattr(m.drop, "p", 1.0),
    "act": lambda m: setattr(m, "act", torch.relu),
    "table": lambda m: m.table.update(scale=3),
    "first.forward": lambda m: setattr(m.first, "forward", torch.sin),
}


@pytest.mark.slow
@pytest.mark.parametrize("path", CHANGES)
def test_a_change_between_calls_counts_and_is_named(path: str) -> None:
    model, x = Model(), torch.randn(7, 8)
    pm = pipelined(model)
    before = pm(x)
    CHANGES[path](model)
    with pytest.warns(autopar.AutoparWarning, match=f"'{path}' has changed since the model was captured"):
        after = pm(x)
    torch.testing.assert_close(after, model(x))
    assert not torch.equal(before, after)
    with warnings.catch_warnings():
        warnings.simplefilter("error", autopar.AutoparWarning)
        torch.testing.assert_close(pm(x), model(x))


def test_a_buffer_where_there_was_none_counts() -> None:
    model, x = Model(), torch.randn(7, 8)
    pm = pipelined(model)
    pm(x)
    model.mask = torch.arange(8.0)
    torch.testing.assert_close(pm(x), model(x))


def test_gradients_are_those_of_a_model_whose_pruning_has_ended() -> None:
    model, x = Model(), torch.randn(7, 8)
    original = copy.deepcopy(model)
    for one in (model, original):
        prune.l1_unstructured(one.first, "weight", 0.3)
    pm = pipelined(model)
    pm(x)
    for one, called in ((model, pm), (original, original)):
        prune.remove(one.first, "weight")
        called(x).square().sum().backward()
    mine, wanted = ({n: p.grad for n, p in one.named_parameters()} for one in (model, original))
    assert_same_gradients(mine, wanted)


def test_what_the_models_code_keeps_in_a_list_is_named_and_left_as_it_was() -> None:
    model, x = Collecting(), torch.randn(7, 8)
    pm = pipelined(model)
    with pytest.warns(autopar.AutoparWarning, match="forward assigns losses"):
        pm(x)
    assert model.losses == []
    with warnings.catch_warnings():
        warnings.simplefilter("error", autopar.AutoparWarning)
        for _ in range(3):
            torch.testing.assert_close(pm(x), model(x))  # the plain model's list grows, which is no change


@pytest.mark.slow
def test_a_model_that_counts_its_calls_is_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(Model):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    captured: list[object] = []
    examine = captures.examine
    monkeypatch.setattr(captures, "examine", lambda *a, **k: captured.append(None) or examine(*a, **k))
    model, x = Counting(), torch.randn(6, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autopar.AutoparWarning)
        pm = autopar.parallelize(model, ["cpu"], n_microbatches=1, tune=0, cache=False)
        pm(x)
        captured.clear()
        calls = model.calls
        for _ in range(3):
            pm(x)
    assert not captured
    assert model.calls == calls + 3  # the plan runs the model itself


class Switched(nn.Module):
    """Computes with attributes that users set on the model."""

    layers_used: Sequence[int] = (0,)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)
        self.act: Callable[[Tensor], Tensor] = torch.tanh
        self.scale = 1.0

    @property
    def doubled(self) -> float:
        return 2 * self.scale

    @doubled.setter
    def doubled(self, value: float) -> None:
        self.scale = value / 2

    def set_scale(self, value: float) -> None:
        self.scale = value

    def forward(self, x: Tensor) -> Tensor:
        for _ in self.layers_used:
            x = self.act(self.first(x))
        return self.last(x) * self.scale


@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
def test_attributes_set_on_a_pipelined_module_are_set_on_its_model() -> None:
    torch.manual_seed(0)
    original, x = Switched(), torch.randn(4, 6)
    model = copy.deepcopy(original)
    plan = Plan.from_split({"first": 0, "last": 1}, n_microbatches=2)
    pm: Any = autopar.parallelize(model, ["cpu", "cpu"], plan=plan, cache=False)
    for change in (
        lambda m: setattr(m, "scale", 3.0),
        lambda m: setattr(m, "act", torch.relu),
        lambda m: setattr(m, "layers_used", [0, 1]),
        lambda m: setattr(m, "doubled", 5.0),
        lambda m: m.set_scale(0.5),
        lambda m: delattr(m, "layers_used"),
        lambda m: setattr(m, "last", copy.deepcopy(m.first)),
    ):
        change(original)
        change(pm)
        torch.testing.assert_close(pm(x), original(x))
    assert pm.scale == model.scale == 0.5
    pm.last_profile = pm.remembered = None  # its own, and what others remember about it
    assert not {"last_profile", "remembered"} & set(vars(model))
    with pytest.raises(AttributeError, match="no_such"):
        del pm.no_such
