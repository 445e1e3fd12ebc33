"""The steps of optimizers, as ranks compare them and name their difference."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

EVERYWHERE = (
    "every rank must make the same steps, with the same optimizer, learning rate and options (not under "
    "`if rank == 0:`, and schedulers that follow a metric need the same metric on all ranks)"
)


GROUPS = "parameter groups"  # as an option of a step: the number of them


class Step(NamedTuple):
    """A step with one of an optimizer's groups, as far as it concerns parameters that the same ranks hold."""

    kind: str  # the optimizer's class
    options: tuple[tuple[str, str], ...]  # names and values
    n: int = 0  # parameters


def difference(found: Sequence[Sequence[Step]], ranks: Sequence[int]) -> str:
    """What differs between the steps of the first of `ranks` and those of another. `found`: by rank."""
    a, b = ranks[0], next(rank for rank in ranks if sorted(found[rank]) != sorted(found[ranks[0]]))
    counts = Counter(found[a]), Counter(found[b])
    here, there = (next(iter(one - other), None) for one, other in (counts, counts[::-1]))
    if here is None or there is None:
        return f"{len(found[a])} on rank {a}, {len(found[b])} on rank {b}, since the last call"
    if here.kind != there.kind:
        return f"{here.kind} on rank {a}, {there.kind} on rank {b}"
    options = zip(here.options, there.options, strict=True)
    (name, mine), (other, theirs) = next(((m, t) for m, t in options if m != t), (("", ""), ("", "")))
    if name == GROUPS:
        return (
            f"{here.kind} has {mine} parameter group{'s' * (mine != '1')} on rank {a}, {theirs} on rank {b}: call "
            "add_param_group() on every rank, with an empty list where a rank has none of the parameters"
        )
    if name:
        return f"{here.kind} has {name}={mine} on rank {a}, {other}={theirs} on rank {b}"
    return f"{here.kind} has {here.n} of such parameters on rank {a}, {there.n} on rank {b}"


def options_of(names: Sequence[str] | Mapping[str, Any], group: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((name, text_of(group.get(name))) for name in names)


def text_of(value: Any) -> str:
    """The same on all ranks for equal values. The host does not wait for a GPU to know one."""
    if isinstance(value, torch.Tensor):
        return repr(value.tolist()) if value.device.type == "cpu" else f"a tensor on {value.device.type}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(text_of, value))})"
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def checksum(value: Any) -> int:
    return zlib.crc32(repr(value).encode())
