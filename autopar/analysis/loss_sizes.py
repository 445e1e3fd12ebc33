"""Whether a captured loss is the loss for every number of samples.

`x[:6]` of five samples is all of them, and code may decide by the number of samples. The tracer guards such a graph by
the sizes that it is right for, except for one sample, which it leaves out of account.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from functools import partial
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
    """New inputs of a captured loss with another number of samples; with values, at most those that there are."""

    def of(value: Any, dim: int | None) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if dim is None:
            return value.detach().clone()
        size = value.shape[dim] // loss.batch_size * samples
        if without_values:
            return value.new_empty((*value.shape[:dim], size, *value.shape[dim + 1 :]), device="meta")
        return value.detach().narrow(dim, 0, size).clone()

    return {key: of(leaves[key], at.batch_dim) for key, at in zip(sorted(leaves), loss.inputs, strict=True)}


def treats_one_sample_alike(
    loss: Program, leaves: Mapping[str, Any], outputs: Collection[str], call: Callable[..., Any]
) -> bool:
    """Whether `call`, the loss itself, computes of one sample what its graph does: the tracer knows no such batches.

    `outputs`: the names of the model's outputs among the leaves, whose values are made up.
    """
    for low, high in _MADE_UP:
        found, wanted = (
            {key: _spread(value, low, high) if key in outputs else value for key, value in inputs.items()}
            for inputs in (resized(loss, leaves, 1), resized(loss, leaves, 1))  # code may write into them
        )
        if not _same(partial(call, **found), partial(loss.graph_module, *wanted.values())):
            return False
    return True


_MADE_UP = (0.1, 0.9), (-1.7, 1.3)  # ranges of outputs: probabilities, and any numbers


def _spread(like: Any, low: float, high: float) -> Any:
    if not isinstance(like, torch.Tensor) or not like.is_floating_point():
        return like
    return torch.linspace(low, high, like.numel(), dtype=like.dtype, device=like.device).view(like.shape)


@torch.no_grad()
def _same(loss: Callable[[], Any], graph: Callable[[], Any]) -> bool:
    """Whether both give the same number. If they cannot be compared, they count as equal: what is wrong with the loss
    shows where it is used."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.allclose(loss(), graph()[0], rtol=1e-3, atol=1e-6, equal_nan=True)
    except Exception:  # the user's code may raise anything
        return True
