"""Children, parameters and buffers that a forward registers, as lazily built modules do.

    if self.head is None:                                if not hasattr(self, "positions"):
        self.head = nn.Linear(x.shape[-1], 10)               self.register_buffer("positions", torch.arange(n))

While a model is captured, what its code creates has no values: initial values would be drawn again, by another call
than the user's, and the graph would train weights that the model does not have. So the model is refused until a plain
call has made it complete. torch's lazy modules (nn.LazyLinear) likewise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import fx, nn
from torch.nn.parameter import is_lazy

from autopar.capture.module_state import Contents
from autopar.errors import CaptureError

_TABLES = {"_modules": "module", "_parameters": "parameter", "_buffers": "buffer"}
_REMEDY = (
    "call the model once before, as in `with torch.no_grad(): model(*example_args)`, so that it has all its modules, "
    "parameters and buffers"
)

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
    RegistrationError if the code inside registered or removed any of the first three."""
    contents, registered = Contents(list(model.modules())), Registrations(model)
    try:
        yield
    finally:
        found = registered.since()
        contents.restore()
        if found:
            raise RegistrationError(f"forward {found}, and a capture needs a model that is complete before; {_REMEDY}")


class Registrations:
    """The children, parameters and buffers of a model at one time."""

    def __init__(self, model: nn.Module) -> None:
        self._before = [
            (path, module, {table: dict(getattr(module, table)) for table in _TABLES})
            for path, module in model.named_modules()
        ]

    def since(self) -> str:
        """What has been registered or removed first: `registers module 'a.extra' (Linear)`; "" for none.

        A buffer or parameter in the place of another is not counted.
        """
        for path, module, tables in self._before:
            for table, kind in _TABLES.items():
                before, now = tables[table], getattr(module, table)
                for name in [*now, *(name for name in before if name not in now)]:
                    old, new = before.get(name), now.get(name)
                    where = f"{kind} '{_joined(path, name)}'"
                    if new is not None and (old is None or (kind == "module" and new is not old)):
                        return f"registers {where} ({type(new).__name__})" if kind == "module" else f"registers {where}"
                    if new is None and old is not None:
                        return f"removes {where}"
        return ""


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}".lstrip(".")
