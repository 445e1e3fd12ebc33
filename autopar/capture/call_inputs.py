"""The flat inputs of a call: their names, and which dimension of each counts samples."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from autopar.capture import torch_private
from autopar.errors import InputError


def find_batch(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaves: list[Any],
    batch_dim: int | dict[str, int | None] | None,
    *,
    may_be_empty: bool = False,
) -> tuple[list[int | None], int]:
    """The batch dimension of every leaf (None: shared) and the batch size (0: none).

    The batch is the size at `batch_dim` of the first tensor that has such a dimension; other tensors are batched
    if they have the same size there. Raises InputError for a batch without samples unless it `may_be_empty`, and for a
    dimension that the input does not have, or no input.
    """
    names = leaf_names(model, args, kwargs)
    chosen: list[int | None]
    if isinstance(batch_dim, dict):
        unknown = [name for name in batch_dim if name not in names]
        if unknown:
            raise InputError(f"batch_dim names {unknown}, but the inputs are {sorted(set(names))}")
        chosen = [batch_dim.get(name) for name in names]
    else:
        chosen = [0 if batch_dim is None else batch_dim] * len(leaves)
    if batch_dim and not isinstance(batch_dim, dict) and not any(map(_has_dimension, leaves, chosen)):
        there = [f"'{name}' has {_dimensions(leaf)}" for name, leaf in zip(names, leaves, strict=True)]
        raise InputError(f"batch_dim={batch_dim}, but no input has such a dimension: {', '.join(there) or 'no inputs'}")
    size: int | None = None
    dims: list[int | None] = []
    for leaf, name, dim in zip(leaves, names, chosen, strict=True):
        if not _has_dimension(leaf, dim):
            if isinstance(batch_dim, dict) and dim is not None:
                raise InputError(
                    f"batch_dim gives input '{name}' dimension {dim}, but the input has no such dimension: it has "
                    f"{_dimensions(leaf)}"
                )
            dims.append(None)
            continue
        assert dim is not None
        dim %= leaf.dim()
        if size is None:
            size = leaf.shape[dim]
            if size == 0 and not may_be_empty:
                raise InputError(f"input '{name}' has no samples: shape {tuple(leaf.shape)}; give at least one")
        if leaf.shape[dim] == size:
            dims.append(dim)
        elif isinstance(batch_dim, dict):
            raise InputError(f"input '{name}' has {leaf.shape[dim]} samples at dimension {dim}, others have {size}")
        else:
            dims.append(None)
    return dims, size or 0


def _has_dimension(leaf: Any, dim: int | None) -> bool:
    return isinstance(leaf, torch.Tensor) and dim is not None and -leaf.dim() <= dim < leaf.dim()


def _dimensions(leaf: Any) -> str:
    """The dimensions that can be given, of a flat input."""
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
        return "no dimensions"
    return f"dimensions {-leaf.dim()} to {leaf.dim() - 1}"


def leaf_names(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """For every leaf, the parameter of `forward` that it was passed for."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    names = []
    for index, arg in enumerate(args):
        named = index < len(parameters) and parameters[index].kind is not inspect.Parameter.VAR_POSITIONAL
        names += [parameters[index].name if named else f"args[{index}]"] * len(torch_private.tree_leaves(arg))
    for key, value in kwargs.items():
        names += [key] * len(torch_private.tree_leaves(value))
    return names


def refuse_packed_sequences(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    names = [*inspect.signature(model.forward).parameters][: len(args)]
    names += [f"args[{index}]" for index in range(len(names), len(args))]

    def is_packed(value: Any) -> bool:
        return isinstance(value, nn.utils.rnn.PackedSequence)

    for name, value in [*zip(names, args, strict=True), *kwargs.items()]:
        if any(map(is_packed, torch_private.tree_leaves(value, is_leaf=is_packed))):
            raise InputError(
                f"input '{name}' is a PackedSequence, in which the steps of all samples are mixed, so that it has no "
                "batch to divide; give the padded tensor and the lengths (torch.nn.utils.rnn.pad_packed_sequence)"
            )
