"""Stages that rehearsals have shown not to fit the memory, for searches that leave them out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class RefusedStage:
    """A stage that does not fit with `in_flight` micro-batches or more.

    One with more atoms may fit, as it may send less.
    """

    schedule: str
    n_microbatches: int
    kind: tuple[int, str]  # pool, name
    recompute: int  # a `Recompute`
    start: np.ndarray  # bool [n]: the cut before it
    stop: np.ndarray  # bool [n]: the cut after it
    in_flight: int  # micro-batches that a replica holds

    def applies(self, schedule: str, n_microbatches: int) -> bool:
        """Whether a search with this number of micro-batches leaves the stage out.

        Fewer micro-batches are larger. But a single one has no gradients yet in its forward, so it may fit.
        """
        fewer = 1 < n_microbatches < self.n_microbatches
        return schedule == self.schedule and (fewer or n_microbatches == self.n_microbatches)
