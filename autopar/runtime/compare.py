"""Plans run against each other and against the plain model on one device."""

from __future__ import annotations

import copy
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar.analysis.example import Example, untouched
from autopar.capture import torch_private
from autopar.capture.module_hooks import without_hooks
from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import SILENT, Progress
from autopar.costs.history import Record, remember
from autopar.errors import InputError
from autopar.plan.plan import Plan, Stage
from autopar.planner.predict import predict
from autopar.planner.search import make_plan
from autopar.planner.search_options import SearchOptions
from autopar.runtime.bound_signature import RunSettings
from autopar.runtime.comparison import Comparison, Row
from autopar.runtime.memory_watch import MemoryWatch
from autopar.runtime.module import PipelinedModule
from autopar.runtime.step_recorder import timed
from cost_models import Device
from cost_models.hardware.devices import operator_threads


@dataclass(frozen=True)
class ComparedCall:
    """What every step is called with."""

    example: Example
    settings: RunSettings


@dataclass(frozen=True)
class _Contestant:
    """A plan (or the plain model) on a copy of the model."""

    name: str
    plan: Plan
    model: nn.Module
    step: Callable[[], object]
    watched: Callable[[MemoryWatch], AbstractContextManager[object]]
    close: Callable[[], None]


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
    """Predict and measure every plan (None: the one that the search finds) and the plain model on the first device.

        single A B   single A B   single A B ...
        warm up    | counted from here

    Every contestant has a deep copy of the model, so that the user's keeps its parameters, gradients and running
    statistics; the random state is put back. Operators that run in the caller's thread have the first device's share
    of threads. `record`: every row goes into the history of predictions.
    """
    devices, example = costs.devices, call.example
    alone = Plan((Stage((devices[0].name,)),), n_microbatches=1)
    priced = {name: _priced(plan, example, costs, options) for name, plan in plans.items()}
    with untouched(example.model), operator_threads(devices[0].threads):
        contestants = [_plain("one device", _priced(alone, example, costs, options), call, devices[0])]
        try:
            for name, plan in priced.items():
                progress(f"preparing {name}", 0.0)
                contestants.append(_pipelined(name, plan, call, devices))
            steps = _steps_in_turn(contestants, devices, repeats, progress)
            rows = [
                Row(c.name, c.plan, seconds, _predicted_memory(c.plan, devices), _memory(c, devices))
                for c, seconds in zip(contestants, steps, strict=True)
            ]
        finally:
            for contestant in contestants:
                contestant.close()
    if record:
        remember(
            [
                Record.of(
                    row.plan,
                    example.model,
                    devices,
                    row.steps,
                    source="compare",
                    predicted_memory=max(row.predicted_memory.values(), default=None),
                    measured_memory=max(row.measured_memory.values(), default=None),
                )
                for row in rows
                if row.predicted is not None
            ]
        )
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
    """The plan whose steps are fastest when all are run in turn, by name, with its measured time; and of each plan the
    predicted and the measured seconds (medians). Copies of the model are run, and `record` means the same, as in
    `run_comparison`."""
    devices, example = costs.devices, call.example
    priced = {name: _priced(plan, example, costs, options) for name, plan in plans.items()}
    contestants: list[_Contestant] = []
    with untouched(example.model), operator_threads(devices[0].threads):
        try:
            for name, plan in priced.items():
                progress(f"preparing {name}", 0.0)
                contestants.append(_pipelined(name, plan, call, devices))
            steps = _steps_in_turn(contestants, devices, repeats, progress)
        finally:
            for contestant in contestants:
                contestant.close()
    if record:
        pairs = zip(contestants, steps, strict=True)
        known = [pair for pair in pairs if pair[0].plan.predicted_step_time is not None]
        remember([Record.of(c.plan, example.model, devices, seconds, source="tune") for c, seconds in known])
    measured = {c.name: statistics.median(seconds) for c, seconds in zip(contestants, steps, strict=True)}
    fastest = min(measured, key=lambda name: measured[name])
    table = {name: (plan.predicted_step_time or 0.0, measured[name]) for name, plan in priced.items()}
    # Pricing drops what only the search knows of its own plans.
    best = replace(plans[fastest], predicted_step_time=priced[fastest].predicted_step_time)
    if best.split:
        best = priced[fastest]
    return fastest, replace(best, measured_step_time=measured[fastest]), table


def _steps_in_turn(
    contestants: Sequence[_Contestant], devices: Sequence[Device], repeats: int, progress: Progress
) -> list[tuple[float, ...]]:
    """Seconds of `repeats` steps of each, after one that warms up."""
    steps: list[list[float]] = [[] for _ in contestants]
    for turn in range(repeats + 1):
        for contestant, seconds in zip(contestants, steps, strict=True):
            progress(f"measuring {contestant.name}", turn / (repeats + 1))
            seconds.append(_timed(contestant, devices))
    return [tuple(seconds[1:]) for seconds in steps]


def _priced(plan: Plan | None, example: Example, costs: CostGraph, options: SearchOptions) -> Plan:
    """The plan with its predictions, all from the same costs."""
    if plan is None:
        return make_plan(costs, options)
    plan = plan.on([device.name for device in costs.devices], [device.kind for device in costs.devices])
    if example.batching.obstacle:
        plan = replace(plan, n_microbatches=1)
    stage_of = {node.name: stage for node, stage in plan.assign(example.program).items()}
    return predict(costs, plan, stage_of, options.conditions)


def _plain(name: str, plan: Plan, call: ComparedCall, device: Device) -> _Contestant:
    model = without_hooks(copy.deepcopy(call.example.model)).to(device.torch_device)
    example = call.example
    args, kwargs, target = torch_private.tree_map(
        lambda x: x.to(device.torch_device) if isinstance(x, torch.Tensor) else x,
        (example.args, example.kwargs, example.target),
    )

    def step() -> None:
        _whole_step(model, args, kwargs, replace(example, target=target))

    return _Contestant(name, plan, model, step, lambda watch: watch(device.name), lambda: None)


def _pipelined(name: str, plan: Plan, call: ComparedCall, devices: Sequence[Device]) -> _Contestant:
    example = call.example

    def decide(_: Example) -> Plan:
        raise AssertionError("a plan is given")

    model = without_hooks(copy.deepcopy(example.model))
    module = PipelinedModule(model, devices, decide, plan=plan, settings=call.settings)
    module.prepare(example.args, example.kwargs, loss_fn=example.loss, target=example.target)

    def step() -> None:
        if example.loss is not None:
            module.train_step(*example.args, target=example.target, loss_fn=example.loss, **example.kwargs)
        else:
            _whole_step(module, example.args, example.kwargs, example)

    def watched(watch: MemoryWatch) -> AbstractContextManager[object]:
        in_this_thread = len(plan.used_devices) == 1 and plan.n_microbatches == 1
        return watch(plan.used_devices[0]) if in_this_thread else module.device_context(watch)

    return _Contestant(name, plan, model, step, watched, module.close)


def _whole_step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], example: Example) -> None:
    """Forward and, in training, backward from the loss of the whole batch."""
    with torch.set_grad_enabled(example.training):
        output = model(*args, **kwargs)
        if example.training:
            _loss(output, example).backward()


def _loss(output: Any, example: Example) -> torch.Tensor:
    """`loss_fn`'s; else the output's own `.loss`; else the sum of the means of all outputs with a gradient."""
    if example.loss is not None:
        return example.loss(output, example.target)
    own = getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    means = [x.mean() for x in torch_private.tree_leaves(output) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not means:
        raise InputError("the model returns nothing with a gradient; give loss_fn= and target=")
    return torch.stack([m.to(means[0].device) for m in means]).sum()


def _timed(contestant: _Contestant, devices: Sequence[Device]) -> float:
    """Seconds of a step that starts without gradients."""
    contestant.model.zero_grad(set_to_none=True)
    _, seconds = timed(contestant.step, devices)
    return seconds


def _memory(contestant: _Contestant, devices: Sequence[Device]) -> dict[str, int]:
    """Bytes at the peak of a step of its own (counting slows it down), by place."""
    contestant.model.zero_grad(set_to_none=True)
    watch = MemoryWatch([d for d in devices if d.name in contestant.plan.used_devices])
    resident = [*contestant.model.parameters(), *contestant.model.buffers()]
    with watch.step(resident), contestant.watched(watch):
        contestant.step()
    return watch.peaks


def _predicted_memory(plan: Plan, devices: Sequence[Device]) -> dict[str, int]:
    places = {d.name: d.name if d.shares_process_memory else str(d.torch_device) for d in devices}
    peaks: dict[str, int] = {}  # a device's peak is the same in all its stages
    for stage in plan.stages:
        if stage.peak_memory is not None or stage.sharding is None:
            peaks |= dict.fromkeys(stage.devices, stage.peak_memory or 0)
    total: Counter[str] = Counter()
    for name, peak in peaks.items():
        total[places[name]] += peak
    return dict(total)
