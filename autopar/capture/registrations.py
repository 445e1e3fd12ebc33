"""Children, parameters and buffers that a forward registers, as lazily built modules do.

    if self.head is None:                                if not hasattr(self, "positions"):
        self.head = nn.Linear(x.shape[-1], 10)               self.register_buffer("positions", torch.arange(n))

While a model is captured, what its code creates has no values: initial values would be drawn again, by another call
than the user's, and the graph would train weights that the model does not have. So the model is refused until a plain
call has made it complete. torch's lazy modules (nn.LazyLinear) likewise. A forward that puts another module or
parameter in the place of one is refused, too: the next call would not have it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx, nn
from torch.nn.parameter import is_lazy

from autopar.capture.module_state import Contents
from autopar.capture.parameter_writes import ParameterWriteError, refusal
from autopar.errors import CaptureError

_TABLES = {"_modules": "module", "_parameters": "parameter", "_buffers": "buffer"}
_REMEDY = (
    "call the model once before, as in `with torch.no_grad(): model(*example_args)`, so that it has all its modules, "
    "parameters and buffers"
)
_INCOMPLETE = f", and a capture needs a model that is complete before; {_REMEDY}"

# The last two are set by torch.export.
_RESERVED = {*dir(fx.GraphModule(nn.Module(), fx.Graph())), "shape_env", "_guards_fn"} - {*dir(nn.Module())}


class RegistrationError(CaptureError):
    """The model is complete only after its first call."""


def refuse_uninitialized(model: nn.Module) -> None:
    """Raise RegistrationError if a lazy module of torch has not seen its first call."""
    for path, module in model.named_modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and is_lazy(tensor):
                raise RegistrationError(
                    f"'{_joined(path, name)}' of {type(module).__name__} has no sizes before the first call; {_REMEDY}"
                )


def refuse_reserved_names(model: nn.Module) -> None:
    """Raise CaptureError if the root holds something under a name that a captured graph needs for itself, such as
    `code`. (Inner modules keep their names: the graph is no module inside of them.)"""
    for table, kind in _TABLES.items():
        for name in getattr(model, table):
            if name in _RESERVED:
                raise CaptureError(
                    f"{kind} '{name}' of {type(model).__name__} cannot be captured: a captured graph (torch.fx."
                    f"GraphModule) has an attribute of this name itself. Rename it, as to '{name.strip('_')}_', or "
                    "hold it in a module inside of the model"
                )


@contextmanager
def contents_restored(model: nn.Module) -> Iterator[None]:
    """On leaving, all modules hold what they held before: children, parameters, buffers, attributes and hooks. Raises
    as `Registrations.refuse_changes` if the code inside changed any of the first three."""
    contents, registrations = Contents(list(model.modules())), Registrations(model.named_modules())
    refused = False
    try:
        yield
    except (ParameterWriteError, RegistrationError):
        refused = True
        raise
    finally:
        error = None if refused else registrations.change()
        contents.restore()
        if error is not None:
            raise error


@contextmanager
def registrations_refused(model: nn.Module) -> Iterator[None]:
    """Raises on leaving, as `Registrations.refuse_changes`, if a call of `model` inside changed what its modules hold.

    For torch.export, which lets a call run over tensors of its own and then puts the model's back.
    """
    before: list[Registrations] = []
    errors: list[CaptureError | None] = []
    handles = [
        model.register_forward_pre_hook(lambda *_: before.append(Registrations(model.named_modules()))),
        model.register_forward_hook(lambda *_: errors.append(before.pop().change())),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for error in filter(None, errors):
            raise error


class Registrations:
    """The children, parameters and buffers of some modules at one time. `modules`: with their paths."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._before = [
            (path, module, [getattr(module, table).copy() for table in _TABLES]) for path, module in modules
        ]

    def change(self, remedy: str = _INCOMPLETE) -> CaptureError | None:
        """The error for the first that has been registered, removed or replaced since: ParameterWriteError for a
        parameter in the place of another, RegistrationError for all else. A buffer in the place of another is fine."""
        for path, module, tables in self._before:
            for (table, kind), before in zip(_TABLES.items(), tables, strict=True):
                now = getattr(module, table)
                if now.keys() == before.keys() and all(map(operator.is_, now.values(), before.values())):
                    continue
                for name in [*now, *(name for name in before if name not in now)]:
                    old, new = before.get(name), now.get(name)
                    if old is not new and (old is None or new is None or kind != "buffer"):
                        return _error(kind, _joined(path, name), old, new, remedy)
        return None

    def refuse_changes(self, remedy: str = _INCOMPLETE) -> None:
        """Raise the error of `change`, if there is one."""
        error = self.change(remedy)
        if error is not None:
            raise error


def _error(kind: str, path: str, old: Any, new: Any, remedy: str) -> CaptureError:
    if new is None:
        return RegistrationError(f"forward removes {kind} '{path}'{remedy}")
    if old is None:
        what = f" ({type(new).__name__})" if kind == "module" else ""
        return RegistrationError(f"forward registers {kind} '{path}'{what}{remedy}")
    if kind == "parameter":
        return refusal(path, "it puts another in its place; if only the first call does, call the model once before")
    return RegistrationError(
        f"forward replaces module '{path}' ({type(old).__name__}) by another ({type(new).__name__}). If only the first "
        f"call does, {_REMEDY}. Otherwise leave all modules in their places, and choose by an argument or an index "
        "which of them forward calls"
    )


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}".lstrip(".")
