"""The plain model on one device. It runs where the plan has one stage, on one device, and one micro-batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.analysis.checked_loss import check_trains, computed_loss
from autopar.analysis.example import LossFunction
from autopar.capture import torch_private
from autopar.capture.thread_state import go_back
from autopar.errors import AutoparError
from autopar.runtime.step_recorder import StepRecorder
from autopar.schedule.clock import Action, Phase
from cost_models.hardware.devices import Device


def plain_call(model: nn.Module, device: Device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the model on `device` returns. The hooks of the root do not run here: the PipelinedModule has run them.

    Raises AutoparError if the model has been moved elsewhere.
    """
    if device.torch_device.type != "cpu":
        args, kwargs = _moved((args, kwargs), device)
    try:
        return model.forward(*args, **kwargs)
    except RuntimeError as error:  # looked into only now, because every check before would delay small models
        _check_place(model, device, error)
        raise


def _check_place(model: nn.Module, device: Device, error: RuntimeError) -> None:
    """Raise AutoparError, caused by `error`, if a tensor of the model is not on its plan's device."""
    place = device.torch_device
    named = [*model.named_parameters(), *model.named_buffers()]
    moved = next(((name, tensor.device) for name, tensor in named if tensor.device != place), None)
    if moved is not None:
        name, where = moved
        raise AutoparError(
            f"the plan runs the model on {place}, but {name} has been moved to {where}; move the model back with "
            f"pm.to('{place}'), or call autopar.parallelize for the devices that it shall run on"
        ) from error


def plain_step(
    model: nn.Module,
    device: Device,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: LossFunction,
    target: Any,
    recorder: StepRecorder | None = None,
    *,
    return_outputs: bool = False,
) -> tuple[torch.Tensor, Any]:
    """A training step: accumulates gradients in `.grad`. Returns the loss and, with `return_outputs`, the outputs, both
    detached. `recorder`: times its passes."""
    if device.torch_device.type != "cpu":
        target = _moved(target, device)
    if recorder is None:  # every function called here would count in the steps of small models
        output = plain_call(model, device, args, kwargs)
        loss = computed_loss(loss_fn, output, target)
        check_trains(loss.requires_grad, loss_fn)
        go_back(loss, device.torch_device)
    else:
        with recorder.action(Action(Phase.FORWARD, 0, 0), device):
            output = plain_call(model, device, args, kwargs)
            loss = computed_loss(recorder.timed_loss(loss_fn), output, target, loss_fn)
            check_trains(loss.requires_grad, loss_fn)
        with recorder.action(Action(Phase.BACKWARD, 0, 0), device):
            go_back(loss, device.torch_device)
    return loss.detach(), detached(output) if return_outputs else None


def detached(tree: Any) -> Any:
    return torch_private.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, tree)


def _moved(tree: Any, device: Device) -> Any:
    place = device.torch_device
    return torch_private.tree_map(lambda x: x.to(place) if isinstance(x, torch.Tensor) else x, tree)
