"""Convolutions on a CPU hold what oneDNN copies; measured by torch's profiler of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from cost_models.memory.allocations import Allocations

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


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
    "images": Convolution(16, 3, 64, 7, 2, 64),
}


def measured(call: Callable[[], Any]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    return highest([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())])


def predicted(call: Callable[[], Any]) -> int:
    with Allocations(cpu_threads=torch.get_num_threads()) as allocations:
        call()
    sizes = allocations.nbytes
    return highest([sizes[event] if event >= 0 else -sizes[~event] for event in allocations.events])


def highest(changes: list[int]) -> int:
    now = most = 0
    for change in changes:
        now += change
        most = max(most, now)
    return most


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_peak_of_a_convolution_is_that_of_its_copies(name: str) -> None:
    convolution = CONVOLUTIONS[name]
    for call in (convolution.forward, convolution.backward):
        # Scratch memory of threads is not predicted.
        assert 0.88 * measured(call("cpu")) <= predicted(call("meta")) <= 1.03 * measured(call("cpu"))
