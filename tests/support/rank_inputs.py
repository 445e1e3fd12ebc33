"""Gradients of a pipelined module's inputs on ranks, beside the plain model in one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
from rank_behaviour import message_of
from rank_cases import Job, loss_of, relative
from rank_training import ready
from torch import nn

import autopar


class Reads(nn.Module):
    """Three stages (two of them read the input) and a table that belongs to no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(12, 12) for _ in range(3))

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.b(torch.tanh(self.a(x))))
        return self.c(y + x) @ table


def of_inputs(job: Job, call: str) -> list[float]:
    """Errors of the gradients of what runs before the module, of the module's input, and of a second batch's."""
    original, pm, x = ready(job)
    torch.manual_seed(4)
    before = nn.Linear(x.shape[-1], x.shape[-1]).double()
    before_plain = copy.deepcopy(before)
    errors = []
    for _ in range(2):
        given, given_plain = (x.clone().requires_grad_() for _ in range(2))
        if call == "train_step":
            pm.train_step(before(given), target=x, loss_fn=lambda out, y: loss_of(job.model, out, y))
        else:
            loss_of(job.model, pm(before(given)), x).backward()
        loss_of(job.model, original(before_plain(given_plain)), x).backward()
        pairs = [(given, given_plain), *zip(before.parameters(), before_plain.parameters(), strict=True)]
        for mine, plain in pairs:
            assert plain.grad is not None
            errors.append(relative(mine.grad, plain.grad, plain.grad.abs().max().item()))
    return errors


def of_several_readers(n_microbatches: int) -> list[float]:
    """Errors of the gradients of an input that two stages read, and of one that belongs to no sample."""
    torch.manual_seed(0)
    model, x, table = Reads().double(), torch.randn(8, 12).double(), torch.randn(12, 3).double()
    original = copy.deepcopy(model)
    plan = autopar.Plan.from_split({"a": 0, "b": 1, "c": 2}, n_microbatches=n_microbatches)
    pm = autopar.parallelize(model, plan=plan)
    both = []
    for module in (pm, original):
        inputs = [one.clone().requires_grad_() for one in (x, table)]
        module(*inputs).square().mean().backward()
        both.append([one.grad for one in inputs])
    return [relative(mine, plain, plain.abs().max().item()) for mine, plain in zip(*both, strict=True)]


def of_frozen() -> tuple[float, bool]:
    """The error of an input's gradient where the module trains nothing, and whether one that nothing reads is None."""
    original, pm, x = ready(Job("mlp", "chain"))
    for module in (original, pm):
        module.requires_grad_(False)
    given, plain = (x.clone().requires_grad_() for _ in range(2))
    pm(given).square().mean().backward()
    original(plain).square().mean().backward()
    assert plain.grad is not None
    return relative(given.grad, plain.grad, plain.grad.abs().max().item()), pm(x).requires_grad


def of_shares() -> str:
    """The message where every rank passes samples of its own."""
    _, pm, x = ready(Job("mlp", "chain"), data="per-rank")
    call: Any = lambda: pm(x[:4].requires_grad_())  # noqa: E731
    return message_of(call)
