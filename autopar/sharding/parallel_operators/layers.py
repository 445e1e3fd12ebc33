"""Layers split over devices: rows of an embedding table, experts, samples of a batch that is normalised."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from autopar.sharding.parallel_operators.group import (
    Call,
    Exchanged,
    GroupCall,
    OperatorGroup,
    accumulated,
    again,
    named,
)


def embedding(calls: list[Call], crew: OperatorGroup) -> list[torch.Tensor]:
    """Each device looks up rows of its own part of the table and returns zeros for others; the results add up."""
    given, axes = [named(call) for call in calls], crew.cutting(0)
    sizes = [g["weight"].shape[0] for g in given]
    found = []
    for call, one, size, start in zip(calls, given, sizes, crew.starts(sizes, axes), strict=True):
        ids, padding = one["indices"] - start, one["padding_idx"] - start
        has = (ids >= 0) & (ids < size)
        # The row that gets no gradient is one of a single device.
        mine = padding if one["padding_idx"] >= 0 and 0 <= padding < size else -1
        rows = again(call, indices=ids.masked_fill(~has, 0), padding_idx=mine)
        found.append(rows.masked_fill(~has.unsqueeze(-1), 0.0))
    return found


def grouped_product(calls: list[Call], crew: OperatorGroup) -> list[torch.Tensor]:
    """Rows sorted by expert, each times its expert's matrix. A device computes the rows of its experts, else zeros.

    Without values (on the meta device) no expert has rows: the result has the same shape."""
    given = [list(named(call).items())[:3] for call in calls]  # rows, matrices, ends: operators name them differently
    sizes = [matrices.shape[0] for _, (_, matrices), _ in given]
    found = []
    for call, (rows, _, ends), size, first in zip(
        calls, given, sizes, crew.starts(sizes, crew.cutting(0, operand=1)), strict=True
    ):
        numbers = [0, *([0] * len(ends[1]) if ends[1].is_meta else ends[1].tolist())]
        start, stop = numbers[first], numbers[first + size]
        own = {rows[0]: rows[1][start:stop], ends[0]: ends[1][first : first + size] - start}
        found.append(functional.pad(again(call, **own), (0, 0, start, len(rows[1]) - stop)))
    return found


class _BatchNorm(torch.autograd.Function):
    """All devices' rows at once, normalised by the statistics of the whole batch (Ioffe and Szegedy, 2015).

    With d = x - mean, r = 1 / sqrt(var + eps) and sums over the n entries of a channel, wherever they are:

        dx = w r (dy - sum(dy) / n - d r^2 sum(dy d) / n)

    Gradients of weights and biases are each device's own: they add up.
    """

    @staticmethod
    def forward(
        ctx: Any, crew: OperatorGroup, axes: tuple[int, ...], eps: float, *tensors: Any
    ) -> tuple[torch.Tensor, ...]:
        """`tensors`: every device's rows, then their weights, then their biases (or None). Results: rows, then every
        device's mean, variance and count."""
        n = len(tensors) // 3
        parts, weights, biases = tensors[:n], tensors[n : 2 * n], tensors[2 * n :]
        wide = [x.to(accumulated(x.dtype)) for x in parts]
        dims = [0, *range(2, wide[0].dim())]
        entries = [torch.tensor(x.numel() // x.shape[1], dtype=x.dtype, device=x.device) for x in wide]
        counts = crew.all_reduce(entries, axes)
        sums = crew.all_reduce([x.sum(dims) for x in wide], axes)
        means = [s / count for s, count in zip(sums, counts, strict=True)]
        apart = [x - _channels(mean, x) for x, mean in zip(wide, means, strict=True)]
        # Squares of differences, not differences of squares: those would lose most digits of a small variance.
        squares = crew.all_reduce([d.square().sum(dims) for d in apart], axes)
        variances = [s / count for s, count in zip(squares, counts, strict=True)]
        scales = [(v + eps).rsqrt() for v in variances]
        results = []
        for x, d, r, w, b in zip(parts, apart, scales, weights, biases, strict=True):
            y = d * _channels(r if w is None else r * w, d)
            results.append((y if b is None else y + _channels(b, d)).to(x.dtype))
        ctx.save_for_backward(*parts, *means, *scales, *counts, *weights)
        ctx.crew, ctx.axes = crew, axes
        ctx.biases = [None if b is None else b.dtype for b in biases]
        ctx.mark_non_differentiable(*means, *variances, *counts)
        return (*results, *means, *variances, *counts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        n = len(gradients) // 4
        saved = ctx.saved_tensors
        parts, means, scales, counts, weights = (saved[i * n : (i + 1) * n] for i in range(5))
        dims = [0, *range(2, parts[0].dim())]
        wide = [g.to(mean.dtype) for g, mean in zip(gradients[:n], means, strict=True)]
        apart = [x.to(mean.dtype) - _channels(mean, x) for x, mean in zip(parts, means, strict=True)]
        own = [g.sum(dims) for g in wide]
        moments = [(g * d).sum(dims) for g, d in zip(wide, apart, strict=True)]
        both = ctx.crew.all_reduce([torch.stack(pair) for pair in zip(own, moments, strict=True)], ctx.axes)
        dx, dw, db = [], [], []
        for i, (g, d, r, w) in enumerate(zip(wide, apart, scales, weights, strict=True)):
            total, moment = both[i] / counts[i]
            inner = g - _channels(total, g) - d * _channels(r * r * moment, g)
            dx.append((inner * _channels(r if w is None else r * w, g)).to(gradients[i].dtype))
            dw.append(None if w is None else (moments[i] * r).to(w.dtype))
            db.append(None if ctx.biases[i] is None else own[i].to(ctx.biases[i]))
        return (None, None, None, *dx, *dw, *db)


def _channels(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """One number per channel, shaped to broadcast against (rows, channels, ..)."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


def batch_norm(calls: list[Call], crew: OperatorGroup) -> list[torch.Tensor]:
    """In training with split rows: normalise by the statistics of all rows; every device updates its running ones."""
    given, n = [named(call) for call in calls], len(calls)
    columns = [[g[name] for g in given] for name in ("input", "weight", "bias")]
    found = _BatchNorm.apply(crew, crew.cutting(0), float(given[0]["eps"]), *(t for column in columns for t in column))
    results, means, variances, counts = (found[i * n : (i + 1) * n] for i in range(4))
    for one, mean, variance, count in zip(given, means, variances, counts, strict=True):
        if one["running_mean"] is not None:
            unbiased = variance * (count / (count - 1))
            for running, new in ((one["running_mean"], mean), (one["running_var"], unbiased)):
                running.lerp_(new.to(running.dtype), float(one["momentum"]))
    return list(results)


def batch_norm_exchanged(plan: GroupCall) -> Exchanged:
    """Forward: the sum and the count, then the squared deviations. Backward: two sums per channel."""
    channels, itemsize = plan.local(0)[1], plan.itemsize()
    yield (channels + 1) * itemsize, plan.together, False
    yield channels * itemsize, plan.together, False
    yield 2 * channels * itemsize, plan.together, True


def nothing_exchanged(plan: GroupCall) -> Exchanged:
    """The parts are addends of the result; devices exchange nothing."""
    yield from ()
