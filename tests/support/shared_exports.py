"""One torch.export per model, call and session: export takes two fifths of the time of all tests.

Models are equal here if their classes, attributes, sizes, sharing of parameters and modes are. A second export of an
equal model for an equal call is a copy of the first one's graph over the second model's own parameters and buffers:

    export(model a) -> graph over a's tensors -> kept as a graph over meta tensors, by key
    export(model b) -> the kept graph, copied, with b's tensors in place of the meta tensors

What is not sure to be equal is exported anew: models with hooks, hints or attributes of unknown types, and models whose
code warned while it was traced, or took lengths of tensors.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Hashable, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import fx, nn

from autopar.capture.call_answers import Question
from autopar.capture.export import Traced
from autopar.capture.repeated_layers import trace_once
from autopar.capture.symbolic_lengths import met_a_symbol
from autopar.capture.torch_private import tree_flatten
from autopar.hints.shard import hinted_modules

Export = Callable[..., Traced]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TENSORS = ("_parameters", "_buffers", "_modules")
_VALUES = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class UnknownError(Exception):
    """Two models may differ in something that the key does not hold."""


class SharedExports:
    """Stands in for autopar.capture.export._export."""

    def __init__(self, export: Export) -> None:
        self._export = export
        self._kept: dict[Hashable, tuple[Traced, dict[str, torch.Tensor]]] = {}

    def __call__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dims: list[frozenset[int | None]],
        in_spec: Any,
        order: Sequence[str],
        caught: list[warnings.WarningMessage],
    ) -> Traced:
        try:
            with torch._C.DisableTorchFunction():  # what this asks of tensors is not what the model's code asks
                key = (_model_key(model), _call_key(args, kwargs), tuple(dims), tuple(order))
        except UnknownError:
            return self._export(model, args, kwargs, dims, in_spec, order, caught)
        if key in self._kept:
            kept, tensors = self._kept[key]
            own = _tensors(model)
            return _copied(kept, {id(tensor): own[name] for name, tensor in tensors.items()})
        traced = self._export(model, args, kwargs, dims, in_spec, order, caught)
        asked = getattr(getattr(torch.is_autocast_enabled, "__self__", None), "asked", None)  # by the model's code
        of_call = getattr(getattr(torch.is_grad_enabled, "func", None), "__self__", None)
        # That code asks for a dtype changes no graph: it has the same answer in every capture.
        answers = set(getattr(of_call, "answers", ())) - {Question.TYPES}
        if not caught and not asked and not answers and not met_a_symbol():
            with torch._C.DisableTorchFunction():
                meta = {name: _on_meta(tensor) for name, tensor in _tensors(model).items()}
                memo = {id(tensor): meta[name] for name, tensor in _tensors(model).items()}
                self._kept[key] = _copied(traced, memo), meta
        return traced


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _copied(traced: Traced, memo: dict[int, Any]) -> Traced:
    """`memo`: from the ids of tensors to those that take their place."""
    module = copy.deepcopy(traced.module, memo)
    assert isinstance(module, fx.GraphModule)
    guards = getattr(module, "_guards_fn", None)
    return Traced(module, traced.out_spec, guards if guards is not None else traced.guards)


def _call_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    leaves, spec = tree_flatten((args, kwargs))
    modes = torch._C.is_grad_enabled(), torch._C.is_inference_mode_enabled()
    return (str(spec), *map(_leaf_key, leaves), *modes, torch.get_default_dtype(), torch.get_default_device())


def _leaf_key(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        if type(leaf) not in (torch.Tensor, nn.Parameter):
            raise UnknownError
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    return _value_key(leaf, {})


def _model_key(model: nn.Module) -> Hashable:
    if hinted_modules(model):
        raise UnknownError
    known: dict[int, Hashable] = {}
    groups: dict[int, int] = {}  # tensors and modules that several names share
    parts: list[Hashable] = []
    for path, module in model.named_modules(remove_duplicate=False):
        if any(vars(module).get(name) for name in _HOOKS):
            raise UnknownError
        parts.append((path, groups.setdefault(id(module), len(groups)), type(module), type(module).forward))
        for name, value in sorted(vars(module).items()):
            if name not in _TENSORS:
                parts.append((name, _value_key(value, known)))
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            where = None if tensor is None else (groups.setdefault(id(tensor), len(groups)), _leaf_key(tensor))
            parts.append((name, where))
    return tuple(parts)


def _value_key(value: Any, known: dict[int, Hashable]) -> Hashable:
    if isinstance(value, _VALUES):
        return type(value), value
    if isinstance(value, FunctionType) and value.__closure__:
        if value.__module__ != trace_once.__name__:  # which sets the forward of equal layers
            raise UnknownError
        return value.__qualname__
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        return value  # by identity
    if id(value) not in known:
        known[id(value)] = _object_key(value, known)
    return known[id(value)]


def _object_key(value: Any, known: dict[int, Hashable]) -> Hashable:
    transformers = sys.modules.get("transformers")  # not imported: no model has one of its configurations
    if transformers and isinstance(value, (transformers.PretrainedConfig, transformers.GenerationConfig)):
        return repr(value), repr(vars(value))
    if isinstance(value, dict):
        return type(value), tuple((_value_key(k, known), _value_key(v, known)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_value_key(one, known) for one in value)
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(_value_key(one, known) for one in value)
    raise UnknownError
