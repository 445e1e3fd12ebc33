"""How one tensor gets from one process to another.

gloo tells messages apart by tags, in any order. NCCL has no tags: both ends post in one order, and what a rank sends
and receives between two actions is one operation (exchanges.py).

```
   host       post the receive .......... wait() -> returns at once          post ...
   compute    ... kernels A ------------- waits for the receive - kernels B   A: what used the memory before
   NCCL                    \\- receives ---/                                    B: what reads the tensor
```
`wait()` of an NCCL transfer makes the current stream wait, not the host. A receive starts after what the stream that
posts it has queued so far, so that memory which the allocator gives a second time is not overwritten too early; a send
starts after the kernels that compute its tensor. Whoever posts holds the tensor until it has waited: then the stream on
which the tensor was allocated is behind the transfer, and the allocator may give its memory away. So transfers are
posted, read and waited for on one stream, the caller's.

Numbers that the host needs at once (which values have gradients) travel in rows of bytes of the CPU, over gloo: to read
them from a GPU, the host would have to wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Pending(Protocol):
    """A transfer that has been posted."""

    def wait(self) -> Any: ...


class Channel(Protocol):
    """Posts sends and receives. The caller keeps tensors until it has waited for them; sends do not block it."""

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Pending: ...

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending: ...


class TaggedChannel:
    """Over a process group whose messages have tags (gloo)."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Pending:
        return _posted(dist.isend(tensor, target, group=self._group, tag=tag))

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        return _posted(dist.irecv(tensor, source, group=self._group, tag=tag))


class ExchangeChannel:
    """Over a group of all ranks (NCCL). Tags are not used: the order of posting decides.

    A rank's exchanges run one after the other, on one stream. The transfers of one exchange go on at the same time.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def exchange(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> Pending:
        """`sends`, `receives`: tensors, each with the other rank; those of two ranks match in their order."""
        ends = [*((dist.isend, *one) for one in sends), *((dist.irecv, *one) for one in receives)]
        return _All(dist.batch_isend_irecv([dist.P2POp(*end, group=self._group) for end in ends]))

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Pending:
        return self.exchange([(tensor, target)], [])

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        return self.exchange([], [(tensor, source)])


class _All:
    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class HostChannel:
    """Tensors of GPUs through the CPU's memory. The host waits for the GPU before it sends, and when it has received.

    For ranks that share a GPU, or have no NCCL.
    """

    def __init__(self, channel: Channel) -> None:
        """`channel`: for tensors of the CPU."""
        self._channel = channel

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Pending:
        carried = tensor.cpu()
        return _Carried(self._channel.send(carried, target, tag), carried)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        carried = torch.empty(tensor.shape, dtype=tensor.dtype)
        return _Carried(self._channel.receive(carried, source, tag), carried, tensor)


class _Carried:
    """A transfer of a copy on the CPU, which lives until it has ended."""

    def __init__(self, pending: Pending, carried: torch.Tensor, into: torch.Tensor | None = None) -> None:
        self._pending, self._carried, self._into = pending, carried, into

    def wait(self) -> None:
        self._pending.wait()
        if self._into is not None:
            self._into.copy_(self._carried)
            self._into = None


def _posted(work: Any) -> Pending:
    assert work is not None, "this rank is a member of the group"
    found: Pending = work
    return found
