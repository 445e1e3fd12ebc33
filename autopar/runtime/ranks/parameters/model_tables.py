"""The tables of a model's modules on one rank, and what a user assigns to them after the parameters were placed.

```
   name          shown to the user          inside `whole()`, while a call is bound to its program
   0.weight      this rank's DTensor        the parameter that the model was built with, hollow
   8.weight      nothing: another rank's    the same
   0.running     this rank's buffer         the same buffer
```
A buffer that is assigned anew counts from then on, as in one process: on all ranks, also on those whose table lost the
name. A parameter that is assigned anew would be whole, on every rank, and in no process group: it is refused. So are
values assigned to a parameter's `.data`, because torch does not give them to a DTensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.capture import torch_private_ranks
from autopar.errors import InputError
from autopar.runtime.ranks.faults.failure import explain_errors
from autopar.runtime.ranks.world import World

_COPY = (
    "write the values into the placed one (with torch.no_grad(): p.copy_(torch.distributed.tensor.distribute_tensor("
    "values, p.device_mesh, p.placements))), or assign {} before the first call"
)


_placed: WeakSet[nn.Module] = WeakSet()  # modules of this process whose parameters are on ranks

_all_tables: WeakSet[ModelTables] = WeakSet()  # of this process


@dataclass
class _Entry:
    """One name in a table."""

    module: nn.Module
    table: dict[str, Any]
    name: str
    path: str  # the name in the model
    before: torch.Tensor
    after: torch.Tensor | None  # None: this rank does not have it
    dtype: torch.dtype  # in which it was placed
    built: torch.Tensor  # `before` at first: others know it by its id, which must not become that of another tensor
    memory: tuple[StorageWeakRef, StorageWeakRef] | None  # of a DTensor whose values are in it (torch_private.py)

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.before, nn.Parameter)


class ModelTables:
    """All names of parameters and buffers, once they are placed."""

    def __init__(self) -> None:
        _all_tables.add(self)
        self._entries: list[_Entry] = []
        self._is_whole = False  # inside `whole()`

    def __bool__(self) -> bool:
        return bool(self._entries)

    def place(self, model: nn.Module, new: Mapping[int, torch.Tensor | None]) -> None:
        """From now on the model has `new`, by id of the tensor that it was built with; None: nothing."""
        for path, module in model.named_modules():
            for table in (module._parameters, module._buffers):
                for name, before in table.items():
                    if isinstance(before, nn.Parameter):
                        _placed.add(module)
                    if before is not None:
                        full = f"{path}.{name}" if path else name
                        after = new[id(before)]
                        memory = torch_private_ranks.memory_of(after) if isinstance(after, DTensor) else None
                        entry = _Entry(module, table, name, full, before, after, before.dtype, before, memory)
                        self._entries.append(entry)
        _show((entry, entry.after) for entry in self._entries)

    def drop(self, built: int) -> list[str]:
        """Remove a tensor from this rank's model, by the id of the one that the model was built with. Returns its
        names."""
        dropped = [entry for entry in self._entries if id(entry.built) == built]
        for entry in dropped:
            entry.after = None
        _show((entry, None) for entry in dropped if not self._is_whole)
        return [entry.path for entry in dropped]

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the model has all the tensors that it was built with, those that were placed without values."""
        had = {id(entry) for entry in self._entries if entry.after is not None}
        shown = [(entry, entry.table.get(entry.name)) for entry in self._entries]  # also what `follow` has not seen yet
        _show((entry, entry.before) for entry in self._entries)
        self._order({id(entry.table) for entry, value in shown if value is None})
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False
            _show((e, None if e.after is None and id(e) in had else value) for e, value in shown)
            _show((entry, entry.after) for entry in self._entries[len(shown) :])  # placed inside

    def _order(self, tables: Collection[int]) -> None:
        """Have tables, by id, list what the model was built with in its first order, then what has come since: captures
        follow that order, and it must be the same on ranks that keep a tensor and on those that do not."""
        by_table: defaultdict[int, list[_Entry]] = defaultdict(list)
        for entry in self._entries if tables else ():
            by_table[id(entry.table)].append(entry)
        for key in tables:
            table, first = by_table[key][0].table, [entry.name for entry in by_table[key]]
            for name in [*first, *(name for name in table if name not in first)]:
                table[name] = table.pop(name)

    def follow(self) -> str:
        """Take over the buffers that were assigned since the last call. Returns why the call must be refused; "" if it
        need not."""
        if (problem := self.lost_data()) != "":
            return problem
        for entry in self._entries:
            after = entry.after
            found: Any = entry.table.get(entry.name)
            if found is after and (after is None or after.dtype is entry.dtype):
                # Without its name in a table, a module keeps what is assigned to it as any other attribute.
                if after is not None or entry.name not in entry.module.__dict__:
                    continue
                found = entry.module.__dict__[entry.name]
            if (problem := _problem(entry, found)) != "":
                return problem
            entry.module.__dict__.pop(entry.name, None)
            entry.before = found
            if after is not None:
                entry.after = found
            else:
                entry.table.pop(entry.name, None)
        return ""

    def lost_data(self) -> str:
        """Why values that were assigned to a parameter's `.data` must be refused; "" if there are none."""
        for entry in self._entries:
            if entry.memory is None or not isinstance(entry.after, DTensor):
                continue
            (shown, part), (had_shown, had_part) = torch_private_ranks.memory_of(entry.after), entry.memory
            if part != had_part:
                entry.memory = shown, part
            elif shown != had_shown:
                return (
                    f"values were assigned to the .data of parameter '{entry.path}' after the plan had placed it on "
                    f"ranks, and torch loses them, because it is a DTensor: {_COPY.format('them')}"
                )
        return ""

    def check_known(self, model: nn.Module) -> None:
        """Inside `whole`, raise InputError for parameters that came into the model since: no rank was given them."""
        known, modules = {id(entry.before) for entry in self._entries}, {entry.module for entry in self._entries}
        for path, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in known:
                    full = f"{path}.{name}" if path else name
                    what = (
                        f"parameter '{full}' was registered" if module in modules else f"module '{path}' was assigned"
                    )
                    raise InputError(
                        f"{what} after the plan had placed the model on ranks, so that '{full}' is on none: write "
                        "values into the parameters that were there, or change the model before its first call"
                    )

    def lacks(self, module: object, name: str | None) -> bool:
        """Whether a module was built with a tensor of this name, which this rank does not have."""
        return any(entry.after is None and entry.module is module and entry.name == name for entry in self._entries)

    @property
    def lacking(self) -> tuple[str, ...]:
        """The names of all tensors that this rank does not have."""
        return tuple(entry.path for entry in self._entries if entry.after is None)

    @property
    def kept(self) -> frozenset[str]:
        """The names of all tensors that this rank holds a part of."""
        return frozenset(entry.path for entry in self._entries if entry.after is not None)

    @property
    def is_complete(self) -> bool:
        """Whether this rank has a part of every parameter."""
        return all(entry.after is not None for entry in self._entries if entry.is_parameter)


def check_plain(model: nn.Module) -> None:
    """Raise InputError for a model that a plan has placed already. A rank that holds no part may not notice it."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    part = next((name for name, tensor in tensors if isinstance(tensor, DTensor)), None)
    placed = next((path for path, module in model.named_modules() if module in _placed), None)
    if placed is not None:
        what = f"its module '{placed}' is" if placed else "it is"
        problem = f"a plan has placed {type(model).__name__} on ranks before: {what} in a pipelined module already"
    elif part is not None:
        problem = f"'{part}' is a DTensor before the first call"
    else:
        return
    raise InputError(
        f"{problem}; autopar takes models of plain tensors: to follow another plan, build the model anew and load a "
        "checkpoint (autopar.save, autopar.load); to train models that share a module, parallelize one model that "
        "contains them"
    )


def check_plain_on(world: World, model: nn.Module) -> None:
    """Call `check_plain` on all ranks. If one rank raises, all ranks raise. Collective."""
    world.outcome("reading the model", partial(check_plain, model))


def _explained(error: BaseException) -> str:
    """Why a module lacks an attribute that it was built with."""
    if not isinstance(error, AttributeError) or not any(t.lacks(error.obj, error.name) for t in list(_all_tables)):
        return ""
    return (
        f"since the first call, other ranks have '{error.name}': change it by its name where it is "
        "(pm.named_parameters(), pm.named_buffers()), assign a buffer anew on all ranks, or change a module as a whole "
        "(requires_grad_)"
    )


explain_errors(_explained)


def _show(values: Iterable[tuple[_Entry, torch.Tensor | None]]) -> None:
    """Put values into the tables; None: take the name out."""
    for entry, value in values:
        if value is None:
            entry.table.pop(entry.name, None)
        else:
            entry.table[entry.name] = value


def _problem(entry: _Entry, found: Any) -> str:
    """Why what is found under a name cannot take its place; "" if it can."""
    what = f"{'parameter' if entry.is_parameter else 'buffer'} '{entry.path}'"
    if isinstance(found, torch.Tensor) and found is entry.after:
        return (
            f"{what} is {found.dtype} and was {entry.dtype} when the plan placed it on ranks: convert the model before "
            "its first call"
        )
    if not isinstance(found, torch.Tensor):
        return f"{what} was removed after the plan had placed it on ranks: change the model before its first call"
    if entry.is_parameter:
        return f"{what} was assigned anew after the plan had placed it on ranks: {_COPY.format('it')}"
    if isinstance(found, nn.Parameter) or (found.shape, found.dtype) != (entry.before.shape, entry.dtype):
        was, now = (f"{tuple(one.shape)} {one.dtype}" for one in (entry.before, found))
        return (
            f"{what} is {now} and was {was} when the plan placed it on ranks: assign a tensor like the one before, or "
            "change the model before its first call"
        )
    return ""
