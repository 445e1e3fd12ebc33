"""What is proven of a plan, in short sentences: `Plan.optimality` says it with all that the proof holds fixed."""

from __future__ import annotations

import math
from collections.abc import Iterator

from autopar.plan.plan import Plan
from autopar.report.quantities import digits, percent

_ROUNDING = 1e-12
_SHOWN = 5e-4  # a smaller share would be shown as nothing
_LOOSE = 1.0  # shares beyond this are shown as factors


def how_good(plan: Plan) -> tuple[str, ...]:
    """One or two sentences; () for a plan without bounds."""
    return tuple(_sentences(plan))


def _sentences(plan: Plan) -> Iterator[str]:
    ahead = plan.assumed is not None  # then the bound is one of steps
    searched, best = _gap(plan.objective, plan.searched_bound), "the best of the plans that were searched"
    anywhere = _gap(plan.predicted_step_time if ahead else plan.objective, plan.bound)
    if searched is not None and searched <= _ROUNDING:
        yield f"It is proven to be {best}."
    elif searched is not None:
        yield (
            f"It is less than 0.1% above {best}." if searched < _SHOWN else f"It is at most {_above(searched)} {best}."
        )
    wider = ahead or (searched is not None and plan.bound != plan.searched_bound)
    if wider and anywhere is not None and math.isfinite(anywhere):
        bound = "a lower bound for every plan" if ahead else "a lower bound for any cuts"
        loose = ", which may be far out of reach" if anywhere > _LOOSE else ""
        yield f"It is at most {_above(anywhere)} {bound}{loose}."


def _gap(seconds: float | None, bound: float | None) -> float | None:
    """The share by which `seconds` are above a bound; None where one of both is not known."""
    if seconds is None or bound is None:
        return None
    return seconds / bound - 1 if bound > 0 else math.inf


def _above(gap: float) -> str:
    return f"{digits(1 + gap)} times" if gap > _LOOSE else f"{percent(gap)} above"
