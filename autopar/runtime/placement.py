"""The model's tensors on the devices of a stage: whose memory a stage computes on, and what brings it up to date.

Where a device is that of the model's own tensor (CPU workers share one memory), a stage works on a view of it, or of
the slice that the device has; elsewhere on a copy that is refreshed when the tensor has changed. Whole gradients are
what the leaves' gradients add up to, each in its slice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from autopar.lower.sharded import Piece
from autopar.sharding.layouts import slices


@dataclass
class Leaf:
    """What one device has of a parameter, as the start of an autograd graph."""

    key: int  # id of the model's parameter
    tensor: nn.Parameter
    entries: tuple[slice, ...] | None  # that it has; None: all
    version: int  # of a parameter that lives elsewhere, when last copied

    @classmethod
    def of(cls, parameter: nn.Parameter, piece: Piece, device: torch.device) -> Leaf:
        entries = entries_of(piece, parameter)
        leaf = nn.Parameter(taken(parameter, entries).to(device), requires_grad=parameter.requires_grad)
        return cls(id(parameter), leaf, entries, parameter._version)

    def refresh(self, parameter: nn.Parameter) -> None:
        """After the parameter was changed, moved or frozen."""
        leaf = self.tensor
        if leaf.requires_grad != parameter.requires_grad:
            leaf.requires_grad_(parameter.requires_grad)
        current = taken(parameter, self.entries)
        if parameter.device == leaf.device:
            if leaf.data_ptr() != current.data_ptr():
                leaf.data = current
        elif self.version != parameter._version:
            leaf.data.copy_(current)
            self.version = parameter._version

    def take_gradient(self) -> torch.Tensor | None:
        gradient, self.tensor.grad = self.tensor.grad, None
        return gradient


@dataclass
class Buffer:
    """What one device has of a buffer."""

    name: str
    tensor: torch.Tensor
    entries: tuple[slice, ...] | None  # that it has; None: all
    written: bool  # by the stage
    own: bool  # a copy although the buffer is on this device: another one writes the buffer itself

    @classmethod
    def of(
        cls, name: str, tensor: torch.Tensor, piece: Piece, device: torch.device, *, written: bool, first: bool
    ) -> Buffer:
        """`first`: the part is the first of its stage."""
        entries, own = entries_of(piece, tensor), written and not (first and piece.first)
        return cls(name, taken(tensor, entries).to(device, copy=own), entries, written, own)

    def refresh(self, tensor: torch.Tensor) -> None:
        """After the model's buffer was changed or moved."""
        current = taken(tensor, self.entries)
        if self.own or tensor.device != self.tensor.device:
            self.tensor.copy_(current)
        elif self.tensor.data_ptr() != current.data_ptr():
            self.tensor.data = current

    def write_back(self, tensor: torch.Tensor) -> None:
        """To the model's buffer, after the stage has written into what is no view of it."""
        if self.written and not self.own and tensor.device != self.tensor.device:
            taken(tensor, self.entries).copy_(self.tensor)


def entries_of(piece: Piece, tensor: torch.Tensor) -> tuple[slice, ...] | None:
    """What a device has of a tensor; None for all of it."""
    if all(code < 0 for code in piece.layout):
        return None
    return slices(piece.layout, tensor.shape, piece.mesh, piece.place)


def taken(tensor: torch.Tensor, entries: tuple[slice, ...] | None) -> torch.Tensor:
    """A view without history."""
    return tensor.detach() if entries is None else tensor.detach()[entries]


def summed(leaves: Iterable[tuple[Leaf, nn.Parameter]]) -> dict[int, torch.Tensor]:
    """Whole gradients by id of the model's parameter, summed over the leaves in their order; leaves are reset."""
    total: dict[int, torch.Tensor] = {}
    for leaf, parameter in leaves:
        key, gradient = leaf.key, leaf.take_gradient()
        if gradient is None:
            continue
        if leaf.entries is not None:
            if key not in total:
                total[key] = torch.zeros_like(parameter, device=gradient.device)
            total[key][leaf.entries].add_(gradient.to(total[key].device))
        elif key not in total:
            total[key] = gradient
        elif gradient.is_sparse or total[key].is_sparse:
            total[key] = total[key] + gradient.to(total[key].device)
        else:
            total[key].add_(gradient.to(total[key].device))
    return total
