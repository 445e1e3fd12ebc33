"""What `Plan.by_hand` and `Plan.from_configuration` call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from autopar.analysis.example import Example, LossFunction, capture_example, example_ahead
from autopar.api.cluster_plans import cluster_pricer
from autopar.errors import InputError
from autopar.options import PlanOptions
from autopar.plan.display import by_hand
from autopar.plan.plan import Plan
from autopar.planner.changed_zero import unpriced_at_hand
from autopar.planner.hand_plan.by_hand import plan_by_hand, plan_by_hand_for_workers
from autopar.planner.pricers import with_pricer
from autopar.report.progress import progress_bar
from autopar.runtime.arguments import (
    Devices,
    check_loss_and_target,
    check_module,
    devices_at_hand,
    need_example,
    recapturing,
)
from autopar.runtime.ranks.parameters.holders import check_captured
from autopar.runtime.ranks.world import together
from cost_models import Cluster


@by_hand.register
def _by_hand(
    model: nn.Module,
    devices: Devices,
    degrees: Mapping[str, Any],
    *,
    example_args: tuple[Any, ...] | None,
    example_kwargs: dict[str, Any] | None,
    target: Any,
    loss_fn: LossFunction | None,
    optimizer: str,
    **how: Any,
) -> Plan:
    """See `Plan.by_hand`. `how`: `batch_dim`, `launch`, `precision`, `optimizer_step` and `overlap`."""
    check_module(model)
    options, problems = _options(optimizer, how)
    args, kwargs = need_example("a plan by hand", example_args, example_kwargs)
    check_loss_and_target(loss_fn, target)
    call: dict[str, Any] = {"loss_fn": loss_fn, "target": target, "batch_dim": options.batch_dim}
    with progress_bar() as progress:
        if isinstance(devices, Cluster) and not devices.at_hand:
            example = example_ahead(model, args, kwargs, strict=False, **call)
            return with_pricer(
                plan_by_hand(example, devices, options, degrees, progress, problems=problems),
                cluster_pricer(example, devices, options),
            )
        with together("Plan.by_hand", devices) as world:
            parsed = devices_at_hand(model, devices, None, world)

        def captured(model: nn.Module) -> Example:
            return capture_example(model, parsed, args, kwargs, **call)

        example = captured(model)
        if world is not None:
            check_captured(example.program)
        if all(device.torch_device.type == "cpu" for device in parsed):
            found = plan_by_hand_for_workers(example, parsed, options, degrees, progress, problems)
            return with_pricer(found, unpriced_at_hand(model, recapturing(captured, world), parsed, options))
        cluster = Cluster.from_devices(list(parsed))
        return with_pricer(
            plan_by_hand(example, cluster, options, degrees, progress, problems=problems),
            cluster_pricer(example, cluster, options),
        )


def _options(optimizer: str, how: Mapping[str, Any]) -> tuple[PlanOptions, tuple[str, ...]]:
    """The options, and what is wrong with them, which is said together with what is wrong with the degrees."""
    try:
        return PlanOptions(optimizer=optimizer, **how), ()
    except InputError as error:
        return PlanOptions(), (str(error),)
