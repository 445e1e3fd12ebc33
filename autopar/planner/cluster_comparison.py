"""Plans for a cluster that is not at hand, beside each other: what each is predicted to take, and why."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autopar.analysis.example import Example
from autopar.costs.cost_table import SILENT, Progress
from autopar.costs.model_flops import least_seconds, model_flops, tokens_of
from autopar.errors import InfeasibleError, PlanError
from autopar.options import PlanOptions
from autopar.plan.diff import PlanDiff
from autopar.plan.display import drawn
from autopar.plan.plan import Plan
from autopar.plan.results import Result
from autopar.plan.stage import Stage
from autopar.planner.communication import exposed_communication
from autopar.planner.plan_ahead import plan_ahead, priced_ahead
from cost_models import Cluster


@dataclass(frozen=True)
class PlannedRow:
    """One plan and what a step is predicted to take. Seconds are those of the device that is busy the longest."""

    name: str
    plan: Plan  # with its predictions
    samples: int  # of a step
    tokens: int | None  # of a step; None for a model without token inputs
    least: float  # s: all devices of the cluster for the model's FLOPs at their peaks (`least_seconds`)

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.plan.predicted_step_time or 0.0

    @property
    def throughput(self) -> float:
        """Tokens per second, or samples where there are no tokens."""
        return (self.tokens or self.samples) / self.seconds if self.seconds else 0.0

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation: of all devices of the cluster, used or not."""
        return self.least / self.seconds if self.seconds else 0.0

    @property
    def memory(self) -> int:
        """Bytes that the plan needs on the fullest device, which has least room left for its size."""
        return self._fullest.peak_memory or 0

    @property
    def usable(self) -> float:
        """Bytes that this device has, or may use."""
        return math.inf if self._fullest.usable_memory is None else self._fullest.usable_memory

    @property
    def fits(self) -> bool:
        """Whether the devices have room for it."""
        return self.memory <= self.usable

    @property
    def _fullest(self) -> Stage:
        def filled(stage: Stage) -> float:
            usable = math.inf if stage.usable_memory is None else max(1, stage.usable_memory)
            return (stage.peak_memory or 0) / usable

        return max(self.plan.stages, key=filled)

    @property
    def communication(self) -> float:
        """Seconds of collectives that no computing hides: for every micro-batch and once a step."""
        return max(exposed_communication(self.plan))

    @property
    def bubble(self) -> float:
        """Idle fraction of the used devices' time."""
        return self.plan.bubble or 0.0


@dataclass(frozen=True)
class ClusterComparison(Result):
    """Predicted steps on the same batch under several plans; `print(comparison)` shows a table."""

    rows: tuple[PlannedRow, ...]
    cluster: str  # its devices in short
    n_devices: int
    batch_size: int  # samples
    flops: float  # of a step
    training: bool
    missing: tuple[tuple[str, str], ...] = ()  # names without a row, and why no plan that a search may choose fits

    def __getitem__(self, name: str) -> PlannedRow:
        """The row of a plan. Raises KeyError for an unknown name."""
        for row in self.rows:
            if row.name == name:
                return row
        if name in dict(self.missing):
            raise KeyError(f"there is no plan {name!r}: {dict(self.missing)[name]}")
        raise KeyError(f"there is no plan {name!r}; known are {', '.join(row.name for row in self.rows)}")

    @property
    def fastest(self) -> PlannedRow:
        """Of the plans that fit, if any does."""
        return min(self.rows, key=lambda row: (not row.fits, row.seconds))

    def difference(self, name: str) -> PlanDiff:
        """What the fastest plan does otherwise than `name`."""
        return self[name].plan.diff(self.fastest.plan)

    def figure(self, path: str | Path) -> None:
        """Draw all rows into a file (.png, .svg, .pdf). Raises AutoparError without matplotlib."""
        drawn(self, Path(path))

    def to_json(self) -> str:
        """All rows and their plans; times in seconds, memory in bytes."""
        data = {
            "cluster": self.cluster,
            "devices": self.n_devices,
            "batch_size": self.batch_size,
            "flops": self.flops,
            "training": self.training,
            "fastest": self.fastest.name,
            "missing": dict(self.missing),
            "rows": [_as_json(row) | {"fastest_does_otherwise": self._otherwise(row.name)} for row in self.rows],
        }
        return json.dumps(data, indent=1)

    def _otherwise(self, name: str) -> list[dict[str, Any]]:
        difference = self.difference(name)
        modes = [asdict(mode) | {"name": "recompute"} for mode in difference.modes]
        return [*map(asdict, difference.degrees), *modes]


def compare_ahead(
    example: Example,
    cluster: Cluster,
    plans: Mapping[str, Plan | None],
    options: PlanOptions,
    progress: Progress = SILENT,
) -> ClusterComparison:
    """Price every plan (None: the plan of the search under `options`) on `cluster`.

    Where no plan of the search fits, the other plans are priced all the same. Raises PlanError for a plan that fits
    neither the model nor the cluster, and InfeasibleError like `plan_ahead` where there is nothing else to show.
    """
    flops = model_flops(example)
    least = least_seconds(flops, cluster)
    samples, tokens = max(1, example.program.batch_size), tokens_of(example)
    rows, missing = [], []
    for number, (name, plan) in enumerate(plans.items()):
        progress(name, number / len(plans))
        try:
            priced = (
                plan_ahead(example, cluster, options, progress)
                if plan is None
                else priced_ahead(plan, example, cluster, options, progress)
            )
        except InfeasibleError as error:
            if all(other is None for other in plans.values()):
                raise
            missing.append((name, str(error)))
        except PlanError as error:
            raise PlanError(f"{name}: {error}") from error
        else:
            rows.append(PlannedRow(name, priced, samples, tokens, least))
    total, devices = sum(flops.values()), len(cluster.devices)
    return ClusterComparison(
        tuple(rows), cluster.title, devices, samples, total, example.training, missing=tuple(missing)
    )


def _as_json(row: PlannedRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "seconds": row.seconds,
        "throughput": row.throughput,
        "unit": "tokens/s" if row.tokens else "samples/s",
        "utilisation": row.utilisation,
        "memory": row.memory,
        "fits": row.fits,
        "bubble": row.bubble,
        "communication": row.communication,
        "n_microbatches": row.plan.n_microbatches,
        "schedule": row.plan.schedule,
        "stages": [list(stage.devices) for stage in row.plan.stages],
        "plan": json.loads(row.plan.to_json()),
    }
