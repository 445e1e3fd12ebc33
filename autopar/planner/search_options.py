"""What the user fixed of a plan, and what one search of several knows of the others."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autopar.planner.inter_op.atoms import NO_CONSTRAINTS, Constraints
from autopar.planner.predict import Conditions


@dataclass(frozen=True)
class SearchOptions:
    """What the user fixed; None is free."""

    n_microbatches: int | None = None
    schedule: str | None = None
    max_replicas: int | None = None
    memory_limit: float | None = None  # bytes on each device
    optimizer: str = "adamw"
    one_microbatch_because: str = ""  # why the batch may not be split
    unproven: str = ""  # why it may be split only because a few samples say so
    least_rows: int = 1  # samples in the smallest micro-batch
    loss_inside: bool = False  # the loss runs in the last stage (train_step): backwards need not wait for all forwards
    constraints: Constraints = field(default=NO_CONSTRAINTS)  # hints, by node of the cost graph
    rival: float = math.inf  # s of a plan that is known: only faster ones are of interest
    one_of_several: bool = False  # searches that share the time of one

    @property
    def conditions(self) -> Conditions:
        return Conditions(self.optimizer, self.loss_inside)
