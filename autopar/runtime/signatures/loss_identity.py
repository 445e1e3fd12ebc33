"""What two loss functions must share to compute the same loss, as a value that can be compared and looked up.

Programs write `loss_fn=lambda output, target: ...` at the call, which is a new function in every step, and change what
a loss reads between steps. So a loss is compared by what it computes with, as far as its code names it:

```
   loss_fn ── code, defaults
           ├─ closure, globals that its code reads ──> numbers, containers, functions, modules, tensors
           └─ objects there ── attributes and methods that any of this code names ──> likewise
```
Which names there are is known when all code was read: reading starts again until no new name is found.
"""

from __future__ import annotations

import collections
import contextlib
import dis
import functools
import hashlib
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from autopar.analysis.loss_objects import OF_OTHERS, is_of_package
from autopar.capture.module_state import TORCHS_OWN
from autopar.runtime.call_checks import Pipelined

_NUMBERS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
_DEPTH = 12  # of what lies inside of something else that is looked into
_MOST = 5_000  # values that are looked at; others are compared as objects
_MOST_BYTES = 1 << 20  # of an array of numpy that is looked at
_MOST_MODULES = 100  # parts of a module that are looked at: larger ones are models, not losses
_MOST_CODES = 64  # losses whose names are remembered
# Methods that code calls without naming them.
_IMPLICIT = frozenset(
    ("__call__", "__getitem__", "__getattr__", "__getattribute__", "__contains__", "__iter__", "__len__", "__bool__")
)
_OF_MODULES = frozenset(dir(nn.Module))
_ABSENT = object()


class Form(NamedTuple):
    """How closely losses are compared."""

    numbers: bool  # those that closures, globals, containers and objects hold count, and objects are the same ones
    tensors: bool  # tensors must be the same objects, not just alike


LOOSE, ALIKE, EXACT = Form(False, False), Form(True, False), Form(True, True)

_names_of_code: OrderedDict[Any, frozenset[str]] = OrderedDict()  # that all code of a loss reads, by its own


def identity(value: Any, form: Form) -> Any:
    """Equal for values that compute the same loss; hashable. It keeps all objects alive that it compares as objects."""
    if _computes_with_arguments(value):
        return value
    key = getattr(_function_in(value), "__code__", type(value))
    names = _names_of_code.get(key, frozenset())
    while True:
        reader = _Reader(form, names, value)
        found = reader.of(value, 0)
        if reader.read <= names:
            break
        names |= reader.read
    _names_of_code[key] = names
    if len(_names_of_code) > _MOST_CODES:
        _names_of_code.popitem(last=False)
    return found


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
    """Reads one loss function, and the attributes with some `names`. `read`: the names that its code reads."""

    def __init__(self, form: Form, names: frozenset[str], loss: Any) -> None:
        self._form, self._names, self._loss = form, names | _IMPLICIT, loss
        self.read: set[str] = set()
        self._left = _MOST
        self._path: list[int] = []  # ids of what is being looked into
        self._classes: set[type] = set()  # that were read

    def of(self, value: Any, depth: int) -> Any:
        if isinstance(value, _NUMBERS):
            return (type(value), value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        self._left -= 1
        if depth > _DEPTH or self._left < 0:
            return self._same(value)
        if id(value) in self._path:
            return ("within itself", len(self._path) - self._path.index(id(value)))
        self._path.append(id(value))
        try:
            return self._inside(value, depth + 1)
        finally:
            self._path.pop()

    def _same(self, value: Any) -> Any:
        return _Same(value) if self._form.numbers else type(value)

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if self._form.tensors:
            return _Same(tensor)
        if torch.nn.parameter.is_lazy(tensor):
            return self._same(tensor)
        return (torch.Tensor, tensor.dtype, tuple(tensor.shape), tensor.device.type, tensor.requires_grad)

    def _inside(self, value: Any, depth: int) -> Any:
        if _computes_with_arguments(value):
            return value
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        if isinstance(value, types.MethodType):
            return (self.of(value.__func__, depth), self.of(value.__self__, depth))
        if isinstance(value, (functools.partial, functools.partialmethod)):
            return ("partial", *(self.of(part, depth) for part in (value.func, value.args, value.keywords)))
        if isinstance(value, functools._lru_cache_wrapper):
            return self.of(value.__wrapped__, depth)
        if isinstance(value, (collections.UserDict, collections.UserList)):
            return (type(value), self.of(value.data, depth))
        if isinstance(value, _CONTAINERS):
            return self._container(value, depth)
        if isinstance(value, nn.Module):
            return self._module(value, depth)
        if isinstance(value, types.ModuleType):
            return self._own_code(value, depth)
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value)
        return self._object(value, depth) if self._form.numbers else type(value)

    def _array(self, value: Any) -> Any:
        if value.nbytes > _MOST_BYTES or value.dtype == object:
            return self._same(value)
        content = hashlib.sha256(value.tobytes()).digest() if self._form.numbers else None
        return (type(value), str(value.dtype), value.shape, content)

    def _container(self, value: Any, depth: int) -> Any:
        """Without running any code of a subclass."""
        base: Any = next(kind for kind in _CONTAINERS if isinstance(value, kind))
        if base.__len__(value) > self._left:
            return self._same(value)
        if base is dict:
            content: Any = tuple(self._entries(dict(dict.items(value)), depth))
        else:
            items = [item for item in base.__iter__(value) if self._form.numbers or not isinstance(item, _NUMBERS)]
            content = (frozenset if base in (set, frozenset) else tuple)(self.of(item, depth) for item in items)
        beside = () if type(value) is base or not self._form.numbers else self._attributes(value, type(value), depth)
        return (type(value), content, *beside)

    def _function(self, function: types.FunctionType, depth: int) -> Any:
        read, entries = _read(function.__code__), function.__globals__
        self.read |= read.attributes
        around = [_held(cell) for cell in function.__closure__ or ()]
        around += [entries[name] for name in read.globals if name in entries]
        around += [sys.modules[name] for name in read.imports if name in sys.modules]
        given = self.of((function.__defaults__, function.__kwdefaults__), depth)
        own = self._entries(function.__dict__, depth) if function.__dict__ else ()
        return (function.__code__, given, *(self._around(one, depth) for one in around), *own)

    def _around(self, value: Any, depth: int) -> Any:
        """What a function reads from around it."""
        return self.of(value, depth) if self._form.numbers or not isinstance(value, _NUMBERS) else None

    def _module(self, module: nn.Module, depth: int) -> Any:
        """Its settings may be changed after it was made."""
        whole: Any = module
        whole = whole.unwrap() if isinstance(module, Pipelined) else module
        parts = list(whole.named_modules(remove_duplicate=False))
        if len(parts) > _MOST_MODULES or not self._form.numbers:
            return self._same(module)
        return tuple((path, type(part), *self._of_part(part, depth)) for path, part in parts)

    def _of_part(self, part: nn.Module, depth: int) -> Iterator[Any]:
        """What a module holds beside its children."""
        own, kind = vars(part), type(part)
        if not is_of_package(kind.__module__, "torch"):
            yield from self._of_class(kind, (self._names - own.keys() - _OF_MODULES) | {"forward"}, depth)
        yield from self._entries({k: v for k, v in own.items() if k not in TORCHS_OWN}, depth)
        yield part.training
        for table in ("_parameters", "_buffers", "_forward_pre_hooks", "_forward_hooks"):
            if own[table]:
                yield from self._entries(own[table], depth)

    def _own_code(self, module: types.ModuleType, depth: int) -> Any:
        """What the code names of a user's module of functions."""
        if is_of_package(module.__name__, *OF_OTHERS, "math", "numpy") or not self._form.numbers:
            return self._same(module)
        held = {name: vars(module)[name] for name in sorted(self._names) if name in vars(module)}
        return (_Same(module), *self._entries(held, depth))

    def _object(self, value: Any, depth: int) -> Any:
        """The attributes that code names, of an object or a class."""
        kind = value if isinstance(value, type) else type(value)
        if kind.__module__ == "builtins" or is_of_package(kind.__module__, *OF_OTHERS):
            return _Same(value)
        return (_Same(value), *self._attributes(value, kind, depth))

    def _attributes(self, value: Any, kind: type, depth: int) -> Iterator[Any]:
        """Of the loss itself, also all numbers; all where a `__getattr__` may answer with any of them."""
        own = {} if kind is value else _own_attributes(value, kind, self._names)
        any_name, numbers = _of_user(kind, "__getattr__"), value is self._loss
        wanted = {
            name: one
            for name, one in own.items()
            if any_name or name in self._names or (numbers and isinstance(one, _NUMBERS))
        }
        yield from self._entries(wanted, depth)
        yield from self._of_class(kind, self._names - own.keys(), depth)

    def _of_class(self, kind: type, names: frozenset[str], depth: int) -> Iterator[Any]:
        """What all objects of a class have: settings, and methods with these names. Read once."""
        if kind in self._classes:
            return
        self._classes.add(kind)
        for name in sorted(names):
            for one in (vars(own)[name] for own in kind.__mro__ if _is_users(own) and name in vars(own)):
                function = one.fget if isinstance(one, property) else getattr(one, "__func__", one)
                if isinstance(one, _NUMBERS) and not self._form.numbers:
                    continue
                if not isinstance(one, types.MemberDescriptorType | types.GetSetDescriptorType):
                    yield (name, self.of(function, depth))

    def _entries(self, entries: Mapping[Any, Any], depth: int) -> Iterator[Any]:
        self._left -= len(entries)
        for name, value in entries.items():
            key = name if isinstance(name, _NUMBERS) else _Same(name)
            if isinstance(value, _NUMBERS):
                if self._form.numbers:
                    yield (key, type(value), value)
            else:
                yield (key, self.of(value, depth))


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


def _function_in(value: Any) -> Any:
    """The function of a bound method or a partial; other values as they are."""
    while isinstance(value, (types.MethodType, functools.partial)):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    return value if isinstance(value, types.FunctionType) else None


def _is_users(kind: type) -> bool:
    return kind.__module__ != "builtins" and not is_of_package(kind.__module__, "torch", "collections", "typing")


def _of_user(kind: type, name: str) -> bool:
    return any(name in vars(one) for one in kind.__mro__ if _is_users(one))


def _own_attributes(value: Any, kind: type, names: frozenset[str]) -> dict[str, Any]:
    """Those of an object itself, also in slots; without running any code of theirs."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        own = {}
    found = dict(own) if isinstance(own, dict) else {}
    for name in names - found.keys():
        slot = next((vars(one)[name] for one in kind.__mro__ if name in vars(one)), None)
        if isinstance(slot, types.MemberDescriptorType):
            with contextlib.suppress(AttributeError):  # not set
                found[name] = slot.__get__(value)
    return {name: found[name] for name in sorted(found, key=str)}


def _held(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
