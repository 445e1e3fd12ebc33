"""What a call of any code has in memory at the most, forward and backward, without running it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from cost_models.kernels.autocast_casts import AutocastCasts
from cost_models.kernels.device_kernels import DeviceKernels
from cost_models.memory.allocations import Allocations
from cost_models.memory.step_memory import BLOCK


@contextmanager
def as_on_device(device_type: str, autocast: torch.dtype | None) -> Iterator[None]:
    """Inside, operators of meta tensors do what they do on devices of a type. `autocast`: that they run under; None:
    off."""
    casting = nullcontext() if autocast is None else torch.autocast(device_type, autocast)
    with DeviceKernels(device_type), casting, AutocastCasts(device_type):
        yield


def call_memory(
    call: Callable[[], Sequence[torch.Tensor]],
    there: Sequence[torch.Tensor],
    device_type: str,
    *,
    training: bool = True,
    autocast: torch.dtype | None = None,
) -> int:
    """Bytes at the highest moment of `call()` and of the backward from the tensors that it returns, on the meta device.

    `there`: the tensors that it reads, which are not counted; gradients of them are. `autocast`: as for `as_on_device`.

    Raises:
        ValueError: an unknown device type.
        RuntimeError, NotImplementedError: code that needs the values of tensors.
    """
    if device_type not in BLOCK:
        raise ValueError(f"unknown device type {device_type!r}; known are {', '.join(BLOCK)}")
    allocations = Allocations(BLOCK[device_type])
    allocations.record(there)
    start = len(allocations.events)
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(training),
        as_on_device(device_type, autocast),
        allocations,
    ):
        roots = [t for t in call() if t.requires_grad]
        if roots:
            allocations.in_backward = True
            torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
            allocations.in_backward = False
    now = highest = 0
    for event in allocations.events[start:]:
        now += allocations.nbytes[event] if event >= 0 else -allocations.nbytes[~event]
        highest = max(highest, now)
    return highest
