"""The objects that a loss function refers to. Studying it calls it on examples, which must leave no trace in them.

```
   loss_fn ── closure, defaults, globals that its code names ──> scaler ── attributes ──> _scale: None
                                            while it is captured: a tensor of the tracer, which has no values
                                                      afterwards: None again
```
"""

from __future__ import annotations

import collections
import functools
import itertools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_STATELESS = (  # values that keep nothing of a call; export restores what a module assigns
    *(bool, int, float, str, type(None), torch.dtype, torch.device, torch.Tensor, nn.Module),
    *(types.BuiltinFunctionType, types.ModuleType, type, list, tuple, dict, set),
)
_ATOMS = (  # values that refer to nothing that a call could change by assignment
    *(bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Tensor, torch.Generator),
    *(types.BuiltinFunctionType, types.ModuleType, type, range, slice),
)
_NUMBERS = (bool, int, float)
_DEPTH = 5  # of objects inside objects that are looked into
_MOST = 10_000  # objects that are looked at: a loss may refer to a whole trainer, and that to its data
OF_OTHERS = ("autopar", "torch", "threading", "logging", "multiprocessing", "concurrent", "asyncio")  # packages whose
# objects are left alone: no loss assigns to them, and other threads may, while the loss is studied
_ABSENT = object()


def refers_to_objects(loss_fn: Any) -> bool:
    """Whether a loss function reads objects that may keep what they are called with."""
    seen: set[int] = set()

    def reads(value: Any) -> bool:
        if id(value) in seen:
            return False
        seen.add(id(value))
        if isinstance(value, functools.partial):
            return any(map(reads, (value.func, *value.args, *value.keywords.values())))
        if isinstance(value, types.FunctionType):
            return not is_of_package(value.__module__, "torch") and any(reads(inner) for _, inner in read_by(value))
        return not isinstance(value, _STATELESS)

    return reads(loss_fn)


def is_atom(value: Any) -> bool:
    """Whether a value, which may be a tensor, refers to nothing that a call could change by assignment."""
    return isinstance(value, _ATOMS)


@contextmanager
def restored(loss_fn: Any, *, but: type | tuple[type, ...] = ()) -> Iterator[Callable[[], str]]:
    """Afterwards, the objects that `loss_fn` refers to have the attributes and the entries that they had before, and
    its random generators their states.

    Yields what tells the name of a number that has changed since, such as a count of calls, or of a list that has
    another length; "" if there is none.

    `but`: classes whose objects may keep what they are given inside. Values of tensors that change in place stay
    changed.
    """
    found = _Snapshot(but)
    found.add(loss_fn)
    try:
        yield found.changed_number
    finally:
        found.restore()


def is_of_package(module: Any, *packages: str) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in packages


def code_names(code: types.CodeType) -> list[str]:
    """What a function, and the functions inside it, read or write by name: globals and attributes."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return list(dict.fromkeys([*code.co_names, *itertools.chain.from_iterable(map(code_names, inner))]))


def read_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The values in a function's closure and defaults, and those of the globals that its code names, by name; a default
    of a positional argument has the name "".
    """
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():
            yield name, cell.cell_contents
    yield from (("", default) for default in function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()
    yield from function.__dict__.items()
    names = code_names(code)
    for name in (name for name in names if name in function.__globals__):
        value = function.__globals__[name]
        yield name, value
        if isinstance(value, types.ModuleType) and not is_of_package(value.__name__, *OF_OTHERS):
            # helper.scaled(loss): what the code names of a user's module
            yield from ((f"{name}.{inner}", vars(value)[inner]) for inner in names if inner in vars(value))


class _Snapshot:
    """The attributes and entries of all objects that a value refers to."""

    def __init__(self, but: type | tuple[type, ...]) -> None:
        self._but = but
        self._held: dict[int, Any] = {}  # what was looked at, by id: none of it is freed meanwhile
        self._undo: list[Callable[[], object]] = []
        self._numbers: list[tuple[dict[Any, Any], dict[Any, Any]]] = []  # entries, and which of them were numbers
        self._cells: list[tuple[str, types.CellType, Any]] = []  # likewise
        self._lists: list[tuple[Any, Any, int]] = []  # names, lists and their lengths

    def changed_number(self) -> str:
        """The name of a number that is another one now, or of a list of another length; "" if there is none."""
        for entries, before in self._numbers:
            for name, value in before.items():
                if isinstance(now := entries.get(name), _NUMBERS) and now != value:
                    return str(name)
        changed = (name for name, cell, value in self._cells if _held_in(cell) != value)
        grown = (str(name) for name, items, length in self._lists if len(items) != length)
        return next(changed, "") or next(grown, "")

    def _note(self, entries: dict[Any, Any], names: list[str] | None = None) -> None:
        """Entries that `restore` sets back."""
        self._undo.append(_entries(entries, names))
        some = entries if names is None else {name: entries.get(name) for name in names}
        self._numbers.append((entries, {k: v for k, v in some.items() if isinstance(v, _NUMBERS)}))
        self._lists += [(k, v, len(v)) for k, v in some.items() if isinstance(v, (list, collections.deque))]

    def add(self, value: Any, depth: int = 0) -> None:
        if isinstance(value, torch.Generator) and id(value) not in self._held:
            self._held[id(value)] = value
            self._undo.append(functools.partial(value.set_state, value.get_state()))
        if isinstance(value, _ATOMS) or id(value) in self._held or depth > _DEPTH or len(self._held) >= _MOST:
            return
        self._held[id(value)] = value
        for inner in list(self._inside(value)):
            self.add(inner, depth + 1)

    def restore(self) -> None:
        for undo in self._undo:
            undo()

    def _inside(self, value: Any) -> Iterator[Any]:
        if isinstance(value, types.FunctionType):
            if is_of_package(value.__module__, *OF_OTHERS):
                return
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                self._undo.append(_cell(cell))
                if isinstance(_held_in(cell), _NUMBERS):
                    self._cells.append((name, cell, _held_in(cell)))
            self._note(value.__globals__, code_names(value.__code__))
            self._note(value.__dict__)
            yield from (inner for _, inner in read_by(value))
        elif isinstance(value, functools.partial):
            yield from (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, types.MethodType):
            yield from (value.__func__, value.__self__)
        elif isinstance(value, (tuple, frozenset)):
            yield from value
        elif type(value) in (list, collections.deque, set):
            self._undo.append(_items(value))
            yield from value
        elif type(value) in (dict, collections.OrderedDict, collections.defaultdict, collections.Counter):
            self._note(value)
            yield from value.values()
        elif not isinstance(value, self._but):
            yield from self._attributes(value)

    def _attributes(self, value: Any) -> Iterator[Any]:
        """Those of an object."""
        kind = type(value)
        if is_of_package(kind.__module__, *OF_OTHERS) and not isinstance(value, (nn.Module, torch.amp.GradScaler)):
            return
        try:
            own: Any = object.__getattribute__(value, "__dict__")
        except AttributeError:
            own = None
        if type(own) is dict:
            self._note(own)
            yield from own.values()
        slots = (getattr(one, "__slots__", ()) for one in kind.__mro__)
        for names in slots:
            for name in (names,) if isinstance(names, str) else names:
                before = getattr(value, name, _ABSENT)
                if name not in ("__dict__", "__weakref__"):
                    self._undo.append(_slot(value, name, before))
                    yield before
        called = kind.__dict__.get("__call__")
        if isinstance(called, types.FunctionType):
            yield called


def _held_in(cell: types.CellType) -> Any:
    return cell.cell_contents if cell != types.CellType() else _ABSENT


def _cell(cell: types.CellType) -> Callable[[], None]:
    before = _held_in(cell)

    def undo() -> None:
        if before is _ABSENT:
            if cell != types.CellType():
                del cell.cell_contents
        elif cell == types.CellType() or cell.cell_contents is not before:
            cell.cell_contents = before

    return undo


def _entries(entries: dict[Any, Any], names: list[str] | None = None) -> Callable[[], None]:
    """`names`: of entries that count; all by default."""
    before = dict(entries) if names is None else {name: entries.get(name, _ABSENT) for name in names}

    def undo() -> None:
        for key in list(entries) if names is None else names:
            if before.get(key, _ABSENT) is _ABSENT:
                entries.pop(key, None)
        for key, value in before.items():
            if entries.get(key, _ABSENT) is not value:
                entries[key] = value

    return undo


def _items(items: Any) -> Callable[[], None]:
    before = list(items)

    def undo() -> None:
        if len(items) != len(before) or any(a is not b for a, b in zip(items, before, strict=True)):
            items.clear()
            (items.update if isinstance(items, set) else items.extend)(before)

    return undo


def _slot(value: Any, name: str, before: Any) -> Callable[[], None]:
    def undo() -> None:
        if getattr(value, name, _ABSENT) is before:
            return
        if before is _ABSENT:
            object.__delattr__(value, name)
        else:
            object.__setattr__(value, name, before)

    return undo
