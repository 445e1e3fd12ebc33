"""What one device holds of the model's parameters and buffers, and what keeps it up to date.

A stage on the device of the model's own tensor computes on a view of that tensor, or of the device's slice of it (CPU
workers share one memory). On another device it computes on a copy. Copies of parameters that are trained are made anew
for every call: their version does not tell of fused optimizers, nor of writes through `.data`. Those of frozen
parameters follow version and address.

The gradient of a whole parameter is the sum of its leaves' gradients, each added to its slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.lower.sharded import Piece


@dataclass
class ParameterLeaf:
    """What one device has of a parameter, as a leaf of a stage's autograd graph."""

    key: int  # id of the model's parameter
    tensor: nn.Parameter
    piece: Piece
    copied: tuple[int, int]  # version and address of the model's parameter then; unused where the leaf is a view

    @classmethod
    def of(cls, parameter: nn.Parameter, piece: Piece, device: torch.device) -> ParameterLeaf:
        leaf = nn.Parameter(piece.taken(parameter).to(device), requires_grad=parameter.requires_grad)
        return cls(id(parameter), leaf, piece, _state(parameter))

    def refresh(self, parameter: nn.Parameter) -> None:
        """Follow the model's parameter, which may have been changed, moved or frozen."""
        leaf = self.tensor
        if leaf.requires_grad != parameter.requires_grad:
            leaf.requires_grad_(parameter.requires_grad)
        here = leaf.device == parameter.device
        if here and self.piece.whole and _place(leaf) == _place(parameter):
            return  # the usual case, without making a view of the parameter
        current = self.piece.taken(parameter)
        if here:
            if _place(leaf) != _place(current):
                leaf.data = current
            return
        if parameter.requires_grad or self.copied != _state(parameter):
            leaf.data.copy_(current)
            self.copied = _state(parameter)

    def take_gradient(self) -> torch.Tensor | None:
        """The gradient, which the leaf then no longer has."""
        gradient, self.tensor.grad = self.tensor.grad, None
        return gradient


def separate_gradients(
    leaves: Iterable[ParameterLeaf],
    others: Iterable[torch.Tensor | None],
    storages: Iterable[torch.UntypedStorage] = (),
) -> None:
    """Copy gradients of leaves that share memory with another leaf's gradient, one of `others`, or `storages`.

    Autograd lets them share it where a gradient reaches several tensors through views alone, as for
    `a.view(n) + b.view(n)`. It adds the next micro-batch's gradient in place, which would then count twice.
    """
    spans: list[tuple[int, int, int]] = []  # address, bytes, place in `found`
    for one in others:
        if one is not None and one.layout is torch.strided:
            spans.append((one.data_ptr(), one.nbytes, -1))
    for storage in storages:
        spans.append((storage.data_ptr(), storage.nbytes(), -1))
    found: list[tuple[nn.Parameter, torch.Tensor]] = []
    for leaf in leaves:
        gradient = leaf.tensor.grad
        if gradient is not None and gradient.layout is torch.strided:
            spans.append((gradient.data_ptr(), gradient.nbytes, len(found)))
            found.append((leaf.tensor, gradient))
    spans.sort()
    end, last = 0, -1  # of the span that reaches furthest so far
    for start, nbytes, number in spans:
        for overlapping in (number, last) if start < end else ():
            if overlapping >= 0:
                parameter, gradient = found[overlapping]
                parameter.grad = gradient.clone()
        if start + nbytes > end:
            end, last = start + nbytes, number


class ParameterLeaves:
    """All leaves of an executable, each with the model's parameter that it follows."""

    def __init__(self, leaves: Iterable[ParameterLeaf], parameters: Mapping[int, nn.Parameter]) -> None:
        """`parameters`: the model's, by id."""
        self._pairs = [(leaf, parameters[leaf.key]) for leaf in leaves]
        self._leaves = [leaf.tensor for leaf, _ in self._pairs]
        self._parameters = [parameter for _, parameter in self._pairs]
        whole = all(leaf.piece.whole for leaf, _ in self._pairs)
        self._one_each = whole and len({leaf.key for leaf, _ in self._pairs}) == len(self._pairs)
        self._seen: tuple[list[Any], ...] | None = (
            None  # of the parameters at the last refresh, if all leaves are views of them
        )

    def refresh(self) -> None:
        """Follow the model's parameters, which may have been changed, moved or frozen.

        Leaves that are views of their parameters follow all writes. They hold the memory, so that no other memory has
        its address.
        """
        parameters = self._parameters
        now = (
            [p.data_ptr() for p in parameters],
            [p.stride() for p in parameters],
            [p.requires_grad for p in parameters],
            [p.device for p in parameters],
        )
        if now == self._seen:
            return
        self._seen = None
        for leaf, parameter in self._pairs:
            leaf.refresh(parameter)
        if now[3] == [leaf.device for leaf in self._leaves]:
            self._seen = now

    def take_gradients(self) -> dict[int, torch.Tensor]:
        """`sum_gradients` of all leaves."""
        if not self._one_each:
            return sum_gradients(self._pairs)
        total: dict[int, torch.Tensor] = {}
        for leaf, parameter in zip(self._leaves, self._parameters, strict=True):
            if (gradient := leaf.grad) is not None:
                leaf.grad, device = None, parameter.device
                total[id(parameter)] = gradient if gradient.device == device else gradient.to(device)
        return total

    def drop_gradients(self) -> None:
        for leaf in self._leaves:
            leaf.grad = None


def _place(tensor: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    """Where its entries are: `p.data = p.data.t()` changes only their order."""
    return tensor.data_ptr(), tensor.stride()


def _state(parameter: nn.Parameter) -> tuple[int, int]:
    return parameter._version, parameter.data_ptr()


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

    def refresh(self, tensor: torch.Tensor) -> bool:
        """Follow the model's buffer, which may have been changed or moved.

        Returns whether `write_back` must follow what the stage writes, because that is no view of the model's buffer.
        """
        mine = self.tensor
        elsewhere = tensor.device != mine.device
        if self.private or elsewhere:
            mine.data.copy_(self.piece.taken(tensor))  # as in `write_back`
        elif not self.piece.whole or _place(mine) != _place(tensor):
            current = self.piece.taken(tensor)
            if _place(mine) != _place(current):
                mine.data = current
        return elsewhere and self.written and not self.private

    def write_back(self, tensor: torch.Tensor) -> None:
        """Copy what the stage wrote into the model's buffer."""
        # `.data`: batch norms of a forward whose backward is still to come saved the buffer, or the part of it that
        # another device has, and must not see its version change.
        self.piece.taken(tensor.data).copy_(self.tensor)


def accumulate(parameters: Sequence[nn.Parameter], gradients: Mapping[int, torch.Tensor]) -> None:
    """Add gradients, by id of the parameter, to `.grad`: in place, where it is dense."""
    for parameter in parameters:
        gradient, before = gradients.get(id(parameter)), parameter.grad
        if gradient is None:
            continue
        if before is None:
            parameter.grad = gradient
        elif before.is_sparse:
            parameter.grad = before + gradient
        else:
            before.add_(gradient)


def move(tensor: torch.Tensor, device: torch.device) -> None:
    """Move a tensor of the model, and its gradient, which a backward would else fail to add to."""
    if tensor.device == device:
        return
    gradient, tensor.grad = tensor.grad, None
    tensor.data = tensor.data.to(device)
    if gradient is not None:
        tensor.grad = gradient.to(device)


def sum_gradients(leaves: Iterable[tuple[ParameterLeaf, nn.Parameter]]) -> dict[int, torch.Tensor]:
    """The gradients of whole parameters, by id of the model's parameter, each on its parameter's device.

    Takes the leaves' gradients and adds them in the order of `leaves`, so that a sum has the same bits every time.
    """
    total: dict[int, torch.Tensor] = {}
    for leaf, parameter in leaves:
        key, gradient = leaf.key, leaf.take_gradient()
        if gradient is None:
            continue
        if gradient.device != parameter.device:
            gradient = gradient.to(parameter.device)
        if (entries := leaf.piece.entries(parameter)) is not None:
            if key not in total:
                total[key] = torch.zeros_like(parameter)
            total[key][entries].add_(gradient)
        elif key not in total:
            total[key] = gradient
        elif gradient.is_sparse or total[key].is_sparse:
            total[key] = total[key] + gradient
        else:
            total[key].add_(gradient)
    return total
