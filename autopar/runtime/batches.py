"""A batch as micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar import _torch


def split_sizes(batch: int, n_microbatches: int, least: int = 1) -> list[int]:
    """Samples in each micro-batch, as even as they go, larger ones first; none with fewer than `least`."""
    parts = max(1, min(n_microbatches, batch // least))
    small, more = divmod(batch, parts)
    return [small + 1] * more + [small] * (parts - more)


def split_leaf(leaf: Any, dim: int | None, sizes: Sequence[int]) -> list[Any]:
    """One piece of a flat input for each micro-batch, detached; the whole where it has no batch dimension."""
    if not isinstance(leaf, torch.Tensor):
        return [leaf] * len(sizes)
    whole = leaf.detach()
    pieces = list(whole.split(list(sizes), dim)) if dim is not None else [whole] * len(sizes)
    return [p.detach().requires_grad_() for p in pieces] if leaf.requires_grad else pieces


def split_tree(tree: Any, sizes: Sequence[int]) -> list[Any]:
    """`tree` for each micro-batch: tensors with the batch's number of samples are split on dimension 0."""
    leaves, spec = _torch.tree_flatten(tree)
    pieces = [
        list(x.split(list(sizes)))
        if isinstance(x, torch.Tensor) and x.dim() and x.shape[0] == sum(sizes)
        else [x] * len(sizes)
        for x in leaves
    ]
    return [_torch.tree_unflatten([p[i] for p in pieces], spec) for i in range(len(sizes))]
