"""What a loss computes, as a text that is the same in every process: ranks compare it.

A captured loss is its graph, with the values of the constants in it: what else the code of the loss reads or does (a
rank's number in a log line) makes no difference. Of a loss without a graph, only names and code can be compared.
"""

from __future__ import annotations

import functools
import hashlib
import types
import zlib
from typing import Any

import torch
from torch import fx, nn

from autopar.capture import torch_private
from cost_models.graphs import get_attribute

_NUMBERS = (bool, int, float, complex, str, bytes, type(None), torch.dtype)


def digest_of_graph(module: fx.GraphModule) -> str:
    """Of a captured loss."""
    return _digest(_graph(module))


def digest_of_code(loss_fn: Any) -> str:
    """Of a loss without a graph."""
    return _digest(_code(loss_fn))


def _digest(facts: Any) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _graph(module: fx.GraphModule) -> list[Any]:
    places = {node: place for place, node in enumerate(module.graph.nodes)}
    lines: list[Any] = []
    for node in module.graph.nodes:
        target: Any = node.target
        if node.op == "get_attr":
            target = _constant(get_attribute(module, str(target)))
        elif node.op in ("placeholder", "output"):
            target = node.op
        elif not isinstance(target, (str, torch._ops.OpOverload)):
            target = getattr(target, "__qualname__", type(target).__qualname__)
        lines.append((node.op, str(target), _argument(node.args, places), _argument(node.kwargs, places)))
    return lines


def _argument(value: Any, places: dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return "node", places[value]
    if isinstance(value, (tuple, list)):
        return [_argument(item, places) for item in value]
    if isinstance(value, dict):
        return [(name, _argument(item, places)) for name, item in sorted(value.items())]
    if isinstance(value, torch.device):
        return value.type  # every rank has its own GPU
    return value if isinstance(value, _NUMBERS) else type(value).__name__


def _constant(value: Any) -> Any:
    if isinstance(value, fx.GraphModule):
        return _graph(value)
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    facts = (tuple(value.shape), value.dtype)
    # What is trained with the loss is trained on the ranks that compute the loss alone.
    comparable = type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided
    if value.requires_grad or not comparable or value.is_meta or torch_private.is_fake(value):
        return facts
    whole = value.detach().cpu().contiguous().reshape(-1)
    return *facts, zlib.crc32(whole.view(torch.uint8).numpy().data) if whole.numel() else 0


def _code(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return value.co_name, value.co_code.hex(), value.co_names, [_code(one) for one in value.co_consts]
    if isinstance(value, _NUMBERS):
        return value
    if isinstance(value, (tuple, list)):
        return [_code(one) for one in value]
    if isinstance(value, frozenset):
        return sorted(repr(_code(one)) for one in value)  # in an order that is not another one in every process
    if isinstance(value, functools.partial):
        return (
            _code(value.func),
            _code(value.args),
            [(name, _code(one)) for name, one in sorted(value.keywords.items())],
        )
    if isinstance(value, types.MethodType):
        return type(value.__self__).__qualname__, _code(value.__func__)
    if isinstance(value, types.FunctionType):
        return value.__qualname__, _code(value.__code__)
    called = getattr(type(value), "forward" if isinstance(value, nn.Module) else "__call__", None)
    own = _code(called) if isinstance(called, types.FunctionType) else None
    named = isinstance(value, (type, types.BuiltinFunctionType, functools._lru_cache_wrapper))
    return (value if named else type(value)).__qualname__, own
