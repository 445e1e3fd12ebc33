"""What is proven of a plan, in short sentences: `Plan.optimality` has the whole of it.

within 0.01% of the least objective under gpipe, with ...; within 34.00% of a lower bound, the work divided ...
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from autopar.report.quantities import digits, percent

_PROVEN = "proven optimal under"
_WITHIN = re.compile(
    r"within (\d+\.\d+|inf)% of (the least objective|a lower bound|one for any cuts)(?: for all plans)?"
)
_SHOWN = 5e-4  # a smaller share would be shown as nothing
_LOOSE = 1.0  # shares beyond this are shown as factors


def how_good(optimality: str) -> tuple[str, ...]:
    """One or two sentences; () for a text that the search does not write."""
    if optimality.startswith(_PROVEN):
        return ("It is proven to be the best of the plans that were searched.",)
    return tuple(_gaps(optimality))


def _gaps(optimality: str) -> Iterator[str]:
    for index, found in enumerate(_WITHIN.finditer(optimality)):
        gap, what = float(found[1]) / 100, found[2]
        if index == 0:
            best = "the best of the plans that were searched"
            yield f"It is less than 0.1% above {best}." if gap < _SHOWN else f"It is at most {_above(gap)} {best}."
        elif gap != float("inf"):
            bound = "a lower bound for every plan" if what == "a lower bound" else "a lower bound for any cuts"
            loose = ", which may be far out of reach" if gap > _LOOSE else ""
            yield f"It is at most {_above(gap)} {bound}{loose}."


def _above(gap: float) -> str:
    return f"{digits(1 + gap)} times" if gap > _LOOSE else f"{percent(gap)} above"
