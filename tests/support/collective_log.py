"""What a rank exchanges with others, in order: collectives by process group, messages by pair of ranks.

Every rank of a group must begin the same collectives in the same order, of the same shapes. gloo pairs what comes, and
NCCL hangs: an order that differs between ranks can go unnoticed here, and be wrong. Two ranks that are in two groups
together must begin the collectives of both in one order, too: NCCL, and torch's own checks, may wait where gloo
does not.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from autopar.capture.torch_private import tree_leaves
from autopar.lower import process_groups

_OF_TENSORS = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "barrier",
)
_OF_OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
_FUNCTIONAL = ("all_reduce", "all_to_all", "started_all_gather", "started_reduce_scatter", "started_all_reduce")


@dataclass
class CollectiveLog:
    """Of one rank."""

    members: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by name of the process group: its ranks
    calls: defaultdict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))  # by group: kind, shapes ...
    order: list[str] = field(default_factory=list)  # the groups of all collectives, in the order of their beginnings
    sent: defaultdict[int, list[Any]] = field(
        default_factory=lambda: defaultdict(list)
    )  # by receiver: tag, shape, dtype
    received: defaultdict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))  # by sender

    def add(self, group: Any, kind: str, values: Any) -> None:
        """`group`: a process group, or its name; None: all ranks."""
        if isinstance(group, str):
            group = dist.distributed_c10d._resolve_process_group(group)
        group = dist.group.WORLD if group is None else group
        self.members[group.group_name] = tuple(dist.get_process_group_ranks(group))
        self.calls[group.group_name].append((kind, *values))
        self.order.append(group.group_name)

    def order_with(self, other: CollectiveLog) -> list[str]:
        """The groups of the collectives that this rank and another both begin, in this rank's order."""
        return [name for name in self.order if name in other.calls]


@contextmanager
def logged() -> Iterator[CollectiveLog]:
    """Inside, the log of all that this process exchanges through torch.distributed's functions and autopar's."""
    log, before = CollectiveLog(), []

    def replace(place: Any, name: str, new: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        if hasattr(place, name):
            before.append((place, name, getattr(place, name)))
            setattr(place, name, new(getattr(place, name)))

    for name in _OF_TENSORS:
        replace(dist, name, lambda call, name=name: _of_group(log, call, name, _shapes))
    for name in _OF_OBJECTS:
        replace(dist, name, lambda call, name=name: _of_group(log, call, name, lambda _: ()))
    for name in _FUNCTIONAL:
        replace(process_groups, name, lambda call, name=name: _functional(log, call, name))
    replace(dist, "new_group", lambda call: _new_group(log, call))
    replace(dist, "isend", lambda call: _message(log.sent, call))
    replace(dist, "irecv", lambda call: _message(log.received, call))
    replace(dist, "P2POp", lambda call: _end_of_exchange(log, call))
    try:
        yield log
    finally:
        for place, name, call in reversed(before):
            setattr(place, name, call)


def _shapes(values: Any) -> tuple[Any, ...]:
    return tuple((tuple(x.shape), str(x.dtype)) for x in tree_leaves(values) if isinstance(x, torch.Tensor))


def _of_group(log: CollectiveLog, call: Callable[..., Any], kind: str, of: Callable[[Any], Any]) -> Callable[..., Any]:
    def logged_call(*args: Any, group: Any = None, **kwargs: Any) -> Any:
        log.add(group, kind, of((args, kwargs)))
        return call(*args, group=group, **kwargs)

    return logged_call


def _functional(log: CollectiveLog, call: Callable[..., Any], kind: str) -> Callable[..., Any]:
    def logged_call(x: torch.Tensor, *what: Any) -> torch.Tensor:
        log.add(what[-1], f"functional {kind}", (*what[:-1], *_shapes(x)))
        return call(x, *what)

    return logged_call


def _new_group(log: CollectiveLog, call: Callable[..., Any]) -> Callable[..., Any]:
    def logged_call(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        log.add(None, "new_group", (None if ranks is None else tuple(ranks),))
        return call(ranks, *args, **kwargs)

    return logged_call


def _message(log: defaultdict[int, list[Any]], call: Callable[..., Any]) -> Callable[..., Any]:
    def logged_call(tensor: torch.Tensor, other: int, *args: Any, tag: int = 0, **kwargs: Any) -> Any:
        log[other].append((tag, tuple(tensor.shape), str(tensor.dtype)))
        return call(tensor, other, *args, tag=tag, **kwargs)

    return logged_call


def _end_of_exchange(log: CollectiveLog, call: Callable[..., Any]) -> Callable[..., Any]:
    def logged_call(op: Any, tensor: torch.Tensor, peer: int, group: Any) -> Any:
        sends, c10d = op is dist.isend, dist.distributed_c10d
        (log.sent if sends else log.received)[peer].append((0, tuple(tensor.shape), str(tensor.dtype)))
        return call(c10d.isend if sends else c10d.irecv, tensor, peer, group)

    return logged_call


def disagreements(logs: Sequence[CollectiveLog]) -> list[str]:
    """Where ranks differ, by group and place; nothing if all agree."""
    found = []
    for group in {name for log in logs for name in log.calls}:
        members = next(log.members[group] for log in logs if group in log.members)
        first = logs[members[0]].calls[group]
        for rank in members[1:]:
            theirs = logs[rank].calls[group]
            for place in range(max(len(first), len(theirs))):
                a, b = (calls[place] if place < len(calls) else "nothing" for calls in (first, theirs))
                if a != b:
                    found.append(f"{group}, {place}: {a} on rank {members[0]}, {b} on rank {rank}")
                    break
    for (a, one), (b, other) in itertools.combinations(enumerate(logs), 2):
        mine, theirs = one.order_with(other), other.order_with(one)
        if not found and mine != theirs:
            place = next(i for i, (x, y) in enumerate(zip(mine, theirs, strict=True)) if x != y)
            found.append(f"collective {place} of both is in {mine[place]} on rank {a}, in {theirs[place]} on rank {b}")
    for sender, log in enumerate(logs):
        for receiver, other in enumerate(logs):
            if log.sent[receiver] != other.received[sender]:
                found.append(
                    f"rank {sender} sends {log.sent[receiver]}, rank {receiver} posts {other.received[sender]}"
                )
    return found
