"""What this process keeps with a plan: the search behind it, or how it is priced.

A plan is pure data, so this is kept here, for as long as the plan's first stage lives. Copies that
`dataclasses.replace` makes share their stages, and so what is kept with them; a plan that was loaded, unpickled or
deep-copied has nothing.
"""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

from autopar.plan.plan import Plan
from autopar.plan.stage import Stage

T = TypeVar("T")


class KeptWithPlans(Generic[T]):
    """One value a plan, by the identity of the plan's first stage.

    Equality would compare whole plans, and confuse equal plans of two searches.
    """

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[Stage], T]] = {}

    def keep(self, plan: Plan, value: T) -> None:
        """Replaces what was kept with the plan."""
        key, known = id(plan.stages[0]), self._values  # a module's own names are gone when the interpreter ends
        known[key] = weakref.ref(plan.stages[0], lambda _: known.pop(key, None)), value

    def of(self, plan: Plan) -> T | None:
        """What was kept with the plan; None where nothing was."""
        found = self._values.get(id(plan.stages[0]))
        return found[1] if found is not None and found[0]() is plan.stages[0] else None
