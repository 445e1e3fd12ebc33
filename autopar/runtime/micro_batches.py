"""Splitting a batch into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar.capture import torch_private


def split_leaf(leaf: Any, dim: int | None, sizes: Sequence[int]) -> list[Any]:
    """One detached piece of a flat input per micro-batch; without a batch dimension, the whole input for each."""
    if not isinstance(leaf, torch.Tensor):
        return [leaf] * len(sizes)
    whole = leaf.detach()
    pieces = list(whole.split(list(sizes), dim)) if dim is not None else [whole] * len(sizes)
    return [p.detach().requires_grad_() for p in pieces] if leaf.requires_grad else pieces


def split_tree(tree: Any, sizes: Sequence[int], dims: Sequence[int] = (0,)) -> list[Any]:
    """`tree` for each micro-batch. A tensor is split on the first of the dimensions `dims` whose size is the batch's;
    without one, all micro-batches share the tensor."""
    leaves, spec = torch_private.tree_flatten(tree)

    def split(leaf: Any) -> list[Any]:
        if isinstance(leaf, torch.Tensor):
            for dim in dims:
                if -leaf.dim() <= dim < leaf.dim() and leaf.shape[dim] == sum(sizes):
                    return list(leaf.split(list(sizes), dim))
        return [leaf] * len(sizes)

    pieces = [split(leaf) for leaf in leaves]
    return [torch_private.tree_unflatten([p[i] for p in pieces], spec) for i in range(len(sizes))]
