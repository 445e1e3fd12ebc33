"""A stage whose computing, or whose collectives, take another time.

The passes of a micro-batch hold both, as far as computing does not hide the collectives:

    | computing                      | collectives |   x computing=1.1   | computing        | collectives |
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from autopar.plan.plan import Plan
from autopar.plan.stage import Stage
from autopar.planner.communication import exposed_each

_TIMES = ("forward_time", "backward_time", "weight_time", "recompute_time", "accumulation_time")


def plan_at_other_speed(
    plan: Plan, *, computing: float = 1.0, collectives: float = 1.0, on: Container[tuple[str, ...]] | None = None
) -> Plan:
    """The plan with stages at other speeds, and what runs on the whole batch with the last one. `on`: the devices of
    these stages; None: all stages."""

    def changes(stage: Stage) -> bool:
        return on is None or stage.devices in on

    stages = tuple(
        at_other_speed(one, computing=computing, collectives=collectives) if changes(one) else one
        for one in plan.stages
    )
    once = plan.whole_batch_time
    if once is not None and changes(plan.stages[-1]):
        once *= computing
    return replace(plan, stages=stages, whole_batch_time=once)


def at_other_speed(stage: Stage, *, computing: float = 1.0, collectives: float = 1.0) -> Stage:
    """The stage with computing and collectives that take these many times as long.

    Collectives that computing hides stay hidden. The optimizer's step keeps its time.
    """
    passes = (stage.forward_time or 0.0) * (2 if stage.recompute else 1)
    passes += (stage.backward_time or 0.0) + (stage.recompute_time or 0.0)
    exposed = min(exposed_each(stage), passes)
    factor = (computing * (passes - exposed) + collectives * exposed) / passes if passes else 1.0
    changed = {name: value * factor for name in _TIMES if (value := getattr(stage, name)) is not None}
    if stage.sync_time is not None:
        changed["sync_time"] = stage.sync_time * collectives
    return replace(stage, **changed)
