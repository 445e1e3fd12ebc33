"""Models whose code differentiates in its forward, in stages that run again and where their bytes are measured."""

from __future__ import annotations

import copy

import pytest
import torch
from models import assert_same_gradients, gradients
from torch import Tensor, nn

import autopar
from autopar import Plan


class Forces(nn.Module):
    """The gradient of an energy, as interatomic potentials have it."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            if not x.requires_grad:
                x = x.detach().requires_grad_()
            return x + torch.autograd.grad(self.energy(x.tanh()).sum(), x, create_graph=True)[0]


class PerSample(nn.Module):
    """torch.func, which refuses to run under hooks on saved tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.func.vmap(torch.func.grad(lambda row: self.energy(row.tanh()).sum()))(x)


@pytest.mark.parametrize("part", [Forces, PerSample])
@pytest.mark.parametrize("recompute", ["none", "stage", "measured"])
@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
def test_it_trains_as_the_plain_model(part: type[nn.Module], recompute: str) -> None:
    torch.manual_seed(0)
    original = nn.Sequential(nn.Linear(8, 8), part(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model, x = copy.deepcopy(original), torch.randn(6, 8)
    again = {0: recompute} if recompute == "stage" else {}
    plan = Plan.from_split({"0": 0, "1": 0, "2": 1}, n_microbatches=2, recompute=again)
    if recompute == "measured":
        plan = autopar.plan(model, ["cpu"] * 2, plan=plan, example_args=(x,), cache=False)
        assert plan.predicted_step_time
    pm = autopar.parallelize(model, ["cpu"] * 2, plan=plan, cache=False)
    for _ in range(2):
        pm(x).square().mean().backward()
        original(x).square().mean().backward()
    assert_same_gradients(gradients(model), gradients(original))
