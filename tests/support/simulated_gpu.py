"""A device whose operators return before they have run, simulated: fixed seconds for launches and kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
LAUNCH = 5e-6  # s on the host
PRODUCT = 4e-3  # s on the device
OTHER = 1e-6  # s on the device


class SimulatedGpu(TorchDispatchMode):
    """While active, operators of this thread are launched on a queue; it is the device's clock as well.

    A mark is a place in the queue. It has a time only once the host has waited for the device. `product`: s of a matrix
    product on the device.
    """

    def __init__(self, product: float = PRODUCT) -> None:
        super().__init__()
        self._product = product
        self.host = 0.0  # s: the host's clock
        self.waits = 0
        self._device = 0.0  # s: when the device will have done all that is queued
        self._marks: list[float] = []
        self._known = 0  # marks that the host has waited for

    def launch(self) -> None:
        """The host calls an operator."""
        self.host += LAUNCH

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.launch()
        self._device = max(self._device, self.host) + (self._product if func in _PRODUCTS else OTHER)
        return func(*args, **(kwargs or {}))

    def mark(self) -> int:
        self.launch()
        self._device = max(self._device, self.host)
        self._marks.append(self._device)
        return len(self._marks) - 1

    def wait(self) -> None:
        self.host = max(self.host, self._device)
        self.waits += 1
        self._known = len(self._marks)

    def between(self, start: int, end: int) -> float:
        assert max(start, end) < self._known, "the device may not have reached this mark"
        return self._marks[end] - self._marks[start]


class LaunchClock:
    """The host's clock in place of the device's: shows when operators of `gpu` were launched."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu

    def mark(self) -> float:
        return self._gpu.host

    def wait(self) -> None:
        self._gpu.wait()

    def between(self, start: float, end: float) -> float:
        return end - start
