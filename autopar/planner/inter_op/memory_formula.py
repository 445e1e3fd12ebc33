"""The bytes that a stage holds on each of its devices: one formula, for numbers and for tables over pairs of cuts.

    resident     parameters + their gradients + the optimizer's state, whatever the batch
    in flight    received + saved      for each micro-batch whose forward has run and whose backward has not
    working      transient             while an operator runs, once

A stage that recomputes keeps only what it received in flight, and has the saved bytes of one micro-batch at work:

    in flight    received
    working      transient + saved
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np

from autopar.costs.operator_cost import Weight
from cost_models import bytes_text

Bytes = TypeVar("Bytes", float, np.ndarray)


class ResidentBytes(NamedTuple):
    """What a device holds all the time for one parameter or buffer."""

    parameter: float
    gradient: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameter + (self.gradient + self.optimizer)


def resident_bytes(weight: Weight, optimizer: str, training: bool) -> ResidentBytes:
    """Gradient and optimizer state exist only in training, and only of what is trained."""
    if not (training and weight.trained):
        return ResidentBytes(weight.held, 0.0, 0.0)
    return ResidentBytes(weight.held, weight.gradient, weight.state(optimizer))


def activation_bytes(saved: Bytes, received: Bytes, transient: Bytes, recompute: bool) -> tuple[Bytes, Bytes]:
    """(bytes in flight, bytes working), of as many samples as the arguments are."""
    if recompute:
        return received, transient + saved
    return saved + received, transient


def split_text(resident: ResidentBytes, needed: float, optimizer: str) -> str:
    """What `needed` bytes are for, as `weights 2 GB, gradients 2 GB, optimizer (adam) 4 GB, activations 1 GB`."""
    held = {
        "weights": resident.parameter,
        "gradients": resident.gradient,
        f"optimizer ({optimizer})": resident.optimizer,
        "activations": max(0.0, needed - resident.total),
    }
    return ", ".join(f"{what} {bytes_text(nbytes)}" for what, nbytes in held.items() if nbytes)
