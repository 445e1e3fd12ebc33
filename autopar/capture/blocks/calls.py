"""Blocks of the model's code under a grad mode or an autocast of their own that stay whole: one operator each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx


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
        return function(*args)


def nested_block(node: fx.Node) -> tuple[fx.GraphModule, tuple[Any, ...]] | None:
    """The nested graph that `node` calls, a block of the model under its own grad mode or autocast, and its inputs."""
    if node.target not in (call_with_grad_mode, call_with_autocast) or node.graph.owning_module is None:
        return None
    place = 1 if node.target is call_with_grad_mode else 4
    child = node.graph.owning_module.get_submodule(str(node.args[place].target))  # type: ignore[union-attr]
    assert isinstance(child, fx.GraphModule)
    return child, tuple(node.args[place + 1 :])
