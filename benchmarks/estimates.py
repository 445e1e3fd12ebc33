"""Whole models estimated from kernel curves of this machine's CPU, and profiled in place, against their steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from statistics import median

import autopar
from autopar import Cluster
from autopar.runtime.other_systems.independent import CEILING, ceiling
from benchmarks.kept import Kept, as_row
from benchmarks.output import Report, Rounds, Table
from benchmarks.timing import interleave
from benchmarks.zoo import Subject, bert, gpt2, resnet, step, t5, vit
from cost_models import MeasurementCache, parse_devices
from cost_models.hardware.devices import operator_threads

ROUNDS = 5
MODELS: tuple[Callable[[bool], Subject], ...] = (resnet, gpt2, bert, t5, vit)


@dataclass(frozen=True)
class Row:
    """Seconds of a forward and a backward on one thread."""

    name: str
    step: float  # median
    steps: tuple[float, ...]
    ceiling_steps: tuple[float, ...]  # the same step in a process of its own, in the same rounds
    profiled: float
    estimated: float


def run_estimates(quick: bool, kept: Kept) -> Report:
    """The device is calibrated once; the operators that make up the models are not measured for the estimates."""
    with MeasurementCache() as cache:
        here = Cluster.from_devices(parse_devices(["cpu", "cpu"])[:1], calibrated=True, cache=cache)
    elsewhere = replace(here, at_hand=())
    rows = [
        as_row(Row, kept.case(build.__name__, make=lambda b=build: asdict(_row(b(quick), here, elsewhere))))  # type: ignore[misc]
        for build in MODELS
    ]
    measured = tuple(Rounds(row.name, {"step": row.steps, CEILING: row.ceiling_steps}, CEILING) for row in rows)
    data = {"rows": [asdict(row) for row in rows]}
    return Report("Whole models, estimated and profiled, against their steps", (_table(rows),), data, measured=measured)


def _row(subject: Subject, here: Cluster, elsewhere: Cluster) -> Row:
    profiled, estimated = (_seconds(subject, cluster) for cluster in (here, elsewhere))
    # One device is estimated, so the machine's ceiling is one process, with the whole batch.
    with operator_threads(1), ceiling(subject.training_step, 1) as independent:
        systems = {"step": lambda: step(subject.model, subject.inputs), CEILING: independent.step}
        seconds = interleave(systems, ROUNDS)
    return Row(subject.name, median(seconds["step"]), seconds["step"], seconds[CEILING], profiled, estimated)


def _seconds(subject: Subject, cluster: Cluster) -> float:
    """Of the whole batch."""
    profile = autopar.profile(subject.model, cluster, example_kwargs=subject.inputs, cache=False)
    whole = max(profile.passes, key=lambda one: one.rows)
    return whole.forward + whole.backward


def _table(rows: list[Row]) -> Table:
    cells = [
        (
            row.name,
            f"{row.step * 1e3:.0f}",
            f"{median(row.ceiling_steps) * 1e3:.0f}",
            f"{row.profiled * 1e3:.0f}",
            f"{row.profiled / row.step:.2f}",
            f"{row.estimated * 1e3:.0f}",
            f"{row.estimated / row.step:.2f}",
        )
        for row in rows
    ]
    return Table(
        "Forward and backward of four samples, one thread",
        ("", "step, ms", "ceiling, ms", "profiled, ms", "/ step", "estimated, ms", "/ step"),
        tuple(cells),
        "Ceiling: the step in a process of its own, in the same rounds. "
        "Profiled: every operator timed within whole passes. Estimated: from FLOPs, bytes and the device's efficiency "
        "curves, no operator of the model having been run.",
    )
