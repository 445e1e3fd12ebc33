"""The placements of a tensor on a mesh: one per mesh axis, as in torch.distributed.tensor.

In the code a tensor's placements are a tuple of numbers (`layout`): d >= 0 for Shard(d), REPLICATE, or PARTIAL (the
tensor is the sum of the devices' tensors along the axis). Where several axes shard one dimension, the first of them is
the outermost:

    mesh 2 x 2, placements (0, 0): device (i, j) has quarter 2 i + j of dimension 0
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from autopar.errors import InputError

Placements = tuple[int, ...]

REPLICATE = -1
PARTIAL = -2

# What all devices read whole gets gradients that add up; what devices add up gets one gradient for all of them.
DUAL = {REPLICATE: PARTIAL, PARTIAL: REPLICATE}


def placements(layout: Placements) -> tuple[Placement, ...]:
    """The layout as torch's placement objects."""
    other: dict[int, Placement] = {REPLICATE: Replicate(), PARTIAL: Partial()}
    return tuple(other[code] if code < 0 else Shard(code) for code in layout)


def from_placements(given: Sequence[Placement]) -> Placements:
    """A layout from torch's placement objects. Raises InputError for others, such as Partial("max")."""

    def code(one: Placement) -> int:
        if isinstance(one, Shard):
            return one.dim
        if isinstance(one, Replicate):
            return REPLICATE
        if isinstance(one, Partial) and one.reduce_op == "sum":
            return PARTIAL
        raise InputError(f"a placement must be Shard(dim), Replicate() or Partial(), got {one}")

    return tuple(map(code, given))


def layouts(shape: Sequence[int], mesh: Sequence[int], *, partial: bool = True) -> list[Placements]:
    """All layouts of a tensor on a mesh of this shape that give every device an equal part, the replicated one first.

    An axis of one device has only REPLICATE. `partial`: with layouts that have PARTIAL."""
    codes = [REPLICATE, *range(len(shape)), *([PARTIAL] if partial else [])]
    every = itertools.product(*(codes if n > 1 else [REPLICATE] for n in mesh))
    return [layout for layout in every if fits(layout, shape, mesh)]


def fits(layout: Placements, shape: Sequence[int], mesh: Sequence[int]) -> bool:
    """Whether the layout cuts every dimension into equal parts."""
    return all(
        size % math.prod(n for n, c in zip(mesh, layout, strict=True) if c == d) == 0 for d, size in enumerate(shape)
    )


def parts(layout: Placements, mesh: Sequence[int]) -> int:
    """The number of parts that the tensor is cut into."""
    return math.prod(n for n, code in zip(mesh, layout, strict=True) if code >= 0)


def local_shape(layout: Placements, shape: Sequence[int], mesh: Sequence[int]) -> tuple[int, ...]:
    """The shape of each device's part."""
    return tuple(
        size // math.prod(n for n, code in zip(mesh, layout, strict=True) if code == d) for d, size in enumerate(shape)
    )


def slices(layout: Placements, shape: Sequence[int], mesh: Sequence[int], place: Sequence[int]) -> tuple[slice, ...]:
    """The entries that the device at `place` has; for PARTIAL, the entries that its addend counts to."""
    found = []
    for d, size in enumerate(shape):
        number, count = 0, 1
        for n, code, here in zip(mesh, layout, place, strict=True):
            if code == d:
                number, count = number * n + here, count * n
        found.append(slice(number * size // count, (number + 1) * size // count))
    return tuple(found)
