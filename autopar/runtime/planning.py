"""A plan for devices at hand: measure operators, search, and with `tune` run the best plans and take the fastest."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from autopar.analysis.example import Example
from autopar.costs.cost_table import SILENT, Progress
from autopar.costs.measured import measure_costs
from autopar.options import PlanOptions
from autopar.plan.fingerprint import fingerprint
from autopar.plan.plan import Plan
from autopar.planner.hint_constraints.one_mesh_plan import asks_for_sharding, checked_alone, plan_as_sharded
from autopar.planner.predict import predict_plan
from autopar.planner.search import make_plan
from autopar.planner.search_options import search_options
from autopar.runtime.tuning import tuned
from cost_models import Device


def plan_at_hand(
    example: Example, devices: Sequence[Device], options: PlanOptions, progress: Progress = SILENT
) -> Plan:
    """The fastest plan for a call of a model on `devices`. Raises PlanError and InfeasibleError."""
    start = time.perf_counter()
    example, search = search_options(example, options, len(devices))
    checked_alone(example, tune=options.tune not in (0, "auto"), candidates=options.candidates)
    if asks_for_sharding(example):
        return plan_as_sharded(example, devices, search)
    # Candidates may split the batch differently from the options: then every size is measured.
    only = None if options.candidates else search.n_microbatches
    costs = measure_costs(example, devices, n_microbatches=only, cache=options.cache, progress=progress)
    spent = time.perf_counter() - start
    best = tuned(example, costs, options, search, spent, progress) if options.tune else make_plan(costs, search)
    return replace(best, model=fingerprint(example.model))


def priced_at_hand(
    plan: Plan, example: Example, devices: Sequence[Device], options: PlanOptions, progress: Progress = SILENT
) -> Plan:
    """The user's `plan` with its predictions, from measurements on `devices`. Raises PlanError."""
    plan.check_model(example.model)
    example, search = search_options(example, options, len(devices))
    costs = measure_costs(example, devices, cache=options.cache, progress=progress)
    return replace(predict_plan(plan, example, costs, search.conditions), model=fingerprint(example.model))
