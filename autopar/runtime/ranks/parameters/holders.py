"""Which rank holds which part of a parameter, from the plan alone. Every rank computes the same.

```
   stage 0 on ranks 0, 1 (mesh 2)      w: rows 0 .. 3 on rank 0, rows 4 .. 7 on rank 1
   stage 1 on ranks 2 | 3 (replicas)   v: whole on ranks 2 and 3, whose gradients add up
```
Ranks with equal parts of a parameter form a group: replicas, devices of a mesh that read it whole, and the stages that
share a tied weight. Their gradients are added up once a step.

A plan may have a rank store less of a parameter than it reads, with the optimizer's state (ZeRO 1 and 2). The ranks of
a row then store the parts of what all of them read, and those of a column store the same part:

```
   one stage on 2 replicas x mesh 2, w read whole, its state S0       rank 0: w[:4] | rank 1: w[4:]    row 0, 1
                                                                      rank 2: w[:4] | rank 3: w[4:]    row 2, 3
                                                                           columns 0, 2 and 1, 3
```
Gradients are then scattered over rows and added up over columns, and values are gathered over rows.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autopar.capture.program import Program
from autopar.errors import PlanError
from autopar.lower import collectives
from autopar.lower.sharded import Piece, has_sparse_gradient
from autopar.lower.stages import Lowered, StageProgram
from autopar.plan.plan import Plan
from autopar.runtime.ranks.parameters.state_parts import Finer, axis_orders, finer_states
from autopar.sharding.layouts import Placements, slices

Part = tuple[tuple[int, int], ...]  # (start, stop) along every dimension


@dataclass(frozen=True)
class StageGrid:
    """The ranks of a stage: replicas x mesh."""

    ranks: tuple[tuple[int, ...], ...]  # of every replica, in the order of the mesh, whose last axis runs fastest
    mesh: tuple[int, ...]  # shape; () for one device
    order: tuple[int, ...] = ()  # of the mesh's axes for DTensors (state_parts.py)

    @property
    def grid(self) -> np.ndarray:
        """Numbers of ranks: replicas, if there are several, then the axes of the mesh in `order`. At least one axis."""
        numbers = np.array(self.ranks).reshape(len(self.ranks), *self.mesh)
        numbers = numbers.transpose(0, *(1 + axis for axis in self.order))
        return numbers if len(self.ranks) > 1 else numbers[0] if self.mesh else numbers.reshape(1)

    def ordered(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """One value per axis of the mesh, in `order`."""
        return tuple(values[axis] for axis in self.order)

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
        found.append((groups, stage.sharding.mesh if stage.sharding is not None and n > 1 else ()))
    stored = [stage.sharding.stored.values() if stage.sharding is not None else () for stage in plan.stages]
    orders = axis_orders(found, stored)
    return tuple(StageGrid(groups, mesh, orders[groups, mesh]) for groups, mesh in found)


@dataclass(frozen=True)
class Holding:
    """What one rank holds of a parameter or buffer."""

    stage: int  # the first that reads it there
    piece: Piece
    part: Part  # that its stages read
    own: Part  # that it stores, with its optimizer's state: the same, or a part of it
    layout: Placements  # of what it stores, in the plan's order of axes
    row: tuple[int, ...]  # ranks that store the parts of `part`, this one among them, ascending
    together: tuple[int, ...]  # the column: ranks that store the same part, this one among them, ascending
    stages: frozenset[int]  # all that read the tensor, on any rank
    scattered: bool  # its gradient is scattered over the row for every micro-batch

    def taken(self, read: torch.Tensor, own: Part | None = None) -> torch.Tensor:
        """A view of what this rank (or one that stores `own`) stores, of what it reads."""
        offsets = zip(self.part, self.own if own is None else own, strict=True)
        return read[tuple(slice(a - start, b - start) for (start, _), (a, b) in offsets)]


def holdings(
    plan: Plan, lowered: Lowered, stages: Sequence[StageGrid], tensors: Mapping[str, torch.Tensor]
) -> dict[int, dict[int, Holding]]:
    """By id of the tensor and rank. `tensors`: the model's, whole, by name.

    Raises PlanError for a tensor that two stages cut differently.
    """
    finer = _finer(plan, lowered, stages, tensors)
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
    whole = {id(tensor): tensor for tensor in tensors.values()}
    return {
        key: holdings_of(whole[key], by_rank, stages, finer, frozenset(parts_in[key])) for key, by_rank in found.items()
    }


def holdings_of(
    tensor: torch.Tensor,
    by_rank: Mapping[int, tuple[int, Piece, Part]],
    stages: Sequence[StageGrid],
    finer: Sequence[Mapping[int, Finer]],
    readers: frozenset[int],
) -> dict[int, Holding]:
    """Of one tensor, by rank. `by_rank`: (stage, piece, part read)."""
    own: dict[int, tuple[Part, tuple[int, ...]]] = {}  # (part, row)
    for rank, (stage, piece, part) in by_rank.items():
        cut = finer[stage].get(id(tensor))
        own[rank] = (part, (rank,)) if cut is None else _own(rank, stages[stage], piece, tensor, cut)
    reading, storing = defaultdict[Part, list[int]](list), defaultdict[Part, list[int]](list)
    for rank in sorted(by_rank):
        reading[by_rank[rank][2]].append(rank)
        storing[own[rank][0]].append(rank)
    # All ranks that share the tensor reduce its gradient in one way: where a stage does not scatter it, or a row has
    # one rank alone, none does. That costs memory alone.
    cuts = {stage: finer[stage].get(id(tensor)) for stage, _, _ in by_rank.values()}
    scattered = all(cut is not None and cut.scattered for cut in cuts.values())
    scattered = scattered and all(len(row) > 1 for _, row in own.values())
    found = {}
    for rank, (stage, piece, part) in by_rank.items():
        mine, row = own[rank]
        together = tuple(storing[mine])
        if sorted(r for other in together for r in own[other][1]) != reading[part]:
            a, b = sorted({by_rank[r][0] for r in by_rank})[:2]
            raise PlanError(
                f"stages {a} and {b} share '{piece.name}' and cut its optimizer's state differently, which one process "
                "a device does not do; give zero=0, or put them into one stage"
            )
        cut = cuts[stage]
        layout = piece.layout if cut is None else cut.state
        found[rank] = Holding(stage, piece, part, mine, layout, row, together, readers, scattered)
    return found


def _own(rank: int, grid: StageGrid, piece: Piece, tensor: torch.Tensor, cut: Finer) -> tuple[Part, tuple[int, ...]]:
    """What a rank stores of a tensor with a state that is cut finer, and the ranks with the other parts."""
    entries = slices(grid.ordered(cut.state), tensor.shape, grid.ordered(piece.mesh), grid.ordered(piece.place))
    group = np.array(next(group for group in grid.ranks if rank in group)).reshape(grid.mesh)
    line = group[tuple(slice(None) if axis in cut.axes else i for axis, i in enumerate(piece.place))]
    return tuple((e.start, e.stop) for e in entries), tuple(sorted(line.reshape(-1).tolist()))


def _part(piece: Piece, tensor: torch.Tensor) -> Part:
    entries = piece.entries(tensor) or [slice(None)] * tensor.dim()
    return tuple(e.indices(n)[:2] for e, n in zip(entries, tensor.shape, strict=True))


def _cut_differently(name: str, a: int, b: int) -> PlanError:
    return PlanError(
        f"stages {a} and {b} share '{name}' and cut it differently, which one process a device does not do; give both "
        "the same placements of it, or put them into one stage"
    )


def _finer(
    plan: Plan, lowered: Lowered, stages: Sequence[StageGrid], tensors: Mapping[str, torch.Tensor]
) -> list[Mapping[int, Finer]]:
    """By stage and id of the tensor."""
    return [
        finer_states(stage, one, grid.order, tensors)[0]
        for stage, one, grid in zip(plan.stages, lowered.stages, stages, strict=True)
    ]


def check_captured(program: Program) -> None:
    """Raise PlanError for code that no tracer captures, with its module: no plan runs it on ranks."""
    if program.uncaptured:
        raise PlanError(
            f"one process a device runs captured code alone, and {program.uncaptured[0]}: make this code fit for "
            "torch.export, or give devices=, so that one process runs the plan"
        )


def check_supported(
    plan: Plan, lowered: Lowered, stages: Sequence[StageGrid], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Raise PlanError for what ranks cannot run exactly so far, all of it in one message."""
    problems = []
    for number, (stage, one, grid) in enumerate(zip(plan.stages, lowered.stages, stages, strict=True)):
        problems += [f"stage {number} {text}" for text in finer_states(stage, one, grid.order, tensors)[1]]
        sparse = [name for name in with_sparse_gradients(one) if name in tensors and tensors[name].requires_grad]
        if plan.training and sparse:
            problems.append(f"stage {number} {sparse_problem(sparse[0])}")
        if one.uncaptured:
            problems.append(f"stage {number} runs code that is not captured")
        called = next((str(n.target) for n in one.module.graph.nodes if n.op == "call_module"), None)
        if called is not None and (one.shards > 1 or len(plan.stages) > 1):
            problems.append(
                f"stage {number} calls module '{called}' as a whole, because torch.export refuses the model; only "
                "replicas of the whole model (Plan.from_split({'': 0}, devices=[[...]])) run it"
            )
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


def with_sparse_gradients(stage: StageProgram) -> list[str]:
    """The names of embedding weights whose gradients are sparse if they are trained."""
    names = {piece.attribute: piece.name for piece in stage.pieces}
    found: dict[str, None] = {}
    for node in filter(has_sparse_gradient, stage.module.graph.nodes):
        sources = [node.all_input_nodes[0]]  # the table whose rows are read
        while sources:
            source = sources.pop()
            if source.op == "get_attr" and str(source.target) in names:
                found[names[str(source.target)]] = None
            elif source.target is operator.getitem or getattr(source.target, "__module__", "") == collectives.__name__:
                sources += source.all_input_nodes
    return list(found)


def sparse_problem(name: str) -> str:
    return f"trains '{name}' with sparse gradients, which DTensors do not have (sparse=False does)"


def _lengths(piece: Piece, tensors: Mapping[str, torch.Tensor]) -> list[int]:
    """In how many parts a piece's tensor is, per mesh axis."""
    return [n for n, code in zip(piece.mesh, piece.layout, strict=True) if code >= 0] if piece.name in tensors else []
