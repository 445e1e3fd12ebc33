"""Splitting a batch into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar.errors import InputError


def split_leaf(leaf: Any, dim: int | None, sizes: Sequence[int]) -> list[Any]:
    """One detached piece of a flat input per micro-batch; without a batch dimension, the whole input for each."""
    if not isinstance(leaf, torch.Tensor):
        return [leaf] * len(sizes)
    whole = leaf.detach()
    pieces = list(whole.split(list(sizes), dim)) if dim is not None else [whole] * len(sizes)
    return _leaves(pieces) if leaf.requires_grad else pieces


def split_target(leaf: Any, dim: int | None, sizes: Sequence[int], index: int) -> list[Any]:
    """One piece of flat target `index` for each micro-batch; the whole if `dim` is None. Where the target requires a
    gradient, pieces are leaves. Raises InputError."""
    needs = isinstance(leaf, torch.Tensor) and leaf.requires_grad
    if dim is None:
        return _leaves([leaf] * len(sizes)) if needs else [leaf] * len(sizes)
    if leaf.shape[dim] != sum(sizes):
        raise InputError(
            f"target leaf {index} has {leaf.shape[dim]} samples in dimension {dim} (shape {tuple(leaf.shape)}), but "
            f"the batch has {sum(sizes)}"
        )
    pieces = list(leaf.split(list(sizes), dim))
    return _leaves(pieces) if needs else pieces


def _leaves(pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [piece.detach().requires_grad_() for piece in pieces]
