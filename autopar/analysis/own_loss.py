"""The loss that a model returns itself, as models of transformers do when they get labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autopar.analysis.batch_tail import Tail, returned_nodes
from autopar.capture import torch_private
from autopar.capture.program import Program
from autopar.errors import InputError

_GIVE = "give the model what it computes a loss from (such as labels=), or give train_step target= and loss_fn="


def own_loss(output: Any, target: None = None) -> torch.Tensor:
    """The loss in a model's `output`: a loss function that needs no target.

    That is the entry `loss` of a mapping, the attribute `loss`, the first entry of a tuple or list, or the output
    itself. Raises InputError unless that is a floating-point tensor with one element.
    """
    if isinstance(output, Mapping):
        where, loss = "output['loss']", output.get("loss")
    elif hasattr(output, "loss"):
        where, loss = "output.loss", output.loss
    elif isinstance(output, (tuple, list)):
        where, loss = "output[0]", output[0] if output else None
    else:
        where, loss = "the output", output
    if loss is None:
        raise InputError(f"the model returned no loss ({type(output).__name__} without {where}): {_GIVE}")
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        is_tensor = isinstance(loss, torch.Tensor)
        got = f"{loss.dtype} with {loss.dim()} dimensions" if is_tensor else type(loss).__name__
        raise InputError(f"the model returned no loss ({where} is {got}, not one floating-point number): {_GIVE}")
    return loss


def check_own_loss(program: Program, tail: Tail | None) -> None:
    """Raise InputError if the captured model returns no loss, before anything is planned for it."""
    flat = [_example(x) for x in returned_nodes(program, tail)]
    if all(x is not _Unknown for x in flat):
        own_loss(torch_private.tree_unflatten(flat, program.out_spec))


def returns_own_loss(program: Program, tail: Tail | None) -> bool:
    """Whether the captured model returns a loss."""
    try:
        check_own_loss(program, tail)
    except InputError:
        return False
    return True


class _Unknown:
    """An output whose size the capture does not know."""


def _example(output: Any) -> Any:
    return output.meta.get("val", _Unknown) if isinstance(output, fx.Node) else output
