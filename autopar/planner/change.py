"""What a plan's step would take under another condition."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.plan.plan import Plan


@dataclass(frozen=True)
class Change:
    """The step under one changed condition."""

    what: str
    step_time: float  # s; of the same batch

    def gain(self, plan: Plan) -> float:
        """The share of the plan's step that the change saves; below 0 where the step gets longer."""
        step = plan.predicted_step_time or 0.0
        return 1 - self.step_time / step if step else 0.0
