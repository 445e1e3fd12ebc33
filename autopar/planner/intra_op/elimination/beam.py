"""The search that closes the gap between a lower bound and the best choice, within a memory limit.

Variables take their options in the order opposite to their elimination. A state is a choice for those that have one, of
which only the seconds and bytes so far matter, and the classes of options that tables still to come will look at:

    variables   last eliminated ----------------------------> first eliminated
                [ chosen: forgotten ][ chosen: remembered ][  open: bounded by the messages of their elimination  ]

The messages at price p of memory bound any completion of a state exactly, so for every price that was kept

    seconds(state) + p bytes(state) + least of the rest at p - p memory

is a lower bound of every completion. Taking option x of variable v adds to it

    weight(v)[x] + sum of the tables in v's bucket, at x and the state's classes - v's message there      (>= 0).

A state is dropped if a bound is no better than the best choice known, or if another one that remembers the same has no
more seconds and no more bytes. Of those left only the best `width` go on: where none had to be left out, the best
choice is proven; where some had, the least of their bounds is a bound of the problem, and a wider search may follow.
"""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

import numpy as np

from autopar.planner.intra_op.elimination.effort import Effort
from autopar.planner.intra_op.elimination.order import Elimination, EliminationOrder, EliminationStep, Factor
from autopar.planner.intra_op.elimination.reduction import Token

# Of seconds, relative: no gain of a different choice, but of another order of summation.
TOLERANCE = 1e-10
# The same between two states: so small that all steps together stay within TOLERANCE.
_ROUNDING = 1e-14
# Of a bound of bytes; what a choice really takes is summed up at the end.
_BYTES_ROUNDING = 1e-12
# States looked at before those that remember the same are merged, as parts of the width.
_BEFORE_MERGING = 16
# Entries that a state counts as, for each price: what it takes to extend, sort and merge it.
_PER_STATE = 8
# Combinations of classes up to which they are found through an array of all instead of by sorting.
_FLAGS = 1 << 20


class BeamResult(NamedTuple):
    """What a search of limited width knows afterwards."""

    options: list[int] | None  # of every variable; None: nothing better than the incumbent
    bound: float  # s: any choice that was not looked at takes at least this long (inf: all were)


class View(NamedTuple):
    """Partitions by variable, for one step in backward order."""

    seen: tuple[tuple[int, Token], ...]  # (variable, partition): what the step's tables tell apart
    remembered: tuple[tuple[int, Token], ...]  # what those of later steps do, of variables chosen up to this one


def views(plan: EliminationOrder) -> list[View]:
    """One view per step, in backward order: the last eliminated variable first."""
    pending: dict[int, Token] = {}
    found = []
    for step in plan.steps:  # from the last step of the backward order to its first
        remembered = tuple(sorted(pending.items()))
        seen = tuple(zip(step.scope, step.classes, strict=True))
        found.append(View(seen, remembered))
        pending.pop(step.variable, None)
        for i, token in seen:
            pending[i] = plan.reduced.tokens.refined(pending[i], token) if i in pending else token
    return found[::-1]


class _States(NamedTuple):
    """[states] each."""

    seconds: np.ndarray
    bytes: np.ndarray
    bounds: list[np.ndarray]  # by elimination
    chosen: dict[int, np.ndarray]  # of every remembered variable: its option

    def take(self, index: np.ndarray) -> _States:
        return _States(
            self.seconds[index],
            self.bytes[index],
            [bound[index] for bound in self.bounds],
            {i: options[index] for i, options in self.chosen.items()},
        )


def search(
    plan: EliminationOrder,
    way: list[View],
    eliminations: list[Elimination],
    memory: float,
    incumbent: float,
    width: int,
    effort: Effort,
) -> BeamResult:
    """The best choice that takes less than `incumbent` seconds; it looks at no more than `width` states at a time.

    eliminations: at the prices whose bounds are used, the tightest first; price inf, which bounds the bytes, as well.
    effort: when it is spent, the search stops with the bound it has.
    O(variables x states x (options within the gap) x prices), states being at most `width`.
    """
    most = min(incumbent * (1 - TOLERANCE), sys.float_info.max)
    limits = [memory * (1 + _BYTES_ROUNDING) if math.isinf(e.price) else most for e in eliminations]
    starts = [e.value if math.isinf(e.price) else e.value - _charged(e.price, memory) for e in eliminations]
    zero = np.zeros(1)
    states = _States(zero, zero, [np.array([start]) for start in starts], {})
    trail: list[tuple[np.ndarray, np.ndarray]] = []  # of every step: the state it came from, and the option
    left_out = math.inf
    for step, view in zip(reversed(plan.steps), way, strict=True):
        if effort.is_spent:
            return BeamResult(None, min(left_out, float(_tightest(states, eliminations).min())))
        first, group = _grouped(plan, states, view.seen)
        tables = _StepTables(plan, step, states.chosen, first)
        effort.spend(tables.entries * len(eliminations))
        parents, options, states, bound = _extended(
            tables, states, group, eliminations, limits, _BEFORE_MERGING * width
        )
        left_out = min(left_out, bound)
        effort.spend(_PER_STATE * len(parents) * len(eliminations))
        if not len(parents):
            return BeamResult(None, left_out)
        remembered = {i: states.chosen[i] for i, _ in view.remembered}
        states = states._replace(chosen=remembered)
        _, group = _grouped(plan, states, view.remembered)
        kept = _undominated(states, group)
        if len(kept) > width:
            tightest = _tightest(states, eliminations)[kept]
            order = np.argsort(tightest, kind="stable")
            left_out = min(left_out, float(tightest[order[width]]))
            kept = np.sort(kept[order[:width]])
        states = states.take(kept)
        trail.append((parents[kept].astype(np.int32), options[kept].astype(np.int32)))
    within = np.flatnonzero(states.bytes <= memory)
    if not len(within):
        return BeamResult(None, left_out)
    return BeamResult(_traced(plan, trail, int(within[states.seconds[within].argmin()])), left_out)


def _traced(plan: EliminationOrder, trail: list[tuple[np.ndarray, np.ndarray]], last: int) -> list[int]:
    """The options by variable of the final state number `last`, from parent to parent."""
    chosen = [-1] * len(plan.weights)
    for step, (parents, options) in zip(plan.steps, reversed(trail), strict=True):
        chosen[step.variable] = int(options[last])
        last = int(parents[last])
    return chosen


def _charged(price: float, memory: float) -> float:
    return price * memory if price else 0.0


def _tightest(states: _States, eliminations: list[Elimination]) -> np.ndarray:
    bounds = [bound for bound, e in zip(states.bounds, eliminations, strict=True) if not math.isinf(e.price)]
    return np.maximum.reduce(bounds)


def _grouped(
    plan: EliminationOrder, states: _States, view: tuple[tuple[int, Token], ...]
) -> tuple[np.ndarray, np.ndarray]:
    """States in the same classes: of every group one of them, and of every state its group."""
    tokens = plan.reduced.tokens
    n = len(states.seconds)
    if n == 1 or not view:
        return np.zeros(1, dtype=np.int64), np.zeros(n, dtype=np.int64)
    key, size = np.zeros(n, dtype=np.int64), 1
    for i, token in view:
        if size > 2**62 // tokens.size(token):
            key = np.unique(key, return_inverse=True)[1]
            size = int(key.max()) + 1
        size *= tokens.size(token)
        key = key * tokens.size(token) + tokens.arrays[token][states.chosen[i]]
    if size <= _FLAGS:
        number = np.full(size, -1)
        number[key[::-1]] = np.arange(n)[::-1]  # the first state of each
        first = number[number >= 0]
        number[number >= 0] = np.arange(len(first))
        return first, number[key]
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    return first, group


class _StepTables:
    """The tables of one step, looked up for one state of every group: states that differ in nothing they look at."""

    def __init__(
        self, plan: EliminationOrder, step: EliminationStep, chosen: dict[int, np.ndarray], first: np.ndarray
    ) -> None:
        """`chosen`: options by variable, of all states. `first`: one state of every group."""
        self.plan, self.step, self.n_groups = plan, step, len(first)
        self.arrays, self.weight = plan.reduced.tokens.arrays, plan.weights[step.variable]
        around = {i for factor in step.bucket for i in factor.scope if i != step.variable}
        self.chosen = {i: chosen[i][first] for i in around}
        options = len(self.arrays[plan.distinct[self.weight][0]])
        self.entries = len(first) * options * (1 + len(step.bucket))

    def _looked_up(self, factor: Factor, table: np.ndarray) -> np.ndarray:
        """[groups, options], or [groups, 1] of a message."""
        at = tuple(
            self.arrays[token] if i == self.step.variable else self.arrays[token][self.chosen[i]][:, None]
            for i, token in zip(factor.scope, factor.classes, strict=True)
        )
        return table[at] if at else table

    def increase(self, elimination: Elimination) -> np.ndarray:
        """[groups, options] what the bound of a state rises by."""
        rise = elimination.weights[self.weight][None, :] + np.zeros((self.n_groups, 1))
        for factor in self.step.bucket:
            rise = rise + self._looked_up(factor, elimination.tables[factor.slot])
        for factor in self.step.messages:
            rise = rise - self._looked_up(factor, elimination.tables[factor.slot])
        return rise

    def spent(self) -> tuple[np.ndarray, np.ndarray]:
        """[groups, options] seconds, and [options] bytes, that a state really adds."""
        seconds, size = (self.arrays[token] for token in self.plan.distinct[self.weight])
        total = seconds[None, :] + np.zeros((self.n_groups, 1))
        for factor in self.step.bucket:
            if factor.slot < len(self.plan.edges):
                total = total + self._looked_up(factor, self.plan.edges[factor.slot])
        return total, size


def _extended(
    tables: _StepTables,
    states: _States,
    group: np.ndarray,
    eliminations: list[Elimination],
    limits: list[float],
    most: int,
) -> tuple[np.ndarray, np.ndarray, _States, float]:
    """Every state with every option that keeps all its bounds within the limits: (parents, options, states, left out).

    At most `most`, by their first bound; the last value is the least first bound of those left out.
    """
    rise = tables.increase(eliminations[0])
    order = np.argsort(rise, axis=1, kind="stable")
    rise = np.take_along_axis(rise, order, axis=1)
    slack = limits[0] - states.bounds[0]
    largest = np.full(tables.n_groups, -math.inf)
    np.maximum.at(largest, group, slack)
    # Options are sorted by their rise: columns beyond the last that fits any state of a group are not looked at.
    columns = int((rise <= largest[:, None]).sum(axis=1).max())
    parents, column = np.nonzero(rise[:, :columns][group] <= slack[:, None])
    options = order[group[parents], column]
    bounds = [states.bounds[0][parents] + rise[group[parents], column]]
    left_out = math.inf
    if len(parents) > most:
        by_bound = np.argsort(bounds[0], kind="stable")
        left_out = float(bounds[0][by_bound[most]])
        kept = np.sort(by_bound[:most])
        parents, options, bounds = parents[kept], options[kept], [bounds[0][kept]]
    for n, elimination in enumerate(eliminations[1:], start=1):
        bound = states.bounds[n][parents] + tables.increase(elimination)[group[parents], options]
        good = np.flatnonzero(bound <= limits[n])
        parents, options = parents[good], options[good]
        bounds = [earlier[good] for earlier in bounds] + [bound[good]]
    seconds, size = tables.spent()
    extended = _States(
        states.seconds[parents] + seconds[group[parents], options],
        states.bytes[parents] + size[options],
        bounds,
        {i: before[parents] for i, before in states.chosen.items()} | {tables.step.variable: options},
    )
    return parents, options, extended, left_out


def _undominated(states: _States, group: np.ndarray) -> np.ndarray:
    """The states that no other of their group equals or beats in both seconds and bytes, in ascending order."""
    n = len(group)
    if n == 1:
        return np.zeros(1, dtype=np.int64)
    by_seconds = np.argsort(states.seconds, kind="stable")
    steps = np.diff(states.seconds[by_seconds], prepend=states.seconds[by_seconds[0]])
    rank = np.empty(n, dtype=np.int64)
    rank[by_seconds] = np.cumsum(steps > _ROUNDING * states.seconds.max())
    order = np.lexsort((rank, states.bytes, group))
    # Groups come one after another in `order`, each with ranks below those of the one before: the least so far of all
    # is then the least so far of its group.
    lowered = rank[order] - group[order] * n
    least = np.minimum.accumulate(lowered)
    new = np.ones(n, dtype=bool)
    new[1:] = lowered[1:] < least[:-1]
    return np.sort(order[new])
