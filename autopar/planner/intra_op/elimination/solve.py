"""The exact choice of one option of every operator: `select(choices, memory)`.

    minimise    sum over variables i of seconds_i[x_i]  +  sum over edges e, i to j, of seconds_e[out[x_i], into[x_j]]
    such that   sum over variables i of bytes_i[x_i]  <=  memory

Options that no best choice needs are dropped (reduction.py). Without the limit, variables are then eliminated
one by one in min-plus algebra (order.py), in time exponential only in the width of the graph. Layers of a
transformer have width 2, and one more for each tensor that all layers read, such as a mask:

        x ──┬── norm ──┬── q ──┐
            │          ├── k ──┼── attention ── out ──┬── add ──> next layer
            │          └── v ──┘                      │
            └─────────────────────────────────────────┘      q has two neighbours; without q, k and v so has attention

The limit is priced: for every price p of a byte, elimination gives the least of

    sum of seconds  +  p (sum of bytes - memory),

which bounds the least seconds within the limit from below. The best such bound is found by following the line through
two choices, one too large and one that fits (G. Handler, I. Zang, "A dual algorithm for the constrained shortest path
problem", 1980). A search then closes what gap is left, with the tables of these eliminations as its bounds
(beam.py), wider and wider until it has left nothing out.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from autopar.errors import InfeasibleError, InputError
from autopar.planner.intra_op.elimination.beam import TOLERANCE, search, views
from autopar.planner.intra_op.elimination.choices import Selection, SelectionProblem, cost
from autopar.planner.intra_op.elimination.effort import Effort
from autopar.planner.intra_op.elimination.order import Elimination, EliminationOrder, counted, planned
from autopar.planner.intra_op.elimination.reduction import reduced
from cost_models import bytes_text

# Prices next to the best one, as parts of it: they tell which of the choices that it takes for equally good leave too
# many bytes to the rest, or too few. States further off are bounded by prices tried on the way to the best one.
_NEXT_PRICES = (0.97, 1.03)
_KEPT_PRICES = 8
_FIRST_WIDTH, _WIDER = 64, 8
# How much less than the line between two choices, relative, is rounding.
_ON_THE_LINE = 1e-13
EFFORT = 1e9  # entries that a selection may compute
# Prices tried at most; a dozen are usual.
_MOST_PRICES = 100


class _Point(NamedTuple):
    """A choice that is best at some price of memory."""

    options: tuple[int, ...]  # of every variable, numbered as the caller does
    seconds: float  # s
    bytes: float  # bytes


def select(
    choices: SelectionProblem, memory: float = math.inf, effort: float = EFFORT, entries: float = 2e7
) -> Selection:
    """The options with the least sum of seconds whose bytes, of all kinds, sum up to `memory` (bytes) at most.

    It is the least, to a relative 1e-10, unless the `effort` (entries of tables and states, see `Effort`) is spent
    first: then it is the best one found, with `proven` False and a lower bound. Effort is looked at between steps, so
    the search may take a little more: up to three eliminations are always done. The same input gives the same answer;
    of options of a variable that are equal in all respects the one with the lowest number is taken.

    entries: the most that a table over several variables may have, at about a nanosecond each. A graph that needs more
    is solved exactly still, but by the search alone, which may take long.

    Raises InputError for a memory that is no number of bytes, and InfeasibleError if no choice fits, naming the least
    bytes that one takes.
    """
    if not memory >= 0:
        raise InputError(f"memory must be at least 0 bytes, not {memory}")
    if any(size.ndim > 1 for size in choices.bytes):
        choices = replace(choices, bytes=[counted(size) for size in choices.bytes])
    left = Effort(effort)
    limited = memory < math.fsum(float(size.max()) for size in choices.bytes)
    plan = planned(reduced(choices, with_bytes=limited), entries)
    if not limited:
        memory = math.inf
    free = plan.eliminate(0.0)
    if math.isinf(free.value):
        raise InfeasibleError("no choice of options is allowed by all edges, whatever its memory")
    best = _point(choices, plan, free)
    if plan.exact and best.bytes <= memory:
        return Selection(best.options, best.seconds, best.bytes, best.seconds, plan.width, proven=True)
    left.spend(plan.entries)
    return _within(choices, plan, free, best, memory, left)


def _within(
    choices: SelectionProblem,
    plan: EliminationOrder,
    free: Elimination,
    fastest: _Point,
    memory: float,
    effort: Effort,
) -> Selection:
    """The selection where the choice that is best at price 0 is too large, or not known for sure."""
    bound, eliminations = free.value, [free]
    best = fastest if fastest.bytes <= memory and math.isfinite(fastest.seconds) else None
    if not math.isinf(memory):
        smallest = plan.eliminate(math.inf)
        effort.spend(plan.entries)
        small = _point(choices, plan, smallest)
        least = small.bytes if plan.exact else smallest.value
        if least > memory:
            raise InfeasibleError(
                f"no choice of options fits into {bytes_text(memory)}: the smallest takes "
                f"{'' if plan.exact else 'at least '}{bytes_text(least)}"
            )
        if plan.exact:
            best, priced = _dual(choices, plan, fastest, small, memory, effort)
            bound = max(e.value - e.price * memory for e in (free, *priced))
            price = priced[-1].price
            if bound < best.seconds * (1 - TOLERANCE) and not effort.is_spent:
                priced += [plan.eliminate(price * part) for part in _NEXT_PRICES]
                effort.spend(len(_NEXT_PRICES) * plan.entries)
            priced.sort(key=lambda e: abs(e.price - price))
            eliminations = [*priced[:_KEPT_PRICES], free, smallest]
        else:
            eliminations.append(smallest)
            if small.bytes <= memory and math.isfinite(small.seconds):
                best = small
    way, width = views(plan), _FIRST_WIDTH
    proven = best is not None and bound >= best.seconds * (1 - TOLERANCE)
    while not proven and not effort.is_spent:
        incumbent = math.inf if best is None else best.seconds
        found = search(plan, way, eliminations, memory, incumbent, width, effort)
        if found.options is not None:
            best = _numbered(choices, plan, found.options)
        if best is not None:
            bound = max(bound, min(found.bound, best.seconds))
        proven = math.isinf(found.bound) or (best is not None and bound >= best.seconds * (1 - TOLERANCE))
        width *= _WIDER
    if best is None:
        why = "there is none" if proven else f"none was found within the effort; each takes at least {bound:.6g} s"
        raise InfeasibleError(f"no choice of options is allowed and fits into {bytes_text(memory)}: {why}")
    bound = best.seconds if proven else min(bound, best.seconds)
    return Selection(best.options, best.seconds, best.bytes, bound, plan.width, proven)


def _dual(
    choices: SelectionProblem, plan: EliminationOrder, large: _Point, small: _Point, memory: float, effort: Effort
) -> tuple[_Point, list[Elimination]]:
    """The best choice met that fits, and the eliminations at all prices tried, the last one with the best bound.

    seconds
       |  large (fastest)                  The next price is the slope between the two. A choice below their line
       |    `.  memory                     replaces the one on its side of the limit; if there is none, the line
       |      `. :                         meets the limit at the bound.
       |        `:
       |         :`. small
       +---------:-------- - bytes
    """
    best = small
    priced = []
    for _ in range(_MOST_PRICES):
        price = max(0.0, small.seconds - large.seconds) / (large.bytes - small.bytes)
        priced.append(plan.eliminate(price))
        effort.spend(plan.entries)
        point = _point(choices, plan, priced[-1])
        line = small.seconds + price * small.bytes
        if point.bytes <= memory and point.seconds < best.seconds:
            best = point
        known = point[1:] in (small[1:], large[1:])
        if known or priced[-1].value >= line * (1 - _ON_THE_LINE) or effort.is_spent:
            break
        if point.bytes <= memory:
            small = point
        else:
            large = point
    return best, priced


def _point(choices: SelectionProblem, plan: EliminationOrder, elimination: Elimination) -> _Point:
    return _numbered(choices, plan, plan.choose(elimination))


def _numbered(choices: SelectionProblem, plan: EliminationOrder, chosen: list[int]) -> _Point:
    """The choice in the caller's numbers, with what it really costs."""
    options = tuple(int(kept[option]) for kept, option in zip(plan.reduced.options, chosen, strict=True))
    return _Point(options, *cost(choices, options))
