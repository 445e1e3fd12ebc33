"""A plan from the degrees that an expert writes in Megatron-LM, torchtitan or DeepSpeed, priced as the search does.

model --layers--> stages --degrees--> meshes --by_degrees--> strategies --predict--> Plan
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.analysis.example import Example
from autopar.analysis.operators import operator_keys
from autopar.capture.repeated_layers.fold import fold
from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import SILENT, Progress
from autopar.costs.estimated import estimate_costs
from autopar.errors import PlanError
from autopar.options import PlanOptions
from autopar.plan.fingerprint import fingerprint
from autopar.plan.plan import Plan, Stage
from autopar.planner.hand_plan.degrees import Degrees, degrees_of
from autopar.planner.hand_plan.layers import layers_of, stages_of_layers, stages_without_operators
from autopar.planner.hand_plan.mesh_strategies import by_degrees
from autopar.planner.inter_op.mesh_configuration import MeshConfiguration, mesh_configuration
from autopar.planner.inter_op.meshes import Subject, subject_of
from autopar.planner.intra_op.sharding_task import GraphFacts
from autopar.planner.intra_op.strategy_search import ShardingProblem
from autopar.planner.predict import predict
from autopar.planner.search_options import recipe_of, search_options
from autopar.sharding.mesh import make_mesh
from autopar.sharding.stage_sharding import StageSharding
from cost_models import Cluster, Device, bytes_text


def plan_by_hand(
    example: Example, cluster: Cluster, options: PlanOptions, wanted: Mapping[str, Any], progress: Progress = SILENT
) -> Plan:
    """The plan with the degrees `wanted`, see `degrees_of`, for a call of a model on all devices of `cluster`.

    Raises PlanError that lists every degree that contradicts another, the cluster or the model.
    """
    recipe = recipe_of(example, options)
    example, search = search_options(example, options, len(cluster.devices))
    program = example.program
    layers = layers_of(example.model, program)
    degrees = degrees_of(
        n_devices=len(cluster.devices),
        batch=max(1, program.batch_size),
        splittable=example.batching.obstacle,
        n_layers=len(layers),
        **wanted,
    )
    n_stages = degrees.n_stages
    names = [device.name for device in cluster.devices]
    plan = Plan.from_split(
        stages_of_layers(layers, n_stages),
        n_microbatches=degrees.n_microbatches,
        schedule=degrees.schedule,
        devices=[[names[i] for i in degrees.devices(stage % degrees.pipeline)] for stage in range(n_stages)],
        recompute=range(n_stages) if degrees.recompute == "full" else (),
    )
    stage_of = {node.name: stage for node, stage in plan.assign(program, example.batching.storages).items()}
    empty = stages_without_operators(stage_of, n_stages)
    if empty:
        raise PlanError(f"stages {', '.join(map(str, empty))} of pipeline={degrees.pipeline} have no operators")
    _check_one_kind(plan, cluster)
    costs = estimate_costs(example, cluster, recipe, n_microbatches=degrees.n_microbatches, progress=progress)
    subject = subject_of(example, options.optimizer_name)
    if degrees.mesh:
        mesh = StageSharding(degrees.mesh, degrees.axes)
        plan = replace(plan, stages=tuple(replace(stage, sharding=mesh) for stage in plan.stages))
        costs, configurations, not_followed = _on_meshes(plan, degrees, costs, subject, example, progress)
    else:
        configurations, not_followed = (), ()
    priced = predict(costs, plan, stage_of, search.conditions, configurations)
    estimated = f"estimated from the data sheets of {cluster.title}, not measured"
    notes = (f"by hand: {_text(degrees)}", *not_followed, *_lacking(priced, costs), estimated)
    return replace(
        priced,
        split=(),
        devices=tuple(names),
        device_kinds=tuple(device.kind for device in cluster.devices),
        notes=notes,
        model=fingerprint(example.model),
    )


def plan_by_hand_for_workers(
    example: Example, workers: Sequence[Device], options: PlanOptions, wanted: Mapping[str, Any], progress: Progress
) -> Plan:
    """The same on workers of a CPU: the strategies are those for as many H100, and nothing is predicted.

    Raises like `plan_by_hand`.
    """
    plan = plan_by_hand(example, Cluster.preset(f"{len(workers)}xH100"), options, wanted, progress)
    names = dict(zip(plan.devices, (worker.name for worker in workers), strict=True))
    stages = tuple(replace(stage, devices=tuple(names[d] for d in stage.devices)) for stage in plan.stages)
    why = "the shards of CPU workers run one after another"
    alone = replace(plan, stages=stages, devices=tuple(names.values())).without_predictions(why)
    kinds = tuple(worker.kind for worker in workers)
    return replace(alone, device_kinds=kinds, notes=(*plan.notes[:-1], *alone.notes))


def _check_one_kind(plan: Plan, cluster: Cluster) -> None:
    """Raise PlanError for a stage whose devices differ: they would do equal parts at different speeds."""
    kinds = {device.name: device.kind for device in cluster.devices}
    for number, stage in enumerate(plan.stages):
        mixed = dict.fromkeys(kinds[name] for name in stage.devices)
        if len(mixed) > 1:
            raise PlanError(
                f"stage {number} would have devices of several types, {', '.join(mixed)}, which do equal parts of it; "
                "give degrees for which tensor x data devices in a row are of one type"
            )


def _lacking(plan: Plan, costs: CostGraph) -> tuple[str, ...]:
    """A note about the stage that lacks most memory."""
    memory = {device.name: device.memory for device in costs.devices}
    needed = [(stage.peak_memory or 0, min(memory[d] for d in stage.devices)) for stage in plan.stages]
    number, (peak, usable) = max(enumerate(needed), key=lambda one: one[1][0] - one[1][1])
    if peak <= usable:
        return ()
    return (f"does not fit: stage {number} needs {bytes_text(peak)} on a device that has {bytes_text(usable)}",)


def _text(degrees: Degrees) -> str:
    text = f"tensor={degrees.tensor}, pipeline={degrees.pipeline}, data={degrees.data}, "
    text += f"micro_batch={degrees.micro_batch}, schedule={degrees.schedule}, chunks={degrees.chunks}, "
    text += f"zero={degrees.zero}, recompute={degrees.recompute}"
    return text + (", sequence_parallel" if degrees.sequence_parallel else "")


def _on_meshes(
    plan: Plan, degrees: Degrees, costs: CostGraph, subject: Subject, example: Example, progress: Progress
) -> tuple[CostGraph, tuple[str, ...], tuple[str, ...]]:
    """The cost graph over the meshes of all stages, the name of every stage's configuration, and notes."""
    builder = _Configurations(degrees, costs, subject, example)
    names = []
    for number, stage in enumerate(plan.stages[: degrees.pipeline]):
        progress(f"strategies of stage {number}", number / degrees.pipeline)
        names.append(builder.of(stage).name)
    meshes = tuple(stage.devices for stage in plan.stages[: degrees.pipeline])
    on_meshes = replace(costs, configurations=tuple(builder.found.values()), meshes=meshes)
    return on_meshes, tuple(names * degrees.chunks), tuple(builder.notes)


class _Configurations:
    """The stage configurations of a plan: one for all stages whose devices lie on nodes in the same way."""

    def __init__(self, degrees: Degrees, costs: CostGraph, subject: Subject, example: Example) -> None:
        assert costs.cluster is not None, "hand plans are priced on the links of a cluster"
        self.found: dict[tuple[object, ...], MeshConfiguration] = {}
        self.notes: dict[str, None] = {}
        self._degrees, self._costs, self._cluster = degrees, costs, costs.cluster
        folded = fold(subject.module)
        self._program = subject.program(costs, folded)
        self._task = subject.task(costs, folded, degrees.n_microbatches)
        self._facts = GraphFacts(self._task)
        self._batch_dims: Mapping[str, int | None] = example.batching.batch_dims
        self._keys = {node.name: key for node, key in operator_keys(example.program).items()}

    def of(self, stage: Stage) -> MeshConfiguration:
        pattern = self._pattern(stage.devices)
        if pattern not in self.found:
            mesh = make_mesh(self._degrees.mesh, stage.devices, self._degrees.axes)
            problem = ShardingProblem(self._task, mesh, self._facts)
            sharding, notes = by_degrees(problem, self._degrees, self._batch_dims, self._keys)
            self.notes.update(dict.fromkeys(notes))
            name = f"by hand, {len(self.found)}"
            kind = next(d.kind for d in self._costs.devices if d.name == stage.devices[0])
            self.found[pattern] = mesh_configuration(
                name, kind, self._program, self._task, self._facts, sharding, fastest=True
            )
        return self.found[pattern]

    def _pattern(self, devices: Sequence[str]) -> tuple[object, ...]:
        """The kinds of devices, and for each its node, numbered in their order."""
        nodes = [self._cluster.node_of(name) for name in devices]
        numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
        kinds = {device.name: device.kind for device in self._cluster.devices}
        return (*(kinds[name] for name in devices), *(numbers[node] for node in nodes))
