"""Plans for models with both `pipeline_stage()` pins and `shard()` hints: one mesh per stage.

    devices 0 1 2 3, modules pinned to stages 0 and 1        stage 0: mesh of 0 and 1      stage 1: mesh of 2 and 3

All stages have the same number of consecutive devices. A module without a pin runs as early as its inputs allow. The
search chooses the free strategies of each stage by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import fx

from autopar.analysis.example import Example
from autopar.analysis.node_values import observe
from autopar.analysis.operators import on_device, operator_keys
from autopar.errors import PlanError
from autopar.hints.module_hints import read_hints
from autopar.lower.stages import StageProgram, lower
from autopar.plan.fingerprint import fingerprint
from autopar.plan.plan import Plan
from autopar.plan.stage import Stage
from autopar.planner.hint_constraints.memory_lack import fitting
from autopar.planner.hint_constraints.shard_hints import ResolvedSharding, microbatch_on_meta, resolve_sharding
from autopar.planner.hint_constraints.stage_hints import resolve as resolve_hints
from autopar.planner.hint_constraints.stage_hints import violations
from autopar.planner.intra_op.constraints import ShardingConstraints
from autopar.planner.intra_op.sharding_task import ShardingTask
from autopar.planner.intra_op.solution import whole_graph_sharding
from autopar.planner.intra_op.strategy_search import ShardingProblem
from autopar.planner.search_options import SearchOptions
from autopar.sharding.mesh import make_mesh
from cost_models import Cluster, Device
from cost_models.graphs import private_copy

META = torch.device("meta")
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Pinned:
    """Where every operator runs."""

    stage_of: Mapping[fx.Node, int]
    n_stages: int

    def operators(self, stage: int) -> frozenset[str]:
        """Of one stage, by node."""
        return frozenset(node.name for node, s in self.stage_of.items() if s == stage)


def plan_pinned(example: Example, devices: Sequence[Device], options: SearchOptions, cluster: Cluster) -> Plan:
    """Stages as they are pinned, each on a mesh of its own. Their sharding follows the hints; the search chooses the
    rest, stage by stage. Nothing is predicted of the whole step.

    `cluster`: costs of the devices, in their order. Micro-batches: as many as requested. Otherwise two per stage, if
    they are equal and the hints can cut them, or else one.

    Raises PlanError for hints that the model cannot follow, and InfeasibleError where the memory is too small.
    """
    program, pinned = example.program, _pinned(example)
    size, left = divmod(len(devices), pinned.n_stages)
    if left or not size:
        raise PlanError(
            f"{len(devices)} devices do not make {pinned.n_stages} stages of as many devices; with hints of shard() "
            f"every pinned stage gets as many: give a multiple of {pinned.n_stages}"
        )
    m, resolved = _resolved(example, pinned, size, options.n_microbatches)
    builder = _StagePlanner(example, pinned, devices, options, cluster, m)
    lowered = lower(program, pinned.stage_of, example.batching.storages)
    stages = tuple(map(builder.stage, lowered.stages, resolved))
    plan = Plan(
        stages,
        m,
        options.schedule or "1f1b",
        batch_size=program.batch_size,
        devices=tuple(device.name for device in devices),
        training=example.training,
        notes=(f"{pinned.n_stages} stages as pinned, each sharded over {size} devices by hints of shard()",),
        model=fingerprint(example.model),
        device_kinds=tuple(device.kind for device in devices),
    )
    hints = resolve_hints(read_hints(example.model), program, len(devices), example.batching.storages)
    recompute = [stage.recompute or not example.training for stage in stages]
    problems = violations({node.name: s for node, s in pinned.stage_of.items()}, recompute, hints)
    if problems:
        raise PlanError("the hints cannot be followed together:\n  " + "\n  ".join(problems))
    return plan


class _StagePlanner:
    """Chooses the strategies of one stage after another."""

    def __init__(
        self,
        example: Example,
        pinned: _Pinned,
        devices: Sequence[Device],
        options: SearchOptions,
        cluster: Cluster,
        n_microbatches: int,
    ) -> None:
        self.example, self.pinned, self.devices, self.options = example, pinned, devices, options
        self.cluster, self.m = cluster, n_microbatches
        self.keys = {node.name: key for node, key in operator_keys(example.program).items()}
        module, inputs, self.rows = microbatch_on_meta(example.program, n_microbatches)
        self.values = {node.name: value for node, value in observe(module, inputs).items()}

    def stage(self, lowered: StageProgram, hints: ResolvedSharding) -> Stage:
        size, s = len(hints.order), lowered.index
        group = [s * size + i for i in hints.order]
        problem = self._problem(lowered, hints, group)
        memory = min(self.options.memory_limit or float("inf"), *(self.devices[i].memory for i in group))
        found = fitting(problem, memory, _inside(hints.constraints, problem, lowered), f"stage {s}")
        mine = self.pinned.operators(s)
        return Stage(
            tuple(self.devices[i].name for i in group),
            tuple(key for name, key in self.keys.items() if name in mine),
            recompute=self.example.training and not mine.isdisjoint(self.options.constraints.recompute),
            sharding=whole_graph_sharding(problem, found, self.keys) if size > 1 else None,
        )

    def _problem(self, lowered: StageProgram, hints: ResolvedSharding, group: Sequence[int]) -> ShardingProblem:
        mesh = make_mesh(hints.shape, [self.cluster.devices[i].name for i in group], hints.names)
        in_flight = min(self.m, self.pinned.n_stages - lowered.index) if self.options.loss_inside else self.m
        leaves = [self.values[node.name] for node in lowered.module.graph.nodes if node.op == "placeholder"]
        graph = private_copy(on_device(lowered.module, self.example.program.device, META), META)
        task = ShardingTask(
            graph,
            leaves,
            self.rows,
            self.cluster,
            self.m,
            self.example.training,
            self.options.optimizer,
            in_flight,
            self.options.recipe,
        )
        return ShardingProblem(task, mesh)


def _pinned(example: Example) -> _Pinned:
    pins = dict(read_hints(example.model).stages)
    stage_of = Plan.from_split(pins, n_microbatches=1).assign(example.program)
    return _Pinned(stage_of, max(pins.values()) + 1)


def _resolved(
    example: Example, pinned: _Pinned, size: int, n_microbatches: int | None
) -> tuple[int, tuple[ResolvedSharding, ...]]:
    """The number of micro-batches, and the mesh and constraints of every stage."""
    twice = 2 * pinned.n_stages
    counts = (
        [n_microbatches]
        if n_microbatches is not None
        else [twice, 1]
        if example.program.batch_size % twice == 0
        else [1]
    )
    for m in counts:
        try:
            return m, tuple(
                resolve_sharding(example.program, example.model, size, m, None, pinned.operators(s))
                for s in range(pinned.n_stages)
            )
        except PlanError:
            if m == counts[-1]:
                raise
    raise AssertionError("there is a number of micro-batches to try")


def _inside(constraints: ShardingConstraints, problem: ShardingProblem, stage: StageProgram) -> ShardingConstraints:
    """The constraints on this stage: a hinted call may go on in the next one."""

    def known(constrained: Mapping[str, _T], names: Any) -> dict[str, _T]:
        return {name: allowed for name, allowed in constrained.items() if name in names}

    return replace(
        constraints,
        operands=known(constraints.operands, problem.options),
        results=known(constraints.results, problem.options),
        stored=known(constraints.stored, stage.parameters),
    )
