"""Instants on a device: when it has done what a thread has queued on it so far.

An operator on a GPU returns as soon as its kernels are queued, so the host's clock shows when they were launched. A
CUDA event is an instant in the GPU's own queue. Marks around operators show what each took, without a wait in between:

    host    | launch a | launch b | launch c |                   wait |  read all marks
    GPU          | a .......... | b .......... | c .......... |
    marks       ^0             ^1             ^2             ^3
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from cost_models.hardware.devices import synchronize


class DeviceClock(Protocol):
    """A clock of one device. `Mark` values belong to the clock that made them."""

    def mark(self) -> Any:
        """The instant when the device has done what this thread has queued so far."""

    def wait(self) -> None:
        """Wait until the device has reached all marks: only then `between` may be called."""

    def between(self, start: Any, end: Any) -> float:
        """Seconds from one mark to another."""


class HostClock:
    """The clock of a CPU: an operator is complete when it returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def wait(self) -> None:
        """Nothing is queued."""

    def between(self, start: float, end: float) -> float:
        return end - start


class CudaClock:
    """The clock of a GPU: events on the thread's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self) -> None:
        synchronize(self._device)

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) * 1e-3  # it is in ms


def device_clock(device: torch.device) -> DeviceClock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
