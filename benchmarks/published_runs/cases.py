"""A published figure as a question to the product: which model, on which cluster, under which plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.published_runs.models import Sizes
from cost_models import Cluster
from cost_models.memory.optimizer_step import Implementation

Degrees = Mapping[str, Any]  # arguments of `Plan.by_hand`


@dataclass(frozen=True)
class Options:
    """How a training system runs a step: the options of `Plan.by_hand` that are no degrees."""

    optimizer: str = "adam"
    launch: str = "eager"
    precision: str | None = None
    optimizer_step: Implementation = "fused"
    overlap: str = "none"  # which collectives run behind computing


@dataclass(frozen=True)
class Case:
    """A published figure."""

    name: str  # of the run
    column: str  # that the figure is from
    published: float
    unit: str
    model: Sizes
    batch: int  # samples of a step, on all devices
    cluster: Cluster
    options: Options
    plans: tuple[Degrees, ...] = field(hash=False)  # the one that was run, or several; then the best one counts
    work: float | None = None  # in units x s: over a step's seconds it gives the figure; None: these are seconds
    per_second: float = 1.0  # units of a figure of seconds
    memory: float | None = None  # bytes, the published peak
    reserved: bool = False  # that peak is what torch's allocator had reserved, not what it had given to tensors
    not_expressed: str = ""  # what the run does that a plan of the product cannot say
    library_memory: int = 0  # bytes that the training system's libraries hold besides what the plan does
    family: Sizes | None = None  # the model before its plan rounds a size, such as a vocabulary that is cut evenly

    @property
    def published_seconds(self) -> float:
        return self.published / self.per_second if self.work is None else self.work / self.published

    def figure(self, seconds: float) -> float:
        """The figure, in its unit, of a step that takes `seconds`."""
        return seconds * self.per_second if self.work is None else self.work / seconds

    @property
    def rivals(self) -> tuple[Any, ...]:
        """Equal for runs of one model and batch on one cluster, which differ in their plans."""
        return (self.family or self.model, self.batch, self.cluster, self.options, self.column)
