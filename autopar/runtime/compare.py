"""Predicted and measured steps of several plans: a comparison for the user, or the fastest plan to follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from autopar.analysis.example import Example
from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import SILENT, Progress
from autopar.costs.history import Record, remember
from autopar.plan.plan import Plan, Stage
from autopar.planner.predict import predict_plan
from autopar.planner.search import make_plan
from autopar.planner.search_options import SearchOptions
from autopar.runtime.comparison import Comparison, Row
from autopar.runtime.contestants import ComparedCall, contestants, measured_memory, steps_in_turn
from cost_models import Device


def run_comparison(
    call: ComparedCall,
    plans: Mapping[str, Plan | None],
    costs: CostGraph,
    options: SearchOptions,
    repeats: int,
    *,
    record: bool = False,
    progress: Progress = SILENT,
) -> Comparison:
    """Predict and measure every plan (None: the plan of the search) and the plain model on the first device.

    Copies of the model run, so that the user's stays as it is (`contestants`). `repeats`: steps of each plan that
    count. `record`: every row goes into the history of predictions.
    """
    devices, example = costs.devices, call.example
    priced = _priced(plans, example, costs, options)
    alone = Plan((Stage((devices[0].name,)),), n_microbatches=1)
    plain = predict_plan(alone, example, costs, options.conditions)
    with contestants(call, priced, devices, progress, plain=plain) as ready:
        steps = steps_in_turn(ready, devices, repeats, progress)
        rows = [
            Row(c.name, c.plan, seconds, _predicted_memory(c.plan, devices), measured_memory(c, devices))
            for c, seconds in zip(ready, steps, strict=True)
        ]
    if record:
        remember([_record(row, example, devices) for row in rows if row.predicted is not None])
    names = tuple(device.name for device in devices)
    return Comparison(rows[0], tuple(rows[1:]), names, costs.batch_size, example.training)


def tune(
    call: ComparedCall,
    plans: Mapping[str, Plan],
    costs: CostGraph,
    options: SearchOptions,
    repeats: int,
    *,
    record: bool = False,
    progress: Progress = SILENT,
) -> tuple[str, Plan, dict[str, tuple[float, float]]]:
    """The name of the plan with the fastest steps, that plan with its measured time, and for every plan by name the
    predicted and the measured (median) seconds.

    Copies of the model run, and `repeats` and `record` mean the same, as in `run_comparison`.
    """
    devices, example = costs.devices, call.example
    priced = _priced(plans, example, costs, options)
    with contestants(call, priced, devices, progress) as ready:
        steps = steps_in_turn(ready, devices, repeats, progress)
    if record:
        pairs = zip(ready, steps, strict=True)
        predicted = [pair for pair in pairs if pair[0].plan.predicted_step_time is not None]
        remember([Record.of(c.plan, example.model, devices, seconds, source="tune") for c, seconds in predicted])
    measured = {c.name: median(seconds) for c, seconds in zip(ready, steps, strict=True)}
    fastest = min(measured, key=lambda name: measured[name])
    table = {name: (plan.predicted_step_time or 0.0, measured[name]) for name, plan in priced.items()}
    # A plan of the search keeps its bounds and its explanation, which pricing drops. A user's plan that names modules
    # is complete only once it is priced.
    best = replace(plans[fastest], predicted_step_time=priced[fastest].predicted_step_time)
    if best.split:
        best = priced[fastest]
    return fastest, replace(best, measured_step_time=measured[fastest]), table


def _priced(
    plans: Mapping[str, Plan | None], example: Example, costs: CostGraph, options: SearchOptions
) -> dict[str, Plan]:
    """The plans with their predictions, all from the same costs; None becomes the plan of the search."""
    return {
        name: make_plan(costs, options) if plan is None else predict_plan(plan, example, costs, options.conditions)
        for name, plan in plans.items()
    }


def _record(row: Row, example: Example, devices: Sequence[Device]) -> Record:
    return Record.of(
        row.plan,
        example.model,
        devices,
        row.steps,
        source="compare",
        predicted_memory=max(row.predicted_memory.values(), default=None),
        measured_memory=max(row.measured_memory.values(), default=None),
    )


def _predicted_memory(plan: Plan, devices: Sequence[Device]) -> dict[str, int]:
    """Bytes at the peak, by place (`MemoryWatch`)."""
    places = {d.name: d.name if d.shares_process_memory else str(d.torch_device) for d in devices}
    peaks: dict[str, int] = {}  # by device; all stages of a device have the same peak
    for stage in plan.stages:
        if stage.peak_memory is not None or stage.sharding is None:
            peaks |= dict.fromkeys(stage.devices, stage.peak_memory or 0)
    total: Counter[str] = Counter()
    for name, peak in peaks.items():
        total[places[name]] += peak
    return dict(total)
