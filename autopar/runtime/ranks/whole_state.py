"""The whole model's state on one rank, for files that other tools read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.runtime.ranks.faults.watcher import watched
from autopar.runtime.ranks.module import RankedModule

_EXTRA = "_extra_state"  # how torch names what get_extra_state() of a module returns
_Fact = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a tensor


@watched("whole_state_dict")
@torch.no_grad()
def whole_state_dict(module: RankedModule, rank: int = 0) -> dict[str, Any]:
    """`state_dict()` of the whole model, its tensors on the CPU, on one rank; nothing on the others. Collective.

    Tensors travel one after another, so that the other ranks need room for the largest one alone. Names of one tensor
    get one tensor again. The extra state of a module, of any type, is that of the first rank that runs the module.
    """
    world, own, names = module.world, module.state_dict(), module.names()
    world.announced("whole_state_dict")
    tensors = {name: value for name, value in own.items() if not _is_object(name, value)}
    objects = {name: _sent(own[name]) for name in own.keys() - tensors.keys()}
    facts: list[dict[str, _Fact]] = world.gathered(
        {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}
    )
    known: list[dict[str, Any]] = world.gathered(objects)
    found: dict[str, Any] = {}
    for name in dict.fromkeys(names.values()):
        holders = [holder for holder, of in enumerate(facts) if name in of]
        if holders:
            whole = _whole(tensors[name]) if name in tensors else None  # collective among the ranks of a tensor's mesh
            if rank not in holders:
                shape, dtype = facts[holders[0]][name]
                whole = whole if world.rank == holders[0] else torch.empty(shape, dtype=dtype)
                assert whole is not None, "a holder has it"
                world.broadcast(whole, holders[0])
            value: Any = whole
        elif any(name in of for of in known):
            value = known[_runner(name, facts, known)][name]
        else:
            continue
        if world.rank == rank:
            found[name] = value
    return {name: found[first] for name, first in names.items() if first in found}


def _is_object(name: str, value: Any) -> bool:
    """Whether it travels as an object. An extra state may be a tensor that differs by rank."""
    return not isinstance(value, torch.Tensor) or name.rpartition(".")[2] == _EXTRA


def _sent(value: Any) -> Any:
    return _whole(value) if isinstance(value, torch.Tensor) else value


def _runner(name: str, facts: Sequence[Mapping[str, _Fact]], known: Sequence[Mapping[str, Any]]) -> int:
    """The first rank that has tensors of the module that an object belongs to; else the first that has the object."""
    prefix = name.removesuffix(_EXTRA)
    runs = [rank for rank, of in enumerate(facts) if any(one.startswith(prefix) for one in of) and name in known[rank]]
    return min(runs, default=next((rank for rank, of in enumerate(known) if name in of), 0))


def _whole(value: Any) -> torch.Tensor:
    """A copy on the CPU, which later steps do not change."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().cpu().clone()
