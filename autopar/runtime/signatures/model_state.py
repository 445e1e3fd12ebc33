"""What a captured graph depends on besides the inputs: every call looks whether that has changed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar.capture.module_hooks import has_hooks
from autopar.runtime.signatures.plain_attributes import Attribute, PlainAttributes


class State(NamedTuple):
    """Two states are equal if a graph that was captured in one of them fits the other."""

    modules: tuple[nn.Module, ...]  # the root first
    classes: list[type]  # of the modules
    training: list[bool]  # of the modules
    parameters: list[int]  # their ids
    names: list[str]  # of the parameters in their modules
    dtypes: list[torch.dtype]  # of the parameters
    hooked: list[int]  # ids of inner modules with hooks
    attributes: tuple[Attribute, ...]
    default_dtype: torch.dtype  # of new tensors
    default_device: torch.device


class ModelState:
    """The state of one model.

    A walk over thousands of modules in Python would take longer than many a stage. So the modules are kept, and a call
    compares what all their tables hold now with what they held at the last walk.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: tuple[nn.Module, ...] = ()  # all, the root first; held, so that no id is given away again
        self._children: list[int | str] = []  # of these, at the last walk
        self._attributes: PlainAttributes | None = PlainAttributes()

    def without_attributes(self) -> None:
        """From now on, no plain attribute counts."""
        self._attributes = None

    def leave_out(self, live: Collection[str]) -> None:
        """Plain attributes that do not count: `Program.live`."""
        if self._attributes is not None:
            self._attributes.leave_out(self._model, live)

    def completed(self, state: State) -> State:
        """An earlier state of these modules, with the attributes that count only since another capture."""
        if self._attributes is None or state.modules != self._modules:
            return state
        return state._replace(attributes=self._attributes.completed(state.attributes))

    def changed_attribute(self, now: State, before: Sequence[State]) -> str:
        """The path of an attribute in which `now` differs from the newest of those `before` that differ in attributes
        alone; "" where some differ in none."""
        alike = [state for state in before if state._replace(attributes=now.attributes) == now]
        if not alike or any(state == now for state in alike):
            return ""
        new = [one for one in now.attributes if one not in alike[-1].attributes]
        gone = [one for one in alike[-1].attributes if one not in now.attributes]
        place, name, _ = [*new, *gone][0]
        path = next((path for path, module in self._model.named_modules() if module is now.modules[place]), "")
        return f"{path}.{name}".lstrip(".")

    def now(self) -> State:
        """As the model and the caller's defaults are now."""
        modules = self._modules
        if not modules or _children_of(modules) != self._children:
            self._modules = modules = _walked(self._model)
            self._children = _children_of(modules)
        tables = [module._parameters for module in modules]
        parameters = [p for p in _entries(tables) if p is not None]
        maybe_hooked = [
            module
            for module in modules
            if module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
        ]
        return State(
            modules,
            list(map(type, modules)),
            [module.training for module in modules],
            list(map(id, parameters)),
            list(chain.from_iterable(filter(None, tables))),
            [parameter.dtype for parameter in parameters],
            [id(module) for module in maybe_hooked if module is not self._model and has_hooks(module)],
            () if self._attributes is None else self._attributes.now(modules),
            torch.get_default_dtype(),
            torch.get_default_device(),
        )


def _walked(model: nn.Module) -> tuple[nn.Module, ...]:
    seen: dict[nn.Module, None] = {}
    stack = [model]
    while stack:
        module = stack.pop()
        if module not in seen:
            seen[module] = None
            stack += [child for child in module._modules.values() if child is not None]
    return tuple(seen)


def _children_of(modules: Sequence[nn.Module]) -> list[int | str]:
    """The ids of all children, and their names."""
    tables = [module._modules for module in modules if module._modules]
    return [*map(id, _entries(tables)), *chain.from_iterable(tables)]


def _entries(tables: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """The values of all tables, in order."""
    return chain.from_iterable([table.values() for table in tables if table])
