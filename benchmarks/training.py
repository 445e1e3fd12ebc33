"""Whole training steps of the plain model, of autopar's plans and of a sweep of hand-made plans, all in turn."""

from __future__ import annotations

import dataclasses
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import autopar
from autopar import PipelinedModule, Plan
from autopar.analysis.batching import study
from autopar.analysis.example import untouched
from autopar.capture.program import capture
from autopar.costs import cost_graph
from autopar.costs.cost_graph import CostGraph
from autopar.costs.measured import Measured
from autopar.planner.search import make_plan
from autopar.planner.search_options import SearchOptions
from benchmarks.figures import split_size_curve
from benchmarks.models import Workload
from benchmarks.output import Report, Table
from benchmarks.sweep import Grid, Sweep, grid_plans, grid_steps, summary, training_step
from benchmarks.timing import Step, interleave, ratio
from cost_models import MeasurementCache, parse_devices
from cost_models.hardware.devices import operator_threads

log = logging.getLogger(__name__)

DEVICES = ("cpu", "cpu")
PLAIN, PLAIN_THREADS = "plain model, 1 thread", f"plain model, {len(DEVICES)} threads"
FREE, PURE, PURE_CALL = "autopar", "autopar, pure pipeline", "autopar, pure pipeline, pm() and loss.backward()"


@dataclass(frozen=True)
class Scale:
    rounds: int  # of the plain model, autopar's plans and all of the grid
    rounds_apart: int  # of two intra-op threads, and of the module wrapped for one device, each against the plain model
    grid: Grid


FULL = Scale(5, 7, Grid(cuts=7, counts=(1, 2, 3, 4, 6, 8, 12)))
QUICK = Scale(2, 2, Grid(cuts=2, counts=(1, 2, 4)))


@dataclass(frozen=True)
class Row:
    """One system that runs the step."""

    name: str
    plan: str  # in words, "" for the plain model
    n_microbatches: int | None  # None for the plain model
    predicted: float | None  # s
    measured: float  # s, median
    speedup: float  # median over rounds of the plain model's time on one thread / this
    steps: tuple[float, ...]  # s, one per round with the other rows and the sweep; for PLAIN_THREADS with PLAIN alone


@dataclass(frozen=True)
class Result:
    title: str
    rows: tuple[Row, ...]
    first_plan: float  # s, capture, profile and search with an empty cache
    second_plan: float  # s, with a full one
    wrap: float  # step time of the module wrapped for one device / of the plain model, ratio of medians
    sweep: Sweep

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)


def run_training(workload: Workload, scale: Scale) -> Report:
    with operator_threads(1), _empty_cache():
        result = measure(workload, scale)
    plain, auto = result.row(PLAIN), result.row(FREE)
    return Report(
        f"Training step of {result.title}",
        (_comparison(result), _costs_of_planning(result), _sweep_table(result.sweep)),
        dataclasses.asdict(result),
        lambda path: split_size_curve(
            result.sweep, result.title, plain.steps, auto.steps, auto.n_microbatches or 1, path
        ),
    )


def measure(workload: Workload, scale: Scale) -> Result:
    """All of it, on `DEVICES`; the model's gradients are cleared, its running statistics move.

    All systems share the one model: its parameters stay in place, so that only one copy is held.
    """
    log.info("planning with an empty cache")
    first, first_plan = _timed_plan(workload)
    first.close()
    log.info("planned in %.1f s; again with a full one", first_plan)
    free, second_plan = _timed_plan(workload)
    pure, _ = _timed_plan(workload, max_replicas=1)
    costs = _cost_graph(workload)
    # The caller's loss needs the whole output, so pm() and loss.backward() have a best plan of their own.
    by_call = make_plan(costs, SearchOptions(max_replicas=1))
    called = autopar.parallelize(workload.model, list(DEVICES), plan=by_call)
    assert free.plan is not None
    assert pure.plan is not None
    plans: dict[str, Plan | None] = {PLAIN: None, FREE: free.plan, PURE: pure.plan, PURE_CALL: by_call}
    systems: dict[str, Step] = {
        PLAIN: workload.step,
        FREE: training_step(workload, free),
        PURE: training_step(workload, pure),
        PURE_CALL: lambda: workload.loss(called(**workload.inputs), workload.target).backward(),
    }
    grid = list(grid_plans(costs, scale.grid))
    with grid_steps(workload, DEVICES, grid) as steps:
        log.info("%d rounds of %d systems in turn", scale.rounds, len(systems) + len(steps))
        seconds = interleave({**systems, **steps}, scale.rounds, workload.clear)
    sweep = summary(grid, seconds, seconds[FREE], seconds[PURE])
    predicted = {name: plan.predicted_step_time for name, plan in plans.items() if plan}
    predicted[PLAIN] = free.plan.single_device_time
    rows = [_row(name, plan, predicted.get(name), seconds[name], seconds[PLAIN]) for name, plan in plans.items()]
    log.info("wrapping for one device")
    wrap = _wrap_cost(workload, scale.rounds_apart)
    # Last and apart: OpenMP's second thread keeps spinning for a while, which may slow down what follows.
    systems = {PLAIN: workload.step, PLAIN_THREADS: lambda: _step_on_threads(workload, len(DEVICES))}
    seconds = interleave(systems, scale.rounds_apart, workload.clear)
    rows.append(_row(PLAIN_THREADS, None, None, seconds[PLAIN_THREADS], seconds[PLAIN]))
    for module in (free, pure, called):
        module.close()
    workload.clear()
    return Result(workload.title, tuple(rows), first_plan, second_plan, wrap, sweep)


def _row(
    name: str, plan: Plan | None, predicted: float | None, seconds: tuple[float, ...], plain: tuple[float, ...]
) -> Row:
    """`plain`: s of the plain model on one thread, in the same rounds."""
    count = plan.n_microbatches if plan else None
    return Row(name, words(plan) if plan else "", count, predicted, median(seconds), ratio(plain, seconds), seconds)


def words(plan: Plan) -> str:
    """`cpu:0 | cpu:1, n_microbatches 4, 1f1b`: stages apart, replicas together."""
    stages = " | ".join("+".join(stage.devices) for stage in plan.stages)
    return f"{stages}, n_microbatches {plan.n_microbatches}, {plan.schedule}"


def _timed_plan(workload: Workload, **options: Any) -> tuple[PipelinedModule, float]:
    start = time.perf_counter()
    module = autopar.parallelize(
        workload.model,
        list(DEVICES),
        example_kwargs=workload.inputs,
        target=workload.target,
        loss_fn=workload.loss,
        tune=0,
        **options,
    )
    return module, time.perf_counter() - start


def _cost_graph(workload: Workload) -> CostGraph:
    """The costs that the plans were made from, read from the cache."""
    with MeasurementCache() as cache, untouched(workload.model):
        program = capture(workload.model, (), workload.inputs)
        bound = program.bind((), workload.inputs)
        assert bound is not None
        batching = study(program, bound[0])
        source = Measured(
            program,
            batching,
            bound[0],
            parse_devices(list(DEVICES)),
            training=True,
            loss_fn=workload.loss,
            target=workload.target,
            cache=cache,
        )
        return cost_graph.build(program, batching, source, training=True)


def _step_on_threads(workload: Workload, count: int) -> None:
    with operator_threads(count):
        workload.step()


def _wrap_cost(workload: Workload, rounds: int) -> float:
    module = autopar.parallelize(workload.model, ["cpu"], example_kwargs=workload.inputs)
    steps: dict[str, Step] = {
        "plain": workload.step,
        "wrapped": lambda: workload.loss(module(**workload.inputs), workload.target).backward(),
    }
    seconds = interleave(steps, rounds, workload.clear)
    module.close()
    return median(seconds["wrapped"]) / median(seconds["plain"])


@contextmanager
def _empty_cache() -> Iterator[None]:
    """Measurements go to a new directory, which is gone afterwards."""
    with (
        tempfile.TemporaryDirectory() as directory,
        patch.dict(os.environ, AUTOPAR_CACHE_DIR=str(Path(directory))),
    ):
        yield


def _comparison(result: Result) -> Table:
    rows = []
    for row in result.rows:
        predicted = ("", "")
        if row.predicted is not None:
            predicted = (f"{row.predicted:.3f}", f"{row.predicted / row.measured:.2f}")
        spread = f"{min(row.steps):.3f}-{max(row.steps):.3f}"
        rows.append((row.name, row.plan, f"{row.measured:.3f}", spread, *predicted, f"{row.speedup:.2f}"))
    return Table(
        "Forward and backward",
        ("", "plan", "measured s", "range s", "predicted s", "predicted / measured", "speed-up"),
        tuple(rows),
        f"Medians of {len(result.row(PLAIN).steps)} rounds, in which these systems and all plans of the sweep ran in "
        "turn. The speed-up is the median over the rounds of the plain model's time on one thread / the system's; two "
        "threads were measured in rounds of their own.",
    )


def _costs_of_planning(result: Result) -> Table:
    return Table(
        "What autopar costs",
        ("", "value"),
        (
            ("first plan, empty cache: capture, profile, search", f"{result.first_plan:.1f} s"),
            ("second plan, full cache", f"{result.second_plan:.1f} s"),
            ("step of the model wrapped for one device / of the plain model", f"{result.wrap:.3f}"),
        ),
    )


def _sweep_table(sweep: Sweep) -> Table:
    return Table(
        "The sweep, fastest first",
        ("", "measured s", "range s", "/ automatic", "predicted s", "predicted / measured"),
        tuple(
            (
                point.name,
                f"{point.measured:.3f}",
                f"{min(point.steps):.3f}-{max(point.steps):.3f}",
                f"{point.over_auto:.3f}",
                f"{point.predicted:.3f}",
                f"{point.predicted / point.measured:.2f}",
            )
            for point in sorted(sweep.points, key=lambda point: point.measured)
        ),
        f"Medians of the same rounds as above. Automatic / best of the sweep: {sweep.auto_over_best:.3f}; pure "
        f"pipelines only: {sweep.pure_over_best:.3f}. These rounds also choose the best, which favours it.",
    )
