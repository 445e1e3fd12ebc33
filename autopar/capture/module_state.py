"""What modules hold at one time (attributes, torch's tables, settings that they share), and random generators."""

from __future__ import annotations

import argparse
import random
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import nn

from autopar.capture import torch_private
from cost_models.graphs import storage_key

CONTAINERS = (list, deque, dict, OrderedDict, defaultdict, set)
"""Types of containers whose content may change."""


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers, under all of their names."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def same_view(a: Any, b: Any) -> bool:
    """Whether two tensors are the same entries of the same memory, as those of `a` and `a.to(a.dtype)` while a tracer
    runs: it makes an object for every result."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return a is b
    # Sizes last: a symbol that is compared with a number is that number from then on.
    return a is b or (
        storage_key(a) == storage_key(b)
        and (a.dtype, a.storage_offset(), a.shape, a.stride()) == (b.dtype, b.storage_offset(), b.shape, b.stride())
    )


def _own(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are not torch's own, and not computed for every call (by weight_norm, from
    `weight_g`; by spectral_norm, from `weight_orig`; by recurrent layers, which list their weights)."""
    derived = {name.removesuffix(end) for name in module._parameters for end in ("_g", "_orig") if name.endswith(end)}
    derived |= torch_private.FLAT_WEIGHTS
    return {k: v for k, v in vars(module).items() if k not in TORCHS_OWN and k not in derived}


TORCHS_OWN = frozenset(vars(nn.Module()))
"""Names of the attributes that torch keeps in every module."""


def holds_settings(value: Any) -> bool:
    """Whether a value is an object of settings: a namespace, a dataclass, a configuration. Other objects, such as a
    trainer, may change in every step by themselves."""
    kinds = (types.SimpleNamespace, argparse.Namespace)
    named = not isinstance(value, (type, nn.Module)) and type(value).__name__.lower().endswith(("config", "settings"))
    return isinstance(value, kinds) or (
        (named or is_dataclass(value)) and isinstance(getattr(value, "__dict__", None), dict)
    )


def _content(value: Any) -> Any:
    """A shallow copy of a container; other values as they are."""
    return value.copy() if type(value) in CONTAINERS else value


class Attributes:
    """The attributes of some modules at one time, to see whether they have changed since."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._seen = [(module, {k: (v, _content(v)) for k, v in _own(module).items()}) for module in modules]

    def changed(self) -> str:
        """`Class.attribute` of the first attribute that has changed since; "" if none has."""
        for module, before in self._seen:
            now = _own(module)
            for name in [*now, *(n for n in before if n not in now)]:
                if name not in now or name not in before or not unchanged(before[name], now[name]):
                    return f"{type(module).__name__}.{name}"
        return ""


class Contents:
    """All that some modules hold at one time, to put it back.

    Their attributes and torch's own tables (children, parameters, buffers, hooks), and what the containers and the
    settings among them hold in turn. Not the values of tensors.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._classes = [(module, type(module)) for module in modules]  # torch.nn.utils.parametrize changes them
        held = _containers([vars(module) for module in modules])
        self._held = [(one, one.copy()) for one in held if type(one) is not tuple]

    def restore(self) -> None:
        for module, kind in self._classes:
            if type(module) is not kind:
                module.__class__ = kind
        for container, content in self._held:
            _refill(container, content)


def _containers(values: Sequence[Any]) -> Iterator[Any]:
    """The containers, tuples and attributes of settings among `values`, and those inside of them, each once."""
    seen: set[int] = set()
    pending = list(values)
    while pending:
        value = pending.pop()
        container = vars(value) if holds_settings(value) else value
        if type(container) in (*CONTAINERS, tuple) and id(container) not in seen:
            seen.add(id(container))
            yield container
            pending += _content_of(container)


def own_generators(modules: Iterable[nn.Module]) -> list[tuple[str, torch.Generator]]:
    """The random generators of torch that modules hold, also in containers and settings, as `Class.attribute`."""
    found: dict[torch.Generator, str] = {}
    for module in modules:
        for name, value in vars(module).items():
            if name in TORCHS_OWN or isinstance(value, (nn.Module, torch.Tensor)):
                continue
            inside = (one for container in _containers([value]) for one in _content_of(container))
            for one in (value, *inside):
                if isinstance(one, torch.Generator):
                    found.setdefault(one, f"{type(module).__name__}.{name}")
    return [(name, generator) for generator, name in found.items()]


def held_values(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """All that modules hold in attributes of their own, also within containers and settings."""
    own = [_own(module) for module in modules]
    for container in _containers(own):
        yield from _content_of(container)


def _content_of(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _refill(container: Any, content: Any) -> None:
    """Give a container its earlier content, in the earlier order. One that has not changed is left alone."""
    if isinstance(container, dict):
        same = len(container) == len(content) and all(
            a is b and x is y for (a, x), (b, y) in zip(container.items(), content.items(), strict=True)
        )
    else:
        same = len(container) == len(content) and all(a is b for a, b in zip(container, content, strict=True))
    if same:
        return
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(content)
    else:
        container.update(content)


def unchanged(before: tuple[Any, Any], now: Any) -> bool:
    """`before`: a value, and a shallow copy of it where that is a list, dict or set."""
    value, content = before
    if type(now) in CONTAINERS:
        if type(now) is not type(content) or len(now) != len(content):
            return False
        if isinstance(now, dict):
            return all(k in content and same_value(content[k], v) for k, v in now.items())
        return now == content if isinstance(now, set) else all(map(same_value, content, now))
    return same_value(value, now)


def same_value(a: Any, b: Any) -> bool:
    """Whether two values are one object, or equal numbers or texts."""
    if a is b:
        return True
    return type(a) is type(b) and isinstance(a, (int, float, complex, str, bytes, bool)) and a == b


class Generators:
    """The states of random generators at one time: torch's, Python's, numpy's, and those that a model holds (`own`, by
    name)."""

    def __init__(self, own: Sequence[tuple[str, torch.Generator]] = ()) -> None:
        self._torch = torch_states()
        self._python = random.getstate()
        self._numpy = _numpy_state()
        self._own = [(name, one, one.get_state()) for name, one in own]

    def torch_has_moved(self) -> bool:
        now = torch_states()  # with those of GPUs, if the process has come to use one since
        return any(not torch.equal(a, b) for a, b in zip(self._torch, now, strict=False))

    def others_moved(self) -> str:
        """The first generator other than torch's default ones that has moved since; "" if none has."""
        if random.getstate() != self._python:
            return "Python's random generator"
        if repr(_numpy_state()) != repr(self._numpy):
            return "numpy's random generator"
        return next((name for name, one, state in self._own if not torch.equal(one.get_state(), state)), "")

    def restore(self) -> None:
        set_torch_states(self._torch)
        self.restore_others()

    def restore_others(self) -> None:
        """Only those other than torch's default ones."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        for _, one, state in self._own:
            one.set_state(state)


def torch_states() -> list[torch.Tensor]:
    """Of torch's default generators: that of the CPU, then those of all GPUs if the process has used one."""
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *on_gpus]


def set_torch_states(states: Sequence[torch.Tensor]) -> None:
    """Set the default generators to what `torch_states` returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])


@contextmanager
def torch_generators_restored(own: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """On leaving, torch's default generators are what they were, those of GPUs included, and so are `own`."""
    states, states_of_own = torch_states(), [(one, one.get_state()) for one in own]
    try:
        yield
    finally:
        set_torch_states(states)
        for one, state in states_of_own:
            one.set_state(state)


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return numpy.random.get_state() if numpy is not None else None


@contextmanager
def generators_restored(own: Sequence[tuple[str, torch.Generator]] = ()) -> Iterator[None]:
    """On leaving, the random generators other than torch's default ones are what they were, `own` included."""
    generators = Generators(own)
    try:
        yield
    finally:
        generators.restore_others()
