"""Losses that read more than the model's outputs, on ranks, beside the plain model in one process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_behaviour import message_of
from rank_cases import Job, relative
from rank_training import gradient_error, ready
from torch import nn
from torch.nn import functional

from autopar.analysis.example import LossFunction

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


def _squares(model: nn.Module) -> Any:
    return 0.1 * sum(parameter.square().sum() for parameter in model.parameters())


def of_the_models_parameters(job: Job, when: str) -> list[float]:
    """Errors of the model's gradients where the backward of the sum of its squares runs by itself, `when` says when."""
    original, pm, x = ready(job)
    target = original(x).detach().cos()
    pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)
    pm.zero_grad()
    errors = []
    for _ in range(STEPS):
        if when == "before":
            _squares(pm).backward()
        pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)
        if when == "after":
            _squares(pm).backward()
        (nn.functional.mse_loss(original(x), target) + _squares(original)).backward()
        errors.append(gradient_error(pm, original))
    return errors


def of_refused_parameters(where: str, said: Path | None = None) -> str:
    """The message of a loss that reads parameters of the model, which the last rank also writes to the file `said`.
    `where`: in a loss of micro-batches, of the whole batch, or of outputs outside of the call; all of them, or one that
    the last rank does not have."""
    _, pm, x = ready(Job("mlp", "chain"))
    model, mse = pm.unwrap(), nn.functional.mse_loss
    losses: dict[str, Callable[[Any, Any], Any]] = {
        "all": lambda out, y: mse(out, y) + _squares(model),
        "one": lambda out, y: mse(out, y) + model[0].weight.abs().sum(),
        "whole": lambda out, y: mse(out - out.mean(), y) + _squares(model),
        "product": lambda out, y: mse(out @ model[10].weight, y),
    }
    if where in losses:
        message = message_of(lambda: pm.train_step(x, target=x, loss_fn=losses[where]))
        if said is not None and dist.get_rank() == 1:
            said.write_text(message)
        return message
    return message_of(lambda: (pm(x).sum() + _squares(pm)).backward())


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


def _scaled(output: torch.Tensor, target: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return scale * functional.mse_loss(output, target)


def _read(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """No graph has the branch."""
    loss = functional.mse_loss(output, target)
    return 2 * loss if loss.item() > 1e9 and output.device.type in {"cpu", "cuda", "mps"} else loss


def _logged(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if dist.get_rank() == 7:
        print(output)
    return functional.mse_loss(output, target)


def _raises_on_one(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if dist.get_rank() == 1:
        raise LookupError("no class 7")
    return functional.mse_loss(output, target)


def _weighted(weights: torch.Tensor) -> LossFunction:
    return lambda output, target: ((output - target).square() * weights).mean()


def own_losses(plan: str, kind: str) -> dict[str, Any]:
    """The message, if any, of three steps in which every rank makes a loss of its own."""
    rank = dist.get_rank()
    original, pm, x = ready(Job("mlp", plan))
    tempered = Tempered(12).double()
    same: dict[str, LossFunction] = {
        "lambda": lambda output, target: 3 * functional.mse_loss(output, target),
        "partial": functools.partial(_scaled, scale=2.0),
        "module": tempered,
        "closure": _weighted(torch.arange(12.0).double()),
        "read": _read,
        "logged": _logged,
    }
    other: dict[str, LossFunction] = {
        "other function": functional.mse_loss if rank else functional.l1_loss,
        "other partial": functools.partial(_scaled, scale=2.0 + rank),
        "other closure": _weighted(torch.arange(12.0).double() + rank),
        "other later": functional.mse_loss,
        "raises": _raises_on_one,
    }
    loss_fn = (same | other)[kind]
    pm.train_step(x, target=x, loss_fn=functional.mse_loss)
    if kind != "raises":
        loss_fn(original(x), x).backward()

    def steps() -> None:
        for _ in range(2):
            pm.zero_grad()
            pm.train_step(x, target=x, loss_fn=loss_fn)
        if kind == "other later" and rank:
            pm.train_step(x, target=x, loss_fn=functional.l1_loss)
        elif kind == "other later":
            pm.train_step(x, target=x, loss_fn=loss_fn)

    message = message_of(steps)
    return {"message": message, "error": None if message else gradient_error(pm, original)}
