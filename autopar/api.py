"""The public calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autopar import costgraph
from autopar.errors import InputError
from autopar.plan import Plan
from autopar.report.progress import progress_bar
from autopar.runtime.module import Example, PipelinedModule, untouched
from autopar.schedule import SCHEDULES
from autopar.search.planner import Options, make_plan
from cost_models import OPTIMIZER_STATE, Device, MeasurementCache, parse_devices

log = logging.getLogger(__name__)

Devices = Sequence[str | torch.device] | str | torch.device | None
LossFunction = Callable[[Any, Any], torch.Tensor]

BATCH_NORM = ("per-microbatch", "exact")


def parallelize(
    model: nn.Module,
    devices: Devices = None,
    *,
    example_args: tuple[Any, ...] | None = None,
    example_kwargs: dict[str, Any] | None = None,
    target: Any = None,
    loss_fn: LossFunction | None = None,
    plan: Plan | None = None,
    n_microbatches: int | None = None,
    schedule: str | None = None,
    max_replicas: int | None = None,
    memory_limit: float | None = None,
    optimizer: str = "adamw",
    batch_norm: str = "per-microbatch",
    batch_dim: int | dict[str, int | None] | None = None,
    cache: bool = True,
) -> PipelinedModule:
    """`model` as a pipelined module over `devices`; whatever is not given is chosen by measurement and search.

    Args:
        model: any module that torch.export or torch.fx can capture. Its parameters stay its own.
        devices: strings or torch.device; `"cpu"` may be repeated (workers that share the cores), as may one GPU.
            None: every visible GPU, else one CPU worker a core up to two.
        example_args, example_kwargs: an example call. With one of them it captures, profiles and plans at once,
            else on the first call.
        target, loss_fn: with the example, what `train_step` will be called with, so that the plan makes room for
            the loss in the last stage. (Without, the first `train_step` plans again, mostly from the cache.)
        plan: a plan to follow instead of searching.
        n_microbatches: micro-batches a batch. schedule: "gpipe" or "1f1b".
        max_replicas: most devices one stage may hold; 1 for a pure pipeline.
        memory_limit: bytes usable on each device (default: what it has free).
        optimizer: whose state the memory must hold: "none", "sgd", "momentum", "adam" or "adamw".
        batch_norm: "per-microbatch": statistics of each micro-batch, as DataParallel and DDP do; "exact": the
            batch stays whole if the model has batch norm in training.
        batch_dim: the batch dimension of the inputs (default 0), or a dict from input names to theirs (None: shared).
        cache: keep measurements on disk.

    Raises:
        DeviceError, InputError: an argument does not fit. CaptureError, PlanError, InfeasibleError: when planning.
    """
    parsed, options = _checked(
        model, devices, n_microbatches, schedule, max_replicas, memory_limit, optimizer, batch_norm
    )
    if plan is not None:
        plan = _with_overrides(plan, n_microbatches, schedule).on([d.name for d in parsed])

    def decide(example: Example) -> Plan:
        return _decide(example, parsed, options, batch_norm, cache)

    module = PipelinedModule(model, parsed, decide, plan=plan, batch_dim=batch_dim, batch_norm=batch_norm)
    if example_args is not None or example_kwargs is not None:
        module.prepare(*_call(example_args, example_kwargs), loss_fn=loss_fn, target=target)
    return module


def plan(
    model: nn.Module,
    devices: Devices = None,
    *,
    example_args: tuple[Any, ...] | None = None,
    example_kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> Plan:
    """The plan that `parallelize` would follow for such a call. Takes the same options."""
    if example_args is None and example_kwargs is None:
        raise InputError("planning needs an example call: give example_args= or example_kwargs=")
    module = parallelize(model, devices, example_args=example_args, example_kwargs=example_kwargs, **options)
    try:
        assert module.plan is not None
        return module.plan
    finally:
        module.close()


def _decide(example: Example, devices: tuple[Device, ...], options: Options, batch_norm: str, cache: bool) -> Plan:
    import dataclasses

    batching = example.batching
    why = batching.obstacle
    if not why and batch_norm == "exact" and batching.batch_norms:
        why = f"batch_norm='exact' and '{batching.batch_norms[0]}' normalises by the whole batch's statistics"
    if why and (options.n_microbatches or 1) > 1:
        log.warning("n_microbatches=%s cannot be followed: %s", options.n_microbatches, why)
        options = dataclasses.replace(options, n_microbatches=1)
    options = dataclasses.replace(options, one_microbatch_because=why, loss_inside=example.loss is not None)
    with _cache(cache) as store, progress_bar() as progress, untouched(example.model):
        costs = costgraph.build(
            example.program,
            dataclasses.replace(batching, obstacle=why),
            example.leaves,
            devices,
            training=example.training,
            loss_fn=example.loss,
            target=example.target,
            n_microbatches=options.n_microbatches,
            cache=store,
            progress=progress,
        )
    return make_plan(costs, options)


@contextmanager
def _cache(wanted: bool) -> Iterator[MeasurementCache | None]:
    if not wanted:
        yield None
        return
    with MeasurementCache() as store:
        yield store


def _call(args: tuple[Any, ...] | None, kwargs: dict[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args is not None and not isinstance(args, (tuple, list)):
        raise InputError(f"example_args must be a tuple of arguments, got {type(args).__name__}; write (x,)")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise InputError(f"example_kwargs must be a dict of keyword arguments, got {type(kwargs).__name__}")
    return tuple(args or ()), dict(kwargs or {})


def _checked(
    model: nn.Module,
    devices: Devices,
    n_microbatches: int | None,
    schedule: str | None,
    max_replicas: int | None,
    memory_limit: float | None,
    optimizer: str,
    batch_norm: str,
) -> tuple[tuple[Device, ...], Options]:
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, PipelinedModule):
        raise InputError("the model is pipelined already; give model.unwrap()")
    for name, value in (("n_microbatches", n_microbatches), ("max_replicas", max_replicas)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise InputError(f"{name} must be a whole number of at least 1, got {value!r}")
    if schedule is not None and schedule not in SCHEDULES:
        raise InputError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if memory_limit is not None and not memory_limit > 0:
        raise InputError(f"memory_limit must be a positive number of bytes, got {memory_limit!r}")
    if optimizer not in OPTIMIZER_STATE:
        raise InputError(f"optimizer must be one of {', '.join(OPTIMIZER_STATE)}, got {optimizer!r}")
    if batch_norm not in BATCH_NORM:
        raise InputError(f"batch_norm must be one of {', '.join(BATCH_NORM)}, got {batch_norm!r}")
    return parse_devices(devices), Options(n_microbatches, schedule, max_replicas, memory_limit, optimizer)


def _with_overrides(plan: Plan, n_microbatches: int | None, schedule: str | None) -> Plan:
    import dataclasses

    changes: dict[str, Any] = {}
    if n_microbatches is not None:
        changes["n_microbatches"] = n_microbatches
    if schedule is not None:
        changes["schedule"] = schedule
    return dataclasses.replace(plan, **changes) if changes else plan
