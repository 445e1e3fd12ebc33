"""What compiling stages, or recording them as CUDA graphs, changes in measured seconds.

Operators are measured as they were captured: each is launched from Python. A few steps of the whole model as one stage,
captured and compiled in turn, say how much less (or more) compiled stages take. Launches take the same time whatever
the size of a micro-batch, so the ratio depends on that size:

    samples      captured    compiled    ratio
       2           10 ms        4 ms      0.40      launching bounds the captured stage
      32           80 ms       72 ms      0.90      computing bounds both
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autopar.plan.recompute import PARTLY, Recompute


@dataclass(frozen=True)
class CompiledRatio:
    """Seconds of compiled stages over those of captured ones, at some sizes of the micro-batch.

    Raises:
        ValueError: the sizes do not ascend, or a ratio is not a positive number.
    """

    rows: tuple[float, ...]  # samples, ascending
    ratios: tuple[float, ...]
    # Stages that recompute in these ways run as they were captured.
    left_alone: frozenset[Recompute] = PARTLY
    # Multiplies the seconds of one busy device even where several are busy: replaying a CUDA graph takes one call, so
    # that no worker waits for the interpreter.
    of_one: bool = False

    def __post_init__(self) -> None:
        if not self.rows or any(b <= a for a, b in zip((0, *self.rows), self.rows, strict=False)):
            raise ValueError(f"ratios need ascending micro-batch sizes > 0, got {self.rows}")
        if len(self.ratios) != len(self.rows) or not all(0 < one < math.inf for one in self.ratios):
            raise ValueError(f"each of {len(self.rows)} sizes needs a ratio > 0, got {self.ratios}")

    def at(self, rows: float) -> float:
        """Between measured sizes linear in the logarithm of the size; beyond them that of the nearest."""
        return float(np.interp(math.log(rows), np.log(self.rows), self.ratios))

    def text(self) -> str:
        """The ratios with their sizes."""
        return ", ".join(f"{one:.3g} at {rows:.4g} samples" for rows, one in zip(self.rows, self.ratios, strict=True))


def microbatches_to_compile(batch_size: int, most: int, fixed: int | None) -> list[int]:
    """Numbers of micro-batches whose sizes are compiled and measured: each costs one compilation of the whole model.

    `most`: that the batch allows. `fixed`: by the user; None if the search chooses.
    """
    if fixed is not None:
        return [fixed]
    return sorted({1, min(_SMALLEST, most, batch_size)})


_SMALLEST = 8  # part of the batch


def left_alone_under(graphs: bool) -> frozenset[Recompute]:
    """The kinds of recomputation whose stages are not compiled, or not recorded as CUDA `graphs`."""
    return PARTLY | {Recompute.STAGE} if graphs else PARTLY
