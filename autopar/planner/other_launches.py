"""The same decisions with kernels that are launched otherwise, which the prices of a cluster assume."""

from __future__ import annotations

from autopar.plan.plan import Plan
from autopar.planner.change import Change
from autopar.planner.kept_with_plans import KeptWithPlans
from autopar.planner.pricers import pricer_of

_EAGER, _COMPILED = "eager", "compiled"

_BUSY = 0.5  # model FLOPs utilisation from which on no host holds the devices back

# The plan's step, which copies with the same stages may not share, and the change.
_known: KeptWithPlans[tuple[float | None, tuple[Change, ...]]] = KeptWithPlans()


def compiled_instead(plan: Plan) -> tuple[Change, ...]:
    """The step with compiled stages instead of eager launches; () for a plan that does not launch eagerly, or that was
    not priced on a cluster in this process. Takes about as long as pricing the plan, once."""
    pricer, assumed = pricer_of(plan), plan.assumed
    if pricer is None or pricer.launched is None or assumed is None or assumed.launch != _EAGER:
        return ()
    step, work = plan.predicted_step_time, plan.work
    if step and work is not None and work.flops is not None and (work.utilisation(step) or 0.0) > _BUSY:
        return ()
    known = _known.of(plan)
    if known is None or known[0] != step:
        seconds = pricer.launched(plan, _COMPILED).predicted_step_time
        known = step, () if seconds is None else (Change(f"launch='{_COMPILED}'", seconds),)
        _known.keep(plan, known)
    return known[1]
