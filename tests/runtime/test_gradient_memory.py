"""Gradients of parameters never share memory with what another micro-batch's gradient is added to."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import assert_same_gradients, gradients
from torch import nn

import autopar
from autopar import Plan


class Sums(nn.Module):
    """Autograd gives `a`, `b` and `h` views of one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(*shape)) for shape in ((2, 4), (4, 2), (3, 2)))
        self.first, self.second = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 8)
        self.third = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x) + self.c.view(1, 6)
        return self.third(self.second(h) * (self.a.view(8) + self.b.view(8)))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("split", [{"first": 0, "": 1}, {"": 0, "third": 1}], ids=str)
def test_gradients_that_autograd_gives_as_views_of_one_add_up(split: dict[str, int], schedule: str) -> None:
    """In a micro-batch of one sample `c` has as many entries as what it is added to."""
    torch.manual_seed(0)
    model, x = Sums().double(), torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    original, other = copy.deepcopy(model), x.detach().clone().requires_grad_()
    plan = Plan.from_split(split, n_microbatches=3, schedule=schedule)
    pm = autopar.parallelize(model, ["cpu"] * 2, plan=plan)
    pm(x).square().mean().backward()
    original(other).square().mean().backward()
    assert_same_gradients(gradients(pm), gradients(original))
    torch.testing.assert_close(x.grad, other.grad)


@pytest.mark.parametrize("degrees", [{"data": 2, "micro_batch": 1}, {"tensor": 2}], ids=str)
def test_so_they_do_on_meshes(degrees: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = Sums().double(), torch.randn(8, 6, dtype=torch.float64)
    original = copy.deepcopy(model)
    plan = Plan.by_hand(model, ["cpu"] * 2, example_args=(x,), **{"micro_batch": 2, **degrees})
    pm = autopar.parallelize(model, ["cpu"] * 2, plan=plan)
    pm(x).square().mean().backward()
    original(x).square().mean().backward()
    assert_same_gradients(gradients(pm), gradients(original))
