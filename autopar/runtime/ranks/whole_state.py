"""The whole model's tensors on one rank, for files that other tools read."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.runtime.ranks.faults.watcher import watched
from autopar.runtime.ranks.module import RankedModule


@watched("whole_state_dict")
@torch.no_grad()
def whole_state_dict(module: RankedModule, rank: int = 0) -> dict[str, torch.Tensor]:
    """`state_dict()` of the whole model, on the CPU, on one rank; nothing on the others. Collective.

    Tensors travel one after another, so that the other ranks need room for the largest one alone.
    """
    world, own = module.world, module.state_dict()
    facts = world.gathered({name: (tuple(value.shape), value.dtype) for name, value in own.items()})
    found: dict[str, torch.Tensor] = {}
    for name in module.names():
        holders = [holder for holder, of in enumerate(facts) if name in of]
        if not holders:
            continue
        whole = _whole(own[name]) if name in own else None  # collective among the ranks of a tensor's mesh
        if rank not in holders:
            shape, dtype = facts[holders[0]][name]
            whole = whole if world.rank == holders[0] else torch.empty(shape, dtype=dtype)
            assert whole is not None, "a holder has it"
            world.broadcast(whole, holders[0])
        if world.rank == rank:
            assert whole is not None, "it is here now"
            found[name] = whole
    return found


def _whole(value: Any) -> torch.Tensor:
    """A copy on the CPU, which later steps do not change."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().cpu().clone()
