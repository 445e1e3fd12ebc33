"""Plans for models with `shard()` hints: one mesh of all devices.

hints --shard_hints--> mesh and constraints --strategy_search--> strategies --solution--> the stage of a plan
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.analysis.example import Example
from autopar.analysis.operators import operator_keys
from autopar.errors import PlanError
from autopar.hints.module_hints import read_hints
from autopar.hints.shard import hinted_modules
from autopar.plan.fingerprint import fingerprint
from autopar.plan.plan import Plan
from autopar.plan.stage import Stage
from autopar.planner.explainers import Explainer, with_explainer
from autopar.planner.hint_constraints.memory_lack import fitting
from autopar.planner.hint_constraints.pinned_meshes_plan import plan_pinned
from autopar.planner.hint_constraints.shard_hints import (
    ResolvedSharding,
    has_sharding_hints,
    microbatch_on_meta,
    resolve_sharding,
)
from autopar.planner.intra_op.explain import Solved, operator_explainer
from autopar.planner.intra_op.sharding_task import ShardingTask
from autopar.planner.intra_op.solution import times, whole_graph_sharding
from autopar.planner.intra_op.strategy_search import Sharding, ShardingProblem
from autopar.planner.search_options import SearchOptions
from autopar.sharding.mesh import make_mesh
from cost_models import Cluster, Device

_NAMED = 4  # operators in a note


def asks_for_sharding(example: Example) -> bool:
    return has_sharding_hints(example.program, example.model)


def plan_as_sharded(
    example: Example, devices: Sequence[Device], options: SearchOptions, cluster: Cluster | None = None
) -> Plan:
    """One stage on a mesh of all `devices`. Its sharding follows the hints; the search chooses the rest.

    Where modules are pinned to stages, every stage has a mesh (`plan_pinned`). `cluster`: of the devices, if they are
    not in this machine. CPU workers take turns, so they are not measured: the search chooses as for as many H100.

    Raises PlanError for hints that contradict each other or that the model cannot follow, and InfeasibleError where
    the memory is too small.
    """
    on_cpu = cluster is None and all(d.torch_device.type == "cpu" for d in devices)
    if cluster is None:
        cluster = Cluster.preset(f"{len(devices)}xH100") if on_cpu else Cluster.from_devices(list(devices))
    if any(stage for _, stage in read_hints(example.model).stages):
        return plan_pinned(example, devices, options, cluster)
    if options.schedule is not None:
        raise PlanError(
            f"schedule={options.schedule!r} is for several stages, and with hints of shard() there is one; pin modules "
            "to stages with pipeline_stage()"
        )
    resolved = resolve_sharding(example.program, example.model, len(devices), options.n_microbatches or 1)
    solved = _solved(example, [d.memory for d in devices], options, cluster, resolved)
    found, m = solved.found, solved.problem.task.n_microbatches
    forward, backward, once = (None, None, None) if on_cpu else times(found, m)
    keys = {name: key for key, name in solved.nodes.items()}
    stage = Stage(
        tuple(devices[i].name for i in resolved.order),
        tuple(solved.nodes),
        forward,
        backward,
        peak_memory=None if on_cpu else round(found.nbytes + found.most_gathered),
        sync_time=once,
        recompute=bool(options.constraints.recompute) and example.training,
        sharding=whole_graph_sharding(solved.problem, found, keys),
    )
    plan = Plan(
        (stage,),
        m,
        batch_size=example.program.batch_size,
        devices=tuple(d.name for d in devices),
        training=example.training,
        predicted_step_time=None if on_cpu else m * found.seconds,
        notes=tuple(_notes(example, found, keys, on_cpu)),
        model=fingerprint(example.model),
        device_kinds=tuple(d.kind for d in devices),
    )
    return with_explainer(plan, Explainer(operators=operator_explainer(lambda _: solved)))


def _solved(
    example: Example, memories: Sequence[float], options: SearchOptions, cluster: Cluster, resolved: ResolvedSharding
) -> Solved:
    """The fastest strategies under the hints. `memories`: bytes of every device."""
    program, m = example.program, options.n_microbatches or 1
    module, inputs, rows = microbatch_on_meta(program, m)
    mesh = make_mesh(resolved.shape, [cluster.devices[i].name for i in resolved.order], resolved.names)
    in_flight = 1 if options.loss_inside else m
    training, optimizer = example.training, options.optimizer
    task = ShardingTask(module, inputs, rows, cluster, m, training, optimizer, in_flight, options.recipe)
    memory = min(options.memory_limit or float("inf"), *memories)
    problem = ShardingProblem(task, mesh)
    found = fitting(problem, memory, resolved.constraints, "the model")
    nodes = {key: node.name for node, key in operator_keys(program).items()}
    return Solved(problem, found, nodes, memory, resolved.constraints)


def _notes(example: Example, found: Sharding, keys: dict[str, str], on_cpu: bool) -> Iterator[str]:
    calls = example.program.shard_calls
    modules = [f"module '{path or '(root)'}'" for path in hinted_modules(example.model)]
    titles = dict.fromkeys([*modules, *(call.title for call in calls)])
    axes = " x ".join(f"{name} {n}" for name, n in zip(found.mesh.names, found.mesh.shape, strict=True))
    yield f"sharded by hints on {', '.join(titles)}; the mesh is {axes}"
    n = found.mesh.size
    alone = dict.fromkeys(str(call.operator) for call in calls if call.operator in found.strategies)
    parts = {name: round(1 / found.strategies[name].share) for name in alone}
    repeated = [f"{keys[name]} ({k} of {n} devices do different parts)" for name, k in parts.items() if k < n]
    if repeated:
        more = f" and {len(repeated) - _NAMED} more" if len(repeated) > _NAMED else ""
        yield f"devices repeat the work of {', '.join(repeated[:_NAMED])}{more}"
    if on_cpu:
        yield (
            "the shards of CPU workers run one after another: nothing is gained by them here; seconds of operators and "
            "collectives are those of as many H100"
        )


def checked_alone(example: Example, **others: object) -> None:
    """Raises PlanError where a model with sharding hints is planned with options that compare several plans."""
    used = [name for name, value in others.items() if value]
    if used and asks_for_sharding(example):
        raise PlanError(f"{', '.join(used)}: hints of shard() ask for one plan, there is nothing to try it against")


def checked_width(plan: Plan, max_shards: int | None) -> Plan:
    """`plan`, which follows hints. Raises PlanError where they ask for meshes of more than `max_shards` devices."""
    widest = max(stage.shards for stage in plan.stages)
    if max_shards is not None and max_shards < widest:
        raise PlanError(
            f"max_shards={max_shards}, but with hints of shard() {widest} devices form a mesh; leave it out, "
            f"give at least {widest}, or fewer devices"
        )
    return plan
