"""The public calls."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from torch import nn

from autopar.analysis.example import Example, capture_example, example_ahead
from autopar.costs.estimated import estimate_costs
from autopar.costs.history import recall
from autopar.costs.measured import measure_costs
from autopar.costs.prediction_error import Accuracy
from autopar.costs.profile import Profile, summarize, training_step
from autopar.errors import InputError
from autopar.hints.module_hints import read_hints
from autopar.options import (
    Devices,
    at_hand,
    check_model,
    check_optimizer,
    check_values,
    checked,
    checked_options,
    example_call,
    need_example,
    need_target,
)
from autopar.plan.fingerprint import fingerprint
from autopar.plan.plan import Plan
from autopar.planner.hint_constraints.one_mesh_plan import asks_for_sharding, checked_alone, plan_as_sharded
from autopar.planner.hint_constraints.stages import resolve
from autopar.planner.inter_op.atoms import Constraints
from autopar.planner.inter_op.meshes import subject_of
from autopar.planner.joint import plan_with_meshes
from autopar.planner.search import find_plans, make_plan
from autopar.planner.search_options import SearchOptions
from autopar.report.progress import progress_bar
from autopar.runtime.bound_signature import RunSettings
from autopar.runtime.compare import ComparedCall, run_comparison
from autopar.runtime.compare import tune as run_tuning
from autopar.runtime.comparison import Comparison
from autopar.runtime.module import PipelinedModule
from autopar.runtime.passes import LossFunction
from cost_models import Cluster, Device

log = logging.getLogger(__name__)

TUNING_STEPS = 5  # of every plan that is tuned, after one that warms up


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
    tune: int = 0,
    candidates: Mapping[str, Plan] | None = None,
    verify: bool = True,
    compile: bool | str = False,
    watch_nan: bool = False,
    cache: bool = True,
) -> PipelinedModule:
    """`model` as a pipelined module over `devices`; whatever is not given is chosen by measurement and search.

    Args:
        model: any module that torch.export or torch.fx can capture. Its parameters stay its own.
        devices: strings or torch.device; `"cpu"` may be repeated (workers that share the cores), as may one GPU.
            None: every visible GPU, else one CPU worker a core up to two. Or `Cluster.from_devices(...)`.
        example_args, example_kwargs: an example call. With one of them it captures, profiles and plans at once,
            else on the first call.
        target, loss_fn: with the example, what `train_step` will be called with, so that the plan makes room for
            the loss in the last stage. (Without, the first `train_step` plans again, mostly from the cache.)
        plan: a plan to follow instead of searching.
        n_microbatches: micro-batches a batch. schedule: "gpipe", "1f1b", "interleaved-1f1b" or "zb-h1".
        max_replicas: most devices one stage may hold; 1 for a pure pipeline.
        memory_limit: bytes usable on each device (default: what it has free).
        optimizer: whose state the memory must hold: "none", "sgd", "momentum", "adam", "adamw" or "adafactor".
        batch_norm: "per-microbatch": statistics of each micro-batch, as DataParallel and DDP do; "deferred": the same,
            but the running statistics are those of whole batches; "exact": the batch stays whole if the model has
            batch norm in training.
        batch_dim: the batch dimension of the inputs (default 0), or a dict from input names to theirs (None: shared).
        tune: run that many of the best plans for a few steps and follow the fastest; 0 trusts the prediction.
        candidates: plans of your own, by name, that are run beside them: the plan followed was at least as fast.
        verify: compare a few samples together with the same in parts, whatever is proven of the graph.
        compile: run every stage through torch.compile, with the backend named or, for True, its default.
        watch_nan: look at every value that leaves a stage, and name the operator that made the first NaN.
        cache: keep measurements on disk, and what was predicted and measured of steps (`accuracy`).

    Hints on modules (`pipeline_stage`, `recompute`, `keep_together`) constrain the search. With hints of `shard` all
    devices make one mesh, or one for each stage that modules are pinned to; the search chooses what these leave free.

    Raises:
        DeviceError, InputError: an argument does not fit. CaptureError, PlanError, InfeasibleError: when planning.
    """
    parsed, options = checked(
        model, devices, n_microbatches, schedule, max_replicas, memory_limit, optimizer, batch_norm
    )
    settings = RunSettings(batch_dim, batch_norm, compile=compile, watch_nan=watch_nan, verify=verify)
    tuning = _Tuning(tune, dict(candidates or {}), settings)
    if plan is not None:
        plan = _with_overrides(plan, n_microbatches, schedule).on([d.name for d in parsed], [d.kind for d in parsed])
        plan.check_model(model)

    def decide(example: Example) -> Plan:
        return _decide(example, parsed, options, tuning, cache)

    module = PipelinedModule(model, parsed, decide, plan=plan, settings=settings, record=cache)
    if example_args is not None or example_kwargs is not None:
        module.prepare(*example_call(example_args, example_kwargs), loss_fn=loss_fn, target=target)
    return module


def plan(
    model: nn.Module,
    devices: Devices = None,
    *,
    example_args: tuple[Any, ...] | None = None,
    example_kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> Plan:
    """The plan that `parallelize` would follow for such a call. Takes the same options.

    `devices` may be a cluster that is not at hand (`Cluster.preset`, `Cluster.from_toml`): then costs are estimated
    from its data sheets, and `model` may be on the meta device or made under FakeTensorMode, so that no weights are
    allocated. The plan is followed where such devices are: save it, and give it to `parallelize` as `plan`. Stages may
    then be meshes of devices that split the operators among them, each with its own shape and strategies; `max_shards`:
    most devices of a mesh, 1 for none. (Workers of one CPU do their shards one after another: there nothing is split
    unless `shard` asks for it.)
    """
    need_example("planning", example_args, example_kwargs)
    if isinstance(devices, Cluster) and not devices.at_hand:
        return _plan_ahead(model, devices, *example_call(example_args, example_kwargs), **options)
    if "max_shards" in options:
        raise InputError("max_shards: nothing is split over devices at hand unless autopar.shard() asks for it")
    module = parallelize(model, devices, example_args=example_args, example_kwargs=example_kwargs, **options)
    try:
        assert module.plan is not None
        return module.plan
    finally:
        module.close()


def profile(
    model: nn.Module,
    devices: Devices = None,
    *,
    example_args: tuple[Any, ...] | None = None,
    example_kwargs: dict[str, Any] | None = None,
    target: Any = None,
    loss_fn: LossFunction | None = None,
    optimizer: str | None = None,
    batch_dim: int | dict[str, int | None] | None = None,
    cache: bool = True,
) -> Profile:
    """Seconds and bytes of every operator and module on every kind of device, and the links between the devices.

    Measures what `parallelize` would, which then finds it in the cache; or estimates it for a cluster that is not at
    hand, as `plan` does. The model is unchanged by it. With `optimizer`, also what a whole training step has in memory
    on one device, moment by moment, told without running it. Other arguments and errors as for `parallelize`.
    """
    check_optimizer(optimizer or "none")
    need_example("profiling", example_args, example_kwargs)
    need_target(loss_fn, target)
    check_model(model)
    args, kwargs = example_call(example_args, example_kwargs)
    if isinstance(devices, Cluster) and not devices.at_hand:
        ahead = example_ahead(model, args, kwargs, loss_fn=loss_fn, target=target, batch_dim=batch_dim)
        memory = training_step(ahead, optimizer, devices.node[0].device_type) if optimizer else None
        with progress_bar() as progress:
            return summarize(estimate_costs(ahead, devices, progress=progress), memory)
    check_values(model)
    parsed = at_hand(devices)
    example = capture_example(model, parsed, args, kwargs, loss_fn=loss_fn, target=target, batch_dim=batch_dim)
    memory = training_step(example, optimizer, parsed[0].torch_device.type) if optimizer else None
    with progress_bar() as progress:
        return summarize(measure_costs(example, parsed, cache=cache, progress=progress), memory)


def compare(
    model: nn.Module,
    devices: Devices = None,
    plans: Mapping[str, Plan | None] | None = None,
    *,
    example_args: tuple[Any, ...] | None = None,
    example_kwargs: dict[str, Any] | None = None,
    target: Any = None,
    loss_fn: LossFunction | None = None,
    repeats: int = 5,
    n_microbatches: int | None = None,
    schedule: str | None = None,
    max_replicas: int | None = None,
    memory_limit: float | None = None,
    batch_norm: str = "per-microbatch",
    batch_dim: int | dict[str, int | None] | None = None,
    cache: bool = True,
) -> Comparison:
    """Step times and peak memory of `plans`, predicted and measured, next to the plain model on the first device.

    With `loss_fn` and `target` a step is `train_step`; without, it is a call and a backward from the output's `.loss`
    or else from the means of the outputs. A model in eval mode without `loss_fn` is compared by forwards alone. Steps
    are taken in turn (A B C A B C ...), on deep copies of the model: parameters, gradients, running statistics and the
    random state stay as they are.

    Args:
        plans: by name; None for the plan that autopar finds under the options. Default: {"auto": None}.
        repeats: steps of each plan that count.

    The other arguments and the errors are those of `parallelize`; no plan holds optimizer state here.
    """
    need_example("comparing", example_args, example_kwargs)
    need_target(loss_fn, target)
    if not isinstance(repeats, int) or repeats < 1:
        raise InputError(f"repeats must be a whole number of at least 1, got {repeats!r}")
    plans = {"auto": None} if plans is None else plans
    parsed, options = checked(model, devices, n_microbatches, schedule, max_replicas, memory_limit, "none", batch_norm)
    args, kwargs = example_call(example_args, example_kwargs)
    settings = RunSettings(batch_dim, batch_norm)
    example = capture_example(model, parsed, args, kwargs, loss_fn=loss_fn, target=target, batch_dim=settings.batch_dim)
    example, options = _as_the_model_allows(example, options, parsed, batch_norm)
    if asks_for_sharding(example):
        asked = plan_as_sharded(example, parsed, options) if None in plans.values() else None
        plans = {name: asked if plan is None else plan for name, plan in plans.items()}
    # A plan made by hand may split the batch otherwise than the options do: then all sizes are measured.
    only = options.n_microbatches if all(plan is None for plan in plans.values()) else None
    with progress_bar() as progress:
        costs = measure_costs(example, parsed, n_microbatches=only, cache=cache, progress=progress)
    with progress_bar() as progress:
        return run_comparison(
            ComparedCall(example, settings), plans, costs, options, repeats, record=cache, progress=progress
        )


def accuracy(since: datetime | None = None, kind: str | None = None) -> Accuracy:
    """How far predicted step times were from measured ones: the history beside the cache of measurements.

    Every `compare`, every tuned plan and every `train_step(..., profile=True)` adds to it, unless it was called with
    `cache=False`.

    Args:
        since: only what was measured from then on; local time where it has no zone.
        kind: only plans on a kind of device whose name contains this, such as "H200".
    """
    return Accuracy.of(recall(), since=since, kind=kind)


@dataclass(frozen=True)
class _Tuning:
    """What a plan is measured against before it is followed."""

    finalists: int
    candidates: Mapping[str, Plan]
    settings: RunSettings

    def __post_init__(self) -> None:
        if not isinstance(self.finalists, int) or isinstance(self.finalists, bool) or self.finalists < 0:
            raise InputError(f"tune must be a whole number of at least 0, got {self.finalists!r}")
        if self.candidates and not self.finalists:
            raise InputError("candidates are compared by running them; give tune=1 or more")
        for name, plan in self.candidates.items():
            if not isinstance(plan, Plan):
                raise InputError(f"candidates[{name!r}] must be a Plan, got {type(plan).__name__}")


def _decide(
    example: Example, devices: tuple[Device, ...], options: SearchOptions, tuning: _Tuning, cache: bool
) -> Plan:
    example, options = _as_the_model_allows(example, options, devices, tuning.settings.batch_norm)
    checked_alone(example, tune=tuning.finalists, candidates=tuning.candidates)
    if asks_for_sharding(example):
        return plan_as_sharded(example, devices, options)
    only = None if tuning.candidates else options.n_microbatches
    with progress_bar() as progress:
        costs = measure_costs(example, devices, n_microbatches=only, cache=cache, progress=progress)
    if not tuning.finalists:
        return dataclasses.replace(make_plan(costs, options), model=fingerprint(example.model))
    found = find_plans(costs, options, tuning.finalists)
    plans = {f"automatic {rank}": plan for rank, plan in enumerate(found, 1)} | dict(tuning.candidates)
    call = ComparedCall(example, tuning.settings)
    with progress_bar() as progress:
        name, best, table = run_tuning(call, plans, costs, options, TUNING_STEPS, record=cache, progress=progress)
    told = [
        f"{'*' if other == name else ''}{other} {predicted * 1e3:.4g} / {measured * 1e3:.4g} ms"
        for other, (predicted, measured) in table.items()
    ]
    note = f"tuned over {TUNING_STEPS} steps each, predicted / measured: {', '.join(told)} (* is followed)"
    return dataclasses.replace(best, notes=(*best.notes, note), model=fingerprint(example.model))


def _as_the_model_allows(
    example: Example, options: SearchOptions, devices: Sequence[Device], batch_norm: str
) -> tuple[Example, SearchOptions]:
    """The same with all that keeps the batch whole and all hints taken into account."""
    batching = example.batching
    hints = resolve(read_hints(example.model), example.program, len(devices), batching.storages)
    why = batching.obstacle
    if not why and batch_norm == "exact" and batching.batch_norms:
        why = f"batch_norm='exact' and '{batching.batch_norms[0]}' normalises by the whole batch's statistics"
    if why and (options.n_microbatches or 1) > 1:
        log.warning("n_microbatches=%s cannot be followed: %s", options.n_microbatches, why)
        options = dataclasses.replace(options, n_microbatches=1)
    options = dataclasses.replace(
        options,
        one_microbatch_because=why,
        unproven=batching.unproven,
        least_rows=batching.least_rows,
        loss_inside=example.loss is not None,
        constraints=Constraints(hints.stage_of, hints.recompute, hints.together),
    )
    return dataclasses.replace(example, batching=dataclasses.replace(batching, obstacle=why)), options


def _plan_ahead(
    model: nn.Module,
    cluster: Cluster,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    target: Any = None,
    loss_fn: LossFunction | None = None,
    n_microbatches: int | None = None,
    schedule: str | None = None,
    max_replicas: int | None = None,
    memory_limit: float | None = None,
    optimizer: str = "adamw",
    batch_norm: str = "per-microbatch",
    batch_dim: int | dict[str, int | None] | None = None,
    max_shards: int | None = None,
    **others: Any,
) -> Plan:
    """The plan for devices that are not here."""
    needless = {"cache", "verify", "compile", "watch_nan"}  # of measuring and of running
    if wrong := sorted(set(others) - needless):
        raise InputError(f"{', '.join(wrong)}: nothing can be run on {cluster.title}, which is not at hand")
    options = checked_options(model, n_microbatches, schedule, max_replicas, memory_limit, optimizer, batch_norm)
    if max_shards is not None and (type(max_shards) is not int or max_shards < 1):
        raise InputError(f"max_shards must be a whole number of at least 1, got {max_shards!r}")
    settings = RunSettings(batch_dim, batch_norm)
    example = example_ahead(model, args, kwargs, loss_fn=loss_fn, target=target, batch_dim=settings.batch_dim)
    example, options = _as_the_model_allows(example, options, cluster.devices, batch_norm)
    if asks_for_sharding(example):
        return plan_as_sharded(example, cluster.devices, options, cluster)
    with progress_bar() as progress:
        costs = estimate_costs(example, cluster, n_microbatches=options.n_microbatches, progress=progress)
    if max_shards == 1:
        found = make_plan(costs, options)
    else:
        subject = subject_of(example, options.optimizer)
        with progress_bar() as progress:
            found = plan_with_meshes(costs, options, subject, max_shards=max_shards, progress=progress)
    note = f"estimated from the data sheets of {cluster.title}, not measured"
    return dataclasses.replace(found, notes=(note, *found.notes), model=fingerprint(model))


def _with_overrides(plan: Plan, n_microbatches: int | None, schedule: str | None) -> Plan:
    changes: dict[str, Any] = {}
    if n_microbatches is not None:
        changes["n_microbatches"] = n_microbatches
    if schedule is not None:
        changes["schedule"] = schedule
    return dataclasses.replace(plan, **changes) if changes else plan
