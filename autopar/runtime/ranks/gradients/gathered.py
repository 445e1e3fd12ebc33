"""What stages read of parameters whose parts the ranks of a row store: gathered again when a part has changed.

```
   rank 0 stores w[:4], rank 1 w[4:]      optimizer.step() on both      next call: differs from what was gathered?
                                                                        -> all_gather over the row into the same memory
```
An optimizer's step says which parameters it has changed. Of the others, a rank compares what it stores with what it
gathered, for which a host waits for its GPU. That finds all changes, whatever made them: a checkpoint, a user's
`p.copy_()` or `p.data.copy_()`. The ranks of a row then agree: if one has a change, all gather.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch

from autopar.lower import process_groups
from autopar.runtime.ranks.gradients.buckets import Bucket, ReductionGroup, joined


class GatheredValues:
    """By id of this rank's parameter, what its stages read of it."""

    def __init__(self, carrier: torch.device) -> None:
        """`carrier`: where tensors must be to travel."""
        self._carrier = carrier
        self._stepped: set[int] = set()
        self._values: dict[int, torch.Tensor] = {}
        self._by_row: defaultdict[ReductionGroup, list[Bucket]] = defaultdict(list)

    def add(self, key: int, value: torch.Tensor) -> None:
        """The whole value of a parameter that this rank stores a part of. Its memory stays the same from now on."""
        self._values[key] = value

    def follow(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            if bucket.row is not None:
                self._by_row[bucket.row].append(bucket)

    def get(self, key: int) -> torch.Tensor | None:
        """None: the rank stores what its stages read."""
        return self._values.get(key)

    def stepped(self, keys: Iterable[int]) -> None:
        """An optimizer has changed parameters with these ids."""
        if self._values:
            self._stepped.update(keys)

    def refresh(self, stored: Callable[[int], torch.Tensor]) -> None:
        """Gather what has changed on some rank. Collective. `stored`: from a parameter's id, this rank's part."""
        for row, buckets in self._by_row.items():
            changed = [float(self._has_changed(bucket, stored)) for bucket in buckets]
            following = None
            for bucket, some in zip(buckets, process_groups.largest(changed, row.name), strict=True):
                if some:
                    local = joined(stored(entry.key) for entry in bucket.entries).to(self._carrier)
                    pending = process_groups.started_all_gather(local, row.size, row.name)
                    if following is not None:
                        self._write(*following)
                    following = bucket, pending  # one bucket travels while the one before is written
            if following is not None:
                self._write(*following)
        self._stepped.clear()

    def _has_changed(self, bucket: Bucket, stored: Callable[[int], torch.Tensor]) -> bool:
        return any(entry.key in self._stepped for entry in bucket.entries) or any(
            not torch.equal(entry.holding.taken(self._values[entry.key]), stored(entry.key)) for entry in bucket.entries
        )

    def _write(self, bucket: Bucket, pending: torch.Tensor) -> None:
        """In place, so that autograd notices where a graph from before still needs the old value."""
        blocks = process_groups.finished(pending).chunk(bucket.n)
        sizes = [entry.shape.numel() // bucket.n for entry in bucket.entries]
        with torch.no_grad():
            for number, block in enumerate(blocks):
                for entry, flat in zip(bucket.entries, block.split(sizes), strict=True):
                    part = entry.part(self._values[entry.key], number)
                    part.copy_(flat.view(part.shape))
