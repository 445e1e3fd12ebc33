"""Predicted and measured steps of several plans, compared for the user."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime

import torch

from autopar.analysis.example import Example
from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import SILENT, Progress
from autopar.costs.history import Record, remember
from autopar.costs.measured import measure_costs, with_shards
from autopar.costs.model_flops import step_work_at_hand
from autopar.options import PlanOptions
from autopar.plan.diff import repeated_plans
from autopar.plan.plan import Plan
from autopar.plan.stage import Stage
from autopar.planner.hint_constraints.one_mesh_plan import asks_for_sharding, checked_width, plan_as_sharded
from autopar.planner.inter_op.config import MeshChoices
from autopar.planner.predict import predict_plan
from autopar.planner.price_sharded import widest_mesh
from autopar.planner.search_at_hand import check_max_shards, shards_at_hand
from autopar.planner.search_options import SearchOptions, search_options
from autopar.runtime.comparing.comparison import Comparison, Row, SystemRow
from autopar.runtime.comparing.contestants import (
    ComparedCall,
    Racer,
    Rounds,
    contestants,
    measured_memory,
    predicted_memory,
    priced,
    runs_as_predicted,
    steps_in_turn,
)
from autopar.runtime.comparing.parameter_copies import ParameterCopies
from autopar.runtime.other_systems.catalogue import CEILING, other_systems
from autopar.runtime.signatures.bound_signature import RunSettings
from cost_models import Device
from cost_models.hardware.devices import usable_cores


def compare_at_hand(
    example: Example,
    devices: tuple[Device, ...],
    plans: Mapping[str, Plan | None],
    options: PlanOptions,
    repeats: int,
    progress: Progress = SILENT,
    systems: Sequence[str] = (),
) -> Comparison:
    """Predict and measure plans on devices at hand; arguments as in `autopar.compare`. No optimizer runs."""
    example, search = search_options(example, replace(options, optimizer="none"), len(devices))
    check_max_shards(options.max_shards, devices)
    if asks_for_sharding(example):
        sharded = None
        if None in plans.values():
            sharded = checked_width(plan_as_sharded(example, devices, search), options.max_shards)
        plans = {name: sharded if plan is None else plan for name, plan in plans.items()}
    asked = [search.n_microbatches if plan is None else plan.n_microbatches for plan in plans.values()]
    most = max((m for m in asked if m is not None), default=None)
    cache = options.cache
    costs = measure_costs(example, devices, n_microbatches=most, cache=cache, progress=progress)
    wanted = options.max_shards if None in plans.values() else None
    at_hand = shards_at_hand(example, costs, search, wanted, cache=cache, progress=progress)
    costs = with_shards(at_hand.costs, widest_mesh(plans.values()), cache=cache, progress=progress)
    call = ComparedCall(example, RunSettings.of(options))
    return _run_comparison(
        call,
        plans,
        costs,
        search,
        repeats,
        meshes=at_hand.meshes,
        record=cache,
        progress=progress,
        systems=systems,
        n_microbatches=options.n_microbatches,
    )


def _run_comparison(
    call: ComparedCall,
    plans: Mapping[str, Plan | None],
    costs: CostGraph,
    options: SearchOptions,
    repeats: int,
    *,
    meshes: MeshChoices | None = None,
    record: bool = False,
    progress: Progress = SILENT,
    systems: Sequence[str] = (),
    n_microbatches: int | None = None,
) -> Comparison:
    """Predict and measure every plan (None: the plan of the search) and the plain model on the first device.

    Of plans that do the same, the first runs. Copies of the model run, so that the user's stays as it is
    (`contestants`). `repeats`: steps of each plan that
    count. `meshes`: that stages of the searched plan may have. `record`: every row goes into the history of
    predictions. `systems`: names of other systems that take turns with the plans, with `n_microbatches`.
    """
    devices, example = costs.devices, call.example
    named = priced(plans, example, costs, options, meshes)
    same = repeated_plans(named)
    ready_plans = {name: plan for name, plan in named.items() if name not in same}
    alone = Plan((Stage((devices[0].name,)),), n_microbatches=1)
    plain = predict_plan(alone, example, costs, options.conditions)
    callers, measured_on = torch.get_num_threads(), _this_machine(devices)
    copies = ParameterCopies(example)
    with (
        contestants(call, ready_plans, devices, progress, plain=plain, threads=devices[0].threads) as ready,
        other_systems(systems, example, devices, n_microbatches, copies.make, callers, progress) as others,
    ):
        racers: list[Racer] = [*ready, *others.ready]
        steps = steps_in_turn(racers, devices, Rounds(repeats), progress)
        rows = [
            Row(
                c.name,
                c.plan,
                seconds,
                predicted_memory(c.plan, devices),
                measured_memory(c, example, devices),
                None if c.plan is plain or runs_as_predicted(c.plan, devices, callers) else callers,
            )
            for c, seconds in zip(ready, steps, strict=False)  # those of other systems come after
        ]
        apart = [SystemRow(s.name, s.how, taken) for s, taken in zip(others.ready, steps[len(ready) :], strict=True)]
        apart += [SystemRow(name, "", (), why) for name, why in others.refused.items()]
    if record:
        remember([_record(row, example, devices) for row in rows if row.error is not None])
    names = tuple(device.name for device in devices)
    ceiling = next((row for row in apart if row.name == CEILING), None)
    rest = tuple(sorted((row for row in apart if row is not ceiling), key=lambda row: systems.index(row.name)))
    return Comparison(
        rows[0],
        tuple(rows[1:]),
        names,
        costs.batch_size,
        example.training,
        rest,
        ceiling,
        measured_on,
        step_work_at_hand(example, devices),
        tuple(device.kind for device in devices),
        same,
    )


def _this_machine(devices: Sequence[Device]) -> str:
    """Such as "2 x AMD EPYC, 1 thread; 2 usable cores, load average 0.3 before; torch 2.13.0; 2026-11-22"."""
    kinds = Counter(device.kind for device in devices)
    text = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    text += f"; {usable_cores()} usable cores"
    if hasattr(os, "getloadavg"):
        text += f", load average {os.getloadavg()[0]:.1f} before"
    return f"{text}; torch {torch.__version__}; {datetime.now().astimezone():%Y-%m-%d}"


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
