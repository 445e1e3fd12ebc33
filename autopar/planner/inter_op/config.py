"""What one search of stages fixes, and the meshes that it may give to stages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from autopar.costs.cost_table import SILENT, Progress
from autopar.planner.inter_op.meshes import Meshes

Used = tuple[int, ...]


@dataclass(frozen=True)
class Config:
    """What one search fixes."""

    schedule: str
    n_microbatches: int
    counts: Used  # most devices of each pool
    chunks: int = 1
    most_replicas: int | None = None  # of a stage; None: as many as the options allow
    most_width: int | None = None  # devices of a mesh; None: as many as there are
    least_width: int = 1  # devices of a mesh
    copies: int = 1  # of the whole pipeline: each stage has this many replicas, or a multiple
    # Under 1F1B and ZB-H1, whether sends count only as far as passes do not hide them. Either way the objective differs
    # from steps: a stage waits for some sends, the more so the more alike the stages are.
    sends_behind: bool = False

    def within(self, other: Config) -> bool:
        """Whether every plan under this is one under `other`, with the same schedule and micro-batches."""
        ours = (self.schedule, self.n_microbatches, self.chunks, self.sends_behind)
        return (
            ours == (other.schedule, other.n_microbatches, other.chunks, other.sends_behind)
            and all(a <= b for a, b in zip(self.counts, other.counts, strict=True))
            and (other.most_replicas is None or (self.most_replicas or math.inf) <= other.most_replicas)
            and (other.most_width is None or (self.most_width or math.inf) <= other.most_width)
            and self.least_width >= other.least_width
            and self.copies % other.copies == 0
        )


@dataclass(frozen=True)
class MeshChoices:
    """Where a search takes stage configurations from, for each number of micro-batches when it gets there."""

    meshes: Meshes
    most_width: int | None = None  # devices of a mesh
    progress: Progress = SILENT

    @cached_property
    def widths(self) -> list[int]:
        return [width for width in self.meshes.widths() if width <= (self.most_width or math.inf)]

    @property
    def may_gain_time(self) -> bool:
        """Whether shards of some mesh run at once: those of the same hardware together take as long as the whole."""
        return any(self.meshes.turns(width) < width for width in self.widths)
