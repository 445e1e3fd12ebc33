"""What a stage receives and what it holds, item by item: the bytes that depend on where the cuts lie."""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.memory.optimizer_step import StepShare


@dataclass(frozen=True)
class Value:
    """A tensor that other atoms read; sent directly from its producer's stage to every other stage that reads it."""

    producer: int  # atom
    consumers: tuple[int, ...]  # atoms
    nbytes: float  # bytes forward, of the whole batch
    grad_nbytes: float  # bytes backward, of the whole batch; 0 where no gradient flows


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
