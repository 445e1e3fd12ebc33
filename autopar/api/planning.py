"""The public call `autopar.plan`."""

from __future__ import annotations

import dataclasses
from typing import Any, Unpack

from torch import nn

from autopar.analysis.example import Example, LossFunction, capture_example, example_ahead
from autopar.api.cluster_plans import cluster_pricer, priced_on_cluster
from autopar.capture.call_inputs import flattened
from autopar.errors import InputError
from autopar.errors.names import with_checked_names
from autopar.options import PlanKeywords, PlanOptions
from autopar.plan.display import priced_for
from autopar.plan.plan import Plan
from autopar.planner.changed_zero import at_zero_at_hand, unpriced_at_hand
from autopar.planner.plan_ahead import plan_ahead
from autopar.planner.pricers import Pricer, with_pricer
from autopar.report.progress import progress_bar
from autopar.runtime.arguments import (
    Devices,
    check_loss_and_target,
    check_module,
    check_plan,
    devices_at_hand,
    need_example,
    recapturing,
    refuse_estimated,
)
from autopar.runtime.building import as_wanted, deciding, pipelined, pricing
from autopar.runtime.ranks.module import check_options
from autopar.runtime.ranks.planning import plan_together
from autopar.runtime.ranks.world import together
from autopar.runtime.signatures.dynamic import open_sizes
from cost_models import Cluster


@with_checked_names
def plan(
    model: nn.Module,
    devices: Devices = None,
    *,
    example_args: tuple[Any, ...] | None = None,
    example_kwargs: dict[str, Any] | None = None,
    target: Any = None,
    loss_fn: LossFunction | None = None,
    plan: Plan | None = None,
    **options: Unpack[PlanKeywords],
) -> Plan:
    """Return the plan that `parallelize` would follow for such a call. It takes the options of `parallelize`.

    With `plan`, such as one made or edited by hand, return that plan with its predictions instead of searching;
    `n_microbatches` and `schedule` then replace the plan's own, and other limits of the search say nothing. A plan for
    a cluster records the optimizer and how a step is run (`Plan.assumed`); they hold where options leave them open.

    `devices` may be a cluster that is not at hand (`Cluster.preset`, `Cluster.from_toml`). Then costs are estimated
    from data sheets, and `model` may be on the meta device or built under FakeTensorMode, so that no weights are
    allocated. A model in training mode that returns its own loss is planned for `train_step`. Save the plan,
    and pass it to `parallelize` as `plan` where the devices are.

    On such a cluster, stages may be meshes of devices that share the operators, each mesh with its own shape and
    strategies. `max_shards` is the maximum number of devices per mesh; 1 for no sharding. Default: any number; for
    devices at hand 1 (see `parallelize`).

    On such a cluster nothing is measured, so these options say how a step is run:
        launch: how the host launches kernels. A pass of a stage takes the longer of its kernels and their launches.
            "eager": operator by operator; "compiled": torch.compile of each stage; "cuda-graphs": recorded and
            replayed; "eager-functions": operator by operator, each a torch.autograd.Function in Python, as in layers of
            Megatron-LM. Default: "compiled" with `compile=True`, "cuda-graphs" with `compile="graphs"`, else "eager".
        precision: which copies of a parameter there are: a name of `cost_models.PRECISIONS` for a model in that dtype.
            "bf16-mixed" keeps bfloat16 parameters with float32 master copies, gradients and states. Default: gradients
            and states in the parameter's own dtype and no copies, as torch.optim makes them.
        optimizer_step: "fused", "foreach" or "for-loop". Default: as `optimizer` is set up, or else torch's choice.
        overlap: what the training system does behind computing: "none", "all", or some of these joined by a plus.
            "gradients": reducing gradients in buckets behind the backward, once a step behind the last one.
            "parameters": gathering parameters, behind the computing before their reader; those that the optimizer's
            step wrote behind the first forward. "gathers": gathering activations again, behind the product for their
            gradient (Megatron-LM). "sends": between stages; otherwise the sender waits. Other collectives of
            activations never overlap. Kernels slow down meanwhile (`cost_models.collectives.overlap`). Strategies are
            chosen as if no collective overlapped. "serial": one layer or collective after another, and no launch ahead
            of its layer, as simulators add up traces of layers. Default: "sends", as autopar's own runtime does.

    The predicted step of such a plan ends with the step of `optimizer`; that of devices at hand does not, because
    `train_step` leaves the optimizer to the caller.

    Raises: like `parallelize`; InputError also for `tune`, `candidates` and `calibrate` on a cluster that is not at
    hand.
    """
    check_module(model)
    check_plan(plan)
    check_loss_and_target(loss_fn, target)
    chosen = PlanOptions(**options)
    plan = None if plan is None else as_wanted(plan, chosen)
    args, kwargs = need_example("planning", example_args, example_kwargs)
    open_sizes(chosen.dynamic, model, args, kwargs, flattened(args, kwargs)[0])  # refuses sizes that the call lacks
    if isinstance(devices, Cluster) and not devices.at_hand:
        if chosen.that_run:
            raise InputError(f"{', '.join(chosen.that_run)}: {devices.title} is not at hand, so no plan can run on it")
        batch_dim = chosen.batch_dim
        example = example_ahead(
            model, args, kwargs, loss_fn=loss_fn, target=target, batch_dim=batch_dim, strict=chosen.strict
        )
        if plan is not None and plan.assumed is not None and "optimizer" not in options:
            chosen = dataclasses.replace(chosen, optimizer=plan.assumed.optimizer)
        if plan is not None:
            return priced_on_cluster(plan, example, devices, chosen)
        with progress_bar() as progress:
            return with_pricer(plan_ahead(example, devices, chosen, progress), cluster_pricer(example, devices, chosen))
    refuse_estimated(options)
    with together("autopar.plan", devices) as world:
        parsed = devices_at_hand(model, devices, options.get("optimizer"), world)

        def captured(model: nn.Module) -> Example:
            how: dict[str, Any] = {"loss_fn": loss_fn, "target": target, "batch_dim": chosen.batch_dim}
            return capture_example(model, parsed, args, kwargs, strict=chosen.strict, **how)

        if plan is not None or world is not None:

            def allowed() -> tuple[PlanOptions, Example]:
                return chosen if world is None else check_options(chosen), captured(model)

            chosen, example = allowed() if world is None else world.outcome("autopar.plan", allowed)
            decide = (
                pricing(plan, parsed, chosen, progress_bar)
                if plan is not None
                else deciding(parsed, chosen, progress_bar)
            )
            if world is not None:  # a changed plan is not priced: that takes all ranks, and one may change it alone
                return with_pricer(
                    plan_together(world, parsed, example, decide),
                    unpriced_at_hand(model, recapturing(captured, world), parsed, chosen),
                )
            pricer = Pricer(
                lambda other: pricing(other, parsed, chosen, progress_bar)(example),
                lambda other, zero, m: at_zero_at_hand(other, zero, example, parsed, chosen, m),
            )
            return with_pricer(decide(example), pricer)
        module = pipelined(model, parsed, chosen, progress_bar)
        call: dict[str, Any] = {"example_args": example_args, "example_kwargs": example_kwargs}
        call |= {"target": target, "loss_fn": loss_fn}
        try:
            found = module.prepare(args, kwargs, loss_fn=loss_fn, target=target)
        finally:
            module.close()
        # It holds the user's own objects: the captured program is gone with the module.
        kept: dict[str, Any] = {name: value for name, value in options.items() if name not in _OF_SEARCHES}

        def at_zero(other: Plan, zero: int, n_microbatches: int | None) -> Plan:
            return at_zero_at_hand(other, zero, captured(model), parsed, chosen, n_microbatches)

        return with_pricer(found, Pricer(lambda other: _plan(model, devices, plan=other, **call, **kept), at_zero))


_OF_SEARCHES = ("tune", "candidates", "n_microbatches", "schedule", "max_replicas", "max_shards")
"""Options that say nothing to the price of a plan."""


_plan = plan  # in whose own body the name is an argument


@priced_for.register
def _priced_for(model: nn.Module, devices: Devices, plan: Plan, **call: Any) -> Plan:
    """See `Plan.load`."""
    return _plan(model, devices, plan=plan, **call)
