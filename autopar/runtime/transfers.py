"""Tensors sent from one device to another.

CPU workers share one memory: they send the tensor itself. To or from a GPU, the sender queues a copy on separate
streams, after the kernels that compute the tensor, so that both devices go on computing. The receiver's stream waits
for the copy's event:

```
    compute stream, sender      kernels of micro-batch 0 -> kernels of micro-batch 1 ...
    copy streams                                        \\-> copy 0 \\
    compute stream, receiver                                        \\-> kernels of micro-batch 0
```
No host thread waits for a GPU, except where a CPU stage reads what a GPU sent. `record_stream` registers every stream
that uses a tensor, so that the allocator keeps its memory until all of them are done.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass
class PushedTensor:
    """A tensor whose copy has been queued. It is complete once `event` has happened."""

    tensor: torch.Tensor
    event: torch.cuda.Event
    requires_grad: bool  # whether the original does


def push(value: Any, device: torch.device) -> Any:
    """Start the copy of `value` to `device`. The receiver gets it by `arrived`. Other values stay as they are."""
    if not isinstance(value, torch.Tensor) or value.device == device:
        return value
    tensor, event = value.detach(), None
    if tensor.device.type == "cuda":
        if device.type == "cuda" and _has_peer_access(tensor.device, device):
            return PushedTensor(*_between_gpus(tensor, device), value.requires_grad)
        tensor, event = _to_host(tensor)
    if device.type == "cuda":
        tensor, event = _from_host(tensor, event, device)
    assert event is not None, "either end is a GPU"
    return PushedTensor(tensor, event, value.requires_grad)


def arrived(value: Any, device: torch.device) -> Any:
    """In the receiver's thread: the tensor that `push` sent, for operators called from now on. A copy has no autograd
    history."""
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
    """`value` on `device`, where one thread sends and receives."""
    return arrived(push(value, device), device)


def as_leaf(value: Any, device: torch.device, grad: bool = True) -> Any:
    """What arrived, as a leaf of the stage's own autograd graph. With `grad`, it requires a gradient if the original
    does."""
    if not isinstance(value, (torch.Tensor, PushedTensor)):
        return value
    leaf: torch.Tensor = arrived(value, device).detach()
    return leaf.requires_grad_() if grad and value.requires_grad else leaf


def _between_gpus(tensor: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.cuda.Event]:
    outgoing, incoming = _copy_stream(tensor.device, "out"), _copy_stream(device, "in")
    _after_kernels(outgoing, tensor)
    # torch copies on the source's current stream and makes the target's current stream wait for it. Make both of them
    # copy streams, so that no compute stream waits.
    with torch.cuda.stream(incoming), torch.cuda.stream(outgoing):
        copy = tensor.to(device, non_blocking=True)
    return copy, incoming.record_event()


def _to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
    outgoing = _copy_stream(tensor.device, "out")
    _after_kernels(outgoing, tensor)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    with torch.cuda.stream(outgoing):
        pinned.copy_(tensor, non_blocking=True)
    return pinned, outgoing.record_event()


def _from_host(
    tensor: torch.Tensor, ready: torch.cuda.Event | None, device: torch.device
) -> tuple[torch.Tensor, torch.cuda.Event]:
    incoming = _copy_stream(device, "in")
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
def _copy_stream(device: torch.device, direction: str) -> torch.cuda.Stream:
    """The stream of a GPU for copies in the direction "in" or "out". Two streams let both directions overlap."""
    return torch.cuda.Stream(device)


@cache
def _has_peer_access(a: torch.device, b: torch.device) -> bool:
    """Whether GPU `a` can read the memory of `b`. If not, a direct copy would go through the host and block both."""
    return torch.cuda.can_device_access_peer(a, b)
