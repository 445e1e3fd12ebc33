"""Where the time of the busiest device goes in a predicted step.

| computing, with work done again, collectives and sends that it waits for | waiting | reduction | optimizer |

What runs on the whole batch is a part of its own, and waiting for it another one.
"""

from __future__ import annotations

from autopar.plan.display import step_parts
from autopar.plan.plan import Plan
from autopar.plan.recompute import Recompute
from autopar.planner.communication import exposed_again, exposed_each
from autopar.planner.predicted_step import step_of_plan
from autopar.schedule.clock import Phase


@step_parts.register
def _(plan: Plan) -> dict[str, float]:
    """Seconds by part; they add up to the step. Empty without predictions."""
    step = step_of_plan(plan)
    if step is None:
        return {}
    timeline = step.timeline()
    slots = timeline.busiest
    actions = [event for event in timeline.events if event.slot in slots]
    parts = dict.fromkeys(("recomputing", "exchanging tensors within its stage"), 0.0)
    for event in actions:
        if event.action.phase is Phase.FORWARD:
            stage, predicted = plan.stages[event.action.stage], step.stages[event.action.stage]
            again = predicted.forward if stage.mode is Recompute.STAGE else predicted.again
            own = again[event.action.microbatch]
            parts["recomputing"] += max(0.0, own - exposed_again(stage)) if plan.training else 0.0
            parts["exchanging tensors within its stage"] += exposed_each(stage)
    computing = sum(event.end - event.start for event in actions) - sum(parts.values())
    sends = sum(send.end - send.start for send in timeline.sends if send.slot in slots and not send.transfer.overlap)
    finishes = [finish for finish in timeline.finishes if finish.slot in slots]
    once = sum(finish.reduced - finish.start for finish in finishes), sum(f.end - f.reduced for f in finishes)
    parts = {"computing": max(0.0, computing), **parts, "sending to other stages": sends}
    parts |= {"reducing gradients": once[0], "the optimizer": once[1]}
    if timeline.on_whole_batch:
        does_it = not set(slots).isdisjoint(timeline.whole_batch_slots)
        parts["the whole batch" if does_it else "waiting for the whole batch"] = timeline.on_whole_batch
    return {**parts, "waiting for other stages": timeline.step_time - sum(parts.values())}
