"""A captured signature of the model, bound to a plan and to devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from autopar.analysis.batching import Batching
from autopar.capture.module_hooks import has_hooks
from autopar.capture.program import Program
from autopar.errors import PlanError
from autopar.hints.module_hints import read_hints
from autopar.lower.stages import Lowered, lower
from autopar.options import BatchDim, PlanOptions
from autopar.plan.plan import Plan
from autopar.planner.hint_constraints.sharding_followed import sharding_violations
from autopar.planner.hint_constraints.stages import resolve, violations
from autopar.runtime.executable import Executable
from autopar.runtime.workers import Worker
from cost_models.hardware.devices import Device, find_device


@dataclass(frozen=True)
class RunSettings:
    """How a model is run, whatever the plan."""

    batch_dim: BatchDim = None
    batch_norm: str = "per-microbatch"  # or "deferred" or "exact"
    compile: bool | str = False  # stages go through torch.compile; or the name of its backend
    watch_nan: bool = False
    verify: bool = True

    @classmethod
    def of(cls, options: PlanOptions) -> RunSettings:
        return cls(options.batch_dim, options.batch_norm, options.compile, options.watch_nan, options.verify)


@dataclass
class BoundSignature:
    """One captured signature and how it runs."""

    state: tuple[Any, ...]  # of the model when it was captured, see `model_state`
    program: Program
    batching: Batching
    plan: Plan | None = None  # that it was built for
    n_microbatches: int = 1
    lowered: Lowered | None = None
    executable: Executable | None = None  # None: the plan is the plain model on one device
    whole: BoundSignature | None = None  # the same without shards, for batches that do not come apart


def model_state(modules: Sequence[nn.Module]) -> tuple[Any, ...]:
    """What a captured graph depends on beside the inputs: training or not, by module; which parameters, and their
    dtypes; which inner modules have hooks; the caller's default dtype and device, which new tensors have."""
    return (
        tuple(m.training for m in modules),
        tuple((id(p), p.dtype) for m in modules for p in m._parameters.values() if p is not None),
        tuple(id(m) for m in modules[1:] if has_hooks(m)),
        torch.get_default_dtype(),
        torch.get_default_device(),
    )


def one_microbatch(batching: Batching, settings: RunSettings) -> bool:
    """Whether the batch stays whole."""
    return not batching.splittable or (settings.batch_norm == "exact" and bool(batching.batch_norms))


def build(
    entry: BoundSignature,
    plan: Plan,
    model: nn.Module,
    devices: Sequence[Device],
    worker: Callable[[str], Worker],
    settings: RunSettings,
    *,
    check_hints: bool,
) -> None:
    """Lower `plan` for the entry's program and place it. `worker(name)` serves the device of that name.

    `check_hints`: the plan was given, and must do what the hints on the model ask; the search does so by itself.
    Raises PlanError where the plan does not fit the program.
    """
    stage_of = plan.assign(entry.program)
    if check_hints:
        _check_hints(plan, entry, model, len(devices), stage_of)
    defer = settings.batch_norm == "deferred"
    shardings = [stage.sharding for stage in plan.stages]
    lowered = lower(entry.program, stage_of, entry.batching.storages, defer_norms=defer, shardings=shardings)
    if len(lowered.stages) != len(plan.stages):
        raise PlanError(
            f"the plan has {len(plan.stages)} stages, but operators of this model fill only "
            f"{len(lowered.stages)}; leave the empty ones out"
        )
    for stage, lowered_stage in zip(plan.stages, lowered.stages, strict=True):
        if stage.recompute and lowered_stage.unrepeatable:
            raise PlanError(
                f"stage {lowered_stage.index} cannot be recomputed: {lowered_stage.unrepeatable} writes a buffer "
                "that the model reads; a second run would give something else, let the stage keep its activations"
            )
    n_microbatches = 1 if one_microbatch(entry.batching, settings) else plan.n_microbatches
    executable = None
    if _is_plain(plan, n_microbatches, settings):
        device = find_device(devices, plan.used_devices[0]).torch_device
        if any(t.device != device for t in [*model.parameters(), *model.buffers()]):
            model.to(device)
    else:
        torch_device = {device.name: device.torch_device for device in devices}
        groups = [[s.devices[i : i + s.shards] for i in range(0, len(s.devices), s.shards)] for s in plan.stages]
        executable = Executable(
            entry.program,
            lowered,
            [[worker(group[0]) for group in mine] for mine in groups],
            plan.schedule,
            _Lookup(model),
            chunks=plan.chunks,
            groups=[[[torch_device[name] for name in group] for group in mine] for mine in groups],
            recompute=[stage.recompute for stage in plan.stages],
            predicted_bytes=[stage.peak_memory for stage in plan.stages],
            compiled=settings.compile,
            watch_nan=settings.watch_nan,
        )
    entry.plan, entry.n_microbatches, entry.lowered, entry.executable = plan, n_microbatches, lowered, executable
    entry.whole = None


def without_shards(plan: Plan) -> Plan:
    """The same stages, each whole on the first device of its mesh."""
    stages = tuple(replace(s, devices=s.devices[:: s.shards], sharding=None) for s in plan.stages)
    return replace(plan, stages=stages)


def _is_plain(plan: Plan, n_microbatches: int, settings: RunSettings) -> bool:
    """Whether the plan is the model itself on one device."""
    changed = any(stage.recompute for stage in plan.stages) or bool(settings.compile) or settings.watch_nan
    return len(plan.used_devices) == 1 and n_microbatches == 1 and not changed


def _check_hints(
    plan: Plan, entry: BoundSignature, model: nn.Module, n_devices: int, stage_of: Mapping[fx.Node, int]
) -> None:
    hints, names = read_hints(model), {node.name: stage for node, stage in stage_of.items()}
    problems = sharding_violations(plan, names, entry.program, model)
    if hints:
        resolved = resolve(hints, entry.program, n_devices, entry.batching.storages)
        # Without a backward there is nothing to recompute for.
        recompute = [stage.recompute or not entry.program.training for stage in plan.stages]
        problems += violations(names, recompute, resolved)
    if problems:
        raise PlanError("the plan does not follow the hints on the model:\n  " + "\n  ".join(problems))


class _Lookup:
    """The model's tensors by name, as they are now (`.to()` replaces buffers)."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._found: dict[str, tuple[nn.Module, str]] = {}

    def __call__(self, name: str) -> torch.Tensor:
        if name not in self._found:
            path, _, leaf = name.rpartition(".")
            self._found[name] = (self._model.get_submodule(path), leaf)
        owner, leaf = self._found[name]
        value = getattr(owner, leaf)
        if not isinstance(value, torch.Tensor):
            raise AttributeError(f"{name} is no tensor of the model")
        return value
