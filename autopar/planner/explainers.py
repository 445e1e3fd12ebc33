"""What can explain a plan that a search of this process chose.

A plan is pure data, so the search behind it is kept here, for as long as the plan's first stage lives. Copies that
`dataclasses.replace` makes share their stages, and so their explainer; a plan that was loaded, unpickled or deep-copied
has none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.costs.cost_table import Progress
from autopar.plan.plan import Plan
from autopar.plan.stage import Stage

if TYPE_CHECKING:
    from autopar.planner.explain import Explanation
    from autopar.planner.intra_op.explain import InsideExplained


@dataclass(frozen=True)
class Explainer:
    """Functions that search again; None where a plan's own numbers are all there is."""

    plan: Callable[[Plan], Explanation] | None = None
    operators: Callable[[Plan, str], InsideExplained] | None = None  # of the module or operator at a path
    # The same decisions priced on the cluster with all networks this many times as fast.
    on_networks: Callable[[Plan, float, Progress], Plan] | None = None


# By the identity of a plan's first stage. Equality would compare whole plans, and confuse equal plans of two searches.
_explainers: dict[int, tuple[weakref.ref[Stage], Explainer]] = {}


def with_explainer(plan: Plan, explainer: Explainer) -> Plan:
    """The same plan, which `explainer` explains from now on."""
    key, known = id(plan.stages[0]), _explainers  # a module's own names are gone when the interpreter ends
    known[key] = weakref.ref(plan.stages[0], lambda _: known.pop(key, None)), explainer
    return plan


def explainer_of(plan: Plan) -> Explainer:
    """What was registered for the plan; an empty Explainer where nothing was."""
    reference, explainer = _explainers.get(id(plan.stages[0]), (None, Explainer()))
    return explainer if reference is not None and reference() is plan.stages[0] else Explainer()
