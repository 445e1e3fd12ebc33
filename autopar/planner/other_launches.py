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
    pricer, step = pricer_of(plan), plan.predicted_step_time
    if pricer is None or pricer.launched is None or not _may_gain(plan):
        return ()
    known = _known.of(plan)
    if known is None or known[0] != step:
        seconds = pricer.launched(plan, _COMPILED).predicted_step_time
        known = step, () if seconds is None else (Change(f"launch='{_COMPILED}'", seconds),)
        _known.keep(plan, known)
    return known[1]


def untried_launch(plan: Plan) -> bool:
    """Whether compiled stages may be faster, and nothing in this process can price them: the plan was loaded."""
    return _may_gain(plan) and pricer_of(plan) is None


def _may_gain(plan: Plan) -> bool:
    """Whether a plan launches eagerly, and the host may hold its devices back."""
    step, work = plan.predicted_step_time, plan.work
    if step and work is not None and work.flops is not None and (work.utilisation(step) or 0.0) > _BUSY:
        return False
    return plan.assumed is not None and plan.assumed.launch == _EAGER
