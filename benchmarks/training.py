"""Whole training steps of the plain model, of autopar's plans and of a sweep of hand-made plans, all in turn."""

from __future__ import annotations

import dataclasses
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import autopar
from autopar import Plan
from autopar.analysis.batching import study
from autopar.analysis.example import untouched
from autopar.capture.program import capture
from autopar.costs import cost_graph
from autopar.costs.cost_graph import CostGraph
from autopar.costs.measured import Measured
from autopar.plan.diff import run_alike
from autopar.planner.search import make_plan
from autopar.planner.search_options import SearchOptions
from autopar.runtime.other_systems.independent import CEILING, ceiling
from benchmarks.figures import split_size_curve
from benchmarks.kept import Kept
from benchmarks.models import Workload
from benchmarks.output import Report, Rounds, Table
from benchmarks.sweep import (
    Final,
    Grid,
    GridPlan,
    Sweep,
    grid_plans,
    grid_steps,
    summary,
    training_step,
)
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
    final_rounds: dict[str, tuple[float, ...]]  # s, of all systems in the rounds of `finals`
    finals: tuple[Final, ...]  # FREE against the best of the sweep, PURE against the best pipeline of it

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)


def run_training(build: Callable[[bool], Workload], quick: bool, kept: Kept) -> Report:
    return report_of(build(quick), QUICK if quick else FULL, kept)


def report_of(workload: Workload, scale: Scale, kept: Kept) -> Report:
    with operator_threads(1), _empty_cache():
        result = measure(workload, scale, kept)
    plain, independent, auto = result.row(PLAIN), result.row(CEILING), result.row(FREE)
    return Report(
        f"Training step of {result.title}",
        (_comparison(result), _final_table(result), _costs_of_planning(result), _sweep_table(result.sweep)),
        dataclasses.asdict(result),
        lambda path: split_size_curve(
            result.sweep, result.title, plain.steps, independent.steps, auto.steps, auto.n_microbatches or 1, path
        ),
        _rounds(result),
    )


def _rounds(result: Result) -> tuple[Rounds, ...]:
    """All times, by the rounds that they were taken in."""
    together = {row.name: row.steps for row in result.rows if row.name != PLAIN_THREADS}
    together |= {point.name: point.steps for point in result.sweep.points}
    threads = {PLAIN_THREADS: result.row(PLAIN_THREADS).steps}
    return (
        Rounds(result.title, together, CEILING),
        Rounds(f"{result.title}, finals", result.final_rounds, CEILING),
        # No ceiling: OpenMP's second thread spins on after its step, and would slow independent processes down.
        Rounds(f"{result.title}, {len(DEVICES)} threads", threads),
    )


@dataclass(frozen=True)
class _Plans:
    """All that is decided before the first round. A run that goes on keeps them."""

    first: float  # s, capture, profile and search with an empty cache
    second: float  # s, with a full one
    free: Plan
    pure: Plan
    called: Plan  # for pm() and loss.backward(): the caller's loss needs the whole output
    grid: tuple[GridPlan, ...]

    def to_data(self) -> dict[str, Any]:
        """As JSON has it."""
        plans = {name: getattr(self, name).to_json() for name in ("free", "pure", "called")}
        return {"first": self.first, "second": self.second, **plans, "grid": [one.to_data() for one in self.grid]}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> _Plans:
        plans = {name: Plan.from_json(data[name]) for name in ("free", "pure", "called")}
        return cls(data["first"], data["second"], **plans, grid=tuple(map(GridPlan.of, data["grid"])))


def _planned(workload: Workload, grid: Grid) -> _Plans:
    log.info("planning with an empty cache")
    _, first = _timed_plan(workload)
    log.info("planned in %.1f s; again with a full one", first)
    free, second = _timed_plan(workload)
    pure, _ = _timed_plan(workload, max_replicas=1)
    costs = _cost_graph(workload)
    called = make_plan(costs, SearchOptions(max_replicas=1))
    return _Plans(first, second, free, pure, called, tuple(grid_plans(costs, grid)))


def measure(workload: Workload, scale: Scale, kept: Kept) -> Result:
    """All of it, on `DEVICES`; the model's gradients are cleared, its running statistics move.

    All systems share the one model: its parameters stay in place, so that only one copy is held.
    """
    made = _Plans.of(kept.case("plans", make=lambda: _planned(workload, scale.grid).to_data()))
    plans: dict[str, Plan | None] = {PLAIN: None, FREE: made.free, PURE: made.pure, PURE_CALL: made.called}
    free, pure, called = (
        autopar.parallelize(workload.model, list(DEVICES), plan=plan) for plan in (made.free, made.pure, made.called)
    )
    systems: dict[str, Step] = {
        PLAIN: workload.step,
        FREE: training_step(workload, free),
        PURE: training_step(workload, pure),
        PURE_CALL: lambda: workload.loss(called(**workload.inputs), workload.target).backward(),
    }
    with (
        ceiling(workload.training_step, len(DEVICES)) as independent,
        grid_steps(workload, DEVICES, made.grid) as steps,
    ):
        systems[CEILING] = independent.step

        def clear() -> None:
            workload.clear()
            independent.clear()

        log.info("%d rounds of %d systems in turn", scale.rounds, len(systems) + len(steps))
        seconds = interleave({**systems, **steps}, scale.rounds, clear, kept.part("all"))
        sweep = summary(made.grid, seconds, seconds[FREE])
        log.info("%d rounds of the best ones", scale.rounds_apart)
        pairs = ((FREE, made.free, sweep.fastest.name), (PURE, made.pure, sweep.fastest_pipeline.name))
        final_rounds, finals = _finals(
            pairs, {**systems, **steps}, made.grid, scale.rounds_apart, clear, kept.part("finals")
        )
    predicted = {name: plan.predicted_step_time for name, plan in plans.items() if plan}
    predicted[PLAIN] = made.free.single_device_time
    plans[CEILING] = None
    rows = [_row(name, plan, predicted.get(name), seconds[name], seconds[PLAIN]) for name, plan in plans.items()]
    log.info("wrapping for one device")
    wrap = _wrap_cost(workload, scale.rounds_apart, kept.part("wrapped"))
    # Last and apart: OpenMP's second thread keeps spinning for a while, which may slow down what follows.
    systems = {PLAIN: workload.step, PLAIN_THREADS: lambda: _step_on_threads(workload, len(DEVICES))}
    seconds = interleave(systems, scale.rounds_apart, workload.clear, kept.part("threads"))
    rows.append(_row(PLAIN_THREADS, None, None, seconds[PLAIN_THREADS], seconds[PLAIN]))
    for module in (free, pure, called):
        module.close()
    workload.clear()
    return Result(workload.title, tuple(rows), made.first, made.second, wrap, sweep, final_rounds, finals)


def _finals(
    pairs: Sequence[tuple[str, Plan, str]],
    steps: Mapping[str, Step],
    grid: Sequence[GridPlan],
    rounds: int,
    clear: Step,
    kept: Kept,
) -> tuple[dict[str, tuple[float, ...]], tuple[Final, ...]]:
    """Seconds of all that ran, and who is faster.

    `pairs`: an automatic plan's name, the plan, and the name of its rival in the grid.
    """
    rivals = {str(one): one.plan for one in grid}
    same = {name: run_alike(plan, rivals[rival]) for name, plan, rival in pairs}
    racing = {CEILING} | {name for name, _, _ in pairs} | {rival for name, _, rival in pairs if not same[name]}
    seconds = interleave({name: steps[name] for name in steps if name in racing}, rounds, clear, kept)
    return seconds, tuple(
        Final.of(rival, seconds[name], seconds.get(rival, ()), same=same[name]) for name, _, rival in pairs
    )


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


def _timed_plan(workload: Workload, **options: Any) -> tuple[Plan, float]:
    call: dict[str, Any] = {"example_kwargs": workload.inputs, "target": workload.target, "loss_fn": workload.loss}
    start = time.perf_counter()
    module = autopar.parallelize(workload.model, list(DEVICES), tune=0, **call, **options)
    seconds, plan = time.perf_counter() - start, module.plan
    module.close()
    assert plan is not None
    return plan, seconds


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


def _wrap_cost(workload: Workload, rounds: int, kept: Kept) -> float:
    module = autopar.parallelize(workload.model, ["cpu"], example_kwargs=workload.inputs)
    steps: dict[str, Step] = {
        "plain": workload.step,
        "wrapped": lambda: workload.loss(module(**workload.inputs), workload.target).backward(),
    }
    seconds = interleave(steps, rounds, workload.clear, kept)
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


def _final_table(result: Result) -> Table:
    return Table(
        "Automatic plans against the best of the sweep",
        ("", "its rival", "measured s", "rival s", "/ rival", "interval"),
        tuple(_final_line(name, final) for name, final in zip((FREE, PURE), result.finals, strict=True)),
        f"{len(result.finals[0].automatic)} rounds of their own, in turn: the rounds of the sweep chose the rival, "
        "which favours it there. Medians; of the ratio over rounds, with its bootstrap interval.",
    )


def _final_line(name: str, final: Final) -> tuple[str, ...]:
    if final.same:
        return (name, f"{final.rival}: the same plan", f"{median(final.automatic):.3f}", *[""] * 3)
    times = (f"{median(final.automatic):.3f}", f"{median(final.best):.3f}", f"{final.over_best:.3f}")
    found = final.interval
    return (name, final.rival, *times, f"{found.low:.3f}-{found.high:.3f} ({found.level:.0%})")


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
        "Medians of the same rounds as the first table. The lowest of many medians is low partly by luck.",
    )
