"""A captured signature of the model, bound to a plan and to devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx, nn

from autopar.analysis.batching import Batching
from autopar.analysis.blocks import Blocks
from autopar.capture.program import Program
from autopar.errors import PlanError
from autopar.hints.module_hints import read_hints
from autopar.lower.stages import Lowered, lower
from autopar.options import BatchDim, Dynamic, PlanOptions
from autopar.plan.plan import Plan
from autopar.planner.hint_constraints.shard_violations import sharding_violations
from autopar.planner.hint_constraints.stage_hints import resolve, violations
from autopar.runtime.signatures.loss_splits import LossSplits
from autopar.runtime.signatures.model_state import State
from autopar.runtime.stages.executable import Executable
from autopar.runtime.stages.stage_replica import StagePlacement
from autopar.runtime.step.workers import WorkerPool
from cost_models.hardware.devices import Device, find_device


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run that do not depend on the plan; see `autopar.parallelize`."""

    batch_dim: BatchDim = None
    batch_norm: str = "per-microbatch"  # or "deferred" or "exact"
    compile: bool | str = False  # run stages through torch.compile; a string names its backend
    watch_nan: bool = False
    verify: bool = False
    dynamic: Dynamic = None
    strict: bool = False  # refuse parts that no tracer captures

    @classmethod
    def of(cls, options: PlanOptions) -> RunSettings:
        return cls(
            options.batch_dim,
            options.batch_norm,
            options.compile,
            options.watch_nan,
            options.verify,
            options.dynamic,
            options.strict,
        )


@dataclass(eq=False)
class BoundSignature:
    """One captured signature, and how it runs once it is bound to a plan."""

    state: State  # of the model at the capture
    program: Program
    batching: Batching
    plan: Plan | None = None  # the plan that it is bound to
    n_microbatches: int = 1
    lowered: Lowered | None = None
    executable: Executable | None = None  # None: the plan runs the plain model on one device
    loss_splits: LossSplits | None = None  # of the loss functions that it was trained with
    specialised: bool = False  # from a capture with symbolic sizes
    reused: bool = False  # `batching` comes from a call of other sizes, and lacks what measuring needs
    plan_of_other_call: bool = False  # the plan was made for another one, whose operators may be others
    whole: BoundSignature | None = None  # the same without shards, for batches that the shards do not divide


def whole_because(batching: Batching, settings: RunSettings) -> str:
    """Why the batch must be one micro-batch; "" if it may be split."""
    return batching.whole_because(settings.batch_norm)


def bind(
    signature: BoundSignature,
    plan: Plan,
    model: nn.Module,
    devices: Sequence[Device],
    workers: WorkerPool,
    settings: RunSettings,
    *,
    check_hints: bool,
) -> None:
    """Lower `plan` for the program of `signature`, and place its stages on workers.

    `check_hints`: the user gave the plan, so that it may contradict the hints on the model; a plan of the search does
    not. Raises PlanError where the plan does not fit the program.
    """
    stage_of = plan.assign(signature.program, signature.batching.storages)
    if check_hints:
        check_follows_hints(plan, signature, model, len(devices), stage_of)
    lowered = lowered_by(plan, signature, stage_of, settings)
    n_microbatches = 1 if whole_because(signature.batching, settings) else plan.n_microbatches
    executable = None
    if _is_plain(plan, n_microbatches, settings):
        device = find_device(devices, plan.used_devices[0]).torch_device
        if any(t.device != device for t in [*model.parameters(), *model.buffers()]):
            model.to(device)
    else:
        executable = Executable(
            signature.program,
            lowered,
            _placements(plan, devices, workers),
            plan.schedule,
            Lookup(model),
            chunks=plan.chunks,
            compiled=settings.compile,
            watch_nan=settings.watch_nan,
        )
    signature.plan, signature.n_microbatches = plan, n_microbatches
    signature.lowered, signature.executable, signature.whole = lowered, executable, None


def lowered_by(
    plan: Plan, signature: BoundSignature, stage_of: Mapping[fx.Node, int], settings: RunSettings
) -> Lowered:
    """The stages of `plan`. Raises PlanError where it does not fit the program."""
    lowered = lower(
        signature.program,
        stage_of,
        signature.batching.storages,
        defer_norms=settings.batch_norm == "deferred",
        shardings=[stage.sharding for stage in plan.stages],
        recompute=[stage.mode for stage in plan.stages] if signature.program.training else (),
        of_other_call=signature.plan_of_other_call,
    )
    if len(lowered.stages) != len(plan.stages):
        raise PlanError(
            f"the plan has {len(plan.stages)} stages, but operators of this model fill only "
            f"{len(lowered.stages)}; leave the empty ones out"
        )
    for stage, lowered_stage in zip(plan.stages, lowered.stages, strict=True):
        if stage.recompute and lowered_stage.unrepeatable:
            raise PlanError(
                f"stage {lowered_stage.index} cannot be recomputed: {lowered_stage.unrepeatable} writes a buffer "
                "that the model reads (or keeps a state), so that a second run would compute other values; "
                "set recompute=False for the stage"
            )
    return lowered


def _placements(plan: Plan, devices: Sequence[Device], workers: WorkerPool) -> list[StagePlacement]:
    torch_device = {device.name: device.torch_device for device in devices}
    placements = []
    for stage in plan.stages:
        n = stage.shards
        groups = [stage.devices[i : i + n] for i in range(0, len(stage.devices), n)]  # one per replica
        placements.append(
            StagePlacement(
                workers=tuple(workers[group[0]] for group in groups),
                devices=tuple(tuple(torch_device[name] for name in group) for group in groups),
                recompute=stage.recompute,
                predicted_bytes=stage.peak_memory,
            )
        )
    return placements


def without_shards(plan: Plan) -> Plan:
    """The same plan, each mesh replaced by its first device, which computes the whole stage."""
    stages = tuple(replace(s, devices=s.devices[:: s.shards], sharding=None) for s in plan.stages)
    return replace(plan, stages=stages)


def _is_plain(plan: Plan, n_microbatches: int, settings: RunSettings) -> bool:
    """Whether the plan runs the plain model on one device."""
    changed = any(stage.mode for stage in plan.stages) or bool(settings.compile) or settings.watch_nan
    return len(plan.used_devices) == 1 and n_microbatches == 1 and not changed


def check_follows_hints(
    plan: Plan, signature: BoundSignature, model: nn.Module, n_devices: int, stage_of: Mapping[fx.Node, int]
) -> None:
    """Raise PlanError where a plan contradicts the hints on the model."""
    hints, names = read_hints(model), {node.name: stage for node, stage in stage_of.items()}
    problems = sharding_violations(plan, names, signature.program, model)
    if hints:
        resolved = resolve(hints, signature.program, n_devices, signature.batching.storages)
        # A forward alone never recomputes, so that it satisfies every hint to do so.
        recompute = [stage.recompute or not signature.program.training for stage in plan.stages]
        again = rerun_by_layers(plan, signature.program, signature.batching.storages, stage_of)
        problems += violations(names, recompute, resolved, again)
    if problems:
        raise PlanError("the plan does not follow the hints on the model:\n  " + "\n  ".join(problems))


def rerun_by_layers(
    plan: Plan, program: Program, storages: Mapping[str, frozenset[int]], stage_of: Mapping[fx.Node, int]
) -> frozenset[str]:
    """The operators that run again with their layers."""
    if not any(stage.layerwise for stage in plan.stages):
        return frozenset()
    blocks = Blocks(program, storages)
    return frozenset(node.name for node in blocks.of if node in stage_of and plan.stages[stage_of[node]].layerwise)


class Lookup:
    """The model's current tensors by name. (`.to()` replaces buffers, so that they are looked up for every call.)"""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._owners: dict[str, tuple[nn.Module, str]] = {}

    def __call__(self, name: str) -> torch.Tensor:
        if name not in self._owners:
            path, _, leaf = name.rpartition(".")
            self._owners[name] = (self._model.get_submodule(path), leaf)
        owner, leaf = self._owners[name]
        value = owner._buffers.get(leaf)  # those are most of what is looked up, and getattr takes long to find them
        if value is None:
            value = getattr(owner, leaf)
        if not isinstance(value, torch.Tensor):
            raise AttributeError(f"{name} is not a tensor of the model")
        return value
