"""Copies of one model, to run plans on, that share its parameters.

A step writes buffers and gradients, and leaves parameters as they are. So the copies share the memory of the model's
parameters, and where plans move them to other devices, one copy on each device:

    user's model on the CPU      plan A: cuda:0, cuda:1      plan B: cuda:0
    weight 0                     weight 0 on cuda:0  <------ the same memory
    weight 1                     weight 1 on cuda:1          weight 1 on cuda:0

A model whose code is not captured as a whole is copied with its parameters.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from autopar.analysis.example import Example
from autopar.capture.module_hooks import without_hooks


class ParameterCopies:
    """Copies of the model of one example call."""

    def __init__(self, example: Example) -> None:
        self.shared = keeps_parameters(example)
        self._model = example.model
        self._placed: dict[tuple[int, torch.device], torch.Tensor] = {}  # by parameter of the model and device

    def make(self) -> nn.Module:
        """A copy with parameters, gradients and buffers of its own, and without the user's hooks."""
        known: dict[int, object] = {}
        if self.shared:
            for parameter in self._model.parameters():
                if type(parameter) is nn.Parameter and not parameter.is_inference():
                    own = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
                    known[id(parameter)] = own
        return without_hooks(copy.deepcopy(self._model, known))

    def share(self, model: nn.Module) -> None:
        """Let a copy that was placed on devices use the memory of earlier ones where they have the same values."""
        if not self.shared:
            return
        for parameter, own in zip(self._model.parameters(), model.parameters(), strict=True):
            if own.device != parameter.device:
                own.data = self._placed.setdefault((id(parameter), own.device), own.data)


def keeps_parameters(example: Example) -> bool:
    """Whether a call is known to leave the model's parameters as they are: capture refuses graphs that write one.
    Of uncaptured code, only what it does in the example is known."""
    return not example.program.uncaptured
