"""Modules whose forward assigns a buffer anew: one function for each way to do so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WIDTH = 6

Use = Callable[[Any, torch.Tensor], torch.Tensor]


class Assigning(nn.Module):
    """A layer with the buffers `mean`, `other` and `count`, and `use`, which may assign them."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.linear, self.use = nn.Linear(WIDTH, WIDTH), use
        self.register_buffer("mean", torch.linspace(0.5, 1, WIDTH))
        self.register_buffer("other", torch.linspace(1, 2, WIDTH))
        self.register_buffer("count", torch.tensor(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self, x)


def counted(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.count = m.count + 1
    return m.linear(x) / m.count


def observed(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.mean = torch.maximum(m.mean, x.detach().abs().amax(0))
    return m.linear(x / m.mean)


def read_before(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x) * m.mean  # autograd saves the old value
    m.mean = 0.9 * m.mean + 0.1 * y.detach().mean(0)
    return y


def kept_old(m: Any, x: torch.Tensor) -> torch.Tensor:
    old = m.mean
    m.mean = m.mean + 1
    return m.linear(x) * old + m.mean


def only_recorded(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    m.mean = y.detach().mean(0)
    return y


def twice(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.mean = m.mean * 0.5
    x = m.linear(x) * m.mean
    m.mean = m.mean + x.detach().mean(0)
    return x + m.mean


def by_table(m: Any, x: torch.Tensor) -> torch.Tensor:
    m._buffers["mean"] = m.mean * 0.9 + 0.1
    return m.linear(x) * m.mean


def without_gradients(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    with torch.no_grad():
        m.mean = 0.9 * m.mean + 0.1 * y.mean(0)
    return y - m.mean


def in_training(m: Any, x: torch.Tensor) -> torch.Tensor:
    if m.training:
        m.count = m.count + 1
    return m.linear(x) + m.count


def in_evaluation(m: Any, x: torch.Tensor) -> torch.Tensor:
    if not m.training:
        m.mean = m.mean * 2
    return m.linear(x) * m.mean


def swapped(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.mean, m.other = m.other, m.mean
    return m.linear(x) * m.mean


def changed_after(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.mean = m.mean * 0.5
    m.mean.add_(1)
    return m.linear(x) * m.mean


def changed_before(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.mean.mul_(0.5)
    m.mean = m.mean + m.other
    return m.linear(x) * m.mean


def of_a_constant(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.mean = torch.full_like(m.mean, 3.0)
    return m.linear(x) * m.mean


def in_place(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.count += 1
    return m.linear(x) / m.count


USES: list[Use] = [
    *(counted, observed, read_before, kept_old, only_recorded, twice, by_table, without_gradients, in_training),
    *(in_evaluation, swapped, changed_after, changed_before, of_a_constant, in_place),
]
