"""Jobs of ranks that use buffers which no stage of the first call reads."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar import Plan, PlanError
from autopar.runtime.module import PipelinedModule

WIDTH = 11
STEPS = 3


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    x, y = torch.randn(2, 8, WIDTH, dtype=torch.float64)
    return x, y


def evaluated(model: nn.Module, x: torch.Tensor, *flags: bool) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        y: torch.Tensor = model(x, *flags)
    model.train()
    return y


def trained(model: nn.Module) -> None:
    x, y = batch()
    for step in range(STEPS):
        if isinstance(model, PipelinedModule):
            model.train_step(x * (step + 1), target=y, loss_fn=functional.mse_loss)
        else:
            functional.mse_loss(model(x * (step + 1)), y).backward()


def norms() -> nn.Module:
    torch.manual_seed(1)
    layers = (layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    return nn.Sequential(*layers).double()


def counted_by_norms(folder: Path, batch_norm: str) -> dict[str, torch.Tensor]:
    """Evaluate, train, save; the buffers that this rank has."""
    plan = Plan.from_split({"0": 0, "1": 0, "2": 1, "3": 1}, n_microbatches=2)
    pm = autopar.parallelize(norms(), plan=plan, batch_norm=batch_norm)
    evaluated(pm, batch()[0])
    trained(pm)
    autopar.save(folder, pm, step=STEPS)
    return dict(pm.named_buffers())


class Scaled(nn.Module):
    """Training writes a buffer in its last layer; one way of evaluating reads it in the first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: bool = False) -> torch.Tensor:
        h = self.a(x)
        if scale:
            h = h * (1 + self.seen)
        y: torch.Tensor = self.b(h.tanh())
        if self.training:
            self.seen.add_(y.detach().abs().mean())
        return y


def read_elsewhere(reads_first: bool) -> str | tuple[float, list[str]]:
    """The error of evaluating after training, and the buffers that this rank lists; or why training is refused.

    `reads_first`: evaluate in both ways before training.
    """
    torch.manual_seed(1)
    model = Scaled().double()
    alone = copy.deepcopy(model)
    pm = autopar.parallelize(model, plan=Plan.from_split({"a": 0, "b": 1}, n_microbatches=1))
    x, _ = batch()
    evaluated(pm, x)
    if reads_first:
        evaluated(pm, x, True)
    try:
        trained(pm)
    except PlanError as error:
        return str(error)
    trained(alone)
    difference = (evaluated(pm, x, True) - evaluated(alone, x, True)).abs().max()
    return float(difference), [name for name, _ in pm.named_buffers()]
