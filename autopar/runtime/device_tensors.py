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


@dataclass
class Leaf:
    """What one device has of a parameter, as the start of an autograd graph."""

    key: int  # id of the model's parameter
    tensor: nn.Parameter
    piece: Piece
    version: int  # of a parameter that lives elsewhere, when last copied

    @classmethod
    def of(cls, parameter: nn.Parameter, piece: Piece, device: torch.device) -> Leaf:
        leaf = nn.Parameter(piece.taken(parameter).to(device), requires_grad=parameter.requires_grad)
        return cls(id(parameter), leaf, piece, parameter._version)

    def refresh(self, parameter: nn.Parameter) -> None:
        """After the parameter was changed, moved or frozen."""
        leaf = self.tensor
        if leaf.requires_grad != parameter.requires_grad:
            leaf.requires_grad_(parameter.requires_grad)
        current = self.piece.taken(parameter)
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

    piece: Piece
    tensor: torch.Tensor
    written: bool  # by the stage
    own: bool  # a copy although the buffer is on this device: another one writes the buffer itself

    @classmethod
    def of(cls, tensor: torch.Tensor, piece: Piece, device: torch.device, *, written: bool, first: bool) -> Buffer:
        """`first`: the part is the first of its stage."""
        own = written and not (first and piece.first)
        return cls(piece, piece.taken(tensor).to(device, copy=own), written, own)

    def refresh(self, tensor: torch.Tensor) -> None:
        """After the model's buffer was changed or moved."""
        current = self.piece.taken(tensor)
        if self.own or tensor.device != self.tensor.device:
            self.tensor.copy_(current)
        elif self.tensor.data_ptr() != current.data_ptr():
            self.tensor.data = current

    def write_back(self, tensor: torch.Tensor) -> None:
        """To the model's buffer, after the stage has written into what is no view of it."""
        if self.written and not self.own and tensor.device != self.tensor.device:
            self.piece.taken(tensor).copy_(self.tensor)


def summed(leaves: Iterable[tuple[Leaf, nn.Parameter]]) -> dict[int, torch.Tensor]:
    """Whole gradients by id of the model's parameter, summed over the leaves in their order; leaves are reset."""
    total: dict[int, torch.Tensor] = {}
    for leaf, parameter in leaves:
        key, gradient = leaf.key, leaf.take_gradient()
        if gradient is None:
            continue
        if (entries := leaf.piece.entries(parameter)) is not None:
            if key not in total:
                total[key] = torch.zeros_like(parameter, device=gradient.device)
            total[key][entries].add_(gradient.to(total[key].device))
        elif key not in total:
            total[key] = gradient
        elif gradient.is_sparse or total[key].is_sparse:
            total[key] = total[key] + gradient.to(total[key].device)
        else:
            total[key].add_(gradient.to(total[key].device))
    return total
