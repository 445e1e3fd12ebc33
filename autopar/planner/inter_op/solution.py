"""What the partition search answers: stages between cuts, with their devices, and how far that is proven best."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class StageChoice:
    """One stage: the atoms after the cut `start` and before the cut `stop`, on `replicas` of `kinds[kind]`."""

    start: int  # cut
    stop: int  # cut
    kind: int
    replicas: int
    recompute: int  # a `Recompute`
    time: float  # seconds one micro-batch takes, forward, backward and transfers


@dataclass(frozen=True)
class Solution:
    """The best partition on a number of devices, with a bound on all others."""

    stages: tuple[StageChoice, ...]
    objective: float  # seconds a step takes, as `solve` defines it
    bound: float  # seconds: no partition over these cuts has a smaller objective; equal to it where that is proven
    used: tuple[int, ...]  # devices of each pool

    @property
    def n_devices(self) -> int:
        return sum(self.used)

    def n_actions(self, n_microbatches: int) -> int:
        """Forwards and backwards to simulate: those of one of the equal pipelines (`PredictedStep.one_copy`)."""
        copies = math.gcd(n_microbatches, *(stage.replicas for stage in self.stages))
        return 2 * n_microbatches // copies * len(self.stages)

    def copied(self, copies: int) -> Solution:
        """That many copies of the whole pipeline."""
        stages = tuple(replace(stage, replicas=stage.replicas * copies) for stage in self.stages)
        return replace(self, stages=stages, used=tuple(count * copies for count in self.used))


@dataclass(frozen=True)
class Infeasibility:
    """The stage that lacks most memory in the plan where that is least: in every plan some stage lacks as much."""

    index: int  # of the stage in its plan
    stage: StageChoice
    needed: float  # bytes on each of its devices
    passing: float  # bytes of these while passes run
    stepping: bool  # they are needed while the optimizer steps, with its temporaries and no activations
    available: float  # bytes
