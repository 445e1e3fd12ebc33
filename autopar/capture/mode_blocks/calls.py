"""Blocks of the model's code under a grad mode or an autocast of their own that stay whole: one operator each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from cost_models.graphs import get_attribute
from cost_models.kernels.autocast_casts import AutocastCasts


def call_with_grad_mode(enabled: bool, function: Callable[..., Any], *args: Any) -> Any:
    """Run a `with torch.no_grad():` (or enable_grad) block of the model. A no_grad of the caller takes precedence."""
    with torch.set_grad_enabled(enabled and torch.is_grad_enabled()):
        return function(*args)


def call_with_autocast(
    device_type: str, dtype: torch.dtype | None, enabled: bool, cache: bool | None, function: Any, *args: Any
) -> Any:
    """Run a `with torch.autocast(...):` block of the model.

    `cache`: False for torch's default, too, because a tracer switches the cache of casts off.
    """
    with torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache or None):
        if not any(isinstance(value, torch.Tensor) and value.is_meta for value in args):
            return function(*args)
        with AutocastCasts(device_type):  # autocast itself leaves tensors without values alone
            return function(*args)


def nested_block(node: fx.Node) -> tuple[fx.GraphModule, tuple[Any, ...]] | None:
    """The nested graph that `node` calls, a block of the model under its own grad mode or autocast, and its inputs."""
    if node.target not in (call_with_grad_mode, call_with_autocast) or node.graph.owning_module is None:
        return None
    return called_graph(node.graph.owning_module, node)


def called_graph(owner: nn.Module, node: fx.Node) -> tuple[fx.GraphModule, tuple[Any, ...]] | None:
    """The graph that a node of `owner` calls, and what it passes; None for a node that calls none."""
    for place, value in enumerate(node.args):
        if is_graph(owner, value):
            return get_attribute(owner, str(value.target)), tuple(node.args[place + 1 :])  # type: ignore[union-attr]
    return None


def is_graph(owner: nn.Module, value: Any) -> bool:
    """Whether an argument of a node of `owner` is a nested graph."""
    is_attribute = isinstance(value, fx.Node) and value.op == "get_attr"
    return is_attribute and isinstance(get_attribute(owner, str(value.target)), fx.GraphModule)
