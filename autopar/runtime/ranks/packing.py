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
from typing import NamedTuple

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


@dataclass(frozen=True)
class Packing:
    """Where the parts of a message are."""

    n_numbers: int
    tensors: Mapping[int, SentTensor]  # by position
    starts: Mapping[int, int]  # by position of a packed tensor, its first byte
    nbytes: int  # of the row

    @classmethod
    def of(cls, n_numbers: int, tensors: Mapping[int, SentTensor], most: int) -> Packing:
        """`most`: bytes of the largest tensor that is packed; -1: none is."""
        starts, end = {}, n_numbers * _NUMBER
        for position, spec in tensors.items():
            if spec.nbytes <= most:
                starts[position] = start = -(-end // _STEP) * _STEP
                end = start + spec.nbytes
        return cls(n_numbers, tensors, starts, end)

    @property
    def apart(self) -> list[int]:
        """Positions of the tensors that travel by themselves, in order."""
        return [position for position in self.tensors if position not in self.starts]

    def row(self) -> torch.Tensor:
        return torch.empty(self.nbytes, dtype=torch.uint8)

    def packed(self, numbers: Sequence[int], tensors: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The row of these numbers, of 64 bits, and of the packed ones of these tensors."""
        row = self.row()
        if numbers:
            row[: self.n_numbers * _NUMBER].view(torch.int64).copy_(torch.tensor(numbers, dtype=torch.int64))
        for position in self.starts:
            self._tensor(row, position).copy_(tensors[position])
        return row

    def numbers(self, row: torch.Tensor) -> list[int]:
        found: list[int] = row[: self.n_numbers * _NUMBER].view(torch.int64).tolist()
        return found

    def unpacked(self, row: torch.Tensor) -> dict[int, torch.Tensor]:
        """The packed tensors of a row, in its memory."""
        return {position: self._tensor(row, position) for position in self.starts}

    def _tensor(self, row: torch.Tensor, position: int) -> torch.Tensor:
        """No view of the row: autograd would count a write into one tensor as one into all of them."""
        spec, start = self.tensors[position], self.starts[position]
        found = torch.empty(0, dtype=spec.dtype)
        return found.set_(row.untyped_storage(), start // spec.dtype.itemsize, spec.shape)  # type: ignore[call-overload,no-any-return]
