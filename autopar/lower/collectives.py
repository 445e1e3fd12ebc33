"""The transfers between the devices of a mesh that the graph of a sharded stage calls.

Every function takes a list of the local tensors of all devices and returns such a list. Its order is that of the mesh;
the last axis runs fastest. A function exchanges tensors along one axis, in all lines along that axis at once:

    mesh 2 x 3, axis 1     [0 1 2] [3 4 5]        axis 0     [0 3] [1 4] [2 5]

These functions only move values. `gradient` adds the backward: it passes the moved values to their readers, and in the
backward it moves the gradients of the readers back to the devices that the values came from. Autograd differentiates
the operators of every device by themselves, as in a process of its own.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from autopar.errors import InputError
from autopar.sharding.layouts import DUAL, PARTIAL, REPLICATE, Placements

Parts = Sequence[torch.Tensor]
Move = tuple[str, int, Any]  # name of a function here, axis of the mesh, dimension(s) of the tensor


def lines(n_devices: int, mesh: Sequence[int], axis: int) -> Iterator[range]:
    """The devices of every line along an axis."""
    step = 1
    for n in mesh[axis + 1 :]:
        step *= n
    for first in range(n_devices):
        if first // step % mesh[axis] == 0:
            yield range(first, first + step * mesh[axis], step)


def share(size: int, count: int, dim: int) -> int:
    """A device's part of a size that depends on the batch. Raises InputError where parts would not be even."""
    if size % count:
        raise InputError(
            f"dimension {dim} of size {size} is cut into {count} equal parts, one a device, so that its size must be a "
            f"multiple of {count}; give batches whose micro-batches make it one, or a plan that does not cut it"
        )
    return size // count


def scaled(value: torch.Tensor, factor: float) -> torch.Tensor:
    """The mean over a part, scaled to be its addend of the whole mean."""
    return value * factor


def all_gather(parts: Parts, *, axis: int, dim: int, mesh: Sequence[int]) -> list[torch.Tensor]:
    """Shard(dim) -> Replicate."""
    return _each_line(parts, mesh, axis, lambda line: _shared(line, lambda mine: torch.cat(mine, dim)))


def all_reduce(parts: Parts, *, axis: int, dim: None = None, mesh: Sequence[int]) -> list[torch.Tensor]:
    """Partial -> Replicate."""
    return _each_line(parts, mesh, axis, lambda line: _shared(line, _sum))


def reduce_scatter(parts: Parts, *, axis: int, dim: int, mesh: Sequence[int]) -> list[torch.Tensor]:
    """Partial -> Shard(dim)."""
    return _each_line(parts, mesh, axis, lambda line: _exchanged(line, dim, _sum))


def all_to_all(parts: Parts, *, axis: int, dim: tuple[int, int], mesh: Sequence[int]) -> list[torch.Tensor]:
    """Shard(dim[0]) -> Shard(dim[1])."""
    return _each_line(parts, mesh, axis, lambda line: _exchanged(line, dim[1], lambda mine: torch.cat(mine, dim[0])))


def take_part(parts: Parts, *, axis: int, dim: int, mesh: Sequence[int]) -> list[torch.Tensor]:
    """Replicate -> Shard(dim): every device keeps its part."""
    return _each_line(parts, mesh, axis, lambda line: [_slice(x, dim, i, len(line)) for i, x in enumerate(line)])


def one_addend(parts: Parts, *, axis: int, dim: None = None, mesh: Sequence[int]) -> list[torch.Tensor]:
    """Replicate -> Partial: all but the first count zero."""
    return _each_line(parts, mesh, axis, lambda line: [line[0], *map(torch.zeros_like, line[1:])])


LOCAL = ("take_part", "one_addend")  # a device changes what it has by itself
MOVES: dict[str, Callable[..., list[torch.Tensor]]] = {
    function.__name__: function
    for function in (all_gather, all_reduce, reduce_scatter, all_to_all, take_part, one_addend)
}


def move_between(before: Placements, after: Placements) -> Move:
    """One step of a redistribution; the placements differ along one axis."""
    (axis,) = (a for a, (old, new) in enumerate(zip(before, after, strict=True)) if old != new)
    old, new = before[axis], after[axis]
    if old == PARTIAL:
        return ("all_reduce", axis, None) if new == REPLICATE else ("reduce_scatter", axis, new)
    if old == REPLICATE:
        return ("one_addend", axis, None) if new == PARTIAL else ("take_part", axis, new)
    return ("all_gather", axis, old) if new == REPLICATE else ("all_to_all", axis, (old, new))


def gradient(parts: Parts, result: Parts, *, moves: Sequence[Move] = (), mesh: Sequence[int]) -> list[torch.Tensor]:
    """`result`, made from the values of `parts`; in the backward, its gradients go to `parts` by `moves`."""
    if not torch.is_grad_enabled() or not any(part.requires_grad for part in parts):
        return list(result)
    return list(_Gradient.apply(list(result), moves, mesh, *parts))


def added_up(layout: Placements) -> Placements:
    """The placements of the gradients of a tensor that was spread: along an axis with equal parts, gradients add up."""
    return tuple(DUAL.get(code, code) for code in layout)


def spread(
    x: torch.Tensor, *, layout: Placements, mesh: Sequence[int], devices: Sequence[torch.device]
) -> list[torch.Tensor]:
    """Each device's part of a whole tensor on the first device. Without `devices`, all parts stay there.

    In the backward, gradients arrive in `added_up(layout)`.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return list(_Spread.apply(x, layout, mesh, devices))
    return _scattered(x.detach(), layout, mesh, devices)


def joined(parts: Parts, *, layout: Placements, gradient: Placements, mesh: Sequence[int]) -> torch.Tensor:
    """The whole tensor, on the first device. In the backward, the parts get its gradient in another layout."""
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        found: torch.Tensor = _Joined.apply(layout, gradient, mesh, *parts)
        return found
    return _whole(parts, layout, mesh)


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Parts, moves: Sequence[Move], mesh: Sequence[int], *parts: torch.Tensor) -> Any:
        ctx.moves, ctx.mesh = moves, mesh
        ctx.like = _described(result)
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in result)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        found = _complete(gradients, ctx.like)
        for name, axis, dim in ctx.moves if found else ():
            found = MOVES[name](found, axis=axis, dim=dim, mesh=ctx.mesh)
        return None, None, None, *(found if found else [None] * len(gradients))


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layout: Placements, mesh: Any, devices: Any) -> Any:
        parts = _scattered(x, layout, mesh, devices)
        ctx.layout, ctx.mesh, ctx.like = added_up(layout), mesh, _described(parts)
        ctx.set_materialize_grads(False)
        return tuple(part.detach() for part in parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        found = _complete(gradients, ctx.like)
        return _whole(found, ctx.layout, ctx.mesh) if found else None, None, None, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: Placements, gradient: Placements, mesh: Any, *parts: torch.Tensor) -> Any:
        ctx.layout, ctx.mesh, ctx.devices = gradient, mesh, [part.device for part in parts]
        return _whole(parts, layout, mesh).detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, None, None, *_scattered(gradient, ctx.layout, ctx.mesh, ctx.devices)


def _described(parts: Parts) -> list[tuple[torch.Size, torch.dtype, torch.device]]:
    return [(part.shape, part.dtype, part.device) for part in parts]


def _complete(gradients: Sequence[torch.Tensor | None], like: Any) -> list[torch.Tensor]:
    """Zeros for a device without a gradient. Empty if no device has one."""
    if all(g is None for g in gradients):
        return []
    pairs = zip(gradients, like, strict=True)
    return [torch.zeros(a[0], dtype=a[1], device=a[2]) if g is None else g for g, a in pairs]


def _each_line(
    parts: Parts, mesh: Sequence[int], axis: int, change: Callable[[list[torch.Tensor]], list[torch.Tensor]]
) -> list[torch.Tensor]:
    # A gradient has no history, and must stay the tensor it is: autograd sees who else has it.
    values = [part.detach() if part.requires_grad else part for part in parts]
    for line in lines(len(parts), mesh, axis):
        for device, value in zip(line, change([values[i] for i in line]), strict=True):
            values[device] = value
    return values


def _shared(line: list[torch.Tensor], make: Callable[[list[torch.Tensor]], torch.Tensor]) -> list[torch.Tensor]:
    """One result for all devices of a line, computed on the first."""
    whole = make([x.to(line[0].device) for x in line])
    return [whole.to(x.device) for x in line]


def _exchanged(
    line: list[torch.Tensor], dim: int, make: Callable[[list[torch.Tensor]], torch.Tensor]
) -> list[torch.Tensor]:
    """Device i gets slice i of every device."""
    n = len(line)
    return [make([_slice(x, dim, i, n).to(mine.device) for x in line]) for i, mine in enumerate(line)]


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(operator.add, parts)


def _slice(x: torch.Tensor, dim: int, number: int, count: int) -> torch.Tensor:
    """A copy: autograd keeps gradients, and adds to them in place."""
    size = share(x.shape[dim], count, dim)
    return x.narrow(dim, number * size, size).clone()


def _scattered(
    x: torch.Tensor, layout: Placements, mesh: Sequence[int], devices: Sequence[torch.device]
) -> list[torch.Tensor]:
    """Each device's part of a whole tensor."""

    def cut(part: torch.Tensor, n: int, code: int) -> list[torch.Tensor]:
        if code == PARTIAL:
            return [part] + [torch.zeros_like(part) for _ in range(n - 1)]
        return [part] * n if code == REPLICATE else [_slice(part, code, i, n) for i in range(n)]

    parts = [x]
    for n, code in zip(mesh, layout, strict=True):
        parts = [piece for part in parts for piece in cut(part, n, code)]
    return [part.to(device) for part, device in zip(parts, devices or [x.device] * len(parts), strict=True)]


def _whole(parts: Parts, layout: Placements, mesh: Sequence[int]) -> torch.Tensor:
    """The whole tensor, on the first device: axes are merged from the last one on, which runs fastest."""

    def merged(line: Parts, code: int) -> torch.Tensor:
        if code == REPLICATE:
            return line[0]
        here = [part.to(line[0].device) for part in line]
        return _sum(here) if code == PARTIAL else torch.cat(here, code)

    found = list(parts)
    for n, code in reversed(list(zip(mesh, layout, strict=True))):
        found = [merged(found[i : i + n], code) for i in range(0, len(found), n)]
    return found[0]
