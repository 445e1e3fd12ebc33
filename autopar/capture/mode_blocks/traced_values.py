"""The values that the tracer notes for nodes: in other dtypes, and without symbols."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.capture import torch_private


def without_values(value: Any, mode: FakeTensorMode, place: torch.device | None) -> Any:
    """A traced value, or a parameter, with tensors of `mode`, of the traced call's sizes. `place`: where they are;
    None: where the tensors of `value` are."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return torch_private.hint_of(leaf)
        if torch_private.is_fake(leaf) and leaf.fake_mode is mode:  # type: ignore[attr-defined]
            return leaf
        sizes = [torch_private.hint_of(n) for n in leaf.shape]
        strides = [torch_private.hint_of(n) for n in leaf.stride()]
        with mode:
            return torch.empty_strided(sizes, strides, dtype=leaf.dtype, device=place or leaf.device)

    return torch_private.tree_map(one, value)


def set_dtypes(node: fx.Node, result: Any) -> bool:
    """Let the traced value of `node` have the dtypes of `result`; whether it had others."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and isinstance(result, torch.Tensor):
        node.meta["val"] = in_dtype(value, result.dtype)
    elif isinstance(value, (tuple, list)) and isinstance(result, (tuple, list)):
        dtypes = [one.dtype if isinstance(one, torch.Tensor) else None for one in result]
        node.meta["val"] = type(value)(
            one if dtype is None else in_dtype(one, dtype) for one, dtype in zip(value, dtypes, strict=True)
        )
    return any(
        one.dtype != other.dtype
        for one, other in zip(torch_private.tree_leaves(value), torch_private.tree_leaves(result), strict=False)
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    )


def in_dtype(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A traced tensor with another dtype."""
    if value.dtype == dtype:
        return value
    mode = value.fake_mode if torch_private.is_fake(value) else FakeTensorMode()  # type: ignore[attr-defined]
    with mode, torch.no_grad():
        return value.to(dtype)
