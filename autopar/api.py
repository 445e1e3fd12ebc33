"""The public calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Unpack

import torch
from torch import nn

from autopar.analysis.example import LossFunction, capture_example, example_ahead
from autopar.cluster_plans import cluster_pricer, priced_on_cluster
from autopar.costs.estimated import estimate_costs
from autopar.costs.history import recall
from autopar.costs.measured import measure_costs
from autopar.costs.prediction_error import Accuracy
from autopar.costs.profile import Profile, summarize, training_step
from autopar.errors import InputError, each_warning_once
from autopar.options import BatchDim, CompareKeywords, Data, Dynamic, PlanKeywords, PlanOptions, Tune
from autopar.plan.display import priced_for
from autopar.plan.plan import Plan
from autopar.planner.cluster_comparison import ClusterComparison, compare_ahead
from autopar.planner.plan_ahead import plan_ahead
from autopar.planner.pricers import Pricer, with_pricer
from autopar.report.progress import progress_bar
from autopar.runtime.arguments import (
    Devices,
    check_data,
    check_module,
    devices_at_hand,
    example_call,
    need_example,
    need_target,
    refuse_estimated,
)
from autopar.runtime.building import deciding, pipelined, pricing
from autopar.runtime.compare import compare_at_hand
from autopar.runtime.comparison import Comparison
from autopar.runtime.initial_values.initial import Weights, initial_values
from autopar.runtime.initial_values.sources import InitFunction
from autopar.runtime.module import PipelinedModule
from autopar.runtime.other_systems.catalogue import check_systems
from autopar.runtime.ranks.module import RankedModule, check_options
from autopar.runtime.ranks.planning import plan_together
from autopar.runtime.ranks.world import joined
from cost_models import Cluster


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
        schedule: "gpipe", "1f1b", "interleaved-1f1b" or "zb-h1".
        max_replicas: maximum number of devices per stage; 1 for a pure pipeline.
        max_shards: maximum number of devices of one kind that share the operators of a stage as a mesh. Strategies, one
            for each operator, are chosen with the stages, from measured operators and collectives. Default: 1, because
            one thread launches the kernels of all devices of a mesh, workers of one CPU share its cores, and choosing
            strategies takes time. On workers of a CPU, a mesh saves memory and no time. Meshes have a power of two of
            devices, a divisor of their number, or `max_shards`.
        memory_limit: usable memory of each device: bytes, or a text such as "8GB", "8GiB" or "500MB" (default: what
            the device has free).
        optimizer: the optimizer whose state must fit in memory: one of torch.optim, or a name such as "none", "sgd",
            "momentum", "adam", "adamw" or "adafactor" (`cost_models.OPTIMIZERS` has all).
        batch_norm: "per-microbatch": each micro-batch has its own statistics, as in DataParallel and DDP; "deferred":
            the same, but the running statistics are updated with those of the whole batch; "exact": the batch is not
            split if the model has batch norm in training mode.
        batch_dim: the batch dimension of the inputs (default 0), or a dict from input names to dimensions (None: the
            input has no batch dimension).
        tune: "auto": before a plan is followed, it, the best plan on one device, the best ones without shards and
            without replicas, and the plain model run for a few steps, on copies of the model, and the fastest is
            followed. A number: the same with as many of the best plans. 0 trusts the prediction.
        candidates: your own plans by name; `tune` runs them beside the others.
        calibrate: scale predictions by measured steps of the whole model, run on copies, as `tune` does where the plain
            model is among what it runs.
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
    world = joined() if devices is None else None

    def checked() -> tuple[PlanOptions, tuple[tuple[Any, ...], dict[str, Any]]]:
        check_module(model)
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
        module.agree()
        if initial is not None:
            module.fill_when_placed(initial.origins, initial.fill)
    if example_args is not None or example_kwargs is not None:
        module.prepare(*call, loss_fn=loss_fn, target=target)
    return module


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

    With `plan`, such as one made or edited by hand, return that plan with its predictions instead of searching. A plan
    for a cluster records the optimizer and how a step is run (`Plan.assumed`); they hold where options leave them open.

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
            step wrote behind the first forward. "sends": between stages; otherwise the sender waits. Collectives of
            activations never overlap. Kernels slow down meanwhile (`cost_models.collectives.overlap`). Strategies are
            chosen as if no collective overlapped. "serial": one layer or collective after another, and no launch ahead
            of its layer, as simulators add up traces of layers. Default: "sends", as autopar's own runtime does.

    The predicted step of such a plan ends with the step of `optimizer`; that of devices at hand does not, because
    `train_step` leaves the optimizer to the caller.

    Raises: like `parallelize`; InputError also for `tune`, `candidates` and `calibrate` on a cluster that is not at
    hand.
    """
    check_module(model)
    chosen = PlanOptions.of("plan", PlanKeywords, options)
    args, kwargs = need_example("planning", example_args, example_kwargs)
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
    world = joined() if devices is None else None
    parsed = devices_at_hand(model, devices, options.get("optimizer"), world)
    if plan is not None or world is not None:
        chosen = chosen if world is None else check_options(chosen)
        example = capture_example(
            model,
            parsed,
            args,
            kwargs,
            loss_fn=loss_fn,
            target=target,
            batch_dim=chosen.batch_dim,
            strict=chosen.strict,
        )
        decide = (
            pricing(plan, parsed, chosen, progress_bar) if plan is not None else deciding(parsed, chosen, progress_bar)
        )
        if world is not None:
            return plan_together(world, parsed, example, decide)
        return with_pricer(decide(example), Pricer(lambda other: pricing(other, parsed, chosen, progress_bar)(example)))
    module = pipelined(model, parsed, chosen, progress_bar)
    call: dict[str, Any] = {"example_args": example_args, "example_kwargs": example_kwargs}
    call |= {"target": target, "loss_fn": loss_fn}
    try:
        found = module.prepare(args, kwargs, loss_fn=loss_fn, target=target)
    finally:
        module.close()
    # It holds the user's own objects: the captured program is gone with the module.
    kept: dict[str, Any] = {name: value for name, value in options.items() if name not in _OF_SEARCHES}
    return with_pricer(found, Pricer(lambda other: _plan(model, devices, plan=other, **call, **kept)))


_OF_SEARCHES = ("tune", "candidates", "n_microbatches", "schedule", "max_replicas", "max_shards")
"""Options that say nothing to the price of a plan."""


_plan = plan  # in whose own body the name is an argument


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
    need_target(loss_fn, target)
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


def compare(
    model: nn.Module,
    devices: Devices = None,
    plans: Mapping[str, Plan | None] | None = None,
    *,
    example_args: tuple[Any, ...] | None = None,
    example_kwargs: dict[str, Any] | None = None,
    target: Any = None,
    loss_fn: LossFunction | None = None,
    repeats: int = 7,
    systems: Sequence[str] = (),
    **options: Unpack[CompareKeywords],
) -> Comparison | ClusterComparison:
    """Measure step times and peak memory of `plans` beside their predictions and the plain model on the first device.

    On a cluster that is not at hand nothing is measured: the result is a `ClusterComparison` of predicted steps,
    throughput, model FLOPs utilisation, memory, bubbles and communication.

    With `loss_fn` and `target`, a step is a `train_step`. Without, it is a call and a backward from the output's
    `.loss`, or else from the means of the outputs. For a model in eval mode without `loss_fn`, a step is a forward.
    Steps alternate between the plans (A B C A B C ...) on copies of the model: parameters, gradients, running
    statistics and the random state stay unchanged.

    Args:
        plans: by name; None for the plan that autopar chooses under the options. Default: {"auto": None}.
        repeats: number of measured steps per plan. Six or more allow intervals of 95 %.
        systems: other systems that take turns with the plans, by name. "plain": the model itself with all threads that
            torch has; "ceiling": a process for each device, each with its part of the batch, that exchange nothing, to
            show what the machine gives at most; "DataParallel" (GPUs), "DDP"; for an nn.Sequential "torchgpipe",
            "pipelining" (torch.distributed.pipelining under 1F1B) and "pipelining:SCHEDULE" for each of its schedules.
            They pipeline `n_microbatches`, or two for each device. One that cannot run the step has a row that says
            why. Processes load the model and `loss_fn` by pickle: define these at the top level of a module, and call
            `compare` under `if __name__ == "__main__":`.
        options: `n_microbatches`, `schedule`, `max_replicas`, `max_shards`, `memory_limit`, `batch_norm`, `batch_dim`,
            `strict` and `cache`; on a cluster that is not at hand also `launch`, `precision`, `optimizer_step` and
            `overlap` (see `plan`).

    The other arguments and the errors are those of `parallelize`. Measured plans hold no optimizer state; on a cluster
    that is not at hand they hold Adam's.
    """
    check_module(model)
    chosen = PlanOptions.of("compare", CompareKeywords, options)
    args, kwargs = need_example("comparing", example_args, example_kwargs)
    need_target(loss_fn, target)
    if not isinstance(repeats, int) or repeats < 1:
        raise InputError(f"repeats must be a whole number of at least 1, got {repeats!r}")
    plans, systems = {"auto": None} if plans is None else plans, check_systems(systems)
    if isinstance(devices, Cluster) and not devices.at_hand:
        if systems:
            raise InputError(f"systems: {devices.title} is not at hand, so no other system can run on it")
        batch_dim, strict = chosen.batch_dim, chosen.strict
        example = example_ahead(model, args, kwargs, loss_fn=loss_fn, target=target, batch_dim=batch_dim, strict=strict)
        with progress_bar() as progress:
            return compare_ahead(example, devices, plans, chosen, progress)
    refuse_estimated(options)
    parsed = devices_at_hand(model, devices)
    batch_dim, strict = chosen.batch_dim, chosen.strict
    # Every plan runs on a copy of the model, which would warn again.
    with progress_bar() as progress, each_warning_once(set()):
        example = capture_example(
            model, parsed, args, kwargs, loss_fn=loss_fn, target=target, batch_dim=batch_dim, strict=strict
        )
        return compare_at_hand(example, parsed, plans, chosen, repeats, progress, systems)


@priced_for.register
def _priced_for(model: nn.Module, devices: Devices, plan: Plan, **call: Any) -> Plan:
    """See `Plan.load`."""
    return _plan(model, devices, plan=plan, **call)


def accuracy(since: datetime | None = None, kind: str | None = None) -> Accuracy:
    """Return how far predicted step times were from measured ones, from the history beside the cache of measurements.

    Every `compare`, every tuned plan and every `train_step(..., profile=True)` adds to the history, unless it was
    called with `cache=False`.

    Args:
        since: only steps measured from then on; local time where it has no time zone.
        kind: only plans on device types whose name contains this text, such as "H200".
    """
    return Accuracy.of(recall(), since=since, kind=kind)
