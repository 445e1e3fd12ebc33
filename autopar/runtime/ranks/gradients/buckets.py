"""Parameters of one rank whose gradients, and values, travel together: in the same order on all ranks of a group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.runtime.ranks.parameters.holders import Holding

BUCKET_BYTES = 25 << 20  # as in DistributedDataParallel: large enough for bandwidth, small enough to start early


@dataclass(frozen=True)
class ReductionGroup:
    """Ranks that exchange tensors."""

    name: str  # of the process group
    size: int


@dataclass(frozen=True)
class Entry:
    """A parameter in a bucket."""

    key: int  # id of the rank's parameter
    holding: Holding
    shape: torch.Size  # of what its stages read
    parts: tuple[Any, ...]  # that the ranks of the row store, in the order of the row

    def part(self, read: torch.Tensor, number: int) -> torch.Tensor:
        """A view of what rank `number` of the row stores, of what this rank reads."""
        return self.holding.taken(read, self.parts[number])


@dataclass(frozen=True)
class Bucket:
    """Parameters with the same ranks in their row and in their column (holders.py), of one dtype."""

    entries: tuple[Entry, ...]
    dtype: torch.dtype
    row: ReductionGroup | None  # ranks that store different parts; None: this one stores what it reads
    column: ReductionGroup | None  # ranks that store the same part; None: this one alone
    stages: frozenset[int]  # that read the parameters
    scattered: bool  # gradients are scattered over the row for every micro-batch

    @property
    def n(self) -> int:
        """Ranks of the row."""
        return self.row.size if self.row is not None else 1

    @property
    def large(self) -> bool:
        """Whether one parameter alone is more than a bucket has bytes for."""
        return len(self.entries) == 1 and self.entries[0].shape.numel() * self.dtype.itemsize > BUCKET_BYTES


def buckets_of(
    rank: int,
    holdings: Mapping[int, Mapping[int, Holding]],
    new: Mapping[int, torch.Tensor | None],
    groups: Mapping[tuple[int, ...], Any],
) -> tuple[Bucket, ...]:
    """The buckets of a rank in the order in which gradients are complete: those of late stages come first.

    `new`: the rank's parameters by id of the model's. `groups`: process groups by their ranks. Parameters that only
    this rank stores and reads are in no bucket.
    """
    found: defaultdict[tuple[Any, ...], list[Entry]] = defaultdict(list)
    for key, by_rank in reversed(list(holdings.items())):
        mine, parameter = by_rank.get(rank), new.get(key)
        if mine is None or not isinstance(parameter, nn.Parameter) or len(mine.row) * len(mine.together) == 1:
            continue
        parts = tuple(by_rank[r].own for r in mine.row)
        shape = torch.Size(stop - start for start, stop in mine.part)
        entry = Entry(id(parameter), mine, shape, parts)
        # Of all ranks, so that they sort alike: ranks with other rows and columns share groups of this one's.
        ranks = tuple(sorted({(h.row, h.together) for h in by_rank.values()}))
        stages = tuple(sorted(mine.stages))
        found[-stages[0], stages, mine.scattered, str(parameter.dtype), ranks].append(entry)

    def group(ranks: tuple[int, ...]) -> ReductionGroup | None:
        return ReductionGroup(groups[ranks].group_name, len(ranks)) if len(ranks) > 1 else None

    buckets = []
    for kind in sorted(found):
        for entries in _filled(found[kind], new):
            one = entries[0].holding
            dtype = next(p.dtype for p in new.values() if p is not None and id(p) == entries[0].key)
            buckets.append(
                Bucket(tuple(entries), dtype, group(one.row), group(one.together), one.stages, one.scattered)
            )
    return tuple(buckets)


def _filled(entries: Sequence[Entry], new: Mapping[int, torch.Tensor | None]) -> Iterator[list[Entry]]:
    """As many entries at a time as a bucket has bytes for."""
    sizes = {id(p): p.element_size() for p in new.values() if p is not None}
    taken: list[Entry] = []
    nbytes = 0
    for entry in entries:
        size = entry.shape.numel() * sizes[entry.key]
        if taken and nbytes + size > BUCKET_BYTES:
            yield taken
            taken, nbytes = [], 0
        taken.append(entry)
        nbytes += size
    yield taken


def joined(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """All entries, one tensor behind the other, to be read: without a copy where they lie so in one memory."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    first, end = flat[0], flat[0].data_ptr()
    for one in flat:
        lazy = one.is_conj() or one.is_neg()
        if lazy or one.data_ptr() != end or one.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(flat)
        end += one.nbytes
    return first.as_strided((sum(map(torch.Tensor.numel, flat)),), (1,))
