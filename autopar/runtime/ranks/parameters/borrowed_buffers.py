"""Buffers that a stage reads on a rank that does not keep them.

The stages of the first plan keep the buffers. A call in another mode may read a buffer in another stage: then the
keeper sends its values with every call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from autopar.lower.stages import Lowered
from autopar.runtime.ranks.parameters.holders import StageGrid
from autopar.runtime.ranks.world import World


class Borrowed(NamedTuple):
    """A buffer of the model that ranks read without keeping it."""

    name: str
    keeper: int  # rank
    readers: tuple[int, ...]  # ranks


def borrowed_buffers(
    world: World,
    kept: Collection[str],
    lowered: Lowered,
    stages: Sequence[StageGrid],
    whole: Mapping[str, torch.Tensor],
) -> list[Borrowed]:
    """Collective; the same on all ranks. `kept`: names that this rank keeps. `whole`: the model's tensors, by name."""
    mine = [
        piece.name
        for stage, grid in zip(lowered.stages, stages, strict=True)
        for piece in stage.pieces
        if world.rank in grid.all and piece.name in whole and not isinstance(whole[piece.name], nn.Parameter)
    ]
    needed = sorted({*mine} - {*kept})
    wanted = world.gathered(needed)
    names = sorted({name for theirs in wanted for name in theirs})
    keepers = world.gathered([name in kept for name in names]) if names else []
    return [
        Borrowed(
            name,
            next(rank for rank, theirs in enumerate(keepers) if theirs[place]),
            tuple(rank for rank, theirs in enumerate(wanted) if name in theirs),
        )
        for place, name in enumerate(names)
    ]
