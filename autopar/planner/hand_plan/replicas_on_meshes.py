"""Replicas of whole stages as an axis of a mesh, along which what they hold can be cut.

stage on a, b: micro-batches 0 to 3                stage on a mesh, data 2: micro-batches 0 and 1, twice as large
a   0     2                                        a   0    1      the first half of the samples of each
b      1     3                                     b   0    1      the second half
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.analysis.example import Example
from autopar.errors import PlanError
from autopar.options import PlanOptions
from autopar.plan.degrees import Degrees
from autopar.plan.plan import Plan, with_notes
from autopar.plan.stage import Stage
from autopar.planner.hand_plan.by_hand import Configurations
from autopar.planner.hand_plan.shared_work import SharedWork
from autopar.planner.predict import completed
from autopar.planner.search_options import search_options
from autopar.sharding.stage_sharding import StageSharding
from cost_models import Cluster

ARE_A_MESH = "replicas are a mesh"  # in a note of the changed plan
_AXIS = "data"  # as plans by hand call the axis of replicas


def replicas_on_meshes(
    plan: Plan, example: Example, cluster: Cluster, options: PlanOptions, n_microbatches: int | None = None
) -> Plan:
    """`plan`, which has no predictions, with a mesh in the place of the replicas of every whole stage.

    With `n_microbatches` the plan has that many. Without, a replica does as many samples in each micro-batch as before,
    or, where stages have different numbers of replicas, the plan has as many micro-batches as before. The same plan if
    it has no replicas of whole stages.

    Raises PlanError for a batch that cannot be shared out so, and for replicas of meshes.
    """
    meshes = [str(number) for number, stage in enumerate(plan.stages) if stage.sharding and stage.replicas > 1]
    if meshes:
        raise PlanError(
            f"stage {', '.join(meshes)} has replicas of a whole mesh, along which no axis runs; make the plan with "
            "Plan.by_hand(..., data=..., tensor=..., zero=...)"
        )
    if all(_replicas(stage) == 1 for stage in plan.stages):
        return plan
    example, _ = search_options(example, options, len(cluster.devices))
    n = _microbatches(plan) if n_microbatches is None else n_microbatches
    problems = list(_not_shared_out(plan, n, example))
    if problems:
        raise PlanError("replicas cannot share out the samples of each micro-batch:\n  " + "\n  ".join(problems))
    shared = SharedWork(example, options)
    costs = shared.costs(example, cluster, n)
    plan = completed(plan, example, costs)
    node_of = {operator.key: name for name, operator in costs.operators.items()}
    builders: dict[int, Configurations] = {}
    stages, notes = [], []
    for number, stage in enumerate(plan.stages):
        r = _replicas(stage)
        if r == 1:
            stages.append(stage)
            continue
        if r not in builders:
            builders[r] = Configurations(_degrees(plan, r, n), costs, shared, example)
        nodes = sorted((node_of[key] for key in stage.operators), key=lambda name: costs.operators[name].position)
        on_mesh = replace(stage, sharding=StageSharding((r,), (_AXIS,)))
        stages.append(replace(stage, sharding=builders[r].of(on_mesh).sharding(nodes).decision))
        notes.append(f"stage {number}: its {r} {ARE_A_MESH}, and each does 1/{r} of every micro-batch")
    return with_notes(replace(plan, stages=tuple(stages), n_microbatches=n), notes)


def _replicas(stage: Stage) -> int:
    """Of the stage as a whole."""
    return len(stage.devices) if stage.sharding is None else 1


def _microbatches(plan: Plan) -> int:
    """As many for each replica as it has now, if all stages have as many."""
    counts = {_replicas(stage) for stage in plan.stages}
    r = counts.pop()
    return plan.n_microbatches // r if not counts and plan.n_microbatches % r == 0 else plan.n_microbatches


def _not_shared_out(plan: Plan, n_microbatches: int, example: Example) -> Iterator[str]:
    if example.batching.obstacle:
        yield f"the batch cannot be split: {example.batching.obstacle}"
        return
    batch = max(1, example.program.batch_size)
    counts = [_replicas(stage) for stage in plan.stages]
    shared = [n for n in range(n_microbatches, 0, -1) if all(batch % (n * r) == 0 for r in counts if r > 1)]
    for number, r in enumerate(counts):
        if r > 1 and batch % (n_microbatches * r):
            wrong = f"{r} does not divide the batch" if batch % r else "those of other stages do not divide it"
            right = f"n_microbatches={shared[0]} would be right" if shared else wrong
            yield (
                f"stage {number} has {r} replicas, and {batch} samples are no {n_microbatches} micro-batches of a "
                f"multiple of {r} samples; {right}"
            )


def _degrees(plan: Plan, replicas: int, n_microbatches: int) -> Degrees:
    batch = plan.batch_size or 1
    return Degrees(
        tensor=1,
        pipeline=plan.ranks,
        data=replicas,
        micro_batch=max(1, batch // (n_microbatches * replicas)),
        schedule=plan.schedule,
        chunks=plan.chunks,
        zero=0,
        recompute="none",
        sequence_parallel=False,
        batch=batch,
    )
