"""A stage whose computing, or whose collectives, take another time.

The passes of a micro-batch hold both, as far as computing does not hide the collectives:

    | computing                      | collectives |   x computing=1.1   | computing        | collectives |
"""

from __future__ import annotations

from dataclasses import replace

from autopar.plan.stage import Stage
from autopar.planner.communication import exposed_each

_TIMES = ("forward_time", "backward_time", "weight_time", "recompute_time", "accumulation_time")


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
