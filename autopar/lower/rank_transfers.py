"""The transfers of a mesh as one of its devices takes part in them, where every device is a process (a rank).

Each function here takes and returns this rank's tensor alone; `collectives.py` has the same transfers for the tensors
of all devices. What only the first device has there, every rank has here: a value that enters or leaves the stage is
whole on all ranks, and so is its gradient.

```
    x, whole -- spread: this rank's part -> linear -- all_reduce: Partial -> Replicate -> gelu -- joined -> y, whole
    dx, whole <- parts joined or added up                                        this rank's part <- dy, whole
```
`mesh` is the mesh's shape, `place` the rank's coordinates on it, and `groups` the names of its process groups, one per
axis. The ranks of a line call the same functions in the same order: their graphs are projections of one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.lower import process_groups, regather
from autopar.lower.collectives import Move, added_up, share
from autopar.sharding.layouts import PARTIAL, REPLICATE, Placements
from autopar.sharding.parallel_operators.group import Call, OperatorGroup
from autopar.sharding.parallel_operators.operators import SPECIALS
from autopar.sharding.strategies import Strategy


@dataclass(frozen=True)
class Line:
    """A rank's line along one axis of its mesh."""

    n: int  # ranks
    place: int  # of this rank
    group: str  # name of its process group


def line_of(axis: int, mesh: Sequence[int], place: Sequence[int], groups: Sequence[str]) -> Line:
    return Line(mesh[axis], place[axis], groups[axis])


def moved(x: torch.Tensor, *, move: Move, **where: Any) -> torch.Tensor:
    """One step of a redistribution, without gradient. `move`: name, mesh axis, dimension(s) (`collectives.MOVES`)."""
    name, axis, dim = move
    return _MOVES[name](x.detach() if x.requires_grad else x, dim, line_of(axis, **where))


def gradient(part: torch.Tensor, result: torch.Tensor, *, moves: Sequence[Move] = (), **where: Any) -> torch.Tensor:
    """`result`, made from the value of `part`; in the backward, its gradient goes to `part` by `moves`."""
    if not torch.is_grad_enabled() or not part.requires_grad:
        return result
    found: torch.Tensor = _Gradient.apply(result, moves, where, part)
    return found


def spread(x: torch.Tensor, *, layout: Placements, **where: Any) -> torch.Tensor:
    """This rank's part of a tensor that is whole on every rank. In the backward, the gradient becomes whole again."""
    if torch.is_grad_enabled() and x.requires_grad:
        found: torch.Tensor = _Spread.apply(x, layout, where)
        return found
    return _part(x.detach(), layout, where)


def joined(x: torch.Tensor, *, layout: Placements, gradient: Placements, **where: Any) -> torch.Tensor:
    """The whole tensor. In the backward, this rank takes its part, in another layout, of the whole gradient."""
    if torch.is_grad_enabled() and x.requires_grad:
        found: torch.Tensor = _Joined.apply(layout, gradient, where, x)
        return found
    return _whole(x.detach(), layout, where)


def kept_as_shards(part: torch.Tensor, result: torch.Tensor, *, moves: Sequence[Move], **where: Any) -> torch.Tensor:
    """`result`, which `moves` made of `part`. Where a stage keeps shards (`regather`), autograd keeps `part` instead,
    and the first reader's backward gathers again: in the same place on all ranks of the line."""
    if regather.keeps_shards():
        regather.keep([result], _RankShards(part, moves, where))
    return result


class _RankShards(regather.Shards):
    """What a rank keeps of a tensor that was gathered over its lines."""

    def __init__(self, part: torch.Tensor, moves: Sequence[Move], where: Any) -> None:
        super().__init__([part], moves, where["mesh"])
        self._where = where

    def moved(self, parts: list[torch.Tensor], move: Move) -> list[torch.Tensor]:
        return [moved(part, move=move, **self._where) for part in parts]


def together(call: Call, *, name: str, strategy: Any, **where: Any) -> torch.Tensor:
    """This rank's result of an operator that the ranks of a mesh do together (`sharding.parallel_operators`)."""
    group = RankGroup(Strategy(*strategy), where["mesh"], where["place"], where["groups"])
    (found,) = SPECIALS[name][0]([call], group)
    return found


@dataclass(frozen=True)
class RankGroup(OperatorGroup):
    """The devices of a mesh. The lists that operators exchange hold only this rank's tensors."""

    place: tuple[int, ...]
    names: tuple[str, ...]  # of the process groups, one per axis

    def groups(self, axes: Sequence[int]) -> list[list[int]]:
        """This rank's group. Its devices have equal parts: the list's only entry counts for each of them."""
        return [[0] * len(super().groups(axes)[0])]

    def first(self, axes: Sequence[int]) -> list[bool]:
        return [all(self.place[axis] == 0 for axis in axes)]

    def starts(self, sizes: Sequence[int], axes: Sequence[int]) -> list[int]:
        number = 0
        for axis in axes:
            number = number * self.mesh[axis] + self.place[axis]
        return [number * sizes[0]]

    def all_reduce(
        self,
        parts: Sequence[torch.Tensor],
        axes: Sequence[int],
        combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.add,
    ) -> list[torch.Tensor]:
        (found,) = (part.detach() for part in parts)
        for axis in axes:
            operation = {torch.add: "sum", torch.maximum: "max"}[combine]
            found = process_groups.all_reduce(found.contiguous(), operation, self.names[axis])
        return [found]


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, moves: Sequence[Move], where: Any, part: torch.Tensor) -> Any:
        ctx.moves, ctx.where = moves, where
        return result.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (found,) = gradients
        for move in ctx.moves:
            found = moved(found, move=move, **ctx.where)
        return None, None, None, found


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layout: Placements, where: Any) -> Any:
        ctx.layout, ctx.where = added_up(layout), where
        return _part(x.detach(), layout, where)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _whole(gradients[0], ctx.layout, ctx.where), None, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: Placements, gradient: Placements, where: Any, x: torch.Tensor) -> Any:
        ctx.layout, ctx.where = gradient, where
        return _whole(x.detach(), layout, where)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, None, _part(gradients[0], ctx.layout, ctx.where)


# -- one tensor, one line ----------------------------------------------------------------------------------------------


def _all_gather(x: torch.Tensor, dim: int, line: Line) -> torch.Tensor:
    if line.n == 1:
        return x
    if x.dim() == 0 or dim == 0:
        return process_groups.all_gather(x.contiguous(), line.n, line.group)
    return torch.cat(process_groups.all_gather(x.contiguous(), line.n, line.group).chunk(line.n), dim)


def _all_reduce(x: torch.Tensor, _: None, line: Line) -> torch.Tensor:
    return process_groups.all_reduce(x.contiguous(), "sum", line.group) if line.n > 1 else x


def _reduce_scatter(x: torch.Tensor, dim: int, line: Line) -> torch.Tensor:
    return process_groups.reduce_scatter(_stacked(x, dim, line), line.n, line.group) if line.n > 1 else x


def _all_to_all(x: torch.Tensor, dims: tuple[int, int], line: Line) -> torch.Tensor:
    if line.n == 1:
        return x
    found = process_groups.all_to_all(_stacked(x, dims[1], line), line.n, line.group)
    return torch.cat(found.chunk(line.n), dims[0])


def _take_part(x: torch.Tensor, dim: int, line: Line) -> torch.Tensor:
    """A copy: autograd keeps gradients, and adds to them in place."""
    size = share(x.shape[dim], line.n, dim)
    return x.narrow(dim, line.place * size, size).clone()


def _one_addend(x: torch.Tensor, _: None, line: Line) -> torch.Tensor:
    return x if line.place == 0 else torch.zeros_like(x)


_MOVES: dict[str, Callable[[torch.Tensor, Any, Line], torch.Tensor]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "take_part": _take_part,
    "one_addend": _one_addend,
}


def _stacked(x: torch.Tensor, dim: int, line: Line) -> torch.Tensor:
    """The parts along `dim`, one behind the other along dimension 0."""
    share(x.shape[dim], line.n, dim)
    return x.contiguous() if dim == 0 else torch.cat(x.chunk(line.n, dim))


def _part(x: torch.Tensor, layout: Placements, where: Any) -> torch.Tensor:
    """This rank's part of a whole tensor; axes cut one after another, the first one the coarsest."""
    for axis, code in enumerate(layout):
        line = line_of(axis, **where)
        if code == PARTIAL:
            x = _one_addend(x, None, line)
        elif code != REPLICATE:
            x = _take_part(x, code, line)
    return x


def _whole(x: torch.Tensor, layout: Placements, where: Any) -> torch.Tensor:
    """The whole tensor from the parts of all ranks; axes are merged from the last one on, which runs fastest."""
    for axis, code in reversed(list(enumerate(layout))):
        line = line_of(axis, **where)
        if code == PARTIAL:
            x = _all_reduce(x, None, line)
        elif code != REPLICATE:
            x = _all_gather(x, code, line)
    return x
