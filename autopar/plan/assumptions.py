"""What the prices of a plan assume of how a step is run, where nothing is measured."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from typing import Any

from cost_models import OPTIMIZERS, PRECISIONS
from cost_models.collectives.overlap import overlap_named
from cost_models.kernels.launches import MODES
from cost_models.memory.optimizer_step import IMPLEMENTATIONS


@dataclass(frozen=True)
class Assumptions:
    """The options of these names that a plan for devices that are not at hand was priced with (`PlanOptions`)."""

    launch: str = "eager"
    precision: str | None = None  # None: every tensor in the parameter's own dtype
    optimizer_step: str | None = None  # None: torch's default
    overlap: str = "sends"
    optimizer: str = "adamw"

    def __str__(self) -> str:
        return ", ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) is not None)


_KNOWN: dict[str, Collection[str]] = {
    "launch": MODES,
    "precision": PRECISIONS,
    "optimizer_step": IMPLEMENTATIONS,
    "optimizer": OPTIMIZERS,
}


def wrong_assumptions(assumed: Any) -> Iterator[str]:
    """Everything wrong with assumptions that a file holds. A field that is None was left out, or unreadable."""
    for name, known in _KNOWN.items() if assumed is not None else ():
        value = getattr(assumed, name)
        if value is not None and value not in known:
            yield f"assumed.{name} must be one of {', '.join(known)}, got {value!r}"
    if assumed is not None and assumed.overlap is not None:
        try:
            overlap_named(assumed.overlap)
        except ValueError as error:
            yield f"assumed.overlap cannot be used: {error}"
