"""The plain model on one device: what runs where a plan has one stage on one device and keeps the batch whole."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from autopar.capture import torch_private
from autopar.runtime.passes import LossFunction
from autopar.runtime.step_recorder import StepRecorder
from autopar.schedule.clock import Action, Phase
from cost_models.hardware.devices import Device


def plain_call(model: nn.Module, device: Device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the model on `device` returns. Without the hooks of the root: who calls has run them."""
    args, kwargs = _moved((args, kwargs), device)
    return model.forward(*args, **kwargs)


def plain_step(
    model: nn.Module,
    device: Device,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: LossFunction,
    target: Any,
    notes: StepRecorder | None = None,
) -> torch.Tensor:
    """A training step: the detached loss; gradients are accumulated in `.grad`. `notes`: of its two passes."""
    with _noted(notes, Phase.FORWARD, device):
        output = plain_call(model, device, args, kwargs)
        loss = (loss_fn if notes is None else notes.loss(loss_fn))(output, _moved(target, device))
    with _noted(notes, Phase.BACKWARD, device):
        loss.backward()
    return loss.detach()


def _noted(notes: StepRecorder | None, phase: Phase, device: Device) -> AbstractContextManager[None]:
    return nullcontext() if notes is None else notes.action(Action(phase, 0, 0), device)


def _moved(tree: Any, device: Device) -> Any:
    place = device.torch_device
    if place.type == "cpu":
        return tree
    return torch_private.tree_map(lambda x: x.to(place) if isinstance(x, torch.Tensor) else x, tree)
