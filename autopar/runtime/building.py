"""A pipelined module from a model, devices and options: by the user's plan, or one made at the first call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import nn

from autopar.analysis.example import Example
from autopar.costs.cost_table import Progress
from autopar.errors import PlanError
from autopar.options import Data, PlanOptions
from autopar.plan.plan import Plan
from autopar.runtime.comparing.in_turn import JobRanks
from autopar.runtime.module import PipelinedModule
from autopar.runtime.planning.at_hand import plan_at_hand, priced_at_hand
from autopar.runtime.ranks.module import RankedModule
from autopar.runtime.ranks.planning import DecideTogether
from autopar.runtime.ranks.world import World
from autopar.runtime.signatures.bound_signature import RunSettings
from cost_models import Device

Shown = Callable[[], AbstractContextManager[Progress]]  # shows the progress of what is done inside


def as_wanted(plan: Plan, options: PlanOptions) -> Plan:
    """The user's plan with the micro-batches and the schedule that the options of the call say. Raises PlanError."""
    n_microbatches, schedule = options.n_microbatches or plan.n_microbatches, options.schedule or plan.schedule
    why = "the plan's n_microbatches or schedule was replaced"
    return plan.with_decision(why, n_microbatches=n_microbatches, schedule=schedule)


def deciding(devices: tuple[Device, ...], options: PlanOptions, shown: Shown) -> DecideTogether:
    """Makes a plan; with measurements of ranks, for one process a device."""

    def decide(example: Example, ranks: JobRanks | None = None) -> Plan:
        with shown() as progress:
            return plan_at_hand(example, devices, options, progress, ranks)

    return decide


def pricing(plan: Plan, devices: tuple[Device, ...], options: PlanOptions, shown: Shown) -> DecideTogether:
    """Predicts what the user's plan takes."""

    def price(example: Example, ranks: JobRanks | None = None) -> Plan:
        with shown() as progress:
            return priced_at_hand(plan, example, devices, options, progress, ranks)

    return price


def pipelined(
    model: nn.Module,
    devices: tuple[Device, ...],
    options: PlanOptions,
    shown: Shown,
    plan: Plan | None = None,
    world: World | None = None,
    data: Data = "whole",
) -> PipelinedModule:
    """The model as a module that plans by `options` on its first call, or follows `plan`; with `world`, one rank's."""
    if plan is not None:
        plan = _on_devices(as_wanted(plan, options), devices, world)
        plan.check_model(model)
    decide, settings = deciding(devices, options, shown), RunSettings.of(options)
    if world is not None:
        return RankedModule(world, model, devices, decide, plan=plan, settings=settings, data=data)
    return PipelinedModule(model, devices, decide, plan=plan, settings=settings, record=options.cache)


def _on_devices(plan: Plan, devices: tuple[Device, ...], world: World | None) -> Plan:
    """`plan` on these devices. Raises PlanError."""
    try:
        return plan.on([d.name for d in devices], [d.kind for d in devices])
    except PlanError as error:
        if world is None:
            raise
        n, names = len(plan.used_devices), ", ".join(device.name for device in devices)
        command = f"; start {n} with `{world.command(n)}`" if n > world.size else ""
        message = f"{error}. There is one rank for each device, {world.size} of them: {names}{command}"
        raise PlanError(message) from None
