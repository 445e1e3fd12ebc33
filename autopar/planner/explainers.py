"""What can explain a plan that a search of this process chose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.plan.plan import Plan
from autopar.planner.kept_with_plans import KeptWithPlans

if TYPE_CHECKING:
    from autopar.planner.explain import Explanation
    from autopar.planner.intra_op.explain import InsideExplained


@dataclass(frozen=True)
class Explainer:
    """Functions that search again; None where a plan's own numbers are all there is."""

    plan: Callable[[Plan], Explanation] | None = None
    operators: Callable[[Plan, str], InsideExplained] | None = None  # of the module or operator at a path


_explainers: KeptWithPlans[Explainer] = KeptWithPlans()


def with_explainer(plan: Plan, explainer: Explainer) -> Plan:
    """The same plan, which `explainer` explains from now on."""
    _explainers.keep(plan, explainer)
    return plan


def explainer_of(plan: Plan) -> Explainer:
    """What was registered for the plan; an empty Explainer where nothing was."""
    return _explainers.of(plan) or Explainer()
