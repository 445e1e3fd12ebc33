"""A comparison of plans, and of other systems: what was predicted, and what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from autopar.plan.display import drawn
from autopar.plan.plan import Plan
from autopar.plan.results import Result
from autopar.plan.step_work import StepWork
from cost_models.measuring.intervals import LEVEL, Interval, median_interval, paired_ratio_interval

_LEAST_LEVEL = 0.9  # of confidence in a winner: five rounds or more
_ENOUGH = 0.85  # of the devices, for which independent processes are called undisturbed
SINGLE = "one device"  # name of the row of the plain model


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
    threads: int | None = None  # of operators, where they are the caller's and not those that the prediction is for

    @property
    def predicted(self) -> float | None:
        """Seconds per step; None where a plan's sharded stages have no predictions."""
        return self.plan.predicted_step_time

    @property
    def measured(self) -> float:
        """Seconds per step, the median."""
        return median(self.steps)

    @property
    def interval(self) -> Interval:
        """Of the median: a bootstrap interval."""
        return median_interval(self.steps)

    @property
    def error(self) -> float | None:
        """Error of the prediction, relative to the measured time; above 0 where the step was faster than predicted.
        None also where the step ran with other threads than the prediction is for."""
        return self.predicted / self.measured - 1 if self.predicted is not None and self.threads is None else None


@dataclass(frozen=True)
class SystemRow:
    """Another system on the same step, in turn with the plans. One that cannot run it has no steps."""

    name: str
    how: str  # in words, such as "blocks 3 | 4, 8 micro-batches"
    steps: tuple[float, ...]  # s, one per round
    refused: str = ""  # why it has no steps

    @property
    def measured(self) -> float | None:
        """Seconds per step, the median."""
        return median(self.steps) if self.steps else None

    @property
    def interval(self) -> Interval | None:
        """Of the median: a bootstrap interval."""
        return median_interval(self.steps) if self.steps else None


@dataclass(frozen=True)
class Verdict:
    """Which row is the fastest, as far as the rounds allow to say."""

    fastest: str  # name of the row with the lowest median
    rival: str  # the row that comes closest to it; "" if there is none
    interval: Interval | None  # of the rival's seconds / the fastest's, over rounds

    @property
    def winner(self) -> str | None:
        """None where the rival may be as fast, or where the rounds are too few to tell."""
        if self.interval is None:
            return self.fastest
        return self.fastest if self.interval.low > 1 and self.interval.level >= _LEAST_LEVEL else None


@dataclass(frozen=True)
class Comparison(Result):
    """Steps on the same batch under several plans, run in turn; `print(comparison)` shows a table."""

    single: Row  # the plain model on the first device
    plans: tuple[Row, ...]
    devices: tuple[str, ...]
    batch_size: int  # samples
    training: bool  # whether a step has a backward
    systems: tuple[SystemRow, ...] = ()  # other systems
    # Independent processes, one a device, each with its part of the batch, in the same rounds: what the machine gives
    # at most while this is measured. None: not measured.
    ceiling: SystemRow | None = None
    measured_on: str = ""  # devices, versions, date, and how busy the machine was before
    work: StepWork | None = None  # FLOPs and tokens of a step
    device_kinds: tuple[str, ...] = ()  # of `devices`
    same: Mapping[str, str] = field(default_factory=dict)  # names of plans that did not run: the same plan's name

    @property
    def rows(self) -> tuple[Row, ...]:
        return (self.single, *self.plans)

    def __getitem__(self, name: str) -> Row:
        """The row of a plan; of one that is the same as another, the other's steps. Raises KeyError for an unknown
        name."""
        for row in self.plans:
            if row.name == self.same.get(name, name):
                return replace(row, name=name)
        names = ", ".join([*(row.name for row in self.plans), *self.same])
        known = f"known are {names}" if self.plans else "no plan was compared"
        raise KeyError(f"there is no plan {name!r}; {known}")

    def speed_up(self, row: Row) -> float:
        """The measured time on the single device over that of `row`."""
        return self.single.measured / row.measured

    def utilisation(self, row: Row | SystemRow) -> float | None:
        """Model FLOPs utilisation of all devices, used or not; None without steps, or without a device's data sheet."""
        return self.work.utilisation(row.measured) if self.work is not None and row.measured else None

    @property
    def ceiling_speed_up(self) -> float | None:
        """What independent processes make of the devices, over the single one."""
        seconds = None if self.ceiling is None else self.ceiling.measured
        return None if seconds is None else self.single.measured / seconds

    @property
    def disturbed(self) -> bool:
        """Whether even independent processes made too little of the devices: something else was at work, or the
        devices share what bounds the model."""
        found = self.ceiling_speed_up
        return found is not None and found < _ENOUGH * len(self.devices)

    @property
    def verdict(self) -> Verdict:
        """Over the plain model, the plans and the other systems; the intervals of all pairs with the fastest hold
        together, at 95 % or what the number of rounds allows."""
        steps = {row.name: row.steps for row in self.rows} | {row.name: row.steps for row in self.systems if row.steps}
        fastest = min(steps, key=lambda name: median(steps[name]))
        rivals = [name for name in steps if name != fastest]
        level = 1 - (1 - LEVEL) / max(1, len(rivals))
        intervals = {name: paired_ratio_interval(steps[name], steps[fastest], level) for name in rivals}
        rival = min(rivals, key=lambda name: intervals[name].low, default="")
        return Verdict(fastest, rival, intervals.get(rival))

    def figure(self, path: str | Path) -> None:
        """Draw all rows into a file (.png, .svg, .pdf). Raises AutoparError without matplotlib."""
        drawn(self, Path(path))

    def to_json(self) -> str:
        """All rows and their plans; times in seconds, memory in bytes."""
        verdict = self.verdict
        data = {
            "devices": self.devices,
            "batch_size": self.batch_size,
            "training": self.training,
            "measured_on": self.measured_on,
            "work": None if self.work is None else asdict(self.work),
            "rows": [self._as_json(row) for row in self.rows],
            "same": dict(self.same),
            "systems": [_system_as_json(row) for row in self.systems],
            "ceiling": None if self.ceiling is None else _system_as_json(self.ceiling),
            "ceiling_speed_up": self.ceiling_speed_up,
            "verdict": {**asdict(verdict), "winner": verdict.winner},
        }
        return json.dumps(data, indent=1)

    def _as_json(self, row: Row) -> dict[str, Any]:
        return {
            "name": row.name,
            "stages": [list(stage.devices) for stage in row.plan.stages],
            "n_microbatches": row.plan.n_microbatches,
            "schedule": row.plan.schedule,
            "predicted": row.predicted,
            "measured": row.measured,
            "interval": asdict(row.interval),
            "error": row.error,
            "speed_up": self.speed_up(row),
            "utilisation": self.utilisation(row),
            "steps": row.steps,
            "predicted_memory": dict(row.predicted_memory),
            "measured_memory": dict(row.measured_memory),
            "plan": json.loads(row.plan.to_json()),
        }


def _system_as_json(row: SystemRow) -> dict[str, Any]:
    interval = row.interval
    return {**asdict(row), "measured": row.measured, "interval": None if interval is None else asdict(interval)}
