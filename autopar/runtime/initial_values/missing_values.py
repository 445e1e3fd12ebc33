"""Tensors of a model that have no values: found, and replaced by hollow ones, which take no memory.

A hollow tensor has its shape, dtype and device, and one number in memory. Captures and plans need no more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.capture import torch_private
from autopar.capture.torch_private import is_fake
from autopar.errors import InputError

_REPLACEMENT = "_autopar_replacement"  # attribute of a parameter on the meta device: what took its place


def tensors_without_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers on the meta device, by their first name. Raises InputError for fake ones."""
    found = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_fake(tensor):
            raise InputError(
                f"'{name}' is a fake tensor; build the model under torch.device('meta') instead of FakeTensorMode"
            )
        if tensor.is_meta:
            found[name] = tensor
    return found


def make_hollow(model: nn.Module, lacking: Iterable[torch.Tensor]) -> None:
    """Put tensors on the CPU, without values, in the place of the model's tensors on the meta device.

    Parameters keep their hooks and attributes. An optimizer that was made from those before gets the new ones when it
    first meets this model (`follow`), at the latest at its first step. Buffers get memory: a capture may write them,
    which a hollow one does not allow.
    """
    new = {id(tensor): _hollow_like(tensor) for tensor in lacking}
    if not new:
        return
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in list(table.items()):
                if tensor is not None and id(tensor) in new:
                    setattr(module, name, new[id(tensor)])  # recurrent layers keep lists of their weights up to date
                    setattr(tensor, _REPLACEMENT, new[id(tensor)])
    _follow_at_steps()


def _hollow_like(tensor: torch.Tensor) -> torch.Tensor:
    new = hollow(tensor.shape, tensor.dtype)
    if isinstance(tensor, nn.Parameter):
        parameter = nn.Parameter(new, tensor.requires_grad)
        torch_private.keep_hooks_and_attributes(tensor, parameter)
        return parameter
    return new.clone(memory_format=torch.contiguous_format)


def follow(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer that was made from parameters on the meta device those that took their place."""
    for group in optimizer.param_groups:
        if any(hasattr(p, _REPLACEMENT) for p in group["params"]):
            group["params"][:] = [getattr(p, _REPLACEMENT, p) for p in group["params"]]


@cache
def _follow_at_steps() -> None:
    """Once a process. A parameter on the meta device never has a gradient, so its optimizer would do nothing."""
    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: follow(optimizer))


def hollow(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """What reads it computes NaN, or with zeros."""
    fill = math.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), fill, dtype=dtype).expand(shape)


def is_hollow(tensor: torch.Tensor) -> bool:
    """Whether a tensor has less memory than values."""
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() < tensor.nbytes


def give_memory(tensor: torch.Tensor) -> None:
    """Room for the values of a hollow tensor."""
    tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype)
