"""A loss with the model's own parameters in it, such as a sum of their squares: refused, with what to do instead.

```
   loss of the outputs      a tensor                                             \\
                                                                                  torch cannot go back through their sum
   0.1 * sum of squares     a DTensor, of the parameters that this rank has      /
```
The backward of such a term by itself gives every parameter its gradient, on whatever ranks it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from autopar.analysis.example import LossFunction
from autopar.analysis.loss_functions import title_of
from autopar.errors import InputError
from autopar.runtime.ranks.parameters.own import RankParameters

_MIXED = "got mixed torch.Tensor and DTensor"  # in torch's message, which is a plain RuntimeError


def refuse_dtensors(values: Sequence[torch.Tensor | None], loss_fn: LossFunction | None = None) -> None:
    """Raise InputError for DTensors among losses of `loss_fn`, or (without it) among gradients of outputs."""
    if any(isinstance(value, DTensor) for value in values):
        raise _error("the caller's loss" if loss_fn is None else title_of(loss_fn))


@contextmanager
def refused_in(loss_fn: LossFunction, parameters: RankParameters) -> Iterator[None]:
    """Inside, `loss_fn` is called. What torch raises because it reads parameters of the model becomes an InputError."""
    try:
        yield
    except (AttributeError, RuntimeError) as error:
        lacks = isinstance(error, AttributeError) and parameters.is_elsewhere(error.obj, error.name)
        if lacks or (isinstance(error, RuntimeError) and _MIXED in str(error)):
            raise _error(title_of(loss_fn)) from error
        raise


def _error(which: str) -> InputError:
    return InputError(
        f"{which} reads parameters of the model: on ranks these are DTensors, each rank has only those of its "
        "stages, and no sum with a loss of outputs can be made of them. Go back from that part of the loss by itself, "
        "before or after the call, which adds the same gradients: "
        "(0.1 * sum(p.square().sum() for p in pm.parameters())).backward(); or use weight_decay of the optimizer"
    )
