"""A plan for a cluster that is not at hand, from the data sheets of its devices."""

from __future__ import annotations

from dataclasses import replace

from autopar.analysis.example import ABOUT_WHOLE_BATCH, Example
from autopar.analysis.few_collections import few_collections
from autopar.costs.cost_table import SILENT, Progress
from autopar.costs.estimated import estimate_costs
from autopar.costs.model_flops import step_work
from autopar.costs.recipe import Recipe
from autopar.options import PlanOptions
from autopar.plan.fingerprint import fingerprint
from autopar.plan.plan import Plan
from autopar.planner.explainers import explainer_of, with_explainer
from autopar.planner.hint_constraints.one_mesh_plan import asks_for_sharding, checked_width, plan_as_sharded
from autopar.planner.inter_op.meshes import mesh_program_of
from autopar.planner.joint_search import plan_jointly
from autopar.planner.kept_layers import notes_on_kept_layers
from autopar.planner.predict import predict_plan
from autopar.planner.price_sharded import predict_sharded
from autopar.planner.search_options import (
    ESTIMATED,
    OTHER,
    SearchOptions,
    as_assumed,
    assumptions_of,
    estimated_note,
    other_assumptions,
    recipe_of,
    search_options,
)
from cost_models import Cluster


@few_collections()
def plan_ahead(example: Example, cluster: Cluster, options: PlanOptions, progress: Progress = SILENT) -> Plan:
    """The fastest plan for a call of a model on `cluster`. Raises PlanError and InfeasibleError."""
    recipe = recipe_of(example, options)
    assumed = assumptions_of(recipe, options.optimizer_name)
    example, search = search_options(example, options, len(cluster.devices))
    if asks_for_sharding(example):
        hinted = plan_as_sharded(example, cluster.devices, replace(search, recipe=recipe), cluster)
        checked_width(hinted, options.max_shards)
        priced = _with_prices(hinted, example, cluster, recipe, search, progress)
        notes = (estimated_note(cluster), *priced.notes)
        return replace(priced, notes=notes, assumed=assumed, work=step_work(example, cluster))
    costs = estimate_costs(example, cluster, recipe, n_microbatches=search.n_microbatches, progress=progress)
    mesh_program = mesh_program_of(example, options.optimizer_name)
    best = plan_jointly(costs, search, mesh_program, max_shards=options.max_shards, progress=progress)
    notes = (estimated_note(cluster), *example.notes, *example.program.uncaptured, *best.notes)
    return replace(
        best, notes=notes, model=fingerprint(example.model), assumed=assumed, work=step_work(example, cluster)
    )


def priced_ahead(
    plan: Plan, example: Example, cluster: Cluster, options: PlanOptions, progress: Progress = SILENT
) -> Plan:
    """The user's `plan` with its predictions, from the data sheets of `cluster`. Raises PlanError.

    Where options leave open how a step is run, it is run as the plan records (`Plan.assumed`).
    """
    plan.check_model(example.model)
    options = as_assumed(plan, options)
    recipe = recipe_of(example, options)
    assumed = assumptions_of(recipe, options.optimizer_name)
    example, search = search_options(example, options, len(cluster.devices))
    if any(stage.sharding is not None for stage in plan.stages):
        costs = estimate_costs(example, cluster, recipe, n_microbatches=plan.n_microbatches, progress=progress)
        mesh_program = mesh_program_of(example, options.optimizer_name)
        priced = predict_sharded(plan, example, costs, mesh_program, search.conditions)
    else:
        costs = estimate_costs(example, cluster, recipe, progress=progress)
        priced = predict_plan(plan, example, costs, search.conditions)
    kept = [note for note in priced.notes if not note.startswith((OTHER, ESTIMATED, *ABOUT_WHOLE_BATCH))]
    by_layer = example.training and any(stage.layerwise for stage in plan.stages)
    layers = (notes_on_kept_layers(example) or ()) if by_layer else ()
    kept = [note for note in kept if note not in layers]
    notes = (
        estimated_note(cluster),
        *layers,
        *kept,
        *example.notes,
        *costs.notes,
        *other_assumptions(plan, assumed),
    )
    return replace(
        priced,
        notes=notes,
        model=fingerprint(example.model),
        assumed=assumed,
        work=step_work(example, cluster),
        stages=tuple(stage.within(options.memory_bytes) for stage in priced.stages),
    )


def _with_prices(
    plan: Plan, example: Example, cluster: Cluster, recipe: Recipe, search: SearchOptions, progress: Progress
) -> Plan:
    """A plan made from hints with the predictions that it would have if a file held it.

    Its strategies stay. Without predictions if micro-batches are uneven, which sharded stages are not priced for.
    """
    if example.program.batch_size % plan.n_microbatches:
        return plan
    costs = estimate_costs(example, cluster, recipe, n_microbatches=plan.n_microbatches, progress=progress)
    priced = predict_sharded(plan, example, costs, mesh_program_of(example, search.optimizer), search.conditions)
    stages = tuple(replace(a, sharding=b.sharding) for a, b in zip(priced.stages, plan.stages, strict=True))
    return with_explainer(replace(priced, stages=stages), explainer_of(plan))
