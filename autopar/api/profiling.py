"""The public call `autopar.profile`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.analysis.example import LossFunction, capture_example, example_ahead
from autopar.costs.estimated import estimate_costs
from autopar.costs.measured import measure_costs
from autopar.costs.profile import Profile, summarize, training_step
from autopar.errors.names import with_checked_names
from autopar.options import BatchDim, PlanOptions
from autopar.report.progress import progress_bar
from autopar.runtime.arguments import (
    Devices,
    check_loss_and_target,
    check_module,
    devices_at_hand,
    need_example,
)
from cost_models import Cluster


@with_checked_names
def profile(
    model: nn.Module,
    devices: Devices = None,
    *,
    example_args: tuple[Any, ...] | None = None,
    example_kwargs: dict[str, Any] | None = None,
    target: Any = None,
    loss_fn: LossFunction | None = None,
    optimizer: str | torch.optim.Optimizer | None = None,
    batch_dim: BatchDim = None,
    strict: bool = False,
    cache: bool = True,
) -> Profile:
    """Return seconds and bytes of every operator and module on every device type, and the links between the devices.

    It measures what `parallelize` would measure, which then takes it from the cache. For a cluster that is not at hand
    it estimates, as `plan` does. The model stays unchanged. With `optimizer`, the profile also has the memory of a
    whole training step on one device, moment by moment, computed without running it. Other arguments and errors as for
    `parallelize`.
    """
    check_module(model)
    options = PlanOptions(
        optimizer="none" if optimizer is None else optimizer, batch_dim=batch_dim, strict=strict, cache=cache
    )
    args, kwargs = need_example("profiling", example_args, example_kwargs)
    check_loss_and_target(loss_fn, target)
    if isinstance(devices, Cluster) and not devices.at_hand:
        ahead = example_ahead(model, args, kwargs, loss_fn=loss_fn, target=target, batch_dim=batch_dim, strict=strict)
        memory = training_step(ahead, options.optimizer_name, devices.node[0].device_type) if optimizer else None
        with progress_bar() as progress:
            return summarize(estimate_costs(ahead, devices, progress=progress), memory)
    parsed = devices_at_hand(model, devices)
    example = capture_example(
        model, parsed, args, kwargs, loss_fn=loss_fn, target=target, batch_dim=batch_dim, strict=strict
    )
    memory = training_step(example, options.optimizer_name, parsed[0].torch_device.type) if optimizer else None
    with progress_bar() as progress:
        return summarize(measure_costs(example, parsed, cache=options.cache, progress=progress), memory)
