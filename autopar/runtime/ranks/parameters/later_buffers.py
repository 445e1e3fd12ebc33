"""Buffers that no stage of the first call reads, so that every rank keeps them.

An evaluation does not read `num_batches_tracked`; training counts in it, on the ranks of one stage. From the first call
that writes such a buffer, these ranks alone keep it, as if the first call had placed it there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from autopar.errors import PlanError
from autopar.lower.stages import Lowered, StageProgram
from autopar.runtime.ranks.one_message import on_all_ranks
from autopar.runtime.ranks.parameters.holders import StageGrid


class LaterBuffers:
    """Which ranks use the buffers that every rank keeps."""

    def __init__(self) -> None:
        self._users: defaultdict[int, set[int]] = defaultdict(set)  # ranks, by id of the buffer
        self._settled: set[int] = set()  # that have keepers

    def settle(
        self,
        lowered: Lowered,
        stages: Sequence[StageGrid],
        tensors: Mapping[str, torch.Tensor],
        placed: Collection[int],
    ) -> dict[int, frozenset[int]]:
        """By id, the ranks that keep each buffer from now on which the stages of a later call are the first to write.

        `tensors`: the model's, by name. `placed`: ids of those that the first call has placed. Raises PlanError on all
        ranks if an earlier call reads such a buffer on other ranks.
        """
        keepers: dict[int, frozenset[int]] = {}
        for stage, grid in zip(lowered.stages, stages, strict=True):
            for name in dict.fromkeys(piece.name for piece in stage.pieces):
                tensor = tensors.get(name)
                key = id(tensor)
                if tensor is None or isinstance(tensor, nn.Parameter) or key in placed or key in self._settled:
                    continue
                if name in _written(stage):
                    keepers[key] = frozenset(grid.all)
                    for rank in sorted(self._users[key] - keepers[key])[:1]:
                        raise on_all_ranks(_read_elsewhere(stage.index, name, rank))
                self._users[key] |= set(grid.all)
        self._settled |= set(keepers)
        return keepers


def _read_elsewhere(stage: int, name: str, rank: int) -> PlanError:
    return PlanError(
        f"stage {stage} writes the buffer '{name}', which a call of another mode reads on rank {rank}: make the first "
        "call in the mode in which the model trains, with pm.train()"
    )


def _written(stage: StageProgram) -> frozenset[str]:
    """The buffers that a stage writes, and those that are written for it after the batch."""
    deferred = (name for norm in stage.deferred for name in (norm.mean, norm.var, norm.tracked) if name is not None)
    return frozenset((*stage.written_buffers, *deferred))
