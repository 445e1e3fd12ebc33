"""The one notion of equal layers: equal code, constants and sizes; the values of parameters do not count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from autopar.hints.store import ModuleHints

# Values that are equal if `==` says so.
PLAIN_TYPES = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)

# Compares two values; None: they are compared like any other.
Comparison = Callable[[Any, Any], bool | None]


def _compare_all_alike(a: Any, b: Any) -> bool | None:
    return None


def equal(a: Any, b: Any, special: Comparison = _compare_all_alike) -> bool:
    """Whether two layers, or attributes or arguments of layers, compute the same with their parameters.

    `special` is asked first about each pair of values inside: it compares what depends on where the layers are.
    """
    decided = special(a, b)
    if decided is not None:
        return decided
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (nn.Module, ModuleHints)):
        return equal(vars(a), vars(b), special)
    if isinstance(a, torch.Tensor):
        return tensor_signature(a) == tensor_signature(b) and a.requires_grad == b.requires_grad
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key], special) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y, special) for x, y in zip(a, b, strict=True))
    if isinstance(a, (*PLAIN_TYPES, set, frozenset, slice, torch.layout, torch.memory_format)):
        return bool(a == b) or (a != a and b != b)  # NaN is no reason to differ
    function = getattr(a, "__func__", None)  # a method bound to the layer itself
    return function is not None and function is getattr(b, "__func__", None)


def operators_equal(a: fx.Node, b: fx.Node, same_input: Callable[[fx.Node, fx.Node], bool]) -> bool:
    """Whether two nodes call the same function with equal constants on inputs that `same_input` accepts."""

    def inputs(x: Any, y: Any) -> bool | None:
        return same_input(x, y) if isinstance(x, fx.Node) and isinstance(y, fx.Node) else None

    return a.op == b.op and a.target == b.target and equal((a.args, a.kwargs), (b.args, b.kwargs), inputs)


def tensor_signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What the work on a tensor depends on."""
    # As text, because comparing symbolic sizes would make torch.export fix them ("guard").
    return str(tuple(tensor.shape)), str(tensor.stride()), tensor.dtype, tensor.device
