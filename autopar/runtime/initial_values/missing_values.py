"""Tensors of a model that have no values: found, and replaced by hollow ones, which take no memory.

A hollow tensor has its shape, dtype and device, and one number in memory. Captures and plans need no more.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from autopar.capture.torch_private import is_fake
from autopar.errors import InputError


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


def make_hollow(tensor: torch.Tensor) -> None:
    """Move a tensor from the meta device to the CPU, without values. It stays the same object, for optimizers."""
    new = hollow(tensor.shape, tensor.dtype)
    torch.utils.swap_tensors(
        tensor, nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
    )


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
