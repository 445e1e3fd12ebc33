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

import dis
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar.analysis.loss_objects import OF_OTHERS, is_of_package
from autopar.capture.module_state import TORCHS_OWN
from autopar.runtime.call_checks import Pipelined

_NUMBERS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_DEPTH = 8  # of what lies inside of something else that is looked into
_MOST = 5_000  # values that are looked at; others are compared as objects
_MOST_MODULES = 100  # parts of a module that are looked at: larger ones are models, not losses
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

    def of(self, value: Any, names: frozenset[str] | None, depth: int) -> Any:
        """`names`: of attributes that the code around the value reads; None: that is not known."""
        if isinstance(value, _NUMBERS):
            return (type(value), value)
        if isinstance(value, torch.Tensor):
            return _Same(value) if self._form.tensors else _like(value)
        self._left -= 1
        if depth > _DEPTH or self._left < 0 or isinstance(value, type):
            return _Same(value)
        if id(value) in self._path:
            return ("within itself", len(self._path) - self._path.index(id(value)))
        self._path.append(id(value))
        try:
            return self._inside(value, names, depth + 1)
        finally:
            self._path.pop()

    def _inside(self, value: Any, names: frozenset[str] | None, depth: int) -> Any:
        if _computes_with_arguments(value):
            return value
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        if isinstance(value, types.MethodType):
            function = value.__func__
            own = _read(function.__code__).attributes if isinstance(function, types.FunctionType) else names
            return (self.of(function, names, depth), self.of(value.__self__, own, depth))
        if isinstance(value, functools.partial):
            return ("partial", *(self.of(part, names, depth) for part in (value.func, value.args, value.keywords)))
        if isinstance(value, (tuple, list, dict)) and len(value) > self._left:
            return _Same(value)
        if isinstance(value, (tuple, list)):
            return (type(value), *(self.of(item, names, depth) for item in value))
        if isinstance(value, nn.Module):
            return self._module(value, names, depth)
        if isinstance(value, dict):
            return (type(value), *self._entries(value, names, depth))
        if isinstance(value, types.ModuleType):
            return self._own_code(value, names, depth)
        return self._object(value, names, depth) if hasattr(value, "__dict__") and self._form.numbers else _Same(value)

    def _function(self, function: types.FunctionType, depth: int) -> Any:
        read, entries = _read(function.__code__), function.__globals__
        around = [_held(cell) for cell in function.__closure__ or ()]
        around += [entries[name] for name in read.globals if name in entries]
        given = ((function.__defaults__, function.__kwdefaults__), None, depth)
        return (function.__code__, self.of(*given), *(self._around(one, read.attributes, depth) for one in around))

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
        own, through = vars(part), _through(part, (names or frozenset()) | {"forward"})
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
        """The attributes that code names. Of an object that is called, also all numbers."""
        through = _through(value, frozenset({"__call__"}) if names is None else names)
        own = vars(value)
        named = {name: one for name in sorted(through) if (one := _attribute(value, name)) is not _ABSENT}
        if names is None:
            named |= {name: one for name, one in own.items() if isinstance(one, _NUMBERS)}
        return (_Same(value), *self._entries(named, through, depth))

    def _entries(self, entries: Mapping[Any, Any], names: frozenset[str] | None, depth: int) -> Iterator[Any]:
        self._left -= len(entries)
        for name, value in entries.items():
            key = name if isinstance(name, _NUMBERS) else repr(name)
            if isinstance(value, _NUMBERS):
                if self._form.numbers:
                    yield (key, type(value), value)
            else:
                yield (key, self.of(value, names, depth))


class _Read(NamedTuple):
    """The names that code reads."""

    globals: tuple[str, ...]
    attributes: frozenset[str]


@functools.lru_cache(maxsize=1024)
def _read(code: types.CodeType) -> _Read:
    """What a function, and the functions inside it, read by name."""
    instructions = list(dis.get_instructions(code))
    inner = [_read(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    globals_ = [i.argval for i in instructions if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    of_inner = [name for read in inner for name in read.globals]
    attributes = frozenset(code.co_names).union(*(read.attributes for read in inner))
    return _Read(tuple(dict.fromkeys([*globals_, *of_inner])), attributes)


def _through(value: Any, names: frozenset[str]) -> frozenset[str]:
    """`names`, and those that the methods and properties of an object with one of these names read in turn."""
    kind: Any = type(value)
    return _names_through(kind, names)


@functools.lru_cache(maxsize=1024)
def _names_through(kind: type, names: frozenset[str]) -> frozenset[str]:
    found, pending = set(names), list(names)
    while pending:
        method = _of_class(kind, pending.pop())
        function = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
        if isinstance(function, types.FunctionType) and not is_of_package(function.__module__, "torch"):
            new = _read(function.__code__).attributes - found
            found |= new
            pending += new
    return frozenset(found)


def _of_class(kind: type, name: str) -> Any:
    return next((vars(one)[name] for one in kind.__mro__ if name in vars(one)), _ABSENT)


def _attribute(value: Any, name: str) -> Any:
    """An attribute of an object, or a setting of its class; without running any code of theirs."""
    own = vars(value)
    if name in own:
        return own[name]
    of_class = _of_class(type(value), name)
    return of_class if isinstance(of_class, (*_NUMBERS, list, tuple, dict)) else _ABSENT


def _held(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _like(tensor: torch.Tensor) -> Any:
    return (torch.Tensor, tensor.dtype, tuple(tensor.shape), tensor.device.type, tensor.requires_grad)
