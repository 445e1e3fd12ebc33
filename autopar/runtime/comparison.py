"""A comparison of plans: what was predicted, and what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from autopar.plan.display import reported, shown
from autopar.plan.plan import Plan

if TYPE_CHECKING:
    from autopar.report.document import Report


@dataclass(frozen=True)
class Row:
    """One plan and its steps.

    Memory is by place: a CPU worker by its name, or a GPU with all its workers. The prediction counts parameters, all
    their gradients and the activations in flight, without optimizer state. The measurement is the peak of a step that
    starts without gradients, so that it may be less. It counts the storages that operators use; replicas on CPU share
    their parameters, and each of them counts all.
    """

    name: str
    plan: Plan  # with its predictions
    steps: tuple[float, ...]  # s, one per round
    predicted_memory: Mapping[str, int]  # bytes at the peak
    measured_memory: Mapping[str, int]  # bytes at the peak

    @property
    def predicted(self) -> float | None:
        """Seconds per step; None where a plan's sharded stages have no predictions."""
        return self.plan.predicted_step_time

    @property
    def measured(self) -> float:
        """Seconds per step, the median."""
        return median(self.steps)

    @property
    def error(self) -> float | None:
        """Error of the prediction, relative to the measured time; above 0 where the step was faster than predicted."""
        return None if self.predicted is None else self.predicted / self.measured - 1


@dataclass(frozen=True)
class Comparison:
    """Steps on the same batch under several plans, run in turn; `print(comparison)` shows a table."""

    single: Row  # the plain model on the first device
    plans: tuple[Row, ...]
    devices: tuple[str, ...]
    batch_size: int  # samples
    training: bool  # whether a step has a backward

    @property
    def rows(self) -> tuple[Row, ...]:
        return (self.single, *self.plans)

    def __getitem__(self, name: str) -> Row:
        """The row of a plan. Raises KeyError for an unknown name."""
        for row in self.plans:
            if row.name == name:
                return row
        raise KeyError(name)

    def speed_up(self, row: Row) -> float:
        """The measured time on the single device over that of `row`."""
        return self.single.measured / row.measured

    def __str__(self) -> str:
        return shown(self)

    def report(self) -> Report:
        """The same as a `Report`, which a notebook shows as a page, and `save` writes as one HTML file."""
        made: Report = reported(self)
        return made

    def to_json(self) -> str:
        """All rows and their plans; times in seconds, memory in bytes."""
        rows = [self._as_json(row) for row in self.rows]
        data = {"devices": self.devices, "batch_size": self.batch_size, "training": self.training, "rows": rows}
        return json.dumps(data, indent=1)

    def _as_json(self, row: Row) -> dict[str, Any]:
        return {
            "name": row.name,
            "stages": [list(stage.devices) for stage in row.plan.stages],
            "n_microbatches": row.plan.n_microbatches,
            "schedule": row.plan.schedule,
            "predicted": row.predicted,
            "measured": row.measured,
            "error": row.error,
            "speed_up": self.speed_up(row),
            "steps": row.steps,
            "predicted_memory": dict(row.predicted_memory),
            "measured_memory": dict(row.measured_memory),
            "plan": json.loads(row.plan.to_json()),
        }
