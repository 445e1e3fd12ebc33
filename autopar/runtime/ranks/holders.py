"""Which rank holds which part of which parameter, from the plan alone. Every rank computes the same.

```
   stage 0 on ranks 0, 1 (mesh 2)      w: rows 0 .. 3 on rank 0, rows 4 .. 7 on rank 1
   stage 1 on ranks 2 | 3 (replicas)   v: whole on ranks 2 and 3, whose gradients add up
```
Ranks with equal parts of a parameter form a group: replicas, devices of a mesh that read it whole, and the stages that
share a tied weight. Their gradients are added up once a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from autopar.errors import PlanError
from autopar.lower.sharded import Piece
from autopar.lower.stages import Lowered, StageProgram
from autopar.plan.plan import Plan
from autopar.plan.stage import Stage

_FEW = 0.05  # of a stage's parameters

Part = tuple[tuple[int, int], ...]  # (start, stop) along every dimension


@dataclass(frozen=True)
class StageGrid:
    """The ranks of a stage: replicas x mesh."""

    ranks: tuple[tuple[int, ...], ...]  # of every replica, in the order of the mesh, whose last axis runs fastest
    mesh: tuple[int, ...]  # shape; () for one device

    @property
    def grid(self) -> np.ndarray:
        """Numbers of ranks: replicas, if there are several, then the axes of the mesh. At least one axis."""
        shape = [len(self.ranks)] * (len(self.ranks) > 1) + list(self.mesh)
        return np.array(self.ranks).reshape(shape or [1])

    @property
    def all(self) -> tuple[int, ...]:
        return tuple(rank for group in self.ranks for rank in group)

    def device(self, rank: int) -> int:
        """A rank's number on the mesh of its replica."""
        return next(group.index(rank) for group in self.ranks if rank in group)


def grids(plan: Plan, rank_of: Mapping[str, int]) -> tuple[StageGrid, ...]:
    """The ranks of every stage. `rank_of`: by name of the device."""
    found = []
    for stage in plan.stages:
        ranks, n = [rank_of[name] for name in stage.devices], stage.shards
        groups = tuple(tuple(ranks[i : i + n]) for i in range(0, len(ranks), n))
        found.append(StageGrid(groups, stage.sharding.mesh if stage.sharding is not None and n > 1 else ()))
    return tuple(found)


@dataclass(frozen=True)
class Holding:
    """What one rank holds of a parameter or buffer."""

    stage: int  # the first that reads it there
    piece: Piece
    part: Part
    together: tuple[int, ...]  # ranks with the same part, this one among them, ascending


def holdings(
    lowered: Lowered, stages: Sequence[StageGrid], tensors: Mapping[str, torch.Tensor]
) -> dict[int, dict[int, Holding]]:
    """By id of the tensor and rank. `tensors`: the model's, whole, by name.

    Raises PlanError for a tensor that two stages cut differently.
    """
    found: dict[int, dict[int, tuple[int, Piece, Part]]] = {}
    parts_in: dict[int, dict[int, set[Part]]] = {}  # by tensor and stage
    for stage, grid in zip(lowered.stages, stages, strict=True):
        for piece in stage.pieces:
            tensor = tensors.get(piece.name)
            if tensor is None:
                continue  # a constant of the code
            part = _part(piece, tensor)
            parts_in.setdefault(id(tensor), {}).setdefault(stage.index, set()).add(part)
            for group in grid.ranks:
                before = found.setdefault(id(tensor), {}).setdefault(group[piece.device], (stage.index, piece, part))
                if before[2] != part:
                    raise _cut_differently(piece.name, before[0], stage.index)
    for key, by_stage in parts_in.items():
        first, *others = by_stage.items()
        for stage_index, parts in others:
            if parts != first[1]:
                name = next(piece.name for _, piece, _ in found[key].values())
                raise _cut_differently(name, first[0], stage_index)
    return {key: {rank: _holding(rank, by_rank) for rank in by_rank} for key, by_rank in found.items()}


def _holding(rank: int, by_rank: Mapping[int, tuple[int, Piece, Part]]) -> Holding:
    stage, piece, part = by_rank[rank]
    return Holding(stage, piece, part, tuple(sorted(r for r, other in by_rank.items() if other[2] == part)))


def _part(piece: Piece, tensor: torch.Tensor) -> Part:
    entries = piece.entries(tensor) or [slice(None)] * tensor.dim()
    return tuple(e.indices(n)[:2] for e, n in zip(entries, tensor.shape, strict=True))


def _cut_differently(name: str, a: int, b: int) -> PlanError:
    return PlanError(
        f"stages {a} and {b} share '{name}' and cut it differently, which one process a device does not do; give both "
        "the same placements of it, or put them into one stage"
    )


def check_supported(plan: Plan, lowered: Lowered, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise PlanError for what ranks cannot run exactly so far, all of it in one message."""
    problems = []
    for number, (stage, one) in enumerate(zip(plan.stages, lowered.stages, strict=True)):
        finer = _finer_states(stage, one, tensors)
        if finer:
            problems.append(
                f"stage {number} cuts the optimizer's state of '{finer}' finer than the parameter (ZeRO 1 or 2); give "
                "zero=0 or zero=3"
            )
        if one.uncaptured:
            problems.append(f"stage {number} runs code that is not captured")
        cut = [p.name for p in one.pieces if p.name in one.written_buffers and math.prod(_lengths(p, tensors)) > 1]
        if cut:
            problems.append(f"stage {number} writes parts of the buffer '{cut[0]}' on several devices")
    used = [name for stage in plan.stages for name in stage.devices]
    groups = {stage.devices for stage in plan.stages}
    if len({name for group in groups for name in group}) < sum(map(len, groups)):
        shared = next(name for name in used if sum(name in group for group in groups) > 1)
        problems.append(f"{shared} is in several groups of devices")
    if problems:
        raise PlanError("one process a device does not run this plan: " + "; ".join(problems) + "; or give devices=")


def _finer_states(stage: Stage, lowered: StageProgram, tensors: Mapping[str, torch.Tensor]) -> str:
    """A parameter whose optimizer's state, or gradient, the plan cuts finer than itself; "" if those of the stage are
    few: ranks cut states as the parameters, and a plan may save on norms and biases what changes nothing."""
    stored = stage.sharding.stored if stage.sharding is not None else {}
    sizes = {name: tensors[name].nbytes for name in lowered.parameters if name in tensors}
    finer = [n for n in sizes if n in stored and (stored[n].state != stored[n].layout or stored[n].scattered)]
    return finer[0] if sum(sizes[name] for name in finer) > _FEW * sum(sizes.values()) else ""


def _lengths(piece: Piece, tensors: Mapping[str, torch.Tensor]) -> list[int]:
    """In how many parts a piece's tensor is, per mesh axis."""
    return [n for n, code in zip(piece.mesh, piece.layout, strict=True) if code >= 0] if piece.name in tensors else []
