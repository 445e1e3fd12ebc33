"""The gradients of what a loss trains besides the model, on all ranks: each has the tensor and an optimizer for it.

```
   rank 0   stage 0                   tau: nothing          \
   rank 1   stage 1, loss reads tau   micro-batches 0, 2     +  summed: every rank adds the plain model's gradient
   rank 2   stage 1, loss reads tau   micro-batches 1, 3    /
```
A rank that computes no loss knows which tensors are meant by their names in the loss function (loss_tensors.py). Where
ranks would go on with different gradients, all of them refuse the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from autopar.analysis.example import LossFunction
from autopar.analysis.loss_functions import title_of
from autopar.analysis.loss_tensors import trained_tensors
from autopar.capture import torch_private
from autopar.errors import InputError
from autopar.runtime.ranks.executable import RankExecutable
from autopar.runtime.ranks.one_message import on_all_ranks
from autopar.runtime.ranks.parameters.own import RankParameters
from autopar.runtime.step.loss_leaves import LossLeaves

_INSTEAD = (
    "give every rank the same tensors, and the loss function the tensor itself (in its closure, as an attribute, or as "
    "the parameter of a module that it refers to); pass what is computed from others as the target; or compute the "
    "loss from the outputs of the pipelined module, and call backward()"
)


class _Tensor(NamedTuple):
    """A tensor that a loss may train, as other ranks know it."""

    shape: tuple[int, ...]
    dtype: str
    device: str  # its type
    hooked: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Tensor:
        hooked = torch_private.have_gradient_hooks([tensor])
        return cls(tuple(tensor.shape), str(tensor.dtype), tensor.device.type, hooked)

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype} on {self.device}"


class _Facts(NamedTuple):
    """What one rank knows."""

    known: dict[str, _Tensor]  # by name in the loss function
    read: dict[str, bool]  # by name, whether the loss has given it a gradient here; of ranks that computed a loss
    problems: list[str]


def share_loss_gradients(
    leaves: LossLeaves, loss: LossFunction, executable: RankExecutable, parameters: RankParameters, n: int
) -> None:
    """After all backwards, add the sums over ranks to `.grad` of what the loss has read. Collective.

    `n`: micro-batches. Raises InputError on all ranks where that is not possible; no `.grad` has changed then.
    """
    world = executable.world
    own = trained_tensors(loss, parameters.has)
    names = {id(tensor): name for name, tensor in own.items()}
    counts = any(executable.owner(microbatch) == world.rank for microbatch in range(n))
    gradients: dict[str, torch.Tensor | None] = {}
    of_model: list[tuple[torch.Tensor, torch.Tensor]] = []
    problems: list[str] = []
    for leaf, gradient in leaves.take():
        if parameters.has(leaf):
            if id(leaf) not in parameters.parameters or executable.sums.is_shared(id(leaf)):
                problems.append(
                    f"a parameter of the model, of shape {tuple(leaf.shape)}, that several ranks have a copy or a part "
                    "of, or that is no longer in use; have the model return what the loss needs of it"
                )
            elif gradient is not None:
                of_model.append((leaf, gradient))
        elif id(leaf) not in names:
            problems.append(
                f"a tensor of shape {tuple(leaf.shape)} and dtype {leaf.dtype} that requires a gradient, which other "
                f"ranks cannot find by its name; {_INSTEAD}"
            )
        elif gradient is not None and gradient.layout != torch.strided:
            problems.append(f"'{names[id(leaf)]}', whose gradient is sparse; use sparse=False")
        else:
            gradients[names[id(leaf)]] = gradient if counts else None
    read = {name: gradient is not None for name, gradient in gradients.items()}
    found = world.gathered(_Facts({name: _Tensor.of(x) for name, x in own.items()}, read, problems))
    _check(loss, found)
    for leaf, gradient in of_model:  # this rank alone has it
        _add(leaf, gradient)
    for name in sorted({name for theirs in found for name, has in theirs.read.items() if has}):
        mine, tensor = gradients.get(name), own[name]
        total = world.all_reduced(torch.zeros_like(tensor) if mine is None else mine.contiguous())
        _add(tensor, total.detach())


def _check(loss: LossFunction, found: Sequence[_Facts]) -> None:
    """Raise InputError, on all ranks, unless every rank can have the gradient of everything that the loss has read."""

    def refuse(what: str) -> None:
        raise on_all_ranks(InputError(f"{title_of(loss)} reads {what}"))

    for theirs in found:
        if theirs.problems:
            refuse(theirs.problems[0])
    for name in sorted({name for theirs in found for name in theirs.read}):
        first = found[0].known.get(name)
        for rank, theirs in enumerate(found):
            one = theirs.known.get(name)
            if one is None or first is None or one != first:
                refuse(
                    f"'{name}', which requires a gradient, and ranks differ in it: {first or 'missing'} on rank 0, "
                    f"{one or 'missing'} on rank {rank if first is not None else 0}; {_INSTEAD}"
                )
            elif one.hooked:
                refuse(
                    f"'{name}', and hooks run on its gradient: they would see a part of it on every rank; change the "
                    "gradient after train_step"
                )


def _add(leaf: torch.Tensor, gradient: torch.Tensor) -> None:
    with torch.no_grad():
        if leaf.grad is None:
            leaf.grad = gradient
        else:
            leaf.grad.add_(gradient)
