"""The tensors that a loss function trains besides the model, by a name that all ranks of one script share; and its
random generators.

```
   loss_fn ── closure 'tau'                           tau
           ── closure 'criterion' ── parameter        criterion.scale
           ── global 'teacher'    ── module           teacher.0.weight
```
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autopar.analysis.loss_objects import OF_OTHERS, is_atom, is_of_package, read_by

_DEPTH = 12  # of objects inside objects that are looked into: modules nest
_MOST = 20_000  # objects that are looked at: a loss may refer to a whole trainer, and that to its data


@contextmanager
def gradients_aside(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, the tensors have no gradients from before, to which backwards would add in place; on leaving, they have
    those again and no other."""
    known = [(tensor, tensor.grad) for tensor in tensors]
    for tensor, _ in known:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, gradient in known:
            tensor.grad = gradient


def trained_tensors(
    loss_fn: Any, leave_out: Callable[[torch.Tensor], bool] = lambda _: False
) -> dict[str, torch.Tensor]:
    """The leaves that require a gradient which `loss_fn` can reach, by name. `leave_out`: those that do not count."""
    return {
        name or "the loss": value
        for name, value in _reached(loss_fn)
        if isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad and not leave_out(value)
    }


def generators_in(loss_fn: Any) -> list[torch.Generator]:
    """The random generators of torch, other than the default ones, that `loss_fn` can reach."""
    default = [torch.default_generator, *torch.cuda.default_generators]
    found = (value for _, value in _reached(loss_fn) if isinstance(value, torch.Generator))
    return [one for one in found if not any(one is other for other in default)]


def _reached(loss_fn: Any) -> Iterator[tuple[str, torch.Tensor | torch.Generator]]:
    """The tensors and random generators that a loss function can reach, each once, by name."""
    held: dict[int, Any] = {}
    pending: list[tuple[str, Any, int]] = [("", loss_fn, 0)]
    while pending and len(held) < _MOST:
        name, value, depth = pending.pop()
        if id(value) in held:
            continue
        if isinstance(value, (torch.Tensor, torch.Generator)):
            held[id(value)] = value
            yield name, value
        elif depth <= _DEPTH and not is_atom(value):
            held[id(value)] = value
            inner = [(f"{name}.{key}" if name and key else name or key, x, depth + 1) for key, x in _inside(value)]
            pending.extend(reversed(inner))


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value refers to, by name; "" for what goes by the value's own name."""
    if isinstance(value, types.FunctionType):
        if not is_of_package(value.__module__, *OF_OTHERS):
            yield from read_by(value)
    elif isinstance(value, functools.partial):
        yield "", value.func
        yield from ((str(place), one) for place, one in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, types.MethodType):
        yield "", value.__func__
        yield "", value.__self__
    elif isinstance(value, (tuple, list)):
        yield from ((str(place), one) for place, one in enumerate(value))
    elif isinstance(value, Mapping):
        yield from ((str(key), one) for key, one in value.items())
    elif isinstance(value, nn.Module):
        yield from _inside_module(value)
    elif not is_of_package(type(value).__module__, *OF_OTHERS):
        yield from _attributes(value)
        yield from _methods(value, "__call__")


def _inside_module(module: nn.Module) -> Iterator[tuple[str, Any]]:
    if is_of_package(type(module).__module__, "autopar"):
        return  # another pipelined module
    tables = ("_parameters", "_buffers", "_modules")
    for table in tables:
        yield from vars(module).get(table, {}).items()
    if not is_of_package(type(module).__module__, *OF_OTHERS):
        yield from ((name, one) for name, one in vars(module).items() if name not in tables)
        yield from _methods(module, "forward")


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    try:
        own: Any = object.__getattribute__(value, "__dict__")
    except AttributeError:
        own = {}
    yield from own.items() if type(own) is dict else ()
    for kind in type(value).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _methods(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    called = getattr(type(value), name, None)
    if isinstance(called, types.FunctionType):
        yield "", called
