"""A batch as micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar.capture import torch_private


def split_sizes(batch: int, n_microbatches: int, least: int = 1, multiple: int = 1) -> list[int]:
    """Samples in each micro-batch, as even as they go, larger ones first; none with fewer than `least`. All are
    multiples of `multiple`, of which the batch is one."""
    units = batch // multiple
    parts = max(1, min(n_microbatches, units // -(-least // multiple)))
    small, more = divmod(units, parts)
    return [(small + 1) * multiple] * more + [small * multiple] * (parts - more)


def split_leaf(leaf: Any, dim: int | None, sizes: Sequence[int]) -> list[Any]:
    """One piece of a flat input for each micro-batch, detached; the whole where it has no batch dimension."""
    if not isinstance(leaf, torch.Tensor):
        return [leaf] * len(sizes)
    whole = leaf.detach()
    pieces = list(whole.split(list(sizes), dim)) if dim is not None else [whole] * len(sizes)
    return [p.detach().requires_grad_() for p in pieces] if leaf.requires_grad else pieces


def split_tree(tree: Any, sizes: Sequence[int], dims: Sequence[int] = (0,)) -> list[Any]:
    """`tree` for each micro-batch: tensors are split on the first of the dimensions `dims` that has the batch's number
    of samples; those that have none are shared."""
    leaves, spec = torch_private.tree_flatten(tree)

    def split(leaf: Any) -> list[Any]:
        if isinstance(leaf, torch.Tensor):
            for dim in dims:
                if -leaf.dim() <= dim < leaf.dim() and leaf.shape[dim] == sum(sizes):
                    return list(leaf.split(list(sizes), dim))
        return [leaf] * len(sizes)

    pieces = [split(leaf) for leaf in leaves]
    return [torch_private.tree_unflatten([p[i] for p in pieces], spec) for i in range(len(sizes))]
