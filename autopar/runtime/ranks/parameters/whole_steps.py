"""Whether ranks make the same steps where one optimizer trains the whole model, also its stages that share nothing.

```
   made before the placing, SGD(model.parameters())     rank 0   a step      rank 1   no step           refused
   made after it, SGD(pm.parameters())                  rank 0   lr=0.1      rank 1   lr=0.2            a warning
                                                        rank 0   a step      rank 1   no optimizer      as it is meant
```
Stages that share no parameter cannot drift apart, and scripts may train them in different ways. An optimizer that was
made with parameters from before the placing is one optimizer on all ranks: if it is the only one, the ranks must make
the same steps with the same learning rates. One that was made afterwards looks like one optimizer where it has all
parameters that the rank trains. But a script can mean to have one for each stage, and nothing shows which: ranks warn.
Optimizers with some of the parameters are not compared, nor other options: some (Prodigy) change these by themselves,
each rank by its own gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

import torch

from autopar.errors import InputError, warn
from autopar.runtime.ranks.one_message import on_all_ranks
from autopar.runtime.ranks.parameters.optimizers import all_optimizers
from autopar.runtime.ranks.parameters.steps import EVERYWHERE, GROUPS, Step, checksum, difference, options_of
from autopar.runtime.ranks.world import World

_NOT_COMPARED = 0  # in the place of a checksum
_NO_STEP = checksum([])


class WholeSteps:
    """Of one model on one rank."""

    def __init__(self, world: World, own: Sequence[torch.Tensor]) -> None:
        """`own`: the parameters that this rank's stages read."""
        self._world, self._own = world, {id(p): p for p in own}
        self._before: WeakSet[torch.optim.Optimizer] = WeakSet()  # made with parameters from before the placing
        self._steps: list[Step] = []  # since the last call
        self._in_parts = False  # the last step was that of an optimizer with some of this rank's parameters
        # The same on all ranks, of optimizers that were made after the placing:
        self._compares_later = True  # until ranks have warned
        self._compares_rates = True  # until one has several rates, which may be those of its layers
        self._without: set[int] = set()  # ranks that had none, where others made steps

    def add(self, own: Sequence[torch.Tensor]) -> None:
        """Also count these parameters as parameters that this rank's stages read."""
        self._own |= {id(p): p for p in own}

    def is_made_before(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer was made with parameters from before the placing, as on all ranks."""
        self._before.add(optimizer)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has made a step."""
        kind, groups = type(optimizer).__name__, optimizer.param_groups
        if optimizer in self._before:
            for place, group in enumerate(groups):
                name = "lr" if len(groups) == 1 else f"lr of group {place}"
                rate = tuple((name, rate) for _, rate in options_of(["lr"], group))
                self._steps.append(Step(kind, ((GROUPS, str(len(groups))), *rate)))
        elif not self._before and self._compares_later and self._has_some(optimizer):
            self._in_parts = not self._has_all(optimizer)
            if not self._in_parts:
                rates = dict.fromkeys(options_of(["lr"], group) for group in groups if group["params"])
                is_one = self._compares_rates and len(rates) == 1
                self._steps.append(Step(kind, next(iter(rates)) if is_one else ()))

    def number(self) -> int:
        """Of this rank's steps since the last call, for `agree`."""
        if self._before:
            is_compared = len(self._before) == 1 and any(map(self._has_some, self._before))
        else:
            is_compared = self._compares_later and not self._in_parts and bool(self._trained())
        return checksum(sorted(self._steps)) if is_compared else _NOT_COMPARED

    def agree(self, numbers: Sequence[int]) -> None:
        """Raise InputError on all ranks where one optimizer makes other steps on some, or warn on rank 0 where it may
        be one. `numbers`: by rank. Collective where they differ."""
        self._without -= {rank for rank, number in enumerate(numbers) if number not in (_NOT_COMPARED, _NO_STEP)}
        compared = [
            rank
            for rank, number in enumerate(numbers)
            if number != _NOT_COMPARED and not (number == _NO_STEP and rank in self._without)
        ]
        if len({numbers[rank] for rank in compared}) > 1:
            self._refuse_or_warn(compared)
        self._steps.clear()

    def _refuse_or_warn(self, ranks: Sequence[int]) -> None:
        has_one = bool(self._steps) or any(map(self._has_all, all_optimizers()))
        found = self._world.gathered((bool(self._before), has_one, self._steps))
        steps: list[list[Step]] = [theirs for _, _, theirs in found]
        if all(found[rank][0] for rank in ranks):
            raise on_all_ranks(
                InputError(f"ranks differ in the optimizer's steps: {difference(steps, ranks)}; {EVERYWHERE}")
            )
        self._without.update(rank for rank in ranks if not found[rank][1])
        ranks = [rank for rank in ranks if rank not in self._without]
        if any(not step.options for rank in ranks for step in steps[rank]):
            self._compares_rates = False
            steps = [[Step(step.kind, ()) for step in theirs] for theirs in steps]
        if all(sorted(steps[rank]) == sorted(steps[ranks[0]]) for rank in ranks):
            return
        self._compares_later = False
        if self._world.rank == 0:
            warn(
                f"ranks differ in the steps of an optimizer that has all of a rank's parameters: "
                f"{difference(steps, ranks)}. If it is to train the whole model, {EVERYWHERE}. To train stages in "
                "different ways is right, too, and this is not said again: optimizers made before the first call show "
                "which is meant, and are compared with every call"
            )

    def _trained(self) -> set[int]:
        return {key for key, p in self._own.items() if p.requires_grad}

    def _has_some(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(id(p) in self._own for group in optimizer.param_groups for p in group["params"])

    def _has_all(self, optimizer: torch.optim.Optimizer) -> bool:
        trained = self._trained()
        return bool(trained) and trained <= {id(p) for group in optimizer.param_groups for p in group["params"]}
