"""How each loss function that a model is trained with splits over micro-batches: studied once, then looked up.

Programs often write `loss_fn=lambda output, target: ...` at the call, which is a new function in every step. So the
look-up compares what such a function computes with: its code, its defaults, and what its closure and globals hold.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.analysis.batching import Batching
from autopar.analysis.loss import LossSplit, study_loss
from autopar.analysis.loss_objects import is_of_package
from autopar.capture import torch_private
from autopar.capture.program import Program
from autopar.options import BatchDim

_MOST = 16  # loss functions of a signature; the one that was used longest ago goes
_DEPTH = 3  # of functions and containers inside a closure that are looked into
_NUMBERS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

TargetDim = int | Sequence[int | None] | None


class LossSplits:
    """The loss functions that one captured signature has been trained with."""

    def __init__(self, program: Program, batching: Batching) -> None:
        self._program, self._batching = program, batching
        # The loss function lies beside its split, so that no other object takes over the id of what it refers to.
        self._known: OrderedDict[Any, tuple[LossSplit, Any]] = OrderedDict()

    def of(
        self,
        loss_fn: Callable[[Any, Any], Any],
        target: Any,
        batch_size: int,
        target_dim: TargetDim,
        default_dims: Sequence[int],
    ) -> LossSplit:
        """How `loss_fn(output, target)` splits in a call of `batch_size` samples, which the capture may have others of.

        Raises InputError for a `target_dim` that does not fit `target`.
        """
        key = self._found(loss_fn, target, target_dim, default_dims)
        if key not in self._known:
            program = replace(self._program, batch_size=batch_size)
            split = study_loss(loss_fn, program, self._batching, target, target_dim, default_dims=default_dims)
            if split.counts_calls:
                key = _key(loss_fn, target, target_dim, default_dims)
            self._known[key] = (split, (loss_fn, _held(loss_fn)))
            if len(self._known) > _MOST:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key][0]

    def known(
        self, loss_fn: Callable[[Any, Any], Any], target: Any, target_dim: TargetDim, default_dims: Sequence[int]
    ) -> LossSplit | None:
        """What `of` would look up; None: it would study the loss."""
        return self._known.get(self._found(loss_fn, target, target_dim, default_dims), (None, None))[0]

    def _found(
        self, loss_fn: Callable[[Any, Any], Any], target: Any, target_dim: TargetDim, default_dims: Sequence[int]
    ) -> Any:
        """What a split is looked up by. What a loss that counts its calls counts makes no difference."""
        if any(split.counts_calls for split, _ in self._known.values()):
            key = _key(loss_fn, target, target_dim, default_dims)
            if key in self._known:
                return key
        return _key(loss_fn, target, target_dim, default_dims, objects=True)


def _key(
    loss_fn: Callable[[Any, Any], Any],
    target: Any,
    target_dim: TargetDim,
    default_dims: Sequence[int],
    *,
    objects: bool = False,
) -> Any:
    """`objects`: with the numbers that dicts and objects hold."""
    leaves, spec = torch_private.tree_flatten(target)
    dims = tuple(target_dim) if isinstance(target_dim, Sequence) else target_dim
    return (objects, _identity(loss_fn, 0, objects), str(spec), tuple(map(_shape, leaves)), dims, tuple(default_dims))


def default_target_dims(batch_dim: BatchDim) -> tuple[int, ...]:
    """The dimensions of a target that are tried for its samples, where the user gives none."""
    return (batch_dim, 0) if isinstance(batch_dim, int) else (0,)


def _shape(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return _identity(leaf)
    return (leaf.dtype, leaf.dim(), tuple(leaf.shape[1:]), leaf.device.type)


def _held(function: Any) -> list[Any]:
    """What the closure of a function holds; an empty cell holds nothing."""
    contents = []
    for cell in getattr(function, "__closure__", None) or ():
        try:
            contents.append(cell.cell_contents)
        except ValueError:
            contents.append(None)
    return contents


def _identity(value: Any, depth: int = 0, objects: bool = False, names: Collection[str] | None = None) -> Any:
    """What two values must share to compute the same loss: equal for equal numbers, and for one and the same object.

    `objects`: with the numbers that dicts and objects hold; of an object those that the code around it `names`.
    """
    if isinstance(value, _NUMBERS):
        return (type(value), value)
    if depth > _DEPTH:
        return id(value)
    within = functools.partial(_identity, depth=depth + 1, objects=objects)
    if isinstance(value, (tuple, list)):
        return (type(value), *map(within, value))
    if isinstance(value, functools.partial):
        return ("partial", *map(within, (value.func, value.args, tuple(sorted(value.keywords.items())))))
    if isinstance(value, types.MethodType):
        names = _names(value.__func__.__code__) if isinstance(value.__func__, types.FunctionType) else None
        return (within(value.__func__), _identity(value.__self__, depth + 1, objects, names))
    if isinstance(value, types.FunctionType):
        if is_of_package(value.__module__, "torch"):  # which only computes with its arguments
            return id(value)
        names, entries = _names(value.__code__), value.__globals__
        read = tuple(
            _identity(one, max(depth + 1, _DEPTH + (not objects or isinstance(one, nn.Module))), objects, names)
            for one in (entries[name] for name in names if name in entries)
        )
        held = tuple(_identity(one, depth + 1, objects, names) for one in _held(value))
        return (value.__code__, within(value.__defaults__), held, read)
    if isinstance(value, nn.Module):  # its settings may be changed after it was made
        return (id(value), tuple(_numbers(vars(module)) for module in value.modules()))
    if objects and isinstance(value, dict):
        return (id(value), _numbers(value))
    if objects and not isinstance(value, (type, types.ModuleType)) and hasattr(value, "__dict__"):
        own = vars(value)
        return (id(value), _numbers(own if names is None else {name: own[name] for name in names if name in own}))
    return id(value)


def _numbers(entries: Mapping[Any, Any]) -> tuple[Any, ...]:
    """Those that a dict holds, with their names."""
    return tuple((repr(name), type(item), item) for name, item in entries.items() if isinstance(item, _NUMBERS))


def _names(code: types.CodeType) -> list[str]:
    """The globals and attributes that a function and the functions inside it may read."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return [*code.co_names, *(name for constant in inner for name in _names(constant))]
