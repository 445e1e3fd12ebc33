"""The user's sharding hints as constraints on the strategies of operators and the layouts of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.errors import PlanError
from autopar.sharding.layouts import Placements
from autopar.sharding.stage_sharding import Stored, layout_text
from autopar.sharding.strategies import Strategy
from autopar.sharding.strategy_costs import StrategyCosts


@dataclass(frozen=True)
class AllowedPlacements:
    """Layouts that one tensor may have under one hint."""

    layouts: frozenset[Placements]
    reason: str  # the hint, in words


@dataclass(frozen=True)
class ShardingConstraints:
    """By operator (node name) and position of the tensor; all others are free. A border of a sharded call counts as an
    operator."""

    operands: Mapping[str, Mapping[int, tuple[AllowedPlacements, ...]]] = field(default_factory=dict)
    results: Mapping[str, Mapping[int, tuple[AllowedPlacements, ...]]] = field(default_factory=dict)
    stored: Mapping[str, tuple[AllowedPlacements, ...]] = field(default_factory=dict)  # by parameter

    def __bool__(self) -> bool:
        return bool(self.operands or self.results or self.stored)

    def allows(self, operator: str, one: Strategy) -> bool:
        sides = ((self.operands, one.inputs), (self.results, one.outputs))
        return all(
            place < len(layouts) and layouts[place] in wanted.layouts
            for requests, layouts in sides
            for place, several in requests.get(operator, {}).items()
            for wanted in several
        )

    def refusal(self, operator: str, offered: Sequence[Strategy]) -> str:
        """Why no strategy of an operator is left."""
        sides = [*self.operands.get(operator, {}).values(), *self.results.get(operator, {}).values()]
        reasons = dict.fromkeys(wanted.reason for several in sides for wanted in several)
        can = dict.fromkeys(" ".join(map(layout_text, one.inputs)) for one in offered)
        return f"{operator} cannot do what {'; '.join(reasons)} requests; of its operands it can have {_few(can)}"


NO_CONSTRAINTS = ShardingConstraints()


def narrowed(
    constraints: ShardingConstraints,
    seconds: Sequence[np.ndarray],
    options: Mapping[str, tuple[int, StrategyCosts]],
    stored: Mapping[str, tuple[int, tuple[Stored, ...]]],
) -> list[np.ndarray]:
    """The seconds of all variables' options, infinite where the constraints forbid one.

    `options`, `stored`: (variable, its options) of operators and of parameters. Raises PlanError that lists the
    operators and parameters without an option left.
    """
    result, problems = list(seconds), []
    for name in dict.fromkeys((*constraints.operands, *constraints.results)):
        variable, known = options[name]
        allowed = np.array([constraints.allows(name, one) for one in known.strategies])
        result[variable] = np.where(allowed, seconds[variable], np.inf)
        if not allowed.any():
            problems.append(constraints.refusal(name, known.strategies))
    for name, several in constraints.stored.items():
        variable, layouts = stored[name]
        allowed = np.array([all(one.layout in wanted.layouts for wanted in several) for one in layouts])
        result[variable] = np.where(allowed, seconds[variable], np.inf)
        if not allowed.any():
            problems.append(f"parameter {name} cannot be stored as {'; '.join(wanted.reason for wanted in several)}")
    if problems:
        raise PlanError("the shard() hints cannot be followed:\n  " + "\n  ".join(problems))
    return result


def _few(texts: Iterable[str], most: int = 8) -> str:
    every = list(texts)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")
