"""What a loss function returns must be a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.analysis.loss_functions import title_of
from autopar.capture import torch_private
from autopar.errors import AutoparError, InputError

Loss = Callable[[Any, Any], Any]


def computed_loss(function: Loss, output: Any, target: Any, loss_fn: Loss | None = None) -> torch.Tensor:
    """Call the loss. Errors that it raises get a note. Raises InputError if no backward can start from its result.

    `loss_fn`: the user's function, for messages, if `function` wraps it.
    """
    try:
        loss = function(output, target)
    except Exception as error:
        if not isinstance(error, AutoparError):
            got = ", ".join(f"{name} {_described(value)}" for name, value in (("output", output), ("target", target)))
            note = f"{title_of(loss_fn or function)} raised this, for {got}"
            if note not in getattr(error, "__notes__", ()):  # a loss may raise the same object again
                error.add_note(note)
        raise
    return checked_loss(loss, loss_fn or function, output)


def _described(value: Any) -> str:
    """Shape and dtype of a tensor; else its class."""
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__


def checked_loss(loss: Any, loss_fn: Loss, output: Any) -> torch.Tensor:
    """`loss`, which `loss_fn` returned for `output`, if a backward can start from it. Raises InputError."""
    if type(loss) is torch.Tensor and loss.dim() == 0 and not loss.is_complex():  # most losses: not fake, one element
        return loss
    if not isinstance(loss, torch.Tensor):
        hint = "; return the loss alone" if isinstance(loss, (tuple, list, dict)) else ""
        what = f"a {type(loss).__name__}" + (f" of {len(loss)} values" if hint else "")
        raise InputError(f"{title_of(loss_fn)} must return one tensor with one element, got {what}{hint}")
    if torch_private.is_fake(loss) and not any(map(torch_private.is_fake, torch_private.tree_leaves(output))):
        raise InputError(
            f"{title_of(loss_fn)} returned a tensor without values: it keeps a tensor of its study in a place that "
            "autopar did not find when it studied the loss; set such tensors up before the first train_step"
        )
    if loss.numel() != 1:
        raise InputError(
            f"{title_of(loss_fn)} must return one tensor with one element, got shape {tuple(loss.shape)}; reduce it"
        )
    if loss.is_complex():
        raise InputError(
            f"{title_of(loss_fn)} must return a real number, got {loss.dtype}; return its real part or abs()"
        )
    return loss


def check_trains(has_gradient: bool, loss_fn: Loss) -> None:
    """Raise InputError if no backward can start from the loss of a batch."""
    if not has_gradient:
        raise InputError(
            f"{title_of(loss_fn)} returned a loss without a gradient, so that a step would train nothing: compute the "
            "loss from the output with torch operators, without detach(), item() or no_grad(), and let a parameter of "
            "the model require a gradient"
        )
