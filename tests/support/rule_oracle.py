"""Calls of operators with their rules, carried out again on parts of their tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.analysis.rules.notation import Rule
from autopar.analysis.rules.table import bind
from autopar.sharding.local import local_call


def bound(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Rule, list[torch.Tensor]]:
    """The rule of a call, with the tensors themselves for operands, and the call's results."""
    graph, made = fx.Graph(), {}

    def placed(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [placed(v) for v in value]
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder(f"x{len(made)}")
        node.meta["val"], made[node] = value, value
        return node

    inputs = [placed(a) for a in args], {k: placed(v) for k, v in kwargs.items()}
    node = graph.call_function(target, tuple(inputs[0]), inputs[1])
    node.meta["val"] = result = target(*args, **kwargs)
    rule = bind(node)
    assert rule is not None, f"{target} has no rule for {args} {kwargs}"
    operands = tuple(made.get(o, o) for o in rule.operands)
    rule = Rule(operands, rule.inputs, rule.outputs, rule.kinds, rule.sizes, rule.linear)
    return rule, list(result) if isinstance(result, (tuple, list)) else [result]


def rerun(target: Any, args: Any, kwargs: Any, swap: dict[int, Any], shape: list[int]) -> list[torch.Tensor]:
    """The call with other operands; sizes among its arguments follow the local `shape` of the result."""

    def swapped(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [swapped(v) for v in value]
        return swap.get(id(value), value)

    swapped_args, swapped_kwargs = [swapped(a) for a in args], {k: swapped(v) for k, v in kwargs.items()}
    target, args, kwargs = local_call(target, swapped_args, swapped_kwargs, shape)
    result = target(*args, **kwargs)
    return list(result) if isinstance(result, (tuple, list)) else [result]
