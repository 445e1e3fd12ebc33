"""What every device of a mesh has of a tensor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from autopar.sharding.layouts import PARTIAL, Placements, slices


def places(mesh: Sequence[int]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, mesh)))


def part(whole: Any, layout: Placements, mesh: Sequence[int], place: Sequence[int]) -> Any:
    """What a device has; of sums the first has everything."""
    if not isinstance(whole, torch.Tensor):
        return whole
    mine = whole[slices(layout, whole.shape, mesh, place)].contiguous()
    first = all(i == 0 for i, code in zip(place, layout, strict=True) if code == PARTIAL)
    return mine if first else torch.zeros_like(mine)
