"""A plan for devices at hand: measure operators, search, and with `tune` run the best plans and take the fastest."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from autopar.analysis.example import Example
from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import SILENT, Progress
from autopar.costs.measured import measure_costs, with_shards
from autopar.costs.model_flops import step_work_at_hand
from autopar.options import PlanOptions
from autopar.plan.fingerprint import fingerprint
from autopar.plan.plan import Plan, with_notes
from autopar.planner.hint_constraints.one_mesh_plan import (
    asks_for_sharding,
    checked_alone,
    checked_width,
    plan_as_sharded,
)
from autopar.planner.price_sharded import predict_any, widest_mesh
from autopar.planner.search import make_plan
from autopar.planner.search_at_hand import check_max_shards, shards_at_hand, with_shard_notes
from autopar.planner.search_options import search_options
from autopar.runtime.comparing.contestants import ComparedCall
from autopar.runtime.comparing.in_turn import InThisProcess, JobRanks, PlansInTurn
from autopar.runtime.planning.action_overhead import python_overhead
from autopar.runtime.planning.calibration import calibrated
from autopar.runtime.planning.compiled_prices import with_compiled
from autopar.runtime.planning.tuning import tuned
from autopar.runtime.signatures.bound_signature import RunSettings
from cost_models import Device


def plan_at_hand(
    example: Example,
    devices: Sequence[Device],
    options: PlanOptions,
    progress: Progress = SILENT,
    ranks: JobRanks | None = None,
) -> Plan:
    """The fastest plan for a call of a model on `devices`. Raises PlanError and InfeasibleError.

    `ranks`: the processes of the devices, if each has one; they measure together.
    """
    start = time.perf_counter()
    example, search = search_options(example, options, len(devices))
    tries = options.tune not in (0, "auto")
    checked_alone(example, tune=tries, candidates=options.candidates, calibrate=options.calibrate)
    check_max_shards(options.max_shards, devices)
    if asks_for_sharding(example):
        sharded = checked_width(plan_as_sharded(example, devices, search), options.max_shards)
        return replace(sharded, work=step_work_at_hand(example, devices))
    # Candidates may split the batch differently from the options: then every size is measured.
    only = None if options.candidates else search.n_microbatches
    costs = _measured(example, devices, options, only, progress, ranks)
    call = ComparedCall(example, RunSettings.of(options))
    compiled = with_compiled(costs, call, search, cache=options.cache, progress=progress)
    costs = compiled.costs
    cache = options.cache
    at_hand = shards_at_hand(example, costs, search, options.max_shards, cache=cache, progress=progress, ranks=ranks)
    costs, meshes = _pricing_candidates(at_hand.costs, options, progress, ranks), at_hand.meshes
    in_turn = _in_turn(call, costs, ranks)
    spent = time.perf_counter() - start
    progress("searching plans", math.nan)
    if options.tune:
        best = tuned(example, costs, options, search, spent, progress, meshes, in_turn)
    else:
        best = make_plan(costs, search, meshes)
    if options.calibrate and best.time_scale is None:
        best = calibrated(best, example, costs, search, progress, in_turn)
    best = with_notes(with_shard_notes(best, costs, at_hand.notes), [*compiled.notes, *example.notes])
    return replace(best, model=fingerprint(example.model), work=step_work_at_hand(example, devices))


def priced_at_hand(
    plan: Plan,
    example: Example,
    devices: Sequence[Device],
    options: PlanOptions,
    progress: Progress = SILENT,
    ranks: JobRanks | None = None,
) -> Plan:
    """The user's `plan` with its predictions, from measurements on `devices`. Raises PlanError. `ranks`: see
    `plan_at_hand`."""
    plan.check_model(example.model)
    example, search = search_options(example, options, len(devices))
    costs = _measured(example, devices, options, plan.n_microbatches, progress, ranks)
    call = ComparedCall(example, RunSettings.of(options))
    compiled = with_compiled(costs, call, search, cache=options.cache, progress=progress)
    costs = with_shards(compiled.costs, widest_mesh([plan]), cache=options.cache, progress=progress, ranks=ranks)
    priced = predict_any(plan, example, costs, search.conditions)
    if options.calibrate:
        priced = calibrated(priced, example, costs, search, progress, _in_turn(call, costs, ranks))
    work = step_work_at_hand(example, devices)
    priced = with_notes(with_shard_notes(priced, costs), [*compiled.notes, *example.notes])
    return replace(priced, model=fingerprint(example.model), work=work)


def _measured(
    example: Example,
    devices: Sequence[Device],
    options: PlanOptions,
    n_microbatches: int | None,
    progress: Progress,
    ranks: JobRanks | None = None,
) -> CostGraph:
    """What the call costs: its operators, and Python itself. `n_microbatches`: the number that the caller asks for."""
    cache = options.cache
    costs = measure_costs(example, devices, n_microbatches=n_microbatches, cache=cache, progress=progress, ranks=ranks)
    python = python_overhead(costs.devices if ranks is None else costs.devices[:1], cache=cache)
    if ranks is not None:  # no worker waits for another's interpreter, and the links have what messages take
        python = replace(python, busy=python.alone)
    return replace(costs, python=python)


def _in_turn(call: ComparedCall, costs: CostGraph, ranks: JobRanks | None) -> PlansInTurn:
    return InThisProcess(call, costs.devices) if ranks is None else ranks.plans_in_turn(call.settings)


def _pricing_candidates(
    costs: CostGraph, options: PlanOptions, progress: Progress, ranks: JobRanks | None
) -> CostGraph:
    """`costs` that price the meshes of the user's candidates, too."""
    widest = widest_mesh((options.candidates or {}).values())
    return with_shards(costs, widest, cache=options.cache, progress=progress, ranks=ranks)
