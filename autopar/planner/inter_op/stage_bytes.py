"""What a stage receives and what it holds, item by item: the bytes that depend on where the cuts lie."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.costs.sends import Sent
from cost_models.memory.optimizer_step import StepShare


@dataclass(frozen=True)
class Value:
    """A tensor that other atoms read; sent directly from its producer's stage to every other stage that reads it."""

    producer: int  # atom
    consumers: tuple[int, ...]  # atoms
    nbytes: float  # bytes forward, of the whole batch
    grad_nbytes: float  # bytes backward, of the whole batch; 0 where no gradient flows
    copies: int = 1  # devices of a mesh, in one node, that hold the same
    gather: float = 0.0  # s for the whole batch to gather it, or its gradient, from a part on each of them

    @property
    def forward(self) -> Sent:
        """On its way to a stage that reads it."""
        return Sent(self.nbytes, self.copies, self.gather)

    @property
    def backward(self) -> Sent:
        """The gradient of this value, sent in the backward."""
        return Sent(self.grad_nbytes, self.copies, self.gather if self.grad_nbytes else 0.0)

    def scattered(self, seconds_per_byte: float) -> Value:
        """With bytes that take a lane as long as sending and gathering do, at the faster of both ways."""

        def counted(sent: Sent) -> float:
            chosen = sent.over(seconds_per_byte)
            return chosen.nbytes + (chosen.gather / seconds_per_byte if chosen.gather else 0.0)

        return replace(self, nbytes=counted(self.forward), grad_nbytes=counted(self.backward), copies=1, gather=0.0)


@dataclass(frozen=True)
class Shared:
    """Bytes that a stage holds once if it has any of the atoms: a parameter with its gradient, a saved storage.

    Or seconds that it takes once a step in the same case.
    """

    nbytes: float  # bytes, or seconds
    atoms: tuple[int, ...]


@dataclass(frozen=True)
class Stepped:
    """What the optimizer does once a step for a parameter, in every stage that has any of the atoms."""

    share: StepShare
    atoms: tuple[int, ...]
