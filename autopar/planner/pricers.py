"""How a plan of this process is priced again after a change: for the same model, call and devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.plan.degrees import check_zero
from autopar.plan.display import priced_like
from autopar.plan.exits.plan_degrees import zero_of
from autopar.plan.plan import Plan
from autopar.planner.kept_with_plans import KeptWithPlans


@dataclass(frozen=True)
class Pricer:
    """Functions that know the model, the call and the devices."""

    price: Callable[[Plan], Plan]  # with predictions
    # With states cut as ZeRO says, and this number of micro-batches, or what follows for it; without predictions.
    at_zero: Callable[[Plan, int, int | None], Plan] | None = None
    on_networks: Callable[[Plan, float], Plan] | None = None  # on networks this many times as fast
    launched: Callable[[Plan, str], Plan] | None = None  # with kernels launched in this mode


_pricers: KeptWithPlans[Pricer] = KeptWithPlans()


def with_pricer(plan: Plan, pricer: Pricer) -> Plan:
    """The same plan, whose changed copies `pricer` prices."""
    _pricers.keep(plan, pricer)
    return plan


def pricer_of(plan: Plan) -> Pricer | None:
    """None where this process has neither planned nor priced the plan."""
    return _pricers.of(plan)


@priced_like.register
def _(before: Plan, after: Plan, *, zero: int | None = None, n_microbatches: int | None = None) -> Plan:
    pricer = _pricers.of(before)
    check_zero(zero)
    if zero is not None and not (zero == 0 and _cuts_nothing(after)):
        if pricer is None or pricer.at_zero is None:
            raise PlanError(
                "zero can be changed in a plan that this process planned or priced, because the sizes of the "
                "parameters decide how they are cut: Plan.load(path, model, devices, ...), or autopar.plan(model, "
                "devices, plan=plan, ...)"
            )
        after = pricer.at_zero(after, zero, n_microbatches)
    if after is before:
        return before
    return after if pricer is None else with_pricer(pricer.price(after), pricer)


def _cuts_nothing(plan: Plan) -> bool:
    return all(stage.sharding is None or zero_of(stage.sharding) == 0 for stage in plan.stages)
