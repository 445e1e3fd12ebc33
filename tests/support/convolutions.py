"""Convolutions and their backwards, one call each, and what a recording of allocations says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cost_models.memory.allocations import Allocations, Convolutions


class Convolution(NamedTuple):
    samples: int
    into: int  # channels
    out: int
    window: int
    stride: int
    size: int
    groups: int = 1
    dtype: torch.dtype = torch.float32

    def forward(self, device: str) -> Callable[[], Tensor]:
        x, weight = self._tensors(device)
        return lambda: functional.conv2d(x, weight, None, self.stride, self.window // 2, groups=self.groups)

    def backward(self, device: str) -> Callable[[], Any]:
        x, weight = self._tensors(device)
        gradient = torch.empty_like(self.forward(device)())
        stride, padding = [self.stride] * 2, [self.window // 2] * 2
        where: Any = (gradient, x, weight, None, stride, padding, [1, 1], False, [0, 0], self.groups)
        return lambda: torch.ops.aten.convolution_backward(*where, [True, True, False])

    def _tensors(self, device: str) -> tuple[Tensor, Tensor]:
        x = torch.zeros(self.samples, self.into, self.size, self.size, dtype=self.dtype, device=device)
        shape = self.out, self.into // self.groups, self.window, self.window
        return x, torch.zeros(shape, dtype=self.dtype, device=device)


CONVOLUTIONS = {
    "window of 3": Convolution(4, 64, 64, 3, 1, 32),
    "single elements": Convolution(16, 64, 256, 1, 1, 32),
    "strided": Convolution(4, 128, 128, 3, 2, 32),
    "strided single elements": Convolution(4, 256, 512, 1, 2, 32),
    "channels that fill no block": Convolution(4, 100, 60, 3, 1, 20),
    "groups": Convolution(4, 64, 64, 3, 1, 32, groups=2),
    "a channel alone": Convolution(4, 64, 64, 3, 1, 32, groups=64),
    "one small sample": Convolution(1, 64, 64, 3, 1, 16),
    "float64": Convolution(4, 64, 64, 3, 1, 32, dtype=torch.float64),
    "groups of float64": Convolution(4, 64, 64, 3, 1, 32, groups=4, dtype=torch.float64),
    "groups of single elements of float64": Convolution(4, 64, 48, 1, 1, 32, groups=4, dtype=torch.float64),
    "eight channels": Convolution(16, 8, 8, 3, 1, 32),
    "twelve channels": Convolution(16, 12, 12, 3, 1, 32),
    "four channels": Convolution(16, 4, 4, 3, 1, 32),
    "images": Convolution(16, 3, 64, 7, 2, 64),
    "more channels than come in": Convolution(16, 4, 20, 3, 1, 32),
    "fewer channels than come in": Convolution(16, 20, 4, 3, 1, 32),
    "few channels, more than a block": Convolution(16, 8, 48, 7, 1, 32),
    "images whose gradient is wanted": Convolution(16, 3, 12, 3, 1, 32),
    "strided, in blocks that are not full": Convolution(16, 12, 12, 3, 2, 32),
    "strided single elements of few channels": Convolution(16, 12, 20, 1, 2, 32),
    "single elements of few channels": Convolution(16, 3, 16, 1, 1, 32),
    "groups that fill no block": Convolution(64, 24, 24, 3, 1, 16, groups=2),
    "groups of eight channels": Convolution(8, 32, 32, 3, 1, 28, groups=4),
    "groups of sixteen channels, strided": Convolution(8, 64, 64, 3, 2, 28, groups=4),
    "groups of sixteen channels into four, strided": Convolution(8, 64, 16, 1, 2, 28, groups=4),
    "groups of 24 channels, strided": Convolution(8, 96, 96, 3, 2, 28, groups=4),
    "a channel alone, wide": Convolution(16, 24, 24, 5, 1, 32, groups=24),
    "a channel alone, wide and strided": Convolution(16, 24, 24, 5, 2, 32, groups=24),
    "a channel alone, single elements": Convolution(16, 20, 20, 1, 1, 32, groups=20),
    "a channel alone, strided single elements": Convolution(16, 100, 100, 1, 2, 14, groups=100),
    "four channels alone": Convolution(16, 4, 4, 3, 1, 32, groups=4),
}

# With AMX, scratch memory is a large part of these.
WITHOUT_AMX = {
    "bfloat16": Convolution(16, 16, 24, 3, 1, 32, dtype=torch.bfloat16),
    "groups of bfloat16": Convolution(16, 16, 24, 3, 1, 32, groups=4, dtype=torch.bfloat16),
}


def predicted(call: Callable[[], Any], convolutions: Convolutions) -> int:
    """Bytes at the peak of a call on the meta device."""
    with Allocations(convolutions=convolutions) as allocations:
        call()
    sizes = allocations.nbytes
    return highest(sizes[event] if event >= 0 else -sizes[~event] for event in allocations.events)


def highest(changes: Iterable[int]) -> int:
    now = most = 0
    for change in changes:
        now += change
        most = max(most, now)
    return most
