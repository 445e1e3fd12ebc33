"""Tensors on their way from device to device.

CPU workers share one memory: they hand over the very tensor. To and from a GPU, the sender queues the copy on streams
of its own right after the kernels that make the tensor, so that neither device stops computing for it, and the
receiver's stream waits for the copy's event:

```
    compute stream, sender      kernels of micro-batch 0 -> kernels of micro-batch 1 ...
    copy streams                                        \\-> copy 0 \\
    compute stream, receiver                                        \\-> kernels of micro-batch 0
```
No host thread waits for a GPU, except where a CPU stage is to read what comes from one. Tensors are told of every
stream that uses them (`record_stream`), so that the allocator keeps their memory until all have.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass
class PushedTensor:
    """A tensor whose copy has been queued: it is there once `event` has happened."""

    tensor: torch.Tensor
    event: torch.cuda.Event
    requires_grad: bool  # the original does


def push(value: Any, device: torch.device) -> Any:
    """`value` on its way to `device`, where `arrived` takes it."""
    if not isinstance(value, torch.Tensor) or value.device == device:
        return value
    tensor, event = value.detach(), None
    if tensor.device.type == "cuda":
        if device.type == "cuda" and _peers(tensor.device, device):
            return PushedTensor(*_between_gpus(tensor, device), value.requires_grad)
        tensor, event = _to_host(tensor)
    if device.type == "cuda":
        tensor, event = _from_host(tensor, event, device)
    assert event is not None, "either end is a GPU"
    return PushedTensor(tensor, event, value.requires_grad)


def arrived(value: Any, device: torch.device) -> Any:
    """What `push` gave, in the receiver's thread: to be used by what that queues from now on. Without history where it
    was copied."""
    if not isinstance(value, PushedTensor):
        return value
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        stream.wait_event(value.event)
        value.tensor.record_stream(stream)
    else:
        value.event.synchronize()
    return value.tensor


def moved(value: Any, device: torch.device) -> Any:
    """`value` on `device`, the sender and the receiver being one thread."""
    return arrived(push(value, device), device)


def as_leaf(value: Any, device: torch.device, grad: bool = True) -> Any:
    """What arrived, as the start of a stage's own autograd graph; with `grad` it requires one if the original does."""
    if not isinstance(value, (torch.Tensor, PushedTensor)):
        return value
    leaf: torch.Tensor = arrived(value, device).detach()
    return leaf.requires_grad_() if grad and value.requires_grad else leaf


def _between_gpus(tensor: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.cuda.Event]:
    outgoing, incoming = _copies(tensor.device, "out"), _copies(device, "in")
    _after_kernels(outgoing, tensor)
    # torch copies on the source's current stream and lets the target's current stream wait: neither may compute.
    with torch.cuda.stream(incoming), torch.cuda.stream(outgoing):
        copy = tensor.to(device, non_blocking=True)
    return copy, incoming.record_event()


def _to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
    outgoing = _copies(tensor.device, "out")
    _after_kernels(outgoing, tensor)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    with torch.cuda.stream(outgoing):
        pinned.copy_(tensor, non_blocking=True)
    return pinned, outgoing.record_event()


def _from_host(
    tensor: torch.Tensor, ready: torch.cuda.Event | None, device: torch.device
) -> tuple[torch.Tensor, torch.cuda.Event]:
    incoming = _copies(device, "in")
    if ready is not None:
        incoming.wait_event(ready)
    pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
    with torch.cuda.stream(incoming):
        copy = pinned.to(device, non_blocking=True)
    return copy, incoming.record_event()


def _after_kernels(outgoing: torch.cuda.Stream, tensor: torch.Tensor) -> None:
    outgoing.wait_stream(torch.cuda.current_stream(tensor.device))
    tensor.record_stream(outgoing)


@cache
def _copies(device: torch.device, way: str) -> torch.cuda.Stream:
    """The stream of a GPU for copies that go "in" or "out": both ways at once."""
    return torch.cuda.Stream(device)


@cache
def _peers(a: torch.device, b: torch.device) -> bool:
    """Whether a GPU reads another's memory; where not, the driver would stage copies and stop both."""
    return torch.cuda.can_device_access_peer(a, b)
