"""The call that a plan is made for, and leaving the model as it was while it is looked at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.batching import Batching
from autopar.capture import Program
from autopar.runtime.passes import LossFunction


@dataclass(frozen=True)
class Example:
    """What a plan is made for: a captured program and a call of it."""

    model: nn.Module
    program: Program
    batching: Batching
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]  # the flat inputs among them
    training: bool
    loss: LossFunction | None
    target: Any


def has_backward(model: nn.Module, program: Program, loss_fn: LossFunction | None) -> bool:
    """Whether a backward is to be expected after a call that is made now."""
    trains = any(p.requires_grad for p in model.parameters())
    return trains and (loss_fn is not None or (program.training and torch.is_grad_enabled()))


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Gradients and the random state are afterwards what they were."""
    state = torch.get_rng_state()
    gradients = [(p, p.grad) for p in model.parameters()]
    try:
        yield
    finally:
        torch.set_rng_state(state)
        for parameter, gradient in gradients:
            parameter.grad = gradient
