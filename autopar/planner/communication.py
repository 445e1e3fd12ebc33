"""What the devices of a plan spend on collectives: hidden by computing, and exposed.

Of a stage's passes, this is the one place that says which collectives run again, and how much of all is exposed:

    forward, backward     every collective of a micro-batch once
    what runs again       those of the whole forward (stage), of layers, or of attention, once more in the backward
    hidden                what computing hides of all of these, as the plan was priced; the rest is exposed
"""

from __future__ import annotations

import math
from collections.abc import Callable

from autopar.plan.plan import Plan
from autopar.plan.stage import Stage
from autopar.sharding.stage_sharding import Exchange


def rounds(plan: Plan, stage: Stage) -> int:
    """Micro-batches of the busiest replica of a stage."""
    return -(-plan.n_microbatches // stage.replicas)


def runs_again(exchange: Exchange, stage: Stage) -> bool:
    """Whether it happens once more in the backward, because the stage recomputes what needs it."""
    return exchange.again or (stage.recompute and not (exchange.backward or exchange.once))


def times_a_step(exchange: Exchange, plan: Plan, stage: Stage) -> int:
    """How often the busiest mesh does it in a step: for each of its micro-batches, twice where it runs again."""
    return 1 if exchange.once else rounds(plan, stage) * (2 if runs_again(exchange, stage) else 1)


def exposed_communication(plan: Plan) -> tuple[float, ...]:
    """For each place in the pipeline, the seconds of a step in which its devices do nothing but collectives."""
    return _by_rank(plan, lambda stage: rounds(plan, stage) * exposed_each(stage) + (stage.sync_time or 0.0))


def hidden_communication(plan: Plan) -> tuple[float, ...]:
    """For each place in the pipeline, the seconds of a step in which computing hides collectives."""
    return _by_rank(plan, lambda stage: rounds(plan, stage) * hidden_each(stage))


def collectives_each(stage: Stage) -> float:
    """Seconds of all collectives of a micro-batch: forward, backward, and what runs again."""
    if stage.sharding is None:
        return 0.0
    return (stage.sharding.collective_time or 0.0) + _again(stage)


def hidden_each(stage: Stage) -> float:
    """Of `collectives_each`, the seconds that computing hides."""
    return min(stage.hidden_time or 0.0, collectives_each(stage))


def exposed_each(stage: Stage) -> float:
    """Of `collectives_each`, the seconds in which the devices of a stage do nothing else."""
    return collectives_each(stage) - hidden_each(stage)


def exposed_again(stage: Stage) -> float:
    """Of `exposed_each`, the part of what runs again: all of a stage's collectives are hidden alike."""
    total = collectives_each(stage)
    return exposed_each(stage) * _again(stage) / total if total else 0.0


def _again(stage: Stage) -> float:
    exchanges = stage.sharding.exchanges if stage.sharding is not None else ()
    return math.fsum(one.seconds for one in exchanges if runs_again(one, stage))


def _by_rank(plan: Plan, seconds: Callable[[Stage], float]) -> tuple[float, ...]:
    return tuple(sum(seconds(plan.stages[s]) for s in plan.stages_of(rank)) for rank in range(plan.ranks))
