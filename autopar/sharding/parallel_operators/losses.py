"""Softmax, cross-entropy and related losses with classes or rows split over devices.

With the largest score M and the sum of exponentials Z over all classes, wherever they are:

    log_softmax(x)_c     x_c - M - log Z
    cross entropy        M + log Z - (1 - s) x_t - (s / C) sum_c x_c          target t, label smoothing s, C classes

The loss of a row is a sum over classes, so every device has an addend of it: the first M + log Z, and each what comes
of the scores that it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar.sharding.parallel_operators.group import (
    Call,
    Exchanged,
    GroupCall,
    OperatorGroup,
    accumulated,
    again,
    named,
)

_NONE, _MEAN = 0, 1  # reductions; 2: sum


def _largest_and_sum(
    parts: Sequence[torch.Tensor], dim: int, crew: OperatorGroup, axes: tuple[int, ...]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """M and Z of every row, on every device. Dimension `dim` has size 1 in the results."""
    largest = crew.all_reduce([x.detach().amax(dim, keepdim=True) for x in parts], axes, torch.maximum)
    sums = [(x.detach() - m).exp_().sum(dim, keepdim=True) for x, m in zip(parts, largest, strict=True)]
    return largest, crew.all_reduce(sums, axes)


class _Softmax(torch.autograd.Function):
    """All devices' parts at once, because the backward exchanges gradients as well."""

    @staticmethod
    def forward(
        ctx: Any, crew: OperatorGroup, axes: tuple[int, ...], dim: int, log: bool, *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        summed = [x.to(accumulated(x.dtype)) for x in parts]
        largest, sums = _largest_and_sum(summed, dim, crew, axes)
        shifted = [x - m for x, m in zip(summed, largest, strict=True)]
        found = [x - z.log() if log else x.exp() / z for x, z in zip(shifted, sums, strict=True)]
        results = tuple(y.to(x.dtype) for y, x in zip(found, parts, strict=True))
        ctx.save_for_backward(*results)
        ctx.crew, ctx.axes, ctx.dim, ctx.log = crew, axes, dim, log
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        wide = [g.to(accumulated(g.dtype)) for g in gradients]
        ys = [y.to(g.dtype) for y, g in zip(ctx.saved_tensors, wide, strict=True)]
        terms = wide if ctx.log else [g * y for g, y in zip(wide, ys, strict=True)]
        sums = ctx.crew.all_reduce([t.sum(ctx.dim, keepdim=True) for t in terms], ctx.axes)
        if ctx.log:
            found = [g - y.exp() * s for g, y, s in zip(wide, ys, sums, strict=True)]
        else:
            found = [y * (g - s) for g, y, s in zip(wide, ys, sums, strict=True)]
        return (None, None, None, None, *(f.to(g.dtype) for f, g in zip(found, gradients, strict=True)))


def softmax(calls: list[Call], crew: OperatorGroup) -> list[torch.Tensor]:
    """softmax and log_softmax along a dimension that is split."""
    given = [named(call) for call in calls]
    first, name = given[0], str(calls[0][0].overloadpacket.__name__)
    dim = int(first["dim"]) % first["self"].dim()
    dtype = torch.float32 if first.get("half_to_float") else first.get("dtype") or first["self"].dtype
    parts = [g["self"].to(dtype) for g in given]
    return list(_Softmax.apply(crew, crew.cutting(dim), dim, "log" in name, *parts))


def softmax_exchanged(plan: GroupCall) -> Exchanged:
    """Forward: the largest score and the sum, one number per row each. Backward: the sum of gradients."""
    # The dimension is cut by every axis along which devices work together, and none of them has another index.
    dims = {plan.crew.strategy.inputs[0][axis] for axis in plan.together}
    rows = plan.itemsize()
    for d, size in enumerate(plan.local(0)):
        rows *= 1 if d in dims else size
    yield rows, plan.together, False
    yield rows, plan.together, False
    yield rows, plan.together, True


class _FromScores(torch.autograd.Function):
    """M + log Z where it counts, else nothing; to a device's scores it has the gradient of softmax either way."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, normal: torch.Tensor, dim: int, counts: bool) -> torch.Tensor:
        ctx.save_for_backward(scores, normal)
        ctx.dim = dim
        found = normal.squeeze(dim)
        return found.clone() if counts else torch.zeros_like(found)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        scores, normal = ctx.saved_tensors
        return gradient.unsqueeze(ctx.dim) * (scores - normal).exp_(), None, None, None


def _class_dim(rank: int) -> int:
    """The class dimension of scores: the second, or the only one."""
    return min(1, rank - 1)


def _addends(given: list[dict[str, Any]], dim: int, crew: OperatorGroup, *, normalise: bool) -> list[torch.Tensor]:
    """Each device's addend of every row's loss. `normalise`: the input is scores instead of log-probabilities."""
    axes = crew.cutting(dim)
    scores = [g["self"].to(accumulated(g["self"].dtype)) for g in given]
    smoothing = float(given[0].get("label_smoothing") or 0.0)
    sizes = [x.shape[dim] for x in scores]
    n_classes = sum(sizes[i] for i in crew.groups(axes)[0])
    starts, first = crew.starts(sizes, axes), crew.first(axes)
    normals: Sequence[torch.Tensor] = ()
    if normalise:
        normals = [m + z.log() for m, z in zip(*_largest_and_sum(scores, dim, crew, axes), strict=True)]
    found = []
    for i, (x, one) in enumerate(zip(scores, given, strict=True)):
        target = one["target"] - starts[i]
        has = (target >= 0) & (target < sizes[i])
        own = x.gather(dim, target.masked_fill(~has, 0).unsqueeze(dim)).squeeze(dim)
        loss = -(1 - smoothing) * own.masked_fill(~has, 0.0)
        if normalise:
            loss = loss + _FromScores.apply(x, normals[i], dim, first[i])
        if smoothing:
            loss = loss - smoothing / n_classes * x.sum(dim)
        found.append(loss.masked_fill(one["target"] == one["ignore_index"], 0.0))
    return found


def _counted(one: dict[str, Any]) -> torch.Tensor:
    """The divisor of the mean over a device's rows: the number of counted targets, or the sum of their weights."""
    counts = one["target"] != one["ignore_index"]
    if one["weight"] is None:
        return counts.sum()
    return one["weight"][one["target"].masked_fill(~counts, 0)].masked_fill(~counts, 0.0).sum()


def cross_entropy(calls: list[Call], crew: OperatorGroup) -> list[torch.Tensor]:
    """cross_entropy_loss and nll_loss with classes split, or rows, or both."""
    given = [named(call) for call in calls]
    rank, reduction = given[0]["self"].dim(), int(given[0]["reduction"])
    dim = _class_dim(rank)
    if crew.cutting(dim):
        name = str(calls[0][0].overloadpacket.__name__)
        rows = _addends(given, dim, crew, normalise=name == "cross_entropy_loss")
        losses = rows if reduction == _NONE else [loss.sum() for loss in rows]
    else:
        rows = [again(call, reduction=_NONE) for call in calls]
        losses = [loss.to(accumulated(loss.dtype)).sum() for loss in rows]
    if reduction == _MEAN:
        others = crew.cutting(*(d for d in range(rank) if d != dim))
        counts = crew.all_reduce([_counted(one) for one in given], others)
        losses = [loss / count.to(loss.dtype) for loss, count in zip(losses, counts, strict=True)]
    return [loss.to(one["self"].dtype) for loss, one in zip(losses, given, strict=True)]


def cross_entropy_exchanged(plan: GroupCall) -> Exchanged:
    """If classes are split and the input is scores: two numbers per row. If rows are split: one count."""
    dim = _class_dim(len(plan.local(0)))
    classes = plan.crew.cutting(dim)
    if classes and plan.rule.name == "cross_entropy_loss":
        rows = plan.itemsize()
        for d, size in enumerate(plan.local(0)):
            rows *= 1 if d == dim else size
        yield rows, classes, False
        yield rows, classes, False
    others = tuple(axis for axis in plan.together if axis not in classes)
    if others:
        yield plan.itemsize(), others, False
