"""Why an operator cannot be split as a hint says, in terms of its inputs' dimensions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from autopar.analysis.rules.notation import Dims, IndexKind, Rule
from autopar.sharding.layouts import PARTIAL, Placements
from autopar.sharding.strategies import Strategy

Slices = tuple[int, ...]  # parts of every dimension
_MOST = 6


def clashes(rule: Rule, cuts: Mapping[int, Slices]) -> Iterator[str]:
    """The conflicts of a split: dimensions that the operator needs whole, and dimensions of several operands that must
    be split alike but are not. `cuts`: the parts of each operand's dimensions, by position."""
    together: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for place, slices in cuts.items():
        for d, n in enumerate(slices):
            index = _index(rule, rule.inputs[place], d)
            if index is None:
                continue
            together[index].append((place, d, n))
            if n > 1 and rule.kinds[index] is IndexKind.WHOLE:
                free = [e for e in range(len(slices)) if _may_be_cut(rule, rule.inputs[place], e)]
                available = f"dimension{'s' if len(free) > 1 else ''} {', '.join(map(str, free))}" if free else "none"
                yield (
                    f"dimension {d} of operand {place} is cut into {n}, but it is needed whole; of that operand "
                    f"{available} can be cut"
                )
    for index, ends in together.items():
        if len({n for _, _, n in ends}) > 1:
            parts = " and ".join(f"dimension {d} of operand {place} into {n}" for place, d, n in ends)
            why = "summed over together" if rule.kinds[index] is IndexKind.SUMMED else "the same in the result"
            yield f"it cuts {parts} parts, but these are {why}; cut them alike"


def refused(offered: Sequence[Strategy], cuts: Mapping[int, Slices], mesh: Sequence[int], names: Sequence[str]) -> str:
    """The splits of its inputs that are possible instead."""
    possible = dict.fromkeys(
        ", ".join(str(slices_in(one.inputs[place], mesh, len(cuts[place]))) for place in cuts)
        for one in offered
        if not any(PARTIAL in one.inputs[place] for place in cuts)
    )
    listed = [f"({text})" for text in possible]
    more = f" and {len(listed) - _MOST} more" if len(listed) > _MOST else ""
    return f"its inputs ({', '.join(names[place] for place in cuts)}) can be cut {', '.join(listed[:_MOST])}{more}"


def _index(rule: Rule, dims: Dims, d: int) -> str | None:
    """The outermost index of a dimension, along which it is split; None for a dimension of size 1."""
    return next((name for name in dims[d] if rule.sizes[name] != 1), None)


def _may_be_cut(rule: Rule, dims: Dims, d: int) -> bool:
    index = _index(rule, dims, d)
    return index is not None and rule.kinds[index] is not IndexKind.WHOLE


def slices_in(layout: Placements, mesh: Sequence[int], dims: int) -> Slices:
    """The number of parts into which placements split every dimension."""
    return tuple(math.prod(n for n, code in zip(mesh, layout, strict=True) if code == d) for d in range(dims))
