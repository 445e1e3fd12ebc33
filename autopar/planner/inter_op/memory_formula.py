"""The bytes that a stage holds on each of its devices: one formula, for numbers and for tables over pairs of cuts.

    resident     parameters + their gradients + the optimizer's state, whatever the batch
    in flight    received + saved      for each micro-batch whose forward has run and whose backward has not
    working      transient             while an operator runs, once

A stage that recomputes as one keeps only what it received in flight, and has the saved bytes of one micro-batch at
work:

    in flight    received
    working      transient + saved

One that recomputes its layers one after the other keeps what flows between them and what lies outside of them keeps,
and has what one layer saves at work, beside what an operator of that layer needs:

    in flight    received + kept
    working      the most of: transient of an operator + what its layer saves

One whose layers keep every second product, too, has the results of these in flight as well.

When the optimizer steps, no activations are left, and it may need more bytes than these:

    stepping     temporaries of all parameters at once, where its kernels go through all of them together

One that recomputes selectively keeps all but what the cores of its attentions make (rebuilt), and has that of one core
at work:

    in flight    received + saved - rebuilt
    working      transient + rebuilt of the largest core
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from autopar.costs.operator_cost import Weight
from autopar.plan.recompute import Recompute
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

    @classmethod
    def sum_of(cls, held: Iterable[ResidentBytes]) -> ResidentBytes:
        return cls(*(float(sum(of)) for of in zip(cls(0.0, 0.0, 0.0), *held, strict=True)))


def resident_bytes(weight: Weight, optimizer: str, training: bool) -> ResidentBytes:
    """Gradient and optimizer state exist only in training, and only of what is trained."""
    if not (training and weight.trained):
        return ResidentBytes(weight.held, 0.0, 0.0)
    return ResidentBytes(weight.held, weight.gradient, weight.state(optimizer))


def all_resident(weights: Iterable[Weight], optimizer: str, training: bool) -> ResidentBytes:
    """What a device holds all the time for these parameters and buffers."""
    return ResidentBytes.sum_of(resident_bytes(weight, optimizer, training) for weight in weights)


def transient_bytes(allocated: float, output: float, gradient: float) -> float:
    """While an operator runs, beside what stays for the backward: what it allocates, its result, and the gradient of
    that."""
    return allocated + output + gradient


class Activations(NamedTuple, Generic[Bytes]):
    """Bytes of a stage, of any number of samples."""

    saved: Bytes
    received: Bytes
    transient: Bytes
    rebuilt: Bytes  # those of `saved` that the cores of attentions make
    core: Bytes  # of these, what one core makes at most
    kept: Bytes  # what enters layers, and what operators outside of them save
    block: Bytes  # at work there: what an operator needs while it runs, with what its layer saves beside `kept`
    products: Bytes | float = (
        0.0  # beside `kept`, where layers keep every second product; the search offers no such mode
    )


def activation_bytes(of: Activations[Bytes], recompute: int) -> tuple[Bytes, Bytes]:
    """(bytes in flight, bytes working), of as many samples as the arguments are. `recompute`: a `Recompute`."""
    if recompute == Recompute.STAGE:
        return of.received, of.transient + of.saved
    if recompute == Recompute.FULL:
        return of.received + of.kept, of.block
    if recompute == Recompute.OPERATORS:
        return of.received + of.kept + of.products, of.block
    if recompute == Recompute.SELECTIVE:
        return of.saved - of.rebuilt + of.received, of.transient + of.core
    return of.saved + of.received, of.transient


def split_text(resident: ResidentBytes, needed: float, optimizer: str, *, stepping: bool = False) -> str:
    """What `needed` bytes are for, as `weights 2 GB, gradients 2 GB, optimizer (adam) 4 GB, activations 1 GB`.

    `stepping`: they are needed while the optimizer steps, when no activations are left.
    """
    rest = "temporaries of the optimizer's step" if stepping else "activations"
    held = {
        "weights": resident.parameter,
        "gradients": resident.gradient,
        f"optimizer ({optimizer})": resident.optimizer,
        rest: max(0.0, needed - resident.total),
    }
    return ", ".join(f"{what} {bytes_text(nbytes)}" for what, nbytes in held.items() if nbytes)
