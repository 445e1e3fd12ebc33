"""The public call `autopar.parallelize`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autopar.analysis.example import LossFunction
from autopar.errors.names import with_checked_names
from autopar.options import BatchDim, Data, Dynamic, PlanOptions, Tune
from autopar.plan.plan import Plan
from autopar.report.progress import progress_bar
from autopar.runtime.arguments import (
    Devices,
    check_data,
    check_loss_and_target,
    check_module,
    check_plan,
    devices_at_hand,
    example_call,
)
from autopar.runtime.building import pipelined
from autopar.runtime.initial_values.initial import Weights, initial_values
from autopar.runtime.initial_values.sources import InitFunction
from autopar.runtime.module import PipelinedModule
from autopar.runtime.ranks.module import RankedModule, check_options
from autopar.runtime.ranks.world import together


@with_checked_names
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
    max_shards: int | None = None,
    memory_limit: float | str | None = None,
    optimizer: str | torch.optim.Optimizer = "adamw",
    batch_norm: str = "per-microbatch",
    batch_dim: BatchDim = None,
    tune: Tune = "auto",
    candidates: Mapping[str, Plan] | None = None,
    calibrate: bool = False,
    verify: bool = False,
    strict: bool = False,
    compile: bool | str = False,
    watch_nan: bool = False,
    dynamic: Dynamic = None,
    cache: bool = True,
    data: Data = "whole",
    weights: Weights = None,
    init_fn: InitFunction | None = None,
) -> PipelinedModule:
    """Return `model` as a pipelined module over `devices`. Measurement and search choose what the caller leaves open.

    Args:
        model: any module. What torch.export cannot capture runs uncaptured: the smallest such module, or a custom
            torch.autograd.Function, is one operator of the plan. Parameters stay the model's own.
        devices: strings or torch.device. `"cpu"` may be repeated (workers that share the cores), and so may one GPU.
            None: every visible GPU, or without GPUs one CPU worker per core, at most two; under torchrun, one CPU
            worker a rank, each with its own part of the model (docs/how-to/torchrun.md). Or a
            `Cluster.from_devices(...)`.
        example_args, example_kwargs: an example call. With one of them, capture, profiling and planning happen at
            once; otherwise on the first call.
        target, loss_fn: with the example: what `train_step` will be called with, so that the plan leaves room for the
            loss in the last stage. (Without them, the first `train_step` plans again, mostly from the cache.)
        plan: a plan to follow instead of searching.
        n_microbatches: number of micro-batches per batch.
        schedule: "gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "interleaved-zb" or "zb-v".
        max_replicas: maximum number of devices per stage; 1 for a pure pipeline.
        max_shards: maximum number of devices of one kind that share the operators of a stage as a mesh. Strategies, one
            for each operator, are chosen with the stages, from measured operators and collectives. Default: 1, because
            one thread launches the kernels of all devices of a mesh, workers of one CPU share its cores, and choosing
            strategies takes time. On workers of a CPU, a mesh saves memory and no time. Meshes have a power of two of
            devices, a divisor of their number, or `max_shards`; under torchrun, also the devices of several machines.
        memory_limit: usable memory of each device: bytes, or a text such as "8GB", "8GiB" or "500MB" (default: what
            the device has free).
        optimizer: the optimizer whose state must fit in memory: one of torch.optim, or a name such as "none", "sgd",
            "momentum", "adam", "adamw" or "adafactor" (`cost_models.OPTIMIZERS` has all).
        batch_norm: "per-microbatch": each micro-batch has its own statistics, as in DataParallel and DDP; "deferred":
            the same, but the running statistics are updated with those of the whole batch; "exact": the batch is not
            split if the model has batch norm in training mode.
        batch_dim: the batch dimension of the inputs (default 0), or a dict from input names to dimensions (None: the
            input has no batch dimension), in which an input that is not named has the default.
        tune: "auto": before a plan is followed, it, the best plan on one device, the best ones without shards, without
            replicas and without a pipeline, and the plain model run for a few steps, on copies of the model, and the
            fastest is followed. A number: the same with as many of the best plans. 0 trusts the prediction.
        candidates: your own plans by name; `tune` runs them beside the others.
        calibrate: scale predictions by measured steps of the whole model, run on copies. `tune` scales them by the
            steps of the plan itself.
        verify: check on a few samples that splitting the batch keeps the results, also where it is proven from the
            graph. What is not proven is always checked.
        strict: raise CaptureError for a model with parts that cannot be captured, instead of running these uncaptured.
        compile: run stages through torch.compile with its default backend (True) or the backend named, or record them
            as CUDA graphs ("graphs": launched as one, for fixed sizes, on GPUs only). Stages with hooks, uncaptured
            code, shards or layers that run again stay as they are, with a warning that says why.
        watch_nan: check every value that leaves a stage, and name the operator that produced the first NaN.
        dynamic: sizes of inputs that change between calls. None: a size becomes a symbol at the first call with another
            one, which is captured anew; further sizes then take a fraction of a second. True: all sizes and Python ints
            are symbols from the first call on. `{"input_ids": 1, "steps": True}`: these.
            `{"input_ids": {1: (128, 512)}}`: with a plan for lengths up to 128, one for up to 512, and one for more.
            False: every size is captured by itself.
        cache: keep measurements on disk, and record predicted and measured step times (see `accuracy`).
        data: under torchrun, "whole": every rank passes the whole batch. "per-rank": every rank passes samples of its
            own (DistributedSampler), which make the batch together (docs/how-to/torchrun.md).
        weights: for a model built under `torch.device("meta")`: a directory of `autopar.save`, a safetensors file or a
            directory of them, with the original names. Under torchrun each rank reads what the plan gives it, at the
            first call, so that no rank needs room for the whole model; it needs `plan`, because such a model cannot be
            measured. Values are converted to the model's dtype. Without `weights` and `init_fn`, a model that has its
            values on rank 0 alone is sent from there, part by part.
        init_fn: `init_fn(name, tensor)` writes the initial values of one parameter or buffer of a model on the meta
            device; with `weights`, of those that the weights lack. Random numbers are seeded by `torch.manual_seed` and
            the name: the values are the same under every plan.

    The hints `pipeline_stage`, `recompute` and `keep_together` on modules constrain the search. With `shard` hints, all
    devices form one mesh, or one mesh per pinned stage; the search chooses the layouts that the hints leave open.

    Raises:
        DeviceError, InputError: an argument does not fit. CaptureError, PlanError, InfeasibleError: planning failed.
    """
    with together("parallelize", devices) as world:

        def checked() -> tuple[PlanOptions, tuple[tuple[Any, ...], dict[str, Any]]]:
            check_module(model)
            check_plan(plan)
            check_loss_and_target(loss_fn, target)
            check_data(data, devices)
            options = PlanOptions(
                n_microbatches=n_microbatches,
                schedule=schedule,
                max_replicas=max_replicas,
                max_shards=max_shards,
                memory_limit=memory_limit,
                optimizer=optimizer,
                batch_norm=batch_norm,
                batch_dim=batch_dim,
                tune=tune,
                candidates=candidates,
                calibrate=calibrate,
                verify=verify,
                strict=strict,
                compile=compile,
                watch_nan=watch_nan,
                dynamic=dynamic,
                cache=cache,
            )
            call = example_call(example_args, example_kwargs)
            return options if world is None else check_options(options), call

        options, call = checked() if world is None else world.outcome("parallelize", checked)
        initial = initial_values(model, weights, init_fn, ranked=world is not None, has_plan=plan is not None)
        if initial is not None and world is None:
            initial.fill(model)
        here = devices_at_hand(model, devices, optimizer, world)

        def made() -> PipelinedModule:
            return pipelined(model, here, options, progress_bar, plan, world, data)

        module = made() if world is None else world.outcome("parallelize", made)
        if isinstance(module, RankedModule):
            module.agree(options, plan)
            if initial is not None:
                module.fill_when_placed(initial.origins, initial.fill)
    if example_args is not None or example_kwargs is not None:
        module.prepare(*call, loss_fn=loss_fn, target=target)
    return module
