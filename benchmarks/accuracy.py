"""How far predicted steps are from measured ones: automatic plans of three architectures under several constraints."""

from __future__ import annotations

import dataclasses
import gc
import os
import tempfile
from collections.abc import Callable
from typing import Any

import autopar
from autopar import Accuracy, Plan
from benchmarks.output import Report, Table
from benchmarks.zoo import Subject, gpt2, resnet, t5

DEVICES = ["cpu", "cpu"]
MODELS: tuple[Callable[[bool], Subject], ...] = (resnet, gpt2, t5)
# What each plan fixes, next to the free one: pure pipelines under every schedule, few and many micro-batches.
CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"max_replicas": 1},
    {"max_replicas": 1, "schedule": "gpipe", "n_microbatches": 2},
    {"max_replicas": 1, "schedule": "1f1b", "n_microbatches": 4},
    {"max_replicas": 1, "schedule": "zb-h1", "n_microbatches": 4},
)
REPEATS = 3


def run_accuracy(quick: bool) -> Report:
    """In a history of its own: measurements start from nothing, too."""
    before = os.environ.get("AUTOPAR_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOPAR_CACHE_DIR"] = folder
        try:
            for build in MODELS[:2] if quick else MODELS:
                _compare(build(quick))
                gc.collect()  # copies of a model refer to themselves, and the next ones need the memory
            found = autopar.accuracy()
        finally:
            if before is None:
                del os.environ["AUTOPAR_CACHE_DIR"]
            else:
                os.environ["AUTOPAR_CACHE_DIR"] = before
    rows = [dataclasses.asdict(record) | {"time": record.time.isoformat()} for record in found.records]
    return Report("Predicted steps against measured ones", (_distributions(found), _records(found)), {"rows": rows})


def _compare(subject: Subject) -> None:
    def planned(constraints: dict[str, Any]) -> Plan:
        return autopar.plan(subject.model, DEVICES, example_kwargs=subject.inputs, tune=0, **constraints)

    plans: dict[str, Plan | None] = {"free": None}
    plans |= {str(number): planned(constraints) for number, constraints in enumerate(CONSTRAINTS)}
    autopar.compare(subject.model, DEVICES, plans, example_kwargs=subject.inputs, repeats=REPEATS)


def _distributions(found: Accuracy) -> Table:
    assert found.overall is not None
    named = {"all": found.overall, **found.by_schedule}
    rows = tuple(
        (name, str(d.n), f"{d.median:.1%}", f"{d.p95:.1%}", f"{d.worst:.1%}", f"{d.signed_median:+.1%}")
        for name, d in named.items()
    )
    note = "|predicted - measured| / measured of the step time; the signed median is above 0 where steps were faster."
    return Table("Error of predictions", ("", "steps", "median", "p95", "worst", "signed median"), rows, note)


def _records(found: Accuracy) -> Table:
    rows = tuple(
        (
            r.model,
            r.schedule,
            str(r.stages),
            str(r.devices),
            str(r.n_microbatches),
            f"{r.predicted * 1e3:.0f}",
            f"{r.measured * 1e3:.0f}",
            f"{r.error:+.1%}",
        )
        for r in found.records
    )
    columns = ("model", "schedule", "stages", "devices", "micro-batches", "predicted, ms", "measured, ms", "error")
    return Table("Every plan, and the plain model on one device", columns, rows)
