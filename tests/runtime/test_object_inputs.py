"""Inputs that are objects with tensors: dataclasses are taken apart, others are refused, because a graph would keep the
tensors of the first call."""

from __future__ import annotations

import copy
import functools
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import autopar
from autopar import InputError, Plan

WIDTH = 8


@dataclass
class Batch:
    a: torch.Tensor
    b: torch.Tensor
    scale: float = 1.0


@dataclass
class Inner:
    b: torch.Tensor


@dataclass(eq=False)
class Nested:
    a: torch.Tensor
    rest: list[Inner] = field(default_factory=list)

    @property
    def b(self) -> torch.Tensor:
        return self.rest[0].b


class Plain:
    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a, self.b = a, b


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a, self.b = a, b


class Private:
    __slots__ = ("__a", "b")

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.__a, self.b = a, b

    @property
    def a(self) -> torch.Tensor:
        return self.__a


@dataclass
class Own(Batch):
    def __init__(self, both: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__(*both)


class Inherits(Batch):
    def __init__(self, both: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__(*both)


@dataclass
class Extended(Batch):
    """Its objects get an attribute that is no field."""

    more: ClassVar[Any] = 0.0


def extended(a: torch.Tensor, b: torch.Tensor) -> Extended:
    batch = Extended(a, b)
    batch.more = a + 1  # type: ignore[misc]
    return batch


def chain(a: torch.Tensor, _: torch.Tensor) -> Any:
    last: Any = Plain(a, a)
    for _ in range(3000):
        last = SimpleNamespace(before=last)
    return last


def bound(a: torch.Tensor, b: torch.Tensor) -> Any:
    class Adds(Plain):
        def add(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.a

    return Adds(a, b).add


class Named(dict[str, torch.Tensor]):
    @property
    def a(self) -> torch.Tensor:
        return self["a"]

    @property
    def b(self) -> torch.Tensor:
        return self["b"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Any, scale: Any = 1.0) -> torch.Tensor:
        y: torch.Tensor = self.y(self.x(batch.a).tanh() * scale + batch.b)
        return y


def pipelined(model: nn.Module) -> autopar.PipelinedModule:
    return autopar.parallelize(model, ["cpu", "cpu"], plan=Plan.from_split({"x": 0, "y": 1}, n_microbatches=2))


@pytest.mark.parametrize("make", [Batch, lambda a, b: Nested(a, [Inner(b)])], ids=["Batch", "Nested"])
def test_a_dataclass_is_taken_apart(make: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = Model()
    alone, pm = copy.deepcopy(model), pipelined(model)
    for samples in (4, 4, 6):
        batch = make(torch.randn(samples, WIDTH, requires_grad=True), torch.randn(samples, 1))
        torch.testing.assert_close(pm(batch), alone(batch))
        torch.testing.assert_close(pm(batch, scale=torch.tensor(2.0)), alone(batch, scale=torch.tensor(2.0)))
        (own,) = torch.autograd.grad(pm(batch).square().sum(), batch.a)
        (other,) = torch.autograd.grad(alone(batch).square().sum(), batch.a)
        torch.testing.assert_close(own, other)
        batch.a = torch.randn(samples, WIDTH)
        torch.testing.assert_close(pm(batch), alone(batch))


@pytest.mark.parametrize(
    "make",
    [
        Plain,
        Slotted,
        lambda a, b: SimpleNamespace(a=a, b=b),
        lambda a, b: Named(a=a, b=b),
        lambda a, b: UserDict({"a": a, "b": b}),
        lambda a, b: Plain([{"deep": a}], b),  # type: ignore[arg-type]
        lambda _, b: nn.Linear(2, 2),
        Private,
        lambda a, b: Own((a, b)),
        lambda a, b: Inherits((a, b)),
        extended,
        chain,
        bound,
        lambda a, b: functools.partial(torch.add, a),
        lambda a, b: lambda x: x + a,
    ],
    ids=[
        *("Plain", "Slotted", "SimpleNamespace", "Named", "UserDict", "deep", "Linear", "Private", "Own", "Inherits"),
        *("Extended", "chain", "bound", "partial", "closure"),
    ],
)
@pytest.mark.parametrize("keyword", [False, True])
def test_another_object_with_tensors_is_refused(make: Callable[..., Any], keyword: bool) -> None:
    model = Model()
    batch = make(torch.randn(4, WIDTH), torch.randn(4, 1))
    name = r"kwargs\['batch'\]" if keyword else r"args\[0\]"
    with pytest.raises(InputError, match=name + f" is a .*{type(batch).__name__}, which holds .*in a dict, list or"):
        pipelined(model)(batch=batch) if keyword else pipelined(model)(batch)
