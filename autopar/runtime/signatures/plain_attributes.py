"""Plain attributes of a model's modules, whose values a captured graph holds as constants.

    self.temperature = 0.5      dropout.p = 0.3      self.act = torch.relu      self.layers_used = [0, 2]
    model.config.use_cache = False      self.mask = None

Numbers, texts, functions, and what containers, namespaces, dataclasses and configurations hold of these. Of tensors and
buffers counts what they look like: a graph reads them when it runs. Of tensors in containers, and of other objects,
counts which they are. Parts that run uncaptured read their attributes themselves, and what the model's own code assigns
is not the caller's change.
"""

from __future__ import annotations

import decimal
import enum
import fractions
import functools
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import nn

from autopar.capture.module_state import TORCHS_OWN, holds_settings

_VALUES = (
    *(bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device),
    *(enum.Enum, range, slice, decimal.Decimal, fractions.Fraction, np.generic),
)
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
_CONTAINERS = (list, tuple, set, frozenset, dict, deque)
_DEPTH = 4  # containers within containers; of what is deeper, or no container, counts only which object it is

Attribute = tuple[int, str, Any]  # the module's place among all, the name, what counts of the value


class PlainAttributes:
    """Those of one model.

    Every call asks for them. While no table holds another object than at the last walk, and no container has changed,
    its answer holds.
    """

    def __init__(self) -> None:
        self._modules: tuple[nn.Module, ...] = ()
        self._left_out: set[tuple[nn.Module, str]] = set()
        # By all captures so far. What one captures and another does not counts for all.
        self._uncaptured: set[nn.Module] = set()
        self._captured: set[nn.Module] = set()
        self._held: list[int] = []  # ids of what the tables held
        # What containers and objects hold, and the ids of that at the last walk.
        self._contents: list[tuple[Callable[[], Iterable[Any]], list[int]]] = []
        self._known: tuple[Attribute, ...] = ()
        self._kept: list[Any] = []  # so that no id is given away again

    def leave_out(self, model: nn.Module, live: Collection[str]) -> None:
        """From now on, the attributes with these paths do not count, nor any of the modules with these paths."""
        uncaptured: set[nn.Module] = set()
        for path in live:
            owner, _, name = path.rpartition(".")
            try:
                uncaptured |= set(model.get_submodule(path).modules())
            except AttributeError:
                self._left_out.add((model.get_submodule(owner), name))
        self._uncaptured |= uncaptured
        self._captured |= set(model.modules()) - uncaptured
        self._modules = ()

    def completed(self, before: tuple[Attribute, ...]) -> tuple[Attribute, ...]:
        """Attributes as they were when they were looked at, with what counts only since: a capture that runs a module
        uncaptured fits whatever the module holds."""
        known = {(place, name) for place, name, _ in before}
        since = [one for one in self._known if one[:2] not in known and self._modules[one[0]] in self._uncaptured]
        return tuple(sorted([*before, *since], key=itemgetter(0, 1)))

    def now(self, modules: tuple[nn.Module, ...]) -> tuple[Attribute, ...]:
        """As they are now."""
        held = list(map(id, chain.from_iterable(map(dict.values, map(vars, modules)))))
        changed = modules != self._modules or held != self._held
        for items, ids in () if changed else self._contents:
            changed = changed or list(map(id, items())) != ids
        if changed:
            self._modules, self._held = modules, held
            self._walk(modules)
        return self._known

    def _walk(self, modules: Sequence[nn.Module]) -> None:
        found: list[Attribute] = []
        contents: dict[int, tuple[Callable[[], Iterable[Any]], list[int]]] = {}
        self._kept = []
        for place, module in enumerate(modules):
            if module in self._uncaptured and module not in self._captured:
                continue
            for name, value in vars(module).items():
                if name in TORCHS_OWN or (module, name) in self._left_out:
                    continue
                found.append((place, name, _counted(value)))
                self._keep([value])
                if isinstance(value, (list, set, dict, deque)) or holds_settings(value):
                    items = _items(value)
                    inside = list(items())
                    contents[id(value)] = items, list(map(id, inside))
                    self._keep(inside)
            if module._buffers:
                items = module._buffers.values
                contents[id(module)] = items, list(map(id, items()))
                found += [(place, name, _counted(buffer)) for name, buffer in module._buffers.items()]
        self._contents = list(contents.values())
        self._known = tuple(sorted(found, key=itemgetter(0, 1)))  # an attribute may be removed and set again

    def _keep(self, values: Iterable[Any]) -> None:
        """Keep all values but tensors: the contents of a tensor do not count as a change."""
        self._kept += (value for value in values if not isinstance(value, torch.Tensor))


class _Itself:
    """An object that counts by which one it is. It is held, so that no other one gets its id."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other._value is self._value

    __hash__ = None  # type: ignore[assignment]


def _counted(value: Any, depth: int = _DEPTH, *, inside: bool = False) -> Any:
    """What counts of a value: itself where that is plain; of others which one it is. `inside`: of a container, whose
    tensors a graph holds as constants."""
    if isinstance(value, _VALUES):
        return type(value), value  # 1 is not True
    if isinstance(value, _CODE):
        return value
    if isinstance(value, torch.Tensor):
        return _Itself(value) if inside else (torch.Tensor, value.dtype, value.shape, value.requires_grad)
    if depth and isinstance(value, functools.partial):
        return type(value), value.func, _counted([value.args, value.keywords], depth - 1)
    if depth and isinstance(value, dict):
        return dict, tuple((repr(key), _counted(one, depth - 1, inside=True)) for key, one in list(value.items()))
    if depth and isinstance(value, _CONTAINERS):
        ordered = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        return type(value), tuple(_counted(one, depth - 1, inside=True) for one in ordered)
    if depth and holds_settings(value):
        fields = list(vars(value).items())
        return type(value), tuple((key, _counted(one, depth - 1, inside=True)) for key, one in fields)
    return _Itself(value)


def _items(value: Any) -> Callable[[], Iterable[Any]]:
    """What gives all that a container or an object holds."""
    if isinstance(value, (list, set, deque)):
        return value.__iter__
    return value.values if isinstance(value, dict) else vars(value).values
