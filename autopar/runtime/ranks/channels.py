"""How one tensor gets from one process to another.

gloo tells messages apart by tags, in any order. NCCL has no tags, and a process group has one queue: there, every
ordered pair of ranks has a group of its own, so that what a rank sends never waits for what it receives, and both ends
post in one order.
"""

from __future__ import annotations

from collections.abc import Mapping
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


class PairChannel:
    """Over a group of two for every ordered pair of ranks (NCCL). Tags are not used: the order of posting decides."""

    def __init__(self, rank: int, groups: Mapping[tuple[int, int], Any]) -> None:
        """`groups[a, b]`: carries what a sends b, and nothing else."""
        self._rank, self._groups = rank, groups

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Pending:
        return _posted(dist.isend(tensor, target, group=self._groups[self._rank, target]))

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        return _posted(dist.irecv(tensor, source, group=self._groups[source, self._rank]))


def _posted(work: Any) -> Pending:
    assert work is not None, "this rank is a member of the group"
    found: Pending = work
    return found
