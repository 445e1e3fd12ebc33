"""A copy of a module tree for one call, over given parameters and buffers.

Micro-batches, replicas and the user's own threads may run a module at the same time, each over tensors of its own. So
no call changes the user's module while it runs. A copy has all attributes of its original; what the code assigns to
them is put back into the original afterwards.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from autopar.capture import torch_private
from autopar.capture.module_hooks import hook_tables_without_users
from autopar.capture.module_state import CONTAINERS, own_generators
from autopar.capture.registrations import Registrations
from autopar.errors import CaptureError

_TABLES = ("_parameters", "_buffers")
_LOST = (
    " in this call. It runs uncaptured, on a copy that later calls do not have: do it in __init__, or call the model "
    "itself once with such arguments before autopar.parallelize"
)


class HeldTensors:
    """The parameters and buffers of a module tree: each tensor once, and all the places where it is. Also its random
    generators, which copies share. `path`: of the module in the model."""

    def __init__(self, module: nn.Module, path: str = "") -> None:
        self._paths, self.modules = map(list, zip(*module.named_modules(prefix=path), strict=True))
        self.generators = own_generators(self.modules)
        self._places: list[list[tuple[int, str, str]]] = []  # (number of the module, table, name)
        numbers: dict[int, int] = {}
        for index, owner in enumerate(self.modules):
            for table in _TABLES:
                for name, value in getattr(owner, table).items():
                    if value is None:
                        continue
                    number = numbers.setdefault(id(value), len(numbers))
                    if number == len(self._places):
                        self._places.append([])
                    self._places[number].append((index, table, name))

    def current(self) -> list[torch.Tensor]:
        """The tensors that the modules hold now."""
        return [getattr(self.modules[index], table)[name] for (index, table, name), *_ in self._places]

    def copy(self, tensors: Sequence[torch.Tensor], *, private: bool) -> ModuleCopy:
        """The modules over `tensors`. `private`: without the user's hooks, and with containers of its own."""
        return ModuleCopy(self._paths, self.modules, self._places, tensors, private)


class ModuleCopy:
    """A copy of a module tree. `modules`: in the order of the originals, the root first."""

    def __init__(
        self,
        paths: Sequence[str],
        originals: Sequence[nn.Module],
        places: Sequence[Sequence[tuple[int, str, str]]],
        tensors: Sequence[torch.Tensor],
        private: bool,
    ) -> None:
        self._originals, self._places, self._tensors = originals, places, tensors
        self.modules = [nn.Module.__new__(type(module)) for module in originals]
        copies = {id(old): new for old, new in zip(originals, self.modules, strict=True)}
        for old, new in zip(originals, self.modules, strict=True):
            new.__dict__ = {name: _copied(value, copies, private) for name, value in vars(old).items()}
            for table in _TABLES:
                new.__dict__[table] = dict(getattr(old, table))
            new.__dict__["_modules"] = {
                name: None if child is None else copies[id(child)] for name, child in old._modules.items()
            }
            if private:
                new.__dict__.update(hook_tables_without_users(old))
        for same, tensor in zip(places, tensors, strict=True):
            for index, table, name in same:
                getattr(self.modules[index], table)[name] = tensor
        torch_private.refresh_flat_weights(self.modules)
        self._before = [dict(vars(module)) for module in self.modules]
        self._registrations = Registrations(zip(paths, self.modules, strict=True))

    @property
    def root(self) -> nn.Module:
        return self.modules[0]

    def refuse_registrations(self) -> None:
        """Raise ParameterWriteError or RegistrationError if the code registered, removed or replaced what modules hold,
        except buffers in the place of others."""
        self._registrations.refuse_changes(_LOST)

    def write_buffers(self) -> None:
        """Write what the code assigned to buffers into their tensors. Raises CaptureError for another shape or type."""
        for same, tensor in zip(self._places, self._tensors, strict=True):
            for index, table, name in same:
                new = getattr(self.modules[index], table)[name]
                if new is tensor:
                    continue
                if new.shape != tensor.shape or new.dtype != tensor.dtype:
                    raise CaptureError(
                        f"an uncaptured module changed its buffer '{name}' from {tuple(tensor.shape)} {tensor.dtype} "
                        f"to {tuple(new.shape)} {new.dtype}; keep the shape and type of a buffer, or keep the value "
                        "in a plain attribute"
                    )
                with torch.no_grad():
                    tensor.copy_(new)

    def write_attributes(self) -> None:
        """Give the original modules the attributes that the code assigned or deleted."""
        for old, new, before in zip(self._originals, self.modules, self._before, strict=True):
            now = vars(new)
            for name in [*now, *(n for n in before if n not in now)]:
                if name in torch_private.FLAT_WEIGHTS:
                    continue  # of the copy's tensors
                if name not in now:
                    old.__dict__.pop(name, None)
                elif name not in before or now[name] is not before[name]:
                    old.__dict__[name] = now[name]


def _copied(value: Any, copies: dict[int, nn.Module], private: bool) -> Any:
    """An attribute for the copies: references to modules, and methods bound to them, refer to the copies."""
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, types.MethodType) and id(value.__self__) in copies:
        function: Callable[..., Any] = value.__func__
        return types.MethodType(function, copies[id(value.__self__)])
    kind = type(value)
    if kind in (list, tuple) and any(id(item) in copies for item in value):
        return kind(copies.get(id(item), item) for item in value)
    if kind is dict and any(id(item) in copies for item in value.values()):
        return {key: copies.get(id(item), item) for key, item in value.items()}
    return value.copy() if private and kind in CONTAINERS else value
