"""Whether a captured loss is the loss for every number of samples.

`x[:6]` of five samples is all of them, and code may decide by the number of samples. The tracer guards such a graph by
the sizes that it is right for, except for one sample, which it leaves out of account.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from autopar.capture.program import Program

_FEW, _MANY = 2, 1_000_003  # samples; the second is a prime, which fits nothing by chance


def takes_every_size(loss: Program, leaves: Mapping[str, Any], batch_size: int) -> bool:
    """Whether the guards of a captured loss hold for few, many and `batch_size` samples. `leaves`: as it was captured
    on, by name."""
    try:
        for samples in (_FEW, batch_size, _MANY):
            loss.guards(*resized(loss, leaves, samples, without_values=True).values())
    except AssertionError:
        return False
    return True


def resized(loss: Program, leaves: Mapping[str, Any], samples: int, *, without_values: bool = False) -> dict[str, Any]:
    """The inputs of a captured loss with another number of samples; with values, at most those that there are."""

    def of(value: Any, dim: int | None) -> Any:
        if dim is None or not isinstance(value, torch.Tensor):
            return value
        size = value.shape[dim] // loss.batch_size * samples
        if without_values:
            return value.new_empty((*value.shape[:dim], size, *value.shape[dim + 1 :]), device="meta")
        return value.detach().narrow(dim, 0, size)

    return {key: of(leaves[key], at.batch_dim) for key, at in zip(sorted(leaves), loss.inputs, strict=True)}


@torch.no_grad()
def same_result(one: Callable[[], Any], other: Callable[[], Any]) -> bool:
    """Whether two losses give the same number. A call that fails counts as one that does: it fails again where it is
    used, and is seen there."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found, wanted = one(), other()
    except Exception:  # the user's code may raise anything
        return True
    return torch.allclose(found, wanted, rtol=1e-3, atol=1e-6, equal_nan=True)
