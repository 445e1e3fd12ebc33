"""Losses that read more than the model's outputs, on ranks, beside the plain model in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from rank_behaviour import message_of
from rank_cases import Job, relative
from rank_training import ready
from torch import nn

STEPS = 2


class Tempered(nn.Module):
    """A loss with parameters of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.scale = nn.Linear(width, width, bias=False)
        self.unread = nn.Parameter(torch.ones(()))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (self.scale(output) - target).square().mean()


def _error(mine: torch.Tensor | None, plain: torch.Tensor | None) -> float:
    return relative(mine, plain, plain.abs().max().item() if plain is not None else 1.0)


def _errors(pm: Any, original: nn.Module, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    return [_error(mine.grad, plain.grad) for mine, plain in pairs]


def of_own_parameters(job: Job, kind: str) -> list[float]:
    """Errors of the gradients of what the loss reads, added up over steps. `kind`: how the loss refers to it."""
    original, pm, x = ready(job)
    width = original(x).shape[-1]
    own = Tempered(width).double()
    plain = copy.deepcopy(own)

    def loss_of(module: Tempered) -> Callable[[Any, Any], torch.Tensor]:
        if kind == "module":
            return module
        weight = module.scale.weight
        if kind == "closure":
            return lambda out, y: (out @ weight.T - y).square().mean()

        def with_default(out: Any, y: Any, w: torch.Tensor = weight) -> torch.Tensor:
            return (out @ w.T - y).square().mean()

        return with_default

    for _ in range(STEPS):
        target = original(x).detach().cos()
        pm.train_step(x, target=target, loss_fn=loss_of(own))
        loss_of(plain)(original(x), target).backward()
    assert own.unread.grad is None
    return _errors(pm, original, [(own.scale.weight, plain.scale.weight)])


def of_targets(job: Job) -> list[float]:
    """Errors of the gradients of a teacher that makes the target, and of a target that belongs to no sample."""
    original, pm, x = ready(job)
    width = original(x).shape[-1]
    torch.manual_seed(6)
    teacher, factor = nn.Linear(x.shape[-1], width).double(), torch.ones(1, dtype=torch.float64).requires_grad_()
    teacher_plain, factor_plain = copy.deepcopy(teacher), factor.detach().clone().requires_grad_()

    def loss(output: torch.Tensor, target: Any) -> torch.Tensor:
        return (output * target[1] - target[0]).square().mean()

    for _ in range(STEPS):
        pm.train_step(x, target=(teacher(x), factor), loss_fn=loss)
        loss(original(x), (teacher_plain(x), factor_plain)).backward()
    pairs = [(factor, factor_plain), *zip(teacher.parameters(), teacher_plain.parameters(), strict=True)]
    return _errors(pm, original, pairs)


def of_refused(kind: str) -> tuple[str, bool, float]:
    """The message where a gradient would stay on one rank, whether the tensor has one afterwards, and the largest
    error of the model's gradients in a step after it."""
    job = Job("mlp", "chain", n_microbatches=1 if kind == "made" else 4)
    original, pm, x = ready(job, data="per-rank" if kind == "per-rank" else "whole")
    target = original(x).detach().cos()
    tau = nn.Parameter(torch.ones((), dtype=torch.float64))
    made = tau * 2
    if kind == "hook":
        tau.register_hook(lambda gradient: gradient * 2)
    if kind == "per-rank":
        target.requires_grad_()
    losses: dict[str, Callable[[Any, Any], torch.Tensor]] = {
        "hook": lambda out, y: (out * tau - y).square().mean(),
        "made": lambda out, y: (out * made - y).square().mean(),
        "per-rank": lambda out, y: (out - y).square().mean(),
    }
    message = message_of(lambda: pm.train_step(x, target=target, loss_fn=losses[kind]))
    has_gradient, target = tau.grad is not None, target.detach()
    if kind == "per-rank":
        return message, has_gradient, 0.0
    pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)
    nn.functional.mse_loss(original(x), target).backward()
    plain = {name: parameter.grad for name, parameter in original.named_parameters()}
    errors = [_error(own.grad.full_tensor(), plain[name]) for name, own in pm.named_parameters()]
    return message, has_gradient, max(errors)
