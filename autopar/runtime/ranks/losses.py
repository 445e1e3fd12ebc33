"""The losses of micro-batches, from the ranks that computed them to all ranks, as 64-bit numbers, which hold any loss
exactly.

```
   last stage   F0 B0 F1 B1 F2 |start B2 ........ |finish       over gloo the losses travel while backwards go on
   others       F0 F1 F2 |start .. B0 B1 B2 ..... |finish
```
Over NCCL they go from GPU to GPU after the last action, and no host waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.ranks.world import World
from autopar.runtime.stages.stage_replica import StageReplica
from autopar.runtime.step.call import CallTensors
from autopar.runtime.step.execution import Act

_DTYPES = tuple(sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str))  # alike on all ranks


class SharedLosses:
    """Of one training step on one rank. Collective: all ranks start and finish."""

    def __init__(self, world: World, tensors: CallTensors, owner: Callable[[int], int], n_forwards: int) -> None:
        """`owner(micro-batch)`: the rank that computes its loss. `n_forwards`: actions of this rank."""
        self._world, self._tensors, self._owner = world, tensors, owner
        self._left = n_forwards
        self._numbers = torch.empty(0)  # losses, their dtypes, and facts about them
        self._pending: Any = None
        self.has_leaves = False  # once finished: whether the loss has read others that need a gradient, on any rank

    def begin(self) -> None:
        """The actions begin. With TORCH_DISTRIBUTED_DEBUG=DETAIL a collective starts only once all its ranks have come
        to it, and here that could be the rank from which another one needs a message."""
        early = not self._world.over_nccl and dist.get_debug_level() != dist.DebugLevel.DETAIL
        if not early:
            self._left = -1
        elif not self._left:
            self._start()

    def following(self, forward: Act) -> Act:
        """`forward`, and the start after the last one."""

        def act(replica: StageReplica, microbatch: int) -> None:
            forward(replica, microbatch)
            self._left -= 1
            if not self._left:
                self._start()

        return act

    def finish(self) -> None:
        """After all actions: every rank has all losses."""
        tensors, world, n = self._tensors, self._world, len(self._tensors.losses)
        if self._pending is not None:
            self._pending.wait()
            losses, facts = self._numbers.split([n, n + 2])
        elif world.over_nccl:
            # First what hosts exchange: a rank that has ended is noticed there, and not in waiting for a GPU.
            losses, facts = self._own(world.carrier)
            facts = world.all_reduced(facts)
            losses = world.all_reduced(losses)
        else:
            losses, facts = world.all_reduced(torch.cat(self._own())).split([n, n + 2])
        *dtypes, has_gradient, n_leaves = facts.tolist()
        tensors.losses = list(losses.to(world.device, _DTYPES[int(dtypes[0])]).unbind())
        tensors.has_gradient = has_gradient > 0
        self.has_leaves = n_leaves > 0

    def _start(self) -> None:
        self._numbers = torch.cat(self._own())
        self._pending = dist.all_reduce(self._numbers, group=self._world.control, async_op=True)

    def _own(self, carrier: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's losses [n], on `carrier`; by micro-batch their dtypes, then whether one has a
        gradient, and how many leaves of its own the loss has read [n + 2]."""
        tensors, n = self._tensors, len(self._tensors.losses)
        facts = torch.zeros(n + 2, dtype=torch.float64)
        losses = torch.zeros(n, dtype=torch.float64, device=carrier)
        for i, loss in enumerate(tensors.losses):
            if loss is not None and self._owner(i) == self._world.rank:
                losses[i], facts[i] = loss.double(), _DTYPES.index(loss.dtype)
                facts[n] = float(tensors.has_gradient)
        facts[n + 1] = tensors.loss_leaves.count if tensors.loss_leaves is not None else 0
        return losses, facts
