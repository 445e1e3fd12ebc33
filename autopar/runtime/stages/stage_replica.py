"""A stage on one of its devices: its code over leaves of its own, and the actions that its worker does with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.analysis.operators import compute_nodes
from autopar.capture.direct_calls import with_direct_calls
from autopar.lower.regather import with_shards_kept
from autopar.lower.size_values import split_by_sizes
from autopar.lower.stages import StageProgram
from autopar.runtime.stages.device_tensors import DeviceBuffer, ParameterLeaf
from autopar.runtime.stages.graphed_stage import GraphedStage
from autopar.runtime.stages.stage_code import KeptSizeValues
from autopar.runtime.step.workers import Worker
from autopar.schedule.clock import Phase


@dataclass(frozen=True)
class StagePlacement:
    """Where and how one stage runs."""

    workers: tuple[Worker, ...]  # one per replica
    devices: tuple[tuple[torch.device, ...], ...]  # for each replica, the devices that its worker drives
    recompute: bool  # run the forward again for the backward
    predicted_bytes: int | None  # the most that its devices hold, by the plan


@dataclass
class StageReplica:
    """A stage on one of its devices (or meshes)."""

    slot: int
    stage: StageProgram
    worker: Worker
    module: fx.GraphModule
    compute: Callable[..., tuple[Any, ...]]  # `module.forward`, compiled if requested; it skips nn.Module.__call__
    leaves: list[ParameterLeaf]
    buffers: list[DeviceBuffer]
    recompute: bool
    predicted_bytes: int | None  # the most that its device holds, by the plan
    is_last: bool  # no stage follows
    graphs: GraphedStage | None = None  # what `compute` is, where the stage is recorded
    code: fx.GraphModule | None = None  # what runs for every micro-batch, where that is not `module` itself

    @cached_property
    def device(self) -> torch.device:
        return self.worker.device.torch_device

    @cached_property
    def needs_context(self) -> bool:
        """Whether what the stage computes depends on which micro-batch it is."""
        return self.stage.random or self.stage.hooked or bool(self.stage.deferred)

    @cached_property
    def n_operators(self) -> int:
        return len(compute_nodes(self.stage.module.graph))


class ReplicaAction(NamedTuple):
    """An action where it runs."""

    replica: StageReplica
    phase: Phase
    microbatch: int


@dataclass(frozen=True)
class Work:
    """The actions of one execution, by the worker that does them."""

    of_workers: tuple[tuple[Worker, tuple[ReplicaAction, ...]], ...]
    by_one: bool  # one worker of a CPU does all of them, so that any thread may


def captured_code(one: StageReplica) -> Callable[..., tuple[Any, ...]]:
    """The code of a stage as it was captured. A mesh has values of its own for every device, and stays as it is."""
    split = split_by_sizes(one.module) if one.stage.shards == 1 else None
    if split is not None:
        kept = KeptSizeValues(split)
        one.code = kept.module
        return kept
    one.code = with_direct_calls(one.module)
    return with_shards_kept(one.code.forward) if one.stage.regathers else one.code.forward
