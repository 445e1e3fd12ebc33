"""All rules by operator name, and `bind`: the rule of one call, for its shapes and arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.analysis.rules import arithmetic, indexing, neural, views
from autopar.analysis.rules.calls import Maker, OperatorCall, unchanged
from autopar.analysis.rules.notation import MisfitError, Rule, Size, read

RULES: dict[str, str | Maker] = {**arithmetic.RULES, **indexing.RULES, **neural.RULES, **views.RULES}

_NAMESPACES = ("aten", "transformers")


def rule_name(node: fx.Node) -> str | None:
    """The name of an operator of ATen or transformers, without overload and without the underscore of in-place
    variants; None for other nodes."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace not in _NAMESPACES:
        return None
    name = str(node.target.overloadpacket.__name__)
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def recorded(node: fx.Node) -> Any:
    """The value (fake tensors, sizes) that export recorded for a node."""
    return node.meta.get("val")


def bind(
    node: fx.Node,
    value_of: Callable[[fx.Node], Any] = recorded,
    renamed: Callable[[Size], Size] = unchanged,
) -> Rule | None:
    """The rule of `node` for its shapes and arguments; None without one.

    `value_of`: the tensor (or fake tensor) or number that a node computes; only shapes and types are used. `renamed`:
    as for `OperatorCall`.
    """
    name = rule_name(node)
    maker = None if name is None else RULES.get(name)
    if maker is None:
        return None
    call = OperatorCall(node, value_of, renamed)
    stated = maker if isinstance(maker, str) else maker(call)
    if stated is None:
        return None
    text, sizes = (stated, {}) if isinstance(stated, str) else stated
    nodes, shapes = [n for n, _ in call.operands], [shape for _, shape in call.operands]
    try:
        return replace(read(text, nodes, shapes, call.output_shapes, sizes), name=str(name))
    except MisfitError:
        return None
