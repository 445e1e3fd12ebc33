"""Plans for clusters that are not at hand, whose changes are priced again, and plans by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from autopar.analysis.example import Example, LossFunction, capture_example, example_ahead
from autopar.options import PlanOptions
from autopar.plan.display import by_hand
from autopar.plan.plan import Plan
from autopar.planner.hand_plan.by_hand import plan_by_hand, plan_by_hand_for_workers
from autopar.planner.other_networks import with_networks
from autopar.planner.plan_ahead import at_zero_ahead, priced_ahead
from autopar.planner.pricers import Pricer, with_pricer
from autopar.report.progress import progress_bar
from autopar.runtime.arguments import Devices, check_module, devices_at_hand, need_example, need_target
from autopar.runtime.ranks.world import joined
from cost_models import Cluster


def priced_on_cluster(plan: Plan, example: Example, cluster: Cluster, options: PlanOptions) -> Plan:
    """`plan` with its price on a cluster that is not at hand."""
    with progress_bar() as progress:
        priced = priced_ahead(plan, example, cluster, options, progress)
    return with_pricer(priced, cluster_pricer(example, cluster, options))


def cluster_pricer(example: Example, cluster: Cluster, options: PlanOptions) -> Pricer:
    """For plans on a cluster that is not at hand."""
    return Pricer(
        lambda plan: priced_on_cluster(plan, example, cluster, options),
        lambda plan, zero: at_zero_ahead(plan, zero, example, cluster, options),
        lambda plan, factor: priced_on_cluster(plan, example, with_networks(cluster, factor), options),
    )


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
    """See `Plan.by_hand`. `how`: `launch`, `precision`, `optimizer_step` and `overlap`."""
    check_module(model)
    options = PlanOptions(optimizer=optimizer, **how)
    args, kwargs = need_example("a plan by hand", example_args, example_kwargs)
    need_target(loss_fn, target)
    with progress_bar() as progress:
        if isinstance(devices, Cluster) and not devices.at_hand:
            example = example_ahead(model, args, kwargs, loss_fn=loss_fn, target=target, batch_dim=None, strict=False)
            return with_pricer(
                plan_by_hand(example, devices, options, degrees, progress), cluster_pricer(example, devices, options)
            )
        parsed = devices_at_hand(model, devices, None, joined() if devices is None else None)
        example = capture_example(model, parsed, args, kwargs, loss_fn=loss_fn, target=target, batch_dim=None)
        if all(device.torch_device.type == "cpu" for device in parsed):
            return plan_by_hand_for_workers(example, parsed, options, degrees, progress)
        return plan_by_hand(example, Cluster.from_devices(list(parsed)), options, degrees, progress)
