"""Plans side by side: what was predicted, and what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from autopar.plan.display import shown
from autopar.plan.plan import Plan


@dataclass(frozen=True)
class Row:
    """One plan and its steps.

    Memory is by place: the name of a CPU worker, or that of a GPU with all its workers. Predicted are parameters, all
    their gradients and the activations in flight, without optimizer state. Measured is what a place holds at its peak
    in a step that starts without gradients, so that it may be less. It counts the storages that operators were seen to
    use; replicas on CPU share their parameters, and each counts them.
    """

    name: str
    plan: Plan  # with its predictions
    steps: tuple[float, ...]  # s, one of each round
    predicted_memory: Mapping[str, int]  # bytes at the peak
    measured_memory: Mapping[str, int]  # bytes at the peak

    @property
    def predicted(self) -> float | None:
        """Seconds a step; None where a plan's sharded stages have no predictions."""
        return self.plan.predicted_step_time

    @property
    def measured(self) -> float:
        """Seconds a step, the median."""
        return median(self.steps)

    @property
    def error(self) -> float | None:
        """Of the prediction, relative to the measured time: above 0 where the step was faster than predicted."""
        return None if self.predicted is None else self.predicted / self.measured - 1


@dataclass(frozen=True)
class Comparison:
    """Steps of the same batch under several plans, taken in turn; `print(comparison)` shows a table."""

    single: Row  # the plain model on the first device
    plans: tuple[Row, ...]
    devices: tuple[str, ...]
    batch_size: int  # samples
    training: bool  # whether a step has a backward

    @property
    def rows(self) -> tuple[Row, ...]:
        return (self.single, *self.plans)

    def __getitem__(self, name: str) -> Row:
        """The row of a plan. KeyError for a name that was not compared."""
        for row in self.plans:
            if row.name == name:
                return row
        raise KeyError(name)

    def speed_up(self, row: Row) -> float:
        """How many times faster than the single device, measured."""
        return self.single.measured / row.measured

    def __str__(self) -> str:
        return shown(self)

    def to_json(self) -> str:
        """Rows with all numbers in seconds and bytes, and their plans."""
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
