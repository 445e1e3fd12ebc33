"""Attributes of any kind, tensors in containers and names of modules that are changed between calls count in the next.

The plain model is the oracle.
"""

from __future__ import annotations

import enum
import functools
import warnings
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu

import autopar
from autopar import AutoparWarning, InputError, Plan

WIDTH = 8


class Mode(enum.Enum):
    PLAIN, DOUBLE = 1, 2


class Factor:
    def __init__(self, by: float) -> None:
        self._by = by

    def __call__(self, x: Tensor) -> Tensor:
        return x * self._by


class Held(nn.Module):
    """Uses what it holds as `k`."""

    def __init__(self, k: Any, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), k
        self._use = use

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self._use(self.k, self.first(x).tanh()))
        return y


def number(k: float) -> Tensor:
    return torch.tensor([float(k)])


CASES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Any, Any]] = {
    "enum": (lambda k, h: h * k.value, Mode.PLAIN, Mode.DOUBLE),
    "partial": (lambda k, h: k(h), *(functools.partial(leaky_relu, negative_slope=s) for s in (0.1, 0.5))),
    "range": (lambda k, h: h * len(k), range(2), range(3)),
    "slice": (lambda k, h: h * h[:, k].sum(1, keepdim=True), slice(0, 2), slice(0, 3)),
    "numpy number": (lambda k, h: h * float(k), np.float32(2), np.float32(3)),
    "numpy array": (lambda k, h: h * float(k.sum()), np.ones(2), np.ones(3)),
    "decimal": (lambda k, h: h * float(k), Decimal(2), Decimal(3)),
    "object": (lambda k, h: k(h), Factor(2.0), Factor(3.0)),
    "deque": (lambda k, h: h * k[-1], deque([2.0]), deque([3.0])),
    "nested lists": (lambda k, h: h * k[0][0], [[2.0]], [[3.0]]),
    "nested namespaces": (lambda k, h: h * k.a.b, *(SimpleNamespace(a=SimpleNamespace(b=b)) for b in (2.0, 3.0))),
    "tensor in a list": (lambda k, h: h * k[0], [number(2)], [number(3)]),
    "tensor in a namespace": (lambda k, h: h * k.a, SimpleNamespace(a=number(2)), SimpleNamespace(a=number(3))),
    "shape of a tensor": (lambda k, h: h * len(k), torch.ones(2), torch.ones(3)),
    "dtype of a tensor": (lambda k, h: h * k.itemsize, torch.ones(2), torch.ones(2).double()),
}


@pytest.mark.parametrize("name", CASES)
def test_another_object_in_its_place_counts(name: str) -> None:
    use, before, after = CASES[name]
    model, x = Held(before, use), torch.randn(4, WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pm = autopar.parallelize(model, ["cpu"], tune=0)
        torch.testing.assert_close(pm(x), model(x))
        model.k = after
        torch.testing.assert_close(pm(x), model(x))


def test_tensors_that_change_places_in_a_list_count() -> None:
    model, x = Held([number(2), number(3)], lambda k, h: h * k[0] + k[1]), torch.randn(4, WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pm = autopar.parallelize(model, ["cpu"], tune=0)
        pm(x)
        model.k.reverse()
        torch.testing.assert_close(pm(x), model(x))
        for value in range(4, 9):  # what is gone leaves its address to what comes
            model.k.clear()
            model.k += [number(value), number(value + 1)]
            torch.testing.assert_close(pm(x), model(x))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})
        self.scale = nn.Parameter(torch.full((), 2.0))
        self.register_parameter("shift", None)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layers["a"](x)
        return h * self.scale if self.scale is not None else h + self.shift


def test_modules_and_parameters_under_other_names_count() -> None:
    model, x = Named(), torch.randn(4, WIDTH)
    pm = autopar.parallelize(model, ["cpu"], tune=0)
    pm(x)
    a, b = model.layers["a"], model.layers["b"]
    model.layers.clear()
    model.layers["b"] = a
    model.layers["a"] = b
    torch.testing.assert_close(pm(x), model(x))
    model.shift, model.scale = model.scale, None
    torch.testing.assert_close(pm(x), model(x))


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, **features: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        for place, feature in enumerate(features.values()):
            h = h + (place + 1) * feature
        return h


def test_keywords_reach_the_forward_in_their_order() -> None:
    model, (x, a, b) = Features(), torch.randn(3, 4, WIDTH)
    pm = autopar.parallelize(model, ["cpu"], tune=0)
    torch.testing.assert_close(pm(x, b=b, a=a), model(x, b=b, a=a))


def test_a_warning_says_that_a_dtype_is_that_without_autocast() -> None:
    model, x = Held(None, lambda _, h: h.float().to(h.dtype)), torch.randn(4, WIDTH)
    plan = Plan.from_split({"first": 0, "last": 1}, n_microbatches=2)
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pm(x)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.warns(AutoparWarning, match="asks for the dtype"):
        pm(x)


class Cautious(nn.Module):
    """Decides by values while it trains, so that it runs uncaptured then."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and x.sum() > 1e9 else x * self.scale


def test_what_an_uncaptured_module_holds_counts_where_it_is_captured() -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Cautious(), nn.Linear(WIDTH, WIDTH)), torch.randn(4, WIDTH)
    plan = Plan.from_split({"0": 0, "2": 1}, n_microbatches=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan)
        for training in (True, False, True, False):
            pm.train(training)
            for scale in (3.0, 5.0):
                model[1].scale = scale
                torch.testing.assert_close(pm(x), model(x))


@pytest.mark.parametrize("name", ["scale", "note"])
def test_a_pre_hook_that_sets_what_forward_reads_is_refused(name: str) -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Cautious().eval(), nn.Linear(WIDTH, WIDTH)), torch.randn(4, WIDTH)
    model.eval()
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=Plan.from_split({"0": 0, "2": 1}, n_microbatches=1))
    pm(x)
    model[1].register_forward_pre_hook(lambda module, _: setattr(module, name, getattr(module, name, 1.0) + 1.0))
    if name == "scale":
        with pytest.raises(InputError, match="sets its attribute 'scale', which the module's forward reads"):
            pm(x)
    else:
        torch.testing.assert_close(pm(x), model(x))


def test_another_class_of_a_module_counts_in_the_next_call() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), torch.randn(4, WIDTH)
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=Plan.from_split({"0": 0, "2": 1}, n_microbatches=2))
    for cls in (nn.Tanh, nn.Sigmoid, nn.Tanh):
        model[1].__class__ = cls
        torch.testing.assert_close(pm(x), model(x))
