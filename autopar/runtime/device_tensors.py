"""What one device holds of the model's parameters and buffers, and what keeps it up to date.

A stage on the device of the model's own tensor computes on a view of that tensor, or of the device's slice of it (CPU
workers share one memory). On another device it computes on a copy, which is refreshed after the model's tensor changes.
The gradient of a whole parameter is the sum of its leaves' gradients, each added to its slice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from autopar.lower.sharded import Piece


@dataclass
class ParameterLeaf:
    """What one device has of a parameter, as a leaf of a stage's autograd graph."""

    key: int  # id of the model's parameter
    tensor: nn.Parameter
    piece: Piece
    version: int  # of the model's parameter when it was last copied; unused where the leaf is a view

    @classmethod
    def of(cls, parameter: nn.Parameter, piece: Piece, device: torch.device) -> ParameterLeaf:
        leaf = nn.Parameter(piece.taken(parameter).to(device), requires_grad=parameter.requires_grad)
        return cls(id(parameter), leaf, piece, parameter._version)

    def refresh(self, parameter: nn.Parameter) -> None:
        """Follow the model's parameter, which may have been changed, moved or frozen."""
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
        """The gradient, which the leaf then no longer has."""
        gradient, self.tensor.grad = self.tensor.grad, None
        return gradient


@dataclass
class DeviceBuffer:
    """What one device has of a buffer."""

    piece: Piece
    tensor: torch.Tensor
    written: bool  # the stage writes it
    private: bool  # a copy on the buffer's own device, because another replica writes the model's buffer

    @classmethod
    def of(
        cls, tensor: torch.Tensor, piece: Piece, device: torch.device, *, written: bool, first_replica: bool
    ) -> DeviceBuffer:
        """The first device of a stage's first replica writes the model's buffer itself; all others write copies."""
        private = written and not (first_replica and piece.first)
        return cls(piece, piece.taken(tensor).to(device, copy=private), written, private)

    def refresh(self, tensor: torch.Tensor) -> None:
        """Follow the model's buffer, which may have been changed or moved."""
        current = self.piece.taken(tensor)
        if self.private or tensor.device != self.tensor.device:
            self.tensor.copy_(current)
        elif self.tensor.data_ptr() != current.data_ptr():
            self.tensor.data = current

    def write_back(self, tensor: torch.Tensor) -> None:
        """Copy what the stage wrote into the model's buffer, unless the stage wrote into a view of it."""
        if self.written and not self.private and tensor.device != self.tensor.device:
            self.piece.taken(tensor).copy_(self.tensor)


def sum_gradients(leaves: Iterable[tuple[ParameterLeaf, nn.Parameter]]) -> dict[int, torch.Tensor]:
    """The gradients of whole parameters, by id of the model's parameter.

    Takes the leaves' gradients and adds them in the order of `leaves`, so that a sum has the same bits every time.
    """
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
