"""A plan from the degrees that an expert writes in Megatron-LM, torchtitan or DeepSpeed, priced as the search does.

model --layers--> stages --degrees--> meshes --SharedWork.strategies--> strategies --predict--> Plan
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from autopar.analysis.example import Example
from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import SILENT, Progress
from autopar.costs.model_flops import step_work
from autopar.errors import InputError, PlanError
from autopar.options import PlanOptions
from autopar.plan.degrees import Degrees
from autopar.plan.fingerprint import fingerprint
from autopar.plan.made_by_hand import BY_HAND
from autopar.plan.plan import Plan, with_unproven_split
from autopar.plan.recompute import RECOMPUTE
from autopar.plan.stage import Stage
from autopar.planner.hand_plan.degrees import Limits, read_degrees
from autopar.planner.hand_plan.layers import stages_of_layers, stages_without_operators
from autopar.planner.hand_plan.shared_work import SharedWork
from autopar.planner.inter_op.mesh_configuration import MeshConfiguration, mesh_configuration
from autopar.planner.kept_layers import notes_on_kept_layers
from autopar.planner.predict import predict
from autopar.planner.search_options import assumptions_of, estimated_note, search_options
from autopar.sharding.mesh import make_mesh
from autopar.sharding.stage_sharding import StageSharding
from cost_models import Cluster, Device, bytes_text


def plan_by_hand(
    example: Example,
    cluster: Cluster,
    options: PlanOptions,
    wanted: Mapping[str, Any],
    progress: Progress = SILENT,
    shared: SharedWork | None = None,
    problems: Sequence[str] = (),
) -> Plan:
    """The plan with the degrees `wanted`, see `read_degrees`, for a call of a model on all devices of `cluster`.

    `shared`: of earlier plans of the model under the same options. `problems`: what is already known to be wrong.
    Raises PlanError that lists every degree that contradicts another, the cluster or the model.
    """
    shared, refused = (shared, ()) if shared is not None else _shared_work(example, options)
    example, search = search_options(example, options, len(cluster.devices))
    program = example.program
    layers = shared.layers

    @functools.cache
    def not_divided(tensor: int) -> tuple[str, ...]:
        return shared.cut_sizes(example, cluster).not_divided(tensor) if tensor > 1 else ()

    limits = Limits(
        n_devices=len(cluster.devices),
        batch=max(1, program.batch_size),
        obstacle=example.batching.obstacle,
        least=example.batching.least_rows,
        n_layers=len(layers),
        refused=lambda other: (*_mixed_stages(other, cluster), *not_divided(other.tensor)),
    )
    degrees, contradictions = read_degrees(limits, **wanted)
    if problems or refused or contradictions:
        _refuse([*problems, *refused], contradictions)
    n_stages = degrees.n_stages
    recompute, how = _recompute(degrees, example)
    names = [device.name for device in cluster.devices]
    plan = Plan.from_split(
        stages_of_layers(layers, n_stages),
        n_microbatches=degrees.n_microbatches,
        schedule=degrees.schedule,
        devices=[[names[i] for i in degrees.devices(rank)] for rank in degrees.rank_of],
        recompute=dict.fromkeys(range(n_stages), recompute),
    )
    stage_of = {node.name: stage for node, stage in plan.assign(program, example.batching.storages).items()}
    empty = stages_without_operators(stage_of, n_stages)
    if empty:
        raise PlanError(f"stages {', '.join(map(str, empty))} of pipeline={degrees.pipeline} have no operators")
    costs = shared.costs(example, cluster, degrees.n_microbatches, progress)
    if degrees.mesh:
        mesh = StageSharding(degrees.mesh, degrees.axes)
        plan = replace(plan, stages=tuple(replace(stage, sharding=mesh) for stage in plan.stages))
        costs, configurations, not_followed = _on_meshes(plan, degrees, costs, shared, example, progress)
    else:
        configurations, not_followed = (), ()
    priced = predict(costs, plan, stage_of, search.conditions, configurations)
    whole = (*example.notes, *costs.notes, estimated_note(cluster))
    notes = (f"{BY_HAND}{_text(degrees)}", *how, *not_followed, *_lacking(priced, costs), *whole)
    found = replace(
        priced,
        split=(),
        devices=tuple(names),
        device_kinds=tuple(device.kind for device in cluster.devices),
        notes=notes,
        model=fingerprint(example.model),
        assumed=assumptions_of(shared.recipe, options.optimizer_name),
        work=step_work(example, cluster, shared.flops(example)),
    )
    return with_unproven_split(found, example.batching.unproven)


def plan_by_hand_for_workers(
    example: Example,
    workers: Sequence[Device],
    options: PlanOptions,
    wanted: Mapping[str, Any],
    progress: Progress = SILENT,
    problems: Sequence[str] = (),
) -> Plan:
    """The same on workers of a CPU: the strategies are those for as many H100, and nothing is predicted.

    Raises like `plan_by_hand`.
    """
    cluster = Cluster.preset(f"{len(workers)}xH100")
    plan = plan_by_hand(example, cluster, options, wanted, progress, problems=problems)
    names = dict(zip(plan.devices, (worker.name for worker in workers), strict=True))
    stages = tuple(replace(stage, devices=tuple(names[d] for d in stage.devices)) for stage in plan.stages)
    why = "its strategies were chosen by the prices of as many H100"
    alone = replace(plan, stages=stages, devices=tuple(names.values())).without_predictions(why)
    kinds = tuple(worker.kind for worker in workers)
    work = None if plan.work is None else replace(plan.work, least_time=None)  # that of the H100
    return replace(alone, device_kinds=kinds, assumed=None, work=work, notes=(*plan.notes[:-1], *alone.notes))


def _recompute(degrees: Degrees, example: Example) -> tuple[str, tuple[str, ...]]:
    """What all stages do, by its name, and notes about layers that do otherwise."""
    if not RECOMPUTE[degrees.recompute].by_layer or not example.training:
        return degrees.recompute, ()
    notes = notes_on_kept_layers(example)
    if notes is None:
        return "stage", (
            f"no equal layers follow each other in the model: with recompute={degrees.recompute!r} its stages run "
            "again as one",
        )
    return degrees.recompute, notes


def _shared_work(example: Example, options: PlanOptions) -> tuple[SharedWork, tuple[str, ...]]:
    """What plans of the call share, and why the model does not have the requested precision, if so."""
    try:
        return SharedWork(example, options), ()
    except InputError as error:
        return SharedWork(example, replace(options, precision=None)), (str(error),)


def _mixed_stages(degrees: Degrees, cluster: Cluster) -> Iterator[str]:
    """What is wrong with a stage whose devices differ: they would do equal parts at different speeds."""
    kinds = [device.kind for device in cluster.devices]
    if degrees.data * degrees.tensor * degrees.pipeline != len(kinds):
        return  # which devices a stage has is not known
    for rank in range(degrees.pipeline):
        mixed = dict.fromkeys(kinds[i] for i in degrees.devices(rank))
        if len(mixed) > 1:
            yield (
                f"stage {rank} would have devices of several types, {', '.join(mixed)}, which do equal parts of it; "
                "give degrees for which tensor x data devices in a row are of one type"
            )


def _refuse(options: Sequence[str], degrees: Sequence[str]) -> NoReturn:
    """Raise with what is wrong with the options that are no degrees, and with the degrees."""
    if degrees:
        raise PlanError("the plan by hand cannot be followed:\n  " + "\n  ".join([*options, *degrees]))
    raise InputError("; ".join(options))


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
    plan: Plan, degrees: Degrees, costs: CostGraph, shared: SharedWork, example: Example, progress: Progress
) -> tuple[CostGraph, tuple[str, ...], tuple[str, ...]]:
    """The cost graph over the meshes of all stages, the name of every stage's configuration, and notes."""
    builder = Configurations(degrees, costs, shared, example)
    names = []
    for number, stage in enumerate(plan.stages[: degrees.pipeline]):
        progress(f"strategies of stage {number}", number / degrees.pipeline)
        names.append(builder.of(stage).name)
    on_meshes = replace(costs, configurations=tuple(builder.found.values()))
    return on_meshes, tuple(names[rank] for rank in degrees.rank_of), tuple(builder.notes)


class Configurations:
    """The stage configurations of a plan: one for all stages whose devices lie on nodes in the same way."""

    def __init__(self, degrees: Degrees, costs: CostGraph, shared: SharedWork, example: Example) -> None:
        assert costs.cluster is not None, "hand plans are priced on the links of a cluster"
        self.found: dict[tuple[object, ...], MeshConfiguration] = {}
        self.notes: dict[str, None] = {}
        self._degrees, self._costs, self._cluster = degrees, costs, costs.cluster
        self._shared = shared
        self._program = shared.mesh_program.program(costs, shared.folded)
        task = shared.mesh_program.task(costs, shared.folded, degrees.n_microbatches)
        self._task = replace(task, scatters=degrees.zero == 2)
        self._facts = shared.facts(self._task)
        self._batch_dims: Mapping[str, int | None] = example.batching.batch_dims

    def of(self, stage: Stage) -> MeshConfiguration:
        pattern = self._pattern(stage.devices)
        if pattern not in self.found:
            mesh = make_mesh(self._degrees.mesh, stage.devices, self._degrees.axes)
            sharding, notes = self._shared.strategies(self._task, mesh, pattern, self._degrees, self._batch_dims)
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
