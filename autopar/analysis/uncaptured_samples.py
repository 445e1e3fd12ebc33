"""Whether an opaque operator treats every sample by itself, judged by running it on many variations of its inputs.

Nothing is known of its code, so that a comparison on one example may miss what it does: `if x.sum() > 0` takes the same
branch for the whole batch and for its parts, until a batch comes where it does not. So the samples are scaled, negated
and permuted, and the results for the whole are compared with those for two parts; so are the gradients of its inputs,
as code may have a backward of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.analysis.node_values import close
from autopar.capture.uncaptured import Size, Uncaptured

_VARIATIONS = 8


def relates_samples(operator: Uncaptured, operands: Sequence[Any]) -> bool:
    """Whether a result or gradient for all samples differs from those for two parts of them, put together.

    `operands`: of one call. Results without a dimension for samples are not compared. A variation that the operator
    does not run on says nothing.
    """
    dims = [_batch_dim(sizes) for sizes in operator.input_sizes]
    outputs = [_batch_dim(result.sizes) for result in operator.results]
    rows = next((operands[i].shape[dim] for i, dim in enumerate(dims) if dim is not None), 0)
    if rows < 2:
        return False
    generator = torch.Generator().manual_seed(0)
    for _ in range(_VARIATIONS):
        changed = _varied(operands, dims, rows, generator)
        cut = int(torch.randint(1, rows, (), generator=generator, device="cpu"))
        ranges = ((0, rows), (0, cut), (cut, rows))
        try:
            calls = [_narrowed(changed, dims, *ends) for ends in ranges]
            results = [operator.observed(*call) for call in calls]
        except Exception:  # values that its code does not take
            continue
        gradients: list[list[torch.Tensor | None]] = [[None] * len(dims)] * len(calls)
        with contextlib.suppress(Exception):  # of a backward that takes no gradient, or not these values
            arriving = _Arriving(outputs, results[0], generator)
            gradients = [
                operator.observed_gradients(call, arriving.of(*ends)) for call, ends in zip(calls, ranges, strict=True)
            ]
        pairs = [*zip(outputs, *results, strict=True), *zip(dims, *gradients, strict=True)]
        for dim, whole, *parts in pairs:
            if dim is not None and whole is not None and not _equal(whole, parts, dim):
                return True
    return False


class _Arriving:
    """Random gradients for the results of an operator. A part of the samples gets its own part of them."""

    def __init__(self, dims: Sequence[int | None], results: Sequence[torch.Tensor], generator: torch.Generator) -> None:
        """dims: of the samples in `results`, which are those of all samples. Without one nothing arrives."""
        self._dims = dims
        drawn = [torch.randn(r.shape, generator=generator, device="cpu").to(r) for r in results]
        self._whole = [torch.zeros_like(g) if dim is None else g for g, dim in zip(drawn, dims, strict=True)]

    def of(self, start: int, stop: int) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """Those of samples `start` to `stop`, by number of the result."""

        def gradient(number: int, result: torch.Tensor) -> torch.Tensor:
            dim, whole = self._dims[number], self._whole[number]
            return torch.zeros_like(result) if dim is None else whole.narrow(dim, start, stop - start)

        return gradient


def _equal(whole: torch.Tensor, parts: Sequence[torch.Tensor | None], dim: int) -> bool:
    try:
        return close(whole, torch.cat([part for part in parts if part is not None], dim))
    except RuntimeError:  # their other sizes differ
        return False


def _batch_dim(sizes: Sequence[Size]) -> int | None:
    """The dimension that is the number of samples; None without such a dimension."""
    return next((d for d, size in enumerate(sizes) if size == (0, 1)), None)


def _varied(operands: Sequence[Any], dims: Sequence[int | None], rows: int, generator: torch.Generator) -> list[Any]:
    """The operands, with their samples in another order, and floating-point samples scaled by different numbers."""
    order = torch.randperm(rows, generator=generator)
    signs = torch.randint(0, 2, (rows,), generator=generator, device="cpu") * 2 - 1
    scales = signs * torch.exp(2 * torch.randn(rows, generator=generator, device="cpu"))
    varied = list(operands)
    for place, dim in enumerate(dims):
        if dim is None:
            continue
        x = operands[place].detach().index_select(dim, order.to(operands[place].device))
        if x.is_floating_point():
            x = x * scales.to(x).view([-1 if d == dim else 1 for d in range(x.dim())])
        varied[place] = x
    return varied


def _narrowed(operands: Sequence[Any], dims: Sequence[int | None], start: int, stop: int) -> list[Any]:
    return [
        x if place >= len(dims) or dims[place] is None else x.narrow(dims[place], start, stop - start).clone()
        for place, x in enumerate(operands)
    ]
