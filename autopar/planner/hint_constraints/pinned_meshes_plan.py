"""Plans for models whose modules are pinned to stages (`pipeline_stage`) and whose layouts are asked for (`shard`).

    devices 0 1 2 3, modules pinned to stages 0 and 1        stage 0: the mesh of 0 and 1      stage 1: that of 2 and 3

Every stage has as many devices, which follow each other. A module that nobody pinned runs as early as its inputs allow,
and what is free of a stage's layouts is chosen for this stage by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import fx

from autopar.analysis.example import Example
from autopar.analysis.node_values import observe
from autopar.analysis.operators import captured_device, on_device, operator_keys
from autopar.errors import PlanError
from autopar.hints.module_hints import read_hints
from autopar.lower.stages import StageProgram, lower
from autopar.plan.fingerprint import fingerprint
from autopar.plan.plan import Plan, Stage
from autopar.planner.hint_constraints.shard_hints import ResolvedSharding, microbatch_on_meta, resolve_sharding
from autopar.planner.hint_constraints.stage_hints import resolve as resolve_hints
from autopar.planner.hint_constraints.stage_hints import violations
from autopar.planner.intra_op.constraints import ShardingConstraints
from autopar.planner.intra_op.solution import whole_graph_sharding
from autopar.planner.intra_op.strategy_graph import ShardingTask
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
    """Stages as they are pinned, each on a mesh of its own, sharded as the hints ask and otherwise as fast as can be.

    `cluster`: with the costs of the devices, in their order. Micro-batches: as many as asked for, else two a stage if
    these are equal and come apart as asked, else one. Nothing is predicted of the whole.

    Raises PlanError for hints that cannot be followed, and InfeasibleError where the memory is too small.
    """
    program, pinned = example.program, _pinned(example)
    size, left = divmod(len(devices), pinned.n_stages)
    if left or not size:
        raise PlanError(
            f"{len(devices)} devices do not make {pinned.n_stages} stages of as many devices; with hints of shard() "
            f"every pinned stage gets as many: give a multiple of {pinned.n_stages}"
        )
    m, resolved = _resolved(example, pinned, size, options.n_microbatches)
    module, inputs, rows = microbatch_on_meta(program, m)
    values = {node.name: value for node, value in observe(module, inputs).items()}
    lowered = lower(program, pinned.stage_of, example.batching.storages)
    keys = {node.name: key for node, key in operator_keys(program).items()}
    limit = options.memory_limit or float("inf")
    stages = []
    for s, (one, asked) in enumerate(zip(lowered.stages, resolved, strict=True)):
        group = [s * size + i for i in asked.order]
        mesh = make_mesh(asked.shape, [cluster.devices[i].name for i in group], asked.names)
        kept = min(m, pinned.n_stages - s) if options.loss_inside else m
        leaves = [values[node.name] for node in one.module.graph.nodes if node.op == "placeholder"]
        graph = private_copy(on_device(one.module, captured_device(program), META), META)
        task = ShardingTask(graph, leaves, rows, cluster, m, example.training, options.optimizer, kept)
        problem = ShardingProblem(task, mesh)
        memory = min(limit, *(devices[i].memory for i in group))
        found = problem.solve(memory, {}, _inside(asked.constraints, problem, one))
        mine = pinned.operators(s)
        stages.append(
            Stage(
                tuple(devices[i].name for i in group),
                tuple(key for name, key in keys.items() if name in mine),
                recompute=example.training and not mine.isdisjoint(options.constraints.recompute),
                sharding=whole_graph_sharding(problem, found, keys) if size > 1 else None,
            )
        )
    plan = Plan(
        tuple(stages),
        m,
        options.schedule or "1f1b",
        batch_size=program.batch_size,
        devices=tuple(device.name for device in devices),
        training=example.training,
        notes=(f"{pinned.n_stages} stages as pinned, each sharded over {size} devices as asked by hints of shard()",),
        model=fingerprint(example.model),
        device_kinds=tuple(device.kind for device in devices),
    )
    hints = resolve_hints(read_hints(example.model), program, len(devices), example.batching.storages)
    recompute = [stage.recompute or not example.training for stage in stages]
    problems = violations({node.name: s for node, s in pinned.stage_of.items()}, recompute, hints)
    if problems:
        raise PlanError("the hints cannot be followed together:\n  " + "\n  ".join(problems))
    return plan


def _pinned(example: Example) -> _Pinned:
    pins = dict(read_hints(example.model).stages)
    stage_of = Plan.from_split(pins, n_microbatches=1).assign(example.program)
    return _Pinned(stage_of, max(pins.values()) + 1)


def _resolved(
    example: Example, pinned: _Pinned, size: int, asked: int | None
) -> tuple[int, tuple[ResolvedSharding, ...]]:
    """The number of micro-batches, and what the hints ask of every stage."""
    twice = 2 * pinned.n_stages
    counts = [asked] if asked is not None else [twice, 1] if example.program.batch_size % twice == 0 else [1]
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
    """What is asked of this stage: a call may go on in the next one."""

    def known(asked: Mapping[str, _T], names: Any) -> dict[str, _T]:
        return {name: wanted for name, wanted in asked.items() if name in names}

    return replace(
        constraints,
        operands=known(constraints.operands, problem.options),
        results=known(constraints.results, problem.options),
        stored=known(constraints.stored, stage.parameters),
    )
