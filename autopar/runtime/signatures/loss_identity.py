"""What two loss functions must share to compute the same loss, as a value that can be compared and looked up.

Programs write `loss_fn=lambda output, target: ...` at the call, which is a new function in every step, and change what
a loss reads between steps. So a loss is compared by what it computes with, as far as its code names it:

```
   loss_fn ── code, defaults
           ├─ closure, globals that its code reads ──> numbers, containers, functions, modules, tensors
           └─ objects there ── attributes that the code, or a method that it calls, names ──> likewise
```
"""

from __future__ import annotations

import collections
import contextlib
import dis
import functools
import sys
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from autopar.analysis.loss_objects import OF_OTHERS, is_of_package
from autopar.capture.module_state import TORCHS_OWN
from autopar.runtime.call_checks import Pipelined

_NUMBERS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_DEPTH = 8  # of what lies inside of something else that is looked into
_MOST = 5_000  # values that are looked at; others are compared as objects
_MOST_MODULES = 100  # parts of a module that are looked at: larger ones are models, not losses
_OF_MODULES = frozenset(dir(nn.Module))
_ABSENT = object()


class Form(NamedTuple):
    """How closely losses are compared."""

    numbers: bool  # those that closures, globals, containers and objects hold count
    tensors: bool  # tensors must be the same objects, not just alike


LOOSE, ALIKE, EXACT = Form(False, False), Form(True, False), Form(True, True)


def identity(value: Any, form: Form) -> Any:
    """Equal for values that compute the same loss; hashable. It keeps all objects alive that it compares as objects."""
    if _computes_with_arguments(value):
        return value
    return _Reader(form).of(value, None, 0)


def _computes_with_arguments(value: Any) -> bool:
    """Whether a value is a function of torch."""
    return isinstance(value, types.FunctionType) and is_of_package(value.__module__, "torch")


class _Same:
    """An object that equals itself alone."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _Reader:
    """Reads one loss function."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._left = _MOST
        self._path: list[int] = []  # ids of what is being looked into
        self._known: dict[tuple[type, frozenset[str]], tuple[frozenset[str], list[Any]]] = {}
        self._classes: set[tuple[type, frozenset[str]]] = set()  # that were read

    def of(self, value: Any, names: frozenset[str] | None, depth: int) -> Any:
        """`names`: of attributes that the code around the value reads; None: that is not known."""
        if isinstance(value, _NUMBERS):
            return (type(value), value)
        if isinstance(value, torch.Tensor):
            return _Same(value) if self._form.tensors else _like(value)
        self._left -= 1
        if depth > _DEPTH or self._left < 0:
            return _Same(value)
        if id(value) in self._path:
            return ("within itself", len(self._path) - self._path.index(id(value)))
        self._path.append(id(value))
        try:
            return self._inside(value, names, depth + 1)
        finally:
            self._path.pop()

    def _inside(self, value: Any, names: frozenset[str] | None, depth: int) -> Any:
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        if isinstance(value, types.MethodType):
            return (self.of(value.__func__, names, depth), self.of(value.__self__, _names_of(value) or names, depth))
        if isinstance(value, (functools.partial, functools.partialmethod)):
            inner = _names_of(value.func) or names
            return ("partial", *(self.of(part, inner, depth) for part in (value.func, value.args, value.keywords)))
        if isinstance(value, functools._lru_cache_wrapper):
            return self.of(value.__wrapped__, names, depth)
        if isinstance(value, (collections.UserDict, collections.UserList)):
            return (type(value), self.of(value.data, names, depth))
        if isinstance(value, (tuple, list, dict, set, frozenset, collections.deque)):
            return self._container(value, names, depth)
        if isinstance(value, nn.Module):
            return self._module(value, names, depth)
        if isinstance(value, types.ModuleType):
            return self._own_code(value, names, depth)
        if isinstance(value, np.ndarray | np.generic):
            small = value.nbytes <= _MOST and value.dtype != object
            return (type(value), str(value.dtype), value.shape, value.tobytes()) if small else _Same(value)
        return self._object(value, names, depth) if self._form.numbers else _Same(value)

    def _container(self, value: Any, names: frozenset[str] | None, depth: int) -> Any:
        if len(value) > self._left:
            return _Same(value)
        if isinstance(value, dict):
            return (type(value), *self._entries(value, names, depth))
        items = [self.of(item, names, depth) for item in value]
        return (type(value), frozenset(items) if isinstance(value, (set, frozenset)) else tuple(items))

    def _function(self, function: types.FunctionType, depth: int) -> Any:
        read, entries = _read(function.__code__), function.__globals__
        around = [_held(cell) for cell in function.__closure__ or ()]
        around += [entries[name] for name in read.globals if name in entries]
        around += [sys.modules[name] for name in read.imports if name in sys.modules]
        given = (function.__defaults__, function.__kwdefaults__)
        held = (self._around(one, read.attributes, depth) for one in around)
        return (function.__code__, self.of(given, read.attributes, depth), *held)

    def _around(self, value: Any, names: frozenset[str], depth: int) -> Any:
        """What a function reads from around it."""
        return self.of(value, names, depth) if self._form.numbers or not isinstance(value, _NUMBERS) else None

    def _module(self, module: nn.Module, names: frozenset[str] | None, depth: int) -> Any:
        """Its settings may be changed after it was made."""
        whole: Any = module
        parts = list((whole.unwrap() if isinstance(module, Pipelined) else module).modules())
        if len(parts) > _MOST_MODULES or not self._form.numbers:
            return _Same(module)
        return tuple((type(part), *self._of_part(part, names, depth)) for part in parts)

    def _of_part(self, part: nn.Module, names: frozenset[str] | None, depth: int) -> Iterator[Any]:
        """What a module holds beside its children."""
        own, kind = vars(part), type(part)
        if is_of_package(kind.__module__, "torch"):
            through: frozenset[str] | None = None
        else:
            through, methods = self._through(kind, (names or frozenset()) | {"forward"})
            yield from self._of_class(kind, through - own.keys() - _OF_MODULES, methods, depth)
        yield from self._entries({k: v for k, v in own.items() if k not in TORCHS_OWN}, through, depth)
        yield part.training
        for table in ("_parameters", "_buffers", "_forward_pre_hooks", "_forward_hooks"):
            if own[table]:
                yield from self._entries(own[table], through, depth)

    def _own_code(self, module: types.ModuleType, names: frozenset[str] | None, depth: int) -> Any:
        """What the code names of a user's module of functions."""
        if names is None or is_of_package(module.__name__, *OF_OTHERS, "math", "numpy"):
            return _Same(module)
        held = {name: vars(module)[name] for name in sorted(names) if name in vars(module)}
        return (_Same(module), *self._entries(held, names, depth))

    def _object(self, value: Any, names: frozenset[str] | None, depth: int) -> Any:
        """The attributes that code names, of an object or a class. Of an object that is called, also all numbers."""
        kind = value if isinstance(value, type) else type(value)
        if kind.__module__ == "builtins" or is_of_package(kind.__module__, *OF_OTHERS):
            return _Same(value)
        through, methods = self._through(kind, (names or frozenset()) | {"__call__"})
        own = {} if kind is value else _own_attributes(value, kind, through)
        named = {name: one for name, one in own.items() if name in through}
        if _class_attribute(kind, "__getattr__") is not _ABSENT:  # it may answer with any of them
            named = own
        if names is None:
            named |= {name: one for name, one in own.items() if isinstance(one, _NUMBERS)}
        of_class = self._of_class(kind, through - own.keys(), methods, depth)
        return (_Same(value), *self._entries(named, through, depth), *of_class)

    def _through(self, kind: type, names: frozenset[str]) -> tuple[frozenset[str], list[Any]]:
        """`_through`, once for all objects of a class."""
        key = (kind, names)
        if key not in self._known:
            self._known[key] = _through(kind, names)
        return self._known[key]

    def _of_class(self, kind: type, names: Set[str], methods: Sequence[Any], depth: int) -> Iterator[Any]:
        """Settings that a class has for all its objects, and what its methods read: once for equal `names`."""
        key = (kind, frozenset(names))
        if key in self._classes:
            return
        self._classes.add(key)
        held = {name: one for name in sorted(names) if not _is_method(one := _class_attribute(kind, name))}
        yield from self._entries({k: v for k, v in held.items() if v is not _ABSENT}, frozenset(names), depth)
        yield from (self.of(method, None, depth) for method in methods)

    def _entries(self, entries: Mapping[Any, Any], names: frozenset[str] | None, depth: int) -> Iterator[Any]:
        self._left -= len(entries)
        for name, value in entries.items():
            key = name if isinstance(name, _NUMBERS) else _Same(name)
            if isinstance(value, _NUMBERS):
                if self._form.numbers:
                    yield (key, type(value), value)
            else:
                yield (key, self.of(value, names, depth))


class _Read(NamedTuple):
    """The names that code reads."""

    globals: tuple[str, ...]
    imports: tuple[str, ...]
    attributes: frozenset[str]


@functools.lru_cache(maxsize=1024)
def _read(code: types.CodeType) -> _Read:
    """What a function, and the functions inside it, read by name. A constant may be the name in a `getattr`."""
    by_name: dict[str, list[str]] = {"LOAD_GLOBAL": [], "LOAD_NAME": [], "IMPORT_NAME": []}
    for instruction in dis.get_instructions(code):
        if instruction.opname in by_name:
            by_name[instruction.opname].append(instruction.argval)
    inner = [_read(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    globals_ = [*by_name["LOAD_GLOBAL"], *by_name["LOAD_NAME"], *(name for read in inner for name in read.globals)]
    imports = [*by_name["IMPORT_NAME"], *(name for read in inner for name in read.imports)]
    constants = (c for c in code.co_consts if isinstance(c, str) and c.isidentifier())
    attributes = frozenset(code.co_names).union(constants, *(read.attributes for read in inner))
    return _Read(tuple(dict.fromkeys(globals_)), tuple(dict.fromkeys(imports)), attributes)


def _names_of(function: Any) -> frozenset[str] | None:
    """The attributes that a function or method reads; None where its code is not known."""
    function = getattr(function, "__func__", function) if isinstance(function, types.MethodType) else function
    return _read(function.__code__).attributes if isinstance(function, types.FunctionType) else None


def _through(kind: type, names: frozenset[str]) -> tuple[frozenset[str], list[Any]]:
    """`names`, and those that the methods and properties of a class with one of these names read in turn; and these
    methods."""
    found, pending, methods = set(names), sorted(names), []
    while pending:
        method = _class_attribute(kind, pending.pop())
        if not _is_method(method):
            continue
        function = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
        if is_of_package(getattr(function, "__module__", None), "torch"):
            continue
        methods.append(function)
        new = (_names_of(function) or frozenset()) - found
        found |= new
        pending += sorted(new)
    return frozenset(found), methods


def _class_attribute(kind: type, name: str) -> Any:
    return next((vars(one)[name] for one in kind.__mro__ if name in vars(one)), _ABSENT)


def _is_method(value: Any) -> bool:
    """Whether a class attribute is code."""
    kinds = (types.FunctionType, property, classmethod, staticmethod, functools.partialmethod)
    return isinstance(value, (*kinds, functools._lru_cache_wrapper))


def _own_attributes(value: Any, kind: type, names: Set[str]) -> dict[str, Any]:
    """Those of an object itself, also in slots; without running any code of theirs."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        own = {}
    found = dict(own) if isinstance(own, dict) else {}
    for name in names - found.keys():
        if isinstance(slot := _class_attribute(kind, name), types.MemberDescriptorType):
            with contextlib.suppress(AttributeError):  # not set
                found[name] = slot.__get__(value)
    return dict(sorted(found.items()))


def _held(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _like(tensor: torch.Tensor) -> Any:
    return (torch.Tensor, tensor.dtype, tuple(tensor.shape), tensor.device.type, tensor.requires_grad)
