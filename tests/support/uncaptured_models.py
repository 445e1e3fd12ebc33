"""Models with parts that no tracer can capture: custom autograd Functions, numpy, control flow on values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

WIDTH = 8


class DoubledSwish(torch.autograd.Function):
    """Swish with a backward that is twice the true one: a graph that lost it would be noticed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slope: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.slope = slope
        return x * torch.sigmoid(slope * x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(ctx.slope * x)
        return 2 * gradients[0] * (s + ctx.slope * x * s * (1 - s)), None


class NumpySquare(torch.autograd.Function):
    """Computes outside of torch, forward and backward, with a weight as its operand; two results."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, weight)
        squared = torch.from_numpy(np.square(x.detach().cpu().numpy())).to(x)
        return squared * weight, x + weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        a, b = gradients
        return 2 * x * weight * a + b, (x * x * a + b).sum(0)


class FunctionInRoot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(DoubledSwish.apply(self.first(x), 1.5))


class NumpyFunction(nn.Module):
    """The Function reads a parameter of the module that calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = NumpySquare.apply(torch.tanh(self.first(x)), self.weight)
        return self.last(a + b)


class NumpyGate(nn.Module):
    """Scales by what numpy computes from every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = np.tanh(np.abs(x.detach().cpu().numpy()).sum(-1, keepdims=True))
        return self.linear(x) * torch.from_numpy(gate).to(x)


class Branch(nn.Module):
    """Runs other code for each sample, by its values; returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [self.high(row) if row.sum() > 0 else self.low(row) for row in x]
        return torch.stack(rows) * scale, x.sum(-1)


class BranchInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(WIDTH, WIDTH), Branch(), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = self.branch(torch.relu(self.first(x)) - 0.3, scale=0.5)
        return self.last(a), b


class PackedEncoder(nn.Module):
    """An LSTM over sequences of different lengths, padded to the length of the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = self.rnn(packed)
        padded, _ = pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
        return padded


class PackedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder = nn.Embedding(16, WIDTH), PackedEncoder()
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(ids), lengths)).sum(1)


class TiedGate(nn.Module):
    """The opaque module's weight is also the head's, in another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.head = nn.Linear(WIDTH, WIDTH), NumpyGate(), nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.gate.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.gate(self.first(x))))


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Any, ...]]
    split: dict[str, int]  # two stages
    opaque: str  # what the plan names

    def model(self) -> nn.Module:
        torch.manual_seed(3)
        return self.build()


def rows(n: int) -> tuple[torch.Tensor]:
    return (torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(n)),)


def sequences(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    return torch.randint(16, (n, 6), generator=generator), torch.randint(1, 7, (n,), generator=generator)


CASES = (
    Case("function", FunctionInRoot, rows, {"first": 0, "last": 1}, "DoubledSwish"),
    Case("numpy function", NumpyFunction, rows, {"first": 0, "last": 1}, "NumpySquare"),
    Case(
        "numpy modules",
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), NumpyGate(), nn.ReLU(), NumpyGate(), nn.Linear(WIDTH, 4)),
        rows,
        {"0": 0, "3": 1},
        "'1' (NumpyGate)",
    ),
    Case("branch", BranchInside, rows, {"first": 0, "branch": 1, "last": 1}, "'branch' (Branch)"),
    Case("packed", PackedModel, sequences, {"embed": 0, "encoder": 0, "head": 1}, "'encoder' (PackedEncoder)"),
    Case("tied", TiedGate, rows, {"first": 0, "gate": 0, "head": 1}, "'gate' (NumpyGate)"),
)
