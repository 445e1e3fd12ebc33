"""What the devices of a plan spend on collectives: hidden by computing, and exposed."""

from __future__ import annotations

from autopar.plan.plan import Plan
from autopar.plan.stage import Stage
from autopar.sharding.stage_sharding import Exchange


def rounds(plan: Plan, stage: Stage) -> int:
    """Micro-batches of the busiest replica of a stage."""
    return -(-plan.n_microbatches // stage.replicas)


def times_a_step(exchange: Exchange, plan: Plan, stage: Stage) -> int:
    """How often the busiest mesh does it in a step: for every micro-batch of the mesh, and twice where the stage
    recomputes its forward, at once or layer by layer."""
    again = (stage.recompute or stage.layerwise) and not exchange.backward
    return 1 if exchange.once else rounds(plan, stage) * (2 if again else 1)


def exposed_communication(plan: Plan) -> tuple[float, ...]:
    """For each place in the pipeline, the seconds of a step in which its devices do nothing but collectives."""
    return tuple(sum(_exposed(plan, stage) for stage in plan.stages[rank :: plan.ranks]) for rank in range(plan.ranks))


def hidden_communication(plan: Plan) -> tuple[float, ...]:
    """For each place in the pipeline, the seconds of a step in which computing hides collectives."""
    return tuple(
        sum(rounds(plan, stage) * (stage.hidden_time or 0.0) for stage in plan.stages[rank :: plan.ranks])
        for rank in range(plan.ranks)
    )


def exposed_each(stage: Stage) -> float:
    """Seconds of a micro-batch, forward and backward, in which the devices of a stage do nothing but collectives."""
    if stage.sharding is None:
        return 0.0
    each = stage.sharding.collective_time or 0.0
    if stage.recompute or stage.layerwise:
        each += sum(one.seconds for one in stage.sharding.exchanges if not (one.backward or one.once))
    return max(0.0, each - (stage.hidden_time or 0.0))


def _exposed(plan: Plan, stage: Stage) -> float:
    """For every micro-batch and once a step."""
    return rounds(plan, stage) * exposed_each(stage) + (stage.sync_time or 0.0)
