"""Peaks of every worker under plans: stated by the plan, and counted in a step that runs.

What a worker holds is counted by `MemoryWatch`: every storage from its first use by the worker until it is freed. The
optimizer's step counts on the device whose parameters it updates, and its states are there before the step.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np
import torch
from torch import nn

import autopar
from autopar import Plan
from autopar.analysis.example import Example, capture_example, untouched
from autopar.analysis.operators import compute_nodes
from autopar.analysis.own_loss import own_loss
from autopar.costs import cost_graph
from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import CostTable, Progress
from autopar.costs.measured import Measured
from autopar.costs.step_rehearsal import StepRehearsal
from autopar.planner.arrangement import Conditions
from autopar.planner.predict import arranged, completed, predict_plan
from autopar.planner.rehearsed_memory import StagePeak, rehearsed
from autopar.runtime.memory_watch import MemoryWatch
from cost_models import Device, Link, parse_devices

Maker = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Peak:
    """The fullest worker of a stage, in bytes."""

    stage: int
    stated: int  # by the plan: the most that any run holds
    certain: int  # the least that any run holds
    formula: int  # of the partition search
    measured: int

    @property
    def ratio(self) -> float:
        return self.stated / self.measured


@dataclass(frozen=True)
class Call:
    """A training step: of `train_step`, whose loss is in the last stage; else the caller computes the loss himself."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None  # None: the loss that the model returns
    target: Any = None
    train_step: bool = True

    @property
    def keywords(self) -> dict[str, Any]:
        return dict(self.kwargs or {})


@dataclass(frozen=True)
class Subject:
    """A model with a call, captured for a number of CPU workers."""

    model: nn.Module
    call: Call
    devices: tuple[Device, ...]
    example: Example
    costs: CostGraph

    @classmethod
    def of(cls, model: nn.Module, call: Call, workers: int) -> Subject:
        devices = parse_devices(["cpu"] * workers)
        loss, target = None, None
        if call.train_step:
            loss, target = call.loss_fn or own_loss, call.target
        example = capture_example(model, devices, call.args, call.keywords, loss_fn=loss, target=target)
        return cls(model, call, devices, example, costs_of_bytes(example, devices))


def peaks(subject: Subject, plan: Plan, *, optimizer: str, maker: Maker, steps: int = 2) -> list[Peak]:
    """For each stage of `plan`, what it states and the most that `steps` steps hold."""
    plan = plan.on([device.name for device in subject.devices])
    rehearsals, formula = stated(subject, plan, optimizer)
    measured = measure(subject, plan, maker, steps)
    return [
        Peak(index, one.peak, one.certain, other, max(measured[name] for name in stage.devices))
        for index, (one, other, stage) in enumerate(zip(rehearsals, formula, plan.stages, strict=True))
    ]


def stated(subject: Subject, plan: Plan, optimizer: str) -> tuple[Sequence[StagePeak], list[int]]:
    """For each stage of a plan the rehearsed peak, and bytes by the search's formula."""
    example, costs = subject.example, subject.costs
    conditions = Conditions(optimizer, example.stage_loss is not None)
    stage_of = {node.name: stage for node, stage in plan.assign(example.program, example.batching.storages).items()}
    atoms, arrangement = arranged(costs, completed(plan, example, costs), stage_of)
    peaks = [peak for peak in rehearsed(costs, atoms, arrangement, conditions).stages if peak is not None]
    assert len(peaks) == len(plan.stages), "the plans of the benchmark can be rehearsed"
    formula = predict_plan(plan, example, replace(costs, rehearsal=None), conditions)
    return peaks, [stage.peak_memory or 0 for stage in formula.stages]


class _BytesOnly(Measured):
    """Costs of operators that all take the same time: nothing is measured, since only bytes matter."""

    def tables(self, progress: Progress) -> tuple[CostTable, ...]:
        nodes = tuple(node.name for node in compute_nodes(self._program.graph))
        seconds = np.full((1, len(nodes)), 1e-3)
        rows = (max(self._program.batch_size, 1),)
        kinds = dict.fromkeys(device.kind for device in self.devices)
        return tuple(CostTable(kind, 1, nodes, rows, seconds, 2 * seconds, np.zeros((1, 2))) for kind in kinds)

    def links(self) -> dict[tuple[str, str], Link]:
        return {pair: Link(1e-6, 1e10) for pair in permutations([device.name for device in self.devices], 2)}

    def accumulate(self) -> float:
        return 1e-10


def costs_of_bytes(example: Example, devices: Sequence[Device]) -> CostGraph:
    """The cost graph of a call with true bytes and equal times."""
    with untouched(example.model):
        source = _BytesOnly.of(example, devices)
        costs = cost_graph.build(example.program, example.batching, source, training=example.training)
    return replace(costs, rehearsal=StepRehearsal.at_hand(example, devices))


# -- steps that run ---------------------------------------------------------------------------------------------------


def measure(subject: Subject, plan: Plan, maker: Maker, steps: int) -> dict[str, int]:
    """By device the most bytes in each of `steps` steps after the first."""
    module = autopar.parallelize(subject.model, ["cpu"] * len(subject.devices), plan=plan)
    try:
        if subject.call.train_step:
            module.adopt(subject.example)  # it need not be captured again
        _step(module, subject.call, plan, None)
        optimizers = {name: maker(parameters) for name, parameters in _updated(subject, plan).items()}
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        found: dict[str, int] = defaultdict(int)
        for _ in range(steps):
            for name, peak in _watched(module, subject.call, plan, subject.devices, optimizers).items():
                found[name] = max(found[name], peak)
        return dict(found)
    finally:
        module.close()


def _watched(
    module: nn.Module,
    call: Call,
    plan: Plan,
    devices: Sequence[Device],
    optimizers: Mapping[str, torch.optim.Optimizer],
) -> dict[str, int]:
    gc.collect()  # tensors in circles of references must not be freed meanwhile
    watch = MemoryWatch(devices)
    gc.disable()
    try:
        with watch.step([]):
            for name, optimizer in optimizers.items():
                with watch(name):
                    for state in optimizer.state.values():
                        for value in state.values():
                            value.detach()  # touched: it is there from the start
            held = _step(module, call, plan, watch)
            for name, optimizer in optimizers.items():
                with watch(name):
                    optimizer.step()
            del held
    finally:
        gc.enable()
        module.zero_grad()
    return watch.peaks


def _step(module: Any, call: Call, plan: Plan, watch: MemoryWatch | None) -> Any:
    """Forward and backward; returns what the caller holds to the step's end. The caller's own loss is not counted."""
    plain = len(plan.used_devices) == 1 and plan.n_microbatches == 1 and not plan.stages[0].recompute
    context: AbstractContextManager[object] = nullcontext()
    if watch is not None:
        context = watch(plan.used_devices[0]) if plain else module.device_context(watch)
    with context:
        if call.train_step and call.loss_fn is None:
            return module.train_step(*call.args, **call.keywords)
        if call.train_step:
            return module.train_step(*call.args, target=call.target, loss_fn=call.loss_fn, **call.keywords)
        output = module(*call.args, **call.keywords)
    if call.loss_fn is None:
        loss, gradient = output.loss, None
    else:
        loss, (gradient,) = output, torch.autograd.grad(call.loss_fn(output, call.target), [output])
    context = nullcontext()
    if watch is not None:
        context = watch(plan.used_devices[0]) if plain else module.device_context(watch)
    with context:
        loss.backward(gradient)
    return output


def _updated(subject: Subject, plan: Plan) -> dict[str, list[nn.Parameter]]:
    """By device the parameters that it holds for the optimizer: the first stage's that reads them, first replica's."""
    example, rehearsal = subject.example, subject.costs.rehearsal
    assert rehearsal is not None
    stage_of = {node.name: stage for node, stage in plan.assign(example.program, example.batching.storages).items()}
    parameters = dict(subject.model.named_parameters(remove_duplicate=False))
    found: dict[str, list[nn.Parameter]] = defaultdict(list)
    seen: set[int] = set()
    for stage, lowered in zip(plan.stages, rehearsal.lowered(stage_of).stages, strict=True):
        for name in lowered.parameters:
            parameter = parameters.get(name)
            if parameter is not None and parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                found[stage.devices[0]].append(parameter)
    return dict(found)


# -- plans ------------------------------------------------------------------------------------------------------------


def usual_plans(first: str, cuts: Sequence[str]) -> Iterator[tuple[str, Plan]]:
    """One device, pipelines of two and three stages, and replicas. `first`: a module of the first stage; `cuts`: the
    modules at which the second of two stages, and the second and third of three start."""
    two = {first: 0, cuts[0]: 1}
    three = {first: 0, cuts[1]: 1, cuts[2]: 2}
    yield "one device", Plan.from_split({first: 0}, n_microbatches=1)
    yield "one device, 4 micro-batches", Plan.from_split({first: 0}, n_microbatches=4, schedule="gpipe")
    for schedule in ("gpipe", "1f1b", "zb-h1"):
        yield f"2 stages, {schedule}", Plan.from_split(two, n_microbatches=4, schedule=schedule)
        yield f"3 stages, {schedule}", Plan.from_split(three, n_microbatches=4, schedule=schedule)
    yield "2 stages, 1f1b, recomputed", Plan.from_split(two, n_microbatches=4, recompute=(0, 1))
    yield "3 stages, gpipe, recomputed", Plan.from_split(three, n_microbatches=4, schedule="gpipe", recompute=(0, 1, 2))
    pair = ("cpu:0", "cpu:1")
    yield "2 replicas", Plan.from_split({first: 0}, n_microbatches=4, schedule="gpipe", devices=[pair])
    yield "2 replicas, then 1", Plan.from_split(two, n_microbatches=4, devices=[pair, "cpu:2"])
