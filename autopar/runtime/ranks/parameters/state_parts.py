"""Parameters whose optimizer's state a plan cuts finer than the parameter itself (ZeRO 1 and 2), and how DTensors store
them. A stage reads the parameter in its layout; the rank stores the part of it that its share of the state updates.

```
   mesh 2 x 2 (data, tensor); w is read as RS0, its state is S0S0         rank (i, j)
       reads      half j of w
       stores     quarter 2 j + i: half i of what it reads
```
A DTensor counts the axes of its mesh from the outermost cut to the innermost, so here its mesh is (tensor, data): first
come the axes that cut what a rank reads, then those that cut its share of the state. All parameters of a stage are
DTensors on one mesh, because optimizers take lists of such DTensors alone. One order has to do for all of them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from autopar.lower.stages import StageProgram
from autopar.plan.stage import Stage
from autopar.sharding.layouts import PARTIAL, Placements, fits
from autopar.sharding.stage_sharding import Stored, layout_text

_FEW = 0.05  # of a stage's parameters

Grid = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]  # ranks of all replicas, shape of the mesh


@dataclass(frozen=True)
class Finer:
    """A parameter's state, cut finer than the parameter."""

    state: Placements
    axes: frozenset[int]  # of the mesh, that cut the state and not the parameter
    scattered: bool  # the gradient, too, for every micro-batch (ZeRO 2)


def axis_orders(grids: Sequence[Grid], stored: Sequence[Iterable[Stored]]) -> dict[Grid, tuple[int, ...]]:
    """For every grid the order of axes that suits the most parameters, the given order first. `stored`: by stage.

    Stages on the same grid have one order, so that a rank with several stages has one mesh.
    """
    pairs: defaultdict[Grid, list[tuple[Placements, Placements]]] = defaultdict(list)
    for grid, every in zip(grids, stored, strict=True):
        pairs[grid] += [(one.layout, one.state) for one in every if len(one.layout) == len(grid[1])]

    def misfits(order: tuple[int, ...], of: list[tuple[Placements, Placements]]) -> tuple[int, int]:
        read = sum(not _nests(layout, layout, order) for layout, _ in of)
        return read, sum(not _nests(layout, state, order) for layout, state in of)

    found = {}
    for grid, of in pairs.items():
        distinct = list(dict.fromkeys(of))
        found[grid] = min(itertools.permutations(range(len(grid[1]))), key=lambda order: misfits(order, distinct))
    return found


def _nests(layout: Placements, state: Placements, order: Sequence[int]) -> bool:
    """Whether DTensors with their axes in `order` can have both layouts, each rank's state inside of what it reads.

    Axes that cut one dimension of the layout keep their order, and those that cut its state come after them.
    """
    for dim in {code for code in state if code >= 0}:
        cutting = [axis for axis in order if state[axis] == dim]
        reading = [axis for axis, code in enumerate(layout) if code == dim]
        if cutting[: len(reading)] != reading:
            return False
    return True


def finer_states(
    stage: Stage, program: StageProgram, order: Sequence[int], tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[int, Finer], list[str]]:
    """Parameters of a stage with states cut finer, by id, and what ranks do not do of the plan.

    The states of parameters for which the order of axes is wrong, stay as the parameters where they are few: that costs
    memory alone.
    """
    named = stage.sharding.stored if stage.sharding is not None else {}
    stored = {id(tensors[name]): one for name, one in named.items() if name in tensors}  # under any of its names
    layouts = {piece.name: piece.layout for piece in program.pieces}
    mesh = stage.sharding.mesh if stage.sharding is not None else ()
    found: dict[int, Finer] = {}
    problems: list[str] = []
    left: list[str] = []
    for name, layout in layouts.items():
        tensor = tensors.get(name)
        one = stored.get(id(tensor))
        if one is None or not isinstance(tensor, nn.Parameter) or one.state == layout or one.layout != layout:
            continue
        text = f"stores the optimizer's state of '{name}' of shape {tuple(tensor.shape)} as '{layout_text(one.state)}'"
        if PARTIAL in one.state or any(b >= 0 and a != b for a, b in zip(one.state, layout, strict=True)):
            problems.append(f"{text}, which is no part of the parameter, stored as '{layout_text(layout)}'")
        elif any(code >= tensor.dim() for code in one.state) or not fits(one.state, tensor.shape, mesh):
            problems.append(f"{text}: the numbers of parts must divide its dimensions on a mesh of shape {mesh}")
        elif not _nests(layout, one.state, order):
            left.append(name)
        else:
            axes = frozenset(a for a, (b, c) in enumerate(zip(one.state, layout, strict=True)) if b != c)
            found[id(tensor)] = Finer(one.state, axes, one.scattered)
    sizes = {name: tensors[name].nbytes for name in program.parameters if name in tensors}
    if sum(sizes[name] for name in left) > _FEW * sum(sizes.values()):
        problems.append(
            f"cuts the optimizer's state of '{left[0]}' along an axis of the mesh that cuts other parameters inside of "
            "it, and DTensors have one order of axes; give it the placements of the others, or zero=0 or zero=3"
        )
    return found, problems
