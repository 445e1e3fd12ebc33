"""A plan whose parameters, gradients and states are cut over replicas as another stage of ZeRO says."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from autopar.analysis.example import Example
from autopar.costs.estimated import estimate_costs
from autopar.errors import PlanError
from autopar.options import PlanOptions
from autopar.plan.plan import Plan, with_notes
from autopar.planner.hand_plan.replicas_on_meshes import ARE_A_MESH, replicas_on_meshes
from autopar.planner.inter_op.meshes import mesh_program_of
from autopar.planner.plan_ahead import priced_ahead
from autopar.planner.price_sharded import at_zero
from autopar.planner.pricers import Pricer
from autopar.planner.search_options import as_assumed, recipe_of, search_options
from cost_models import Cluster, Device


def at_zero_ahead(
    plan: Plan,
    zero: int,
    example: Example,
    cluster: Cluster,
    options: PlanOptions,
    n_microbatches: int | None = None,
) -> Plan:
    """The user's `plan` with states cut over replicas as a stage of ZeRO says, and without predictions.

    `n_microbatches`: of the plan that is returned, where the user says so; see `replicas_on_meshes`.

    Raises PlanError for a plan without replicas.
    """
    options = as_assumed(plan, options)
    alone = plan.without_predictions(f"ZeRO is {zero} now")
    plan = replicas_on_meshes(alone, example, cluster, options, n_microbatches)
    recipe = recipe_of(example, options)
    example, _ = search_options(example, options, len(cluster.devices))
    costs = estimate_costs(example, cluster, recipe, n_microbatches=plan.n_microbatches)
    return at_zero(plan, zero, example, costs, mesh_program_of(example, options.optimizer_name))


def at_zero_at_hand(
    plan: Plan,
    zero: int,
    example: Example,
    devices: Sequence[Device],
    options: PlanOptions,
    n_microbatches: int | None = None,
) -> Plan:
    """The same for devices at hand: where several dimensions of a parameter can be cut, those that are the fastest on
    as many H100 are.

    Raises PlanError for a plan without replicas.
    """
    cluster = Cluster.preset(f"{len(devices)}xH100")
    names = {device.name: there.name for device, there in zip(devices, cluster.devices, strict=True)}
    plan = plan.on([device.name for device in devices])
    there = _renamed(plan, names)
    # The price fills in how tensors move between strategies.
    cut = at_zero_ahead(there, zero, example, cluster, options, n_microbatches)
    decided = priced_ahead(cut, example, cluster, options)
    alone = plan.without_predictions(f"ZeRO is {zero} now")
    stages = tuple(
        replace(own, operators=new.operators, sharding=None if new.sharding is None else new.sharding.decision)
        for own, new in zip(alone.stages, decided.stages, strict=True)
    )
    changed = replace(alone, stages=stages, n_microbatches=decided.n_microbatches)
    return with_notes(changed, [note for note in decided.notes if ARE_A_MESH in note])


def unpriced_at_hand(
    model: nn.Module, captured: Callable[[nn.Module], Example], devices: Sequence[Device], options: PlanOptions
) -> Pricer:
    """For plans without predictions, of a model on devices at hand, before a change or after it.

    `captured`: captures the call again. The plan does not keep the model: ranks need the memory of its values.
    """
    alive = weakref.ref(model)

    def changed(plan: Plan, zero: int, n_microbatches: int | None) -> Plan:
        model = alive()
        if model is None:
            raise PlanError(
                "the model that this plan was made for is gone; give it again: autopar.plan(model, devices, plan=plan, "
                "...).with_(zero=...)"
            )
        return at_zero_at_hand(plan, zero, captured(model), devices, options, n_microbatches)

    return Pricer(lambda plan: plan, changed)


def _renamed(plan: Plan, names: Mapping[str, str]) -> Plan:
    """On all devices of these names, whatever their kinds."""
    stages = tuple(replace(stage, devices=tuple(names[d] for d in stage.devices)) for stage in plan.stages)
    return replace(plan, stages=stages, devices=tuple(names.values()), device_kinds=())
