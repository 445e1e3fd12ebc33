"""Models whose inputs are [sequence, batch, ...], as torch.nn has them by default: what their users should say."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.capture import torch_private
from autopar.capture.call_inputs import leaf_names


def sequence_first_hint(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The `batch_dim=` to give if dimension 1 of the inputs counts the samples; "" if they do not look like sequences.

    Called where the batch cannot be split on dimension 0.
    """
    names = leaf_names(model, args, kwargs)
    leaves = torch_private.tree_leaves((args, kwargs))
    sequences = {name: leaf for name, leaf in zip(names, leaves, strict=True) if _is_sequence(leaf)}
    if not sequences or len({leaf.shape[1] for leaf in sequences.values()}) > 1:
        return ""
    dims = ", ".join(f'"{name}": 1' for name in sequences)
    module = next((m for m in model.modules() if getattr(m, "batch_first", None) is False), None)
    if module is not None:
        return f"{type(module).__name__} takes [sequence, batch, ...] (batch_first=False): give batch_dim={{{dims}}}"
    return f"if the inputs are [sequence, batch, ...], give batch_dim={{{dims}}}"


def _is_sequence(leaf: Any) -> bool:
    """Whether a tensor may be a batch of sequences: vectors over time, or token numbers over time."""
    if not isinstance(leaf, torch.Tensor):
        return False
    tokens = leaf.dim() == 2 and not leaf.is_floating_point() and leaf.dtype != torch.bool
    return (leaf.dim() == 3 and leaf.is_floating_point()) or tokens
