"""Trainings of a model with parameters that no forward reads, beside the plain model."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from rank_cases import MODELS, Job, plan_of
from rank_training import gradient_error, parameter_error, ready
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import autopar


def _squares(model: nn.Module) -> torch.Tensor:
    found: torch.Tensor = 0.1 * sum(p.square().sum() for p in model.parameters())  # type: ignore[assignment]
    return found


def trained(job: Job, then: Job, folder: Path, late: bool) -> list[float]:
    """Errors of clipped gradients and of parameters, with a term of all parameters: under a plan, and then under
    another one that goes on from the checkpoint. `late`: optimizers are made after the first call."""
    original, pm, x = ready(job)
    target = original(x).detach().cos()
    theirs = torch.optim.AdamW(original.parameters(), lr=1e-2)
    errors = []

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        if late:
            model.train_step(x, target=target, loss_fn=functional.mse_loss)  # type: ignore[operator]
            model.zero_grad()
        return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)  # which takes lists of one kind

    def step(model: nn.Module, ours: torch.optim.Optimizer) -> None:
        model.train_step(x, target=target, loss_fn=functional.mse_loss)  # type: ignore[operator]
        _squares(model).backward()
        (functional.mse_loss(original(x), target) + _squares(original)).backward()
        autopar.clip_grad_norm_(model, 0.3)
        nn.utils.clip_grad_norm_(original.parameters(), 0.3)
        errors.append(gradient_error(model, original))
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
        errors.append(parameter_error(model, original))

    ours = optimizer_of(pm)
    step(pm, ours)
    assert all(isinstance(p, DTensor) for p in pm.parameters())
    autopar.save(folder, pm, ours, step=1)
    _, other, _ = ready(then)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    ours = optimizer_of(other)
    autopar.load(folder, other, ours)
    step(other, ours)
    return errors


def filled(job: Job) -> dict[str, list[float]]:
    """Entries of what no forward reads, where an init_fn gives them; by name."""
    model, x = MODELS[job.model][0]().double(), torch.randn(8, 12, dtype=torch.float64)
    plan = plan_of(job, model, x, dist.get_world_size())
    with torch.device("meta"):
        model = MODELS[job.model][0]().double()
    pm = autopar.parallelize(model, plan=plan, init_fn=lambda name, tensor: tensor.fill_(len(name)))
    pm.train_step(x, target=x, loss_fn=functional.mse_loss)
    return {
        name: p.detach().full_tensor().unique().tolist()  # type: ignore[operator]
        for name, p in pm.named_parameters()
        if name[0] not in "ab" or name.startswith("again")
    }
