"""Tensors sent from one device to another.

CPU workers share one memory: they send the tensor itself. To or from a GPU, the sender queues a copy on separate
streams, after the kernels that compute the tensor, so that both devices go on computing. The copy lands in a tensor of
the copy stream. The receiver's stream waits for the copy's event and takes it over into a tensor of its own:

```
    compute stream, sender      kernels of micro-batch 0 -> kernels of micro-batch 1 ...
    copy streams                                        \\-> copy 0 \\
    compute stream, receiver                                        \\-> take over, kernels of micro-batch 0
```
No host thread waits for a GPU, except where a CPU stage reads what a GPU sent.

A freed tensor's memory goes to the next tensor of the stream that it was allocated on. So what another stream still
reads is held until the stream that owns it has waited for that reader. It waits `_AHEAD` actions later, when the reader
is usually done, and at the end of the execution. Memory is then bounded however far the host runs ahead of the GPUs,
which `Tensor.record_stream` does not give: it frees nothing before the GPU has got there.

Inputs and targets were there when the call began: their copies wait for the caller's kernels up to that point only, and
have streams of their own. When the call returns, the caller may overwrite them: its streams wait for copies from GPUs,
and what lies in the CPU's memory has been copied to a place of its own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from autopar.schedule.transit import COPIES_UNDER_WAY

_AHEAD = COPIES_UNDER_WAY


class _Held(NamedTuple):
    """A tensor that another stream reads."""

    owner: torch.cuda.Stream  # that the tensor was allocated on
    read: torch.cuda.Event  # when the reader is done
    tensor: torch.Tensor


@dataclass
class PushedTensor:
    """A tensor whose copy has been queued. It is complete once `event` has happened."""

    landed: torch.Tensor | None  # None once the receiver has it
    event: torch.cuda.Event
    requires_grad: bool  # whether the original does
    stream: torch.cuda.Stream | None  # that `landed` was allocated on; None: it is pinned memory of the CPU


class Transfers:
    """The copies of one execution, from its start to `finish`."""

    def __init__(self, streams: Sequence[torch.cuda.Stream]) -> None:
        """`streams`: of the caller, one per GPU that computes or has inputs. All workers compute on them."""
        self._start = {stream.device: stream.record_event() for stream in streams}
        self._held: dict[int, deque[list[_Held]]] = {}  # for every worker's thread, by action

    def begin_action(self) -> None:
        """In a worker's thread: what the action `_AHEAD` before this one has sent may be reused from now on."""
        if not self._start:
            return  # no GPU
        actions = self._held.setdefault(threading.get_ident(), deque())
        actions.append([])
        if len(actions) > _AHEAD:
            earliest = actions.popleft()
            _wait_for_readers(earliest)
            del earliest  # not before: its memory is free from here on

    def push(self, value: Any, device: torch.device) -> Any:
        """Start the copy of `value` to `device`. The receiver gets it by `arrived`. Other values stay as they are."""
        if not isinstance(value, torch.Tensor) or value.device == device:
            return value
        return self._pushed(value, device, "")

    def push_input(self, value: Any, device: torch.device) -> Any:
        """The same for an input or a target of the call, which was there when the execution began."""
        if not isinstance(value, torch.Tensor) or value.device == device:
            return value
        return self._pushed(value, device, "inputs ")

    def arrived(self, value: Any, device: torch.device) -> Any:
        """In the receiver's thread: the tensor that `push` sent, for operators called from now on. A copy has no
        autograd history."""
        if not isinstance(value, PushedTensor):
            return value
        landed, value.landed = value.landed, None
        assert landed is not None, "every push arrives once"
        if value.stream is None:
            value.event.synchronize()
            return landed
        computing = torch.cuda.current_stream(device)
        computing.wait_event(value.event)
        taken = landed.clone()
        self._hold(landed, value.stream, computing.record_event())
        return taken

    def moved(self, value: Any, device: torch.device) -> Any:
        """`value` on `device`, where one thread sends and receives."""
        return self.arrived(self.push(value, device), device)

    def moved_input(self, value: Any, device: torch.device) -> Any:
        """The same for an input or a target of the call."""
        return self.arrived(self.push_input(value, device), device)

    def leaf(self, value: Any, device: torch.device, grad: bool) -> Any:
        """What arrived, as a leaf of the stage's own autograd graph. With `grad`, it requires a gradient if the
        original does."""
        if not isinstance(value, PushedTensor):
            return as_leaf(value, grad)
        leaf: torch.Tensor = self.arrived(value, device)
        return leaf.requires_grad_() if grad and value.requires_grad else leaf

    def finish(self) -> None:
        """After all actions: what other streams read may be overwritten and freed by kernels queued from now on."""
        for actions in self._held.values():
            for held in actions:
                _wait_for_readers(held)
        self._held.clear()

    def _pushed(self, value: torch.Tensor, device: torch.device, whose: str) -> PushedTensor:
        tensor, event = value.detach(), None
        if tensor.device.type == "cuda":
            if device.type == "cuda" and _has_peer_access(tensor.device, device):
                return self._between_gpus(tensor, device, whose, value.requires_grad)
            tensor, event = self._to_host(tensor, whose)
        if device.type != "cuda":
            assert event is not None, "either end is a GPU"
            return PushedTensor(tensor, event, value.requires_grad, None)
        incoming = _copy_stream(device, f"{whose}in")
        if event is not None:
            incoming.wait_event(event)
        else:
            tensor = _staged(tensor)
        with torch.cuda.stream(incoming):
            copy = tensor.to(device, non_blocking=True)
        return PushedTensor(copy, incoming.record_event(), value.requires_grad, incoming)

    def _between_gpus(
        self, tensor: torch.Tensor, device: torch.device, whose: str, requires_grad: bool
    ) -> PushedTensor:
        outgoing, incoming = self._outgoing(tensor, whose), _copy_stream(device, f"{whose}in")
        # torch copies on the source's current stream and makes the target's current stream wait for it. Make both of
        # them copy streams, so that no compute stream waits.
        with torch.cuda.stream(incoming), torch.cuda.stream(outgoing):
            copy = tensor.to(device, non_blocking=True)
        event = incoming.record_event()
        self._hold(tensor, torch.cuda.current_stream(tensor.device), event)
        return PushedTensor(copy, event, requires_grad, incoming)

    def _to_host(self, tensor: torch.Tensor, whose: str) -> tuple[torch.Tensor, torch.cuda.Event]:
        outgoing = self._outgoing(tensor, whose)
        pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
        with torch.cuda.stream(outgoing):
            pinned.copy_(tensor, non_blocking=True)
        event = outgoing.record_event()
        self._hold(tensor, torch.cuda.current_stream(tensor.device), event)
        return pinned, event

    def _outgoing(self, tensor: torch.Tensor, whose: str) -> torch.cuda.Stream:
        """The stream for copies of `tensor`, after the kernels that compute it."""
        outgoing = _copy_stream(tensor.device, f"{whose}out")
        start = self._start.get(tensor.device) if whose else None
        if start is not None:
            outgoing.wait_event(start)
        else:
            outgoing.wait_stream(torch.cuda.current_stream(tensor.device))
        return outgoing

    def _hold(self, tensor: torch.Tensor, owner: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Keep `tensor`, allocated on the stream `owner`, until that has waited for `event`."""
        actions = self._held.setdefault(threading.get_ident(), deque([[]]))
        actions[-1].append(_Held(owner, event, tensor))


def _wait_for_readers(held: Sequence[_Held]) -> None:
    for one in held:
        one.owner.wait_event(one.read)


def as_leaf(value: Any, grad: bool = True) -> Any:
    """A tensor as a leaf of another autograd graph. With `grad`, it requires a gradient if the original does."""
    if not isinstance(value, torch.Tensor):
        return value
    leaf = value.detach()
    return leaf.requires_grad_() if grad and value.requires_grad else leaf


def _staged(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, from which a GPU can read while the host goes on. Pinned tensors are copied as well:
    their owner may overwrite them at once. torch keeps the copy's memory until the GPU has read it."""
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)


@cache
def _copy_stream(device: torch.device, name: str) -> torch.cuda.Stream:
    """The stream of a GPU for copies "in" or "out", so that both directions overlap, or for those of inputs."""
    return torch.cuda.Stream(device)


@cache
def _has_peer_access(a: torch.device, b: torch.device) -> bool:
    """Whether GPU `a` can read the memory of `b`. If not, a direct copy would go through the host and block both."""
    return torch.cuda.can_device_access_peer(a, b)
