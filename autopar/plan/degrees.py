"""The degrees of a plan, and the devices of every stage that follow from them.

Devices are numbered as by Megatron-LM: first those that cut tensors, then the replicas, then the stages.

    stage 1   | 8  9 | 10 11 | 12 13 | 14 15 |    tensor=2, data=4, pipeline=2
    stage 0   | 0  1 |  2  3 |  4  5 |  6  7 |
                tensor        data -->
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.schedule.builders import ranks_of_stages

DEGREES = (
    *("tensor", "pipeline", "data", "micro_batch", "schedule", "chunks", "zero", "recompute"),
    "sequence_parallel",
)
"""What a plan by hand can fix."""

ZERO = (0, 1, 2, 3)
"""Stages of ZeRO (Rajbhandari et al., 2020)."""


def check_zero(zero: object) -> None:
    """Raise PlanError for what is no stage of ZeRO; None says nothing of it."""
    if zero is not None and (type(zero) is not int or zero not in ZERO):
        raise PlanError(f"zero must be 0, 1, 2 or 3, got {zero!r}")


@dataclass(frozen=True)
class Degrees:
    """How a plan splits a model; `Plan.by_hand` documents the fields."""

    tensor: int
    pipeline: int
    data: int
    micro_batch: int  # samples
    schedule: str
    chunks: int
    zero: int
    recompute: str
    sequence_parallel: bool
    batch: int  # samples of a step

    @property
    def n_stages(self) -> int:
        return self.pipeline * self.chunks

    @property
    def n_microbatches(self) -> int:
        """Of each replica: a micro-batch of the plan has the samples of all replicas."""
        return self.batch // (self.data * self.micro_batch)

    @property
    def mesh(self) -> tuple[int, ...]:
        """The shape of a stage's mesh; empty for a single device."""
        return tuple(n for n in (self.data, self.tensor) if n > 1)

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the mesh's axes."""
        return tuple(name for name, n in (("data", self.data), ("tensor", self.tensor)) if n > 1)

    @property
    def rank_of(self) -> tuple[int, ...]:
        """The place in the pipeline of each stage."""
        return ranks_of_stages(self.schedule, self.pipeline, self.chunks)

    def devices(self, rank: int) -> range:
        """The numbers of the devices of a place in the pipeline, and so of all of its stages."""
        size = self.data * self.tensor
        return range(rank * size, (rank + 1) * size)
