"""The step of a plan under other conditions, from the plan's own numbers: the same decisions, simulated again."""

from __future__ import annotations

from autopar.plan.plan import Plan
from autopar.planner.change import Change
from autopar.planner.communication import exposed_communication
from autopar.planner.other_speeds import plan_at_other_speed
from autopar.planner.predicted_step import PredictedStep, grows_with_the_batch, step_of_plan

_LINKS = ((0.5, "links between stages half as fast"), (2.0, "links between stages twice as fast"))
_COMPUTING = ((1.1, "computing 10% slower"), (1 / 1.1, "computing 10% faster"))
_COLLECTIVES = ((2.0, "collectives half as fast"), (0.5, "collectives twice as fast"))
_MOST_ACTIONS = 20_000  # micro-batches x stages of a larger batch: more take seconds to simulate


def sensitivity(plan: Plan, step: PredictedStep | None = None) -> tuple[Change, ...]:
    """The step with slower and faster links, devices and collectives, and with larger batches; () without predictions.

    A batch of n times the samples has n times the micro-batches; its step counts per n-th of it, so that all steps are
    for equally many samples. `step`: that of the plan, where it is known.
    """
    step = step_of_plan(plan) if step is None else step
    if step is None:
        return ()
    found = []
    if plan.transfers:
        found += [Change(what, step.timeline(link_speed=speed).step_time) for speed, what in _LINKS]
    changes = [(what, plan_at_other_speed(plan, computing=factor)) for factor, what in _COMPUTING]
    if any(exposed_communication(plan)):
        changes += [(what, plan_at_other_speed(plan, collectives=factor)) for factor, what in _COLLECTIVES]
    for what, changed in changes:
        other = step_of_plan(changed)
        found += [Change(what, other.timeline().step_time)] if other is not None else []
    for times, part in ((2, "half"), (4, "quarter")) if plan.n_microbatches > 1 and grows_with_the_batch(plan) else ():
        if times * plan.n_microbatches * len(plan.stages) > _MOST_ACTIONS:
            break
        larger = step_of_plan(plan, batch_factor=times)
        what = f"a batch {times} times as large, in {times} times the micro-batches, per {part} of it"
        found += [Change(what, larger.timeline().step_time / times)] if larger is not None else []
    return tuple(found)
