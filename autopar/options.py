"""What users pass to the public calls, checked: everything wrong is told before anything is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autopar.capture.torch_private import is_fake
from autopar.errors import InputError
from autopar.planner.search_options import SearchOptions
from autopar.runtime.module import PipelinedModule
from autopar.runtime.passes import LossFunction
from autopar.schedule.builders import SCHEDULES
from cost_models import OPTIMIZERS, Cluster, Device, DeviceError, parse_devices

Devices = Sequence[str | torch.device] | str | torch.device | Cluster | None

BATCH_NORM = ("per-microbatch", "deferred", "exact")


def need_example(what: str, args: object, kwargs: object) -> None:
    if args is None and kwargs is None:
        raise InputError(f"{what} needs an example call: give example_args= or example_kwargs=")


def need_target(loss_fn: LossFunction | None, target: object) -> None:
    if loss_fn is not None and target is None:
        raise InputError("loss_fn needs target=: what loss_fn(output, target) compares the output with")


def example_call(args: tuple[Any, ...] | None, kwargs: dict[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args is not None and not isinstance(args, (tuple, list)):
        raise InputError(f"example_args must be a tuple of arguments, got {type(args).__name__}; write (x,)")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise InputError(f"example_kwargs must be a dict of keyword arguments, got {type(kwargs).__name__}")
    return tuple(args or ()), dict(kwargs or {})


def checked(
    model: nn.Module,
    devices: Devices,
    n_microbatches: int | None,
    schedule: str | None,
    max_replicas: int | None,
    memory_limit: float | None,
    optimizer: str,
    batch_norm: str,
) -> tuple[tuple[Device, ...], SearchOptions]:
    options = checked_options(model, n_microbatches, schedule, max_replicas, memory_limit, optimizer, batch_norm)
    check_values(model)
    return at_hand(devices), options


def checked_options(
    model: nn.Module,
    n_microbatches: int | None,
    schedule: str | None,
    max_replicas: int | None,
    memory_limit: float | None,
    optimizer: str,
    batch_norm: str,
) -> SearchOptions:
    check_model(model)
    for name, value in (("n_microbatches", n_microbatches), ("max_replicas", max_replicas)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise InputError(f"{name} must be a whole number of at least 1, got {value!r}")
    if schedule is not None and schedule not in SCHEDULES:
        raise InputError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if memory_limit is not None and not memory_limit > 0:
        raise InputError(f"memory_limit must be a positive number of bytes, got {memory_limit!r}")
    check_optimizer(optimizer)
    if batch_norm not in BATCH_NORM:
        raise InputError(f"batch_norm must be one of {', '.join(BATCH_NORM)}, got {batch_norm!r}")
    return SearchOptions(n_microbatches, schedule, max_replicas, memory_limit, optimizer)


def check_optimizer(optimizer: str) -> None:
    if optimizer not in OPTIMIZERS:
        raise InputError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")


def check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, PipelinedModule):
        raise InputError("the model is pipelined already; give model.unwrap()")


def check_values(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta or is_fake(tensor):
            raise InputError(
                f"'{name}' has no values (it is on the meta device, or fake): load the model's weights to run it here, "
                "or give autopar.plan a Cluster.preset(...) to plan ahead"
            )


def at_hand(devices: Devices) -> tuple[Device, ...]:
    """The devices to run on."""
    if not isinstance(devices, Cluster):
        return parse_devices(devices)
    if not devices.at_hand:
        raise DeviceError(f"{devices.title} is not at hand: autopar.plan plans for it, to be run where it is")
    return devices.at_hand
