"""Gradients of `accumulate()`: each rank's own stay apart in `.grad` until a backward outside of it adds them up.

```
   with accumulate():   backward    .grad = own gradient of micro-batches 0, 1     on every rank another one
                        backward    .grad + own
   backward                         all-reduce of (.grad + own), once
```
Until then `.grad` is no gradient of the model: clipping, an optimizer's step, and gradients that come from elsewhere
(a penalty on the parameters) are refused. All ranks refuse alike, also those whose parameters no other rank has.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from autopar.capture import torch_private_ranks
from autopar.errors import InputError
from autopar.runtime.ranks.one_message import on_all_ranks
from autopar.runtime.ranks.world import World


class ApartGradients:
    """What this rank's parameters have in `.grad` that other ranks' parts are still missing from."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.is_shared = False  # whether any ranks share a parameter and store all of it
        self._waiting = False  # the same on all ranks
        self.was_taken = False  # the call that runs has taken what waited
        self._hooks: dict[int, RemovableHandle] = {}  # by id of the parameter, while gradients wait
        self._given: dict[int, int] = {}  # by id of the parameter, the address of the gradient that autograd gets

    @property
    def waiting(self) -> bool:
        """Whether a backward outside of `accumulate()` has to follow."""
        return self._waiting

    def add(self, parameters: Mapping[int, nn.Parameter], local: Mapping[int, torch.Tensor]) -> None:
        """A backward inside `accumulate()` has collected its gradients, and is about to give autograd's engine `local`
        of them, by id of the parameter.

        Collective. Raises InputError on all ranks where `.grad` has gradients of all ranks already: sums of both cannot
        be separated.
        """
        if not self.is_shared:
            return
        if not self._waiting:
            mixed = any(p.grad is not None and bool(_local(p.grad).any()) for p in parameters.values())
            if any(theirs[0] for theirs in self._world.gathered_numbers([mixed])):
                raise on_all_ranks(
                    InputError(
                        "accumulate() begins while parameters have gradients of a backward outside of it: call "
                        "zero_grad() first, and have the last backward of a step, not the first, outside"
                    )
                )
            for p in parameters.values():
                p.grad = None
        self._begin(parameters)
        self._given = {key: gradient.data_ptr() for key, gradient in local.items() if key in parameters}

    def take(self, parameters: Mapping[int, nn.Parameter]) -> dict[int, torch.Tensor]:
        """What waits in `.grad`, by id of the parameter, which then has none: a backward outside adds it up."""
        self.was_taken = self._waiting
        if not self._waiting:
            return {}
        found = {key: _local(p.grad) for key, p in parameters.items() if p.grad is not None}
        for p in parameters.values():
            p.grad = None
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._waiting = False
        self._given = {}
        return found

    def put_back(self, parameters: Mapping[int, nn.Parameter], gradients: Mapping[int, torch.Tensor]) -> None:
        """After `take`: what was taken waits again, as DTensors by id of the parameter. Over all ranks it adds up to
        the same."""
        for key, p in parameters.items():
            p.grad = gradients.get(key)
        self._begin(parameters)

    def _begin(self, parameters: Mapping[int, nn.Parameter]) -> None:
        for key, p in parameters.items():
            if key not in self._hooks and p.requires_grad:
                self._hooks[key] = p.register_hook(OwnGradientCheck(self, key))
        self._waiting = True

    def refuse(self, what: str) -> None:
        """Raise InputError if gradients wait."""
        if self._waiting:
            raise incomplete(what)

    def check(self, key: int, gradient: torch.Tensor) -> None:
        """Raise InputError for a gradient of the parameter with this id that is not the pipeline's own."""
        if self._waiting and self._given.pop(key, None) != _local(gradient).data_ptr():
            raise InputError(
                "a parameter gets a gradient inside accumulate() that is not the pipeline's own, such as that of a "
                "penalty on parameters, or one that a hook has changed; it would count once for every rank that "
                "holds the parameter: leave accumulate() out"
            )


class OwnGradientCheck:
    """The hook of a parameter whose gradient waits."""

    def __init__(self, gradients: ApartGradients, key: int) -> None:
        self._gradients, self._key = gradients, key

    def __call__(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None:  # autograd also calls the hook without a gradient
            self._gradients.check(self._key, gradient)


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return torch_private_ranks.part_of(gradient) if isinstance(gradient, DTensor) else gradient


def incomplete(what: str) -> InputError:
    """The error for `what`, which needs complete gradients."""
    return InputError(
        f"{what} needs the gradients of all ranks, and those of accumulate() are still apart: have the last backward "
        "before it outside of accumulate()"
    )
