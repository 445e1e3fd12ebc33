"""A message's numbers and its small tensors, as one row of bytes.

Over gloo every part that travels by itself costs each end about 150 us, whatever its size; packing costs a copy.

```
   row     | numbers, 8 bytes each | tensor 0 | .. | tensor 2 | ..          .. : up to a multiple of 16 bytes
   apart   tensor 1, which is larger than MOST_PACKED
```
Both ends know the shapes, so both know where everything is. Tensors that have arrived use the memory of the row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

MOST_PACKED = 256 << 10
"""bytes of the largest tensor that is packed: to copy it takes the sender about 60 us"""

_STEP = 16  # bytes: tensors of any dtype may start at multiples of this
_NUMBER = 8  # bytes


class SentTensor(NamedTuple):
    """A tensor that a message carries."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Spec = SentTensor | type  # or a Python number, or None


class _Place(NamedTuple):
    """Of a packed tensor."""

    position: int
    spec: SentTensor
    start: int  # in the row, in entries of its dtype


@dataclass(frozen=True)
class Packing:
    """Where the parts of a message are."""

    n_numbers: int
    tensors: Mapping[int, SentTensor]  # by position
    packed_ones: tuple[_Place, ...]
    apart: tuple[int, ...]  # positions of the tensors that travel by themselves, in order
    nbytes: int  # of the row

    @classmethod
    def of(cls, n_numbers: int, tensors: Mapping[int, SentTensor], most: int) -> Packing:
        """`most`: bytes of the largest tensor that is packed; -1: none is."""
        places, apart, end = [], [], n_numbers * _NUMBER
        for position, spec in tensors.items():
            if spec.nbytes > most:
                apart.append(position)
                continue
            start = -(-end // _STEP) * _STEP
            places.append(_Place(position, spec, start // spec.dtype.itemsize))
            end = start + spec.nbytes
        return cls(n_numbers, tensors, tuple(places), tuple(apart), end)

    def row(self) -> torch.Tensor:
        return torch.empty(self.nbytes, dtype=torch.uint8)

    def packed(self, numbers: Sequence[int], tensors: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The row of these numbers, of 64 bits, and of the packed ones of these tensors, which have no history."""
        row = self.row()
        self._numbers_of(row)[:] = numbers
        for position, tensor in self.unpacked(row).items():
            tensor.copy_(tensors[position])
        return row

    def numbers(self, row: torch.Tensor) -> list[int]:
        found: list[int] = self._numbers_of(row).tolist()
        return found

    def unpacked(self, row: torch.Tensor) -> dict[int, torch.Tensor]:
        """The packed tensors of a row, in its memory. They are no views: autograd would count a write into one of them
        as one into all."""
        storage = row.untyped_storage()
        return {
            position: torch.empty(0, dtype=spec.dtype).set_(storage, start, spec.shape)  # type: ignore[call-overload]
            for position, spec, start in self.packed_ones
        }

    def _numbers_of(self, row: torch.Tensor) -> np.ndarray:
        return row.numpy()[: self.n_numbers * _NUMBER].view(np.int64)


class Values:
    """What a stage sends a later one for a micro-batch, by position in its outputs; backward, gradients of these."""

    def __init__(self, specs: Mapping[int, Spec]) -> None:
        self.specs = dict(specs)
        self._known: dict[tuple[Any, int], Packing] = {}

    def packing(self, trained: Sequence[int] | None, most: int) -> Packing:
        """How they travel; with `trained`, the gradients of these. `most`: see Packing.of."""
        key = trained if trained is None else tuple(trained), most
        if key not in self._known:
            tensors = {p: s for p, s in self.specs.items() if isinstance(s, SentTensor)}
            if trained is not None:
                tensors = {p: s for p, s in tensors.items() if p in trained}
            self._known[key] = Packing.of(len(self.specs), tensors, most)
        return self._known[key]
