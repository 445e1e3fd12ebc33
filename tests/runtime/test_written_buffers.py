"""All writes into a buffer reach the model, whichever stages compute what is written."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import autopar
from autopar import Plan

WIDTH, ROWS = 8, 4
Write = Callable[["Written", torch.Tensor], None]


class Written(nn.Module):
    """Its buffer is written by what the first or the last layer computes; the next call reads it."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.write = write
        self.register_buffer("queue", torch.ones(WIDTH, 3 * ROWS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x).tanh()
        last = self.last(first * self.queue.mean())
        self.write(self, (first + last).detach())
        return last @ self.queue.clone()


def of_columns(model: Written, values: torch.Tensor) -> None:
    model.queue[:, :ROWS] = values.T


def of_a_block(model: Written, values: torch.Tensor) -> None:
    model.queue[:2, 1:5] = values[:2, :4]


def shifted(model: Written, values: torch.Tensor) -> None:
    model.queue.copy_(model.queue.roll(ROWS, 1))
    model.queue[:, :ROWS].copy_(values.T)


def averaged(model: Written, values: torch.Tensor) -> None:
    model.queue.mul_(0.9)
    model.queue.add_(values.mean(0)[:, None] * 0.1)


def in_a_chain(model: Written, values: torch.Tensor) -> None:
    model.queue.mul_(0.9).add_(values.mean(), alpha=0.1).clamp_(max=2.0)


def through_a_view(model: Written, values: torch.Tensor) -> None:
    flat = model.queue.view(-1)
    flat.mul_(0.5)
    flat[: values.numel()] += values.flatten()


WRITES = [of_columns, of_a_block, shifted, averaged, in_a_chain, through_a_view]


@pytest.mark.filterwarnings("ignore:the batch is not split")
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
@pytest.mark.parametrize("split", [{"first": 0, "last": 1}, {"first": 0, "last": 0}], ids=["two stages", "one stage"])
def test_buffers_and_what_later_calls_make_of_them_are_the_plain_models(write: Write, split: dict[str, int]) -> None:
    torch.manual_seed(0)
    plain = Written(write)
    pipelined = autopar.parallelize(copy.deepcopy(plain), ["cpu", "cpu"], plan=Plan.from_split(split, n_microbatches=2))
    for _ in range(3):
        x = torch.randn(ROWS, WIDTH)
        results = []
        for one in (plain, pipelined):
            one.zero_grad()
            result = one(x)
            result.square().mean().backward()
            results.append(result.detach())
        torch.testing.assert_close(*results)
        torch.testing.assert_close(pipelined.queue, plain.queue)
        torch.testing.assert_close(pipelined.first.weight.grad, plain.first.weight.grad)
