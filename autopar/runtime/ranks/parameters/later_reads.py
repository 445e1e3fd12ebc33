"""Parameters that a call reads for the first time after the parameters were placed.

```
   first call    body.weight, a.weight                      placed: each on the ranks of its stage
                 b.weight                                   read by no stage: whole on every rank
   later call    body.weight, b.weight (stage 1, rank 1)    b.weight stays whole on every rank; from now on the ranks
                                                            add up its gradient, and each rank gets the sum
```
So the optimizer makes the same steps with every rank's copy, no matter which rank reads the parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import nn

from autopar.errors import PlanError
from autopar.lower.sharded import Piece
from autopar.lower.stages import Lowered
from autopar.runtime.ranks.one_message import on_all_ranks
from autopar.runtime.ranks.parameters.holders import Holding, StageGrid

Holdings = Mapping[int, Mapping[int, Holding]]  # by id of the tensor and rank


def check_held(
    lowered: Lowered,
    stages: Sequence[StageGrid],
    tensors: Mapping[str, torch.Tensor],
    holdings: Holdings,
    everywhere: Collection[int],
) -> None:
    """Raise PlanError on all ranks if a rank needs another piece of a parameter than the piece it has.

    `tensors`: the model's tensors by name. `everywhere`: ids of the parameters that every rank has whole.
    """
    for stage, piece, rank in _reads(lowered, stages):
        tensor = tensors.get(piece.name)
        if not isinstance(tensor, nn.Parameter):
            continue
        if id(tensor) in everywhere:
            fits, has = piece.whole, "every rank has it whole, because no stage of the first call read it"
        else:
            held = holdings.get(id(tensor), {}).get(rank)
            fits = held is not None and (held.piece.layout, held.piece.place) == (piece.layout, piece.place)
            has = "the rank has another part of it" if held is not None else "the rank has none of it"
        if not fits:
            raise on_all_ranks(
                PlanError(
                    f"stage {stage} needs '{piece.name}' on rank {rank} for a call of another mode or size than the "
                    f"first, and {has}; let the first call be one that reads it, in the mode in which the model trains"
                )
            )


def newly_read(
    lowered: Lowered,
    stages: Sequence[StageGrid],
    tensors: Mapping[str, torch.Tensor],
    holdings: Holdings,
    everywhere: Collection[int],
    size: int,
) -> dict[int, dict[int, Holding]]:
    """The holdings, on each of `size` ranks, of parameters that every rank has whole and that no stage has read before.
    By id of the tensor, in the same order on all ranks."""
    ranks = tuple(range(size))
    first: dict[int, tuple[Piece, set[int]]] = {}
    for stage, piece, _ in _reads(lowered, stages):
        tensor = tensors.get(piece.name)
        if tensor is not None and id(tensor) in everywhere and id(tensor) not in holdings:
            first.setdefault(id(tensor), (piece, set()))[1].add(stage)
    shapes = {id(tensor): tensor.shape for tensor in tensors.values()}
    found = {}
    for key, (piece, readers) in first.items():
        whole = tuple((0, n) for n in shapes[key])
        found[key] = {
            rank: Holding(min(readers), piece, whole, whole, piece.layout, (rank,), ranks, frozenset(readers), False)
            for rank in ranks
        }
    return found


def _reads(lowered: Lowered, stages: Sequence[StageGrid]) -> Iterator[tuple[int, Piece, int]]:
    """Yield (stage, piece that the stage reads, rank that reads the piece)."""
    for stage, grid in zip(lowered.stages, stages, strict=True):
        for piece in stage.pieces:
            for group in grid.ranks:
                yield stage.index, piece, group[piece.device]
