"""The search that closes the gap between a lower bound and the best choice, within a memory limit.

Variables take their options in the order opposite to their elimination. A state is a choice for those that have one, of
which only the seconds and bytes so far matter, and the classes of options that tables still to come will look at:

    variables   last eliminated ----------------------------> first eliminated
                [ chosen: forgotten ][ chosen: remembered ][  open: bounded by the messages of their elimination  ]

The messages at price p of memory bound any completion of a state exactly, so for every price that was kept

    seconds(state) + p bytes(state) + least of the rest at p - p memory

is a lower bound of whatever becomes of it. Taking option x of variable v adds to it

    weight(v)[x] + sum of the tables in v's bucket, at x and the state's classes - v's message there      (>= 0).

A state is dropped if a bound is no better than the best choice known, or if another one that remembers the same has no
more seconds and no more bytes. Of those left only the best `width` go on: where none had to be left out, the best
choice is proven; where some had, the least of their bounds is a bound of the problem, and a wider search may follow.
"""

from __future__ import annotations

import math
import sys
import time
from typing import NamedTuple

import numpy as np

from autopar.planner.intra_op.elimination.order import Elimination, EliminationOrder, EliminationStep, Factor

# Of seconds, relative: no gain of a different choice, but of another order of summation.
TOLERANCE = 1e-10
# The same between two states: so small that all steps together stay within TOLERANCE.
_ROUNDING = 1e-14
# Of a bound of bytes; what a choice really takes is summed up at the end.
_BYTES_ROUNDING = 1e-12
# States looked at before those that remember the same are merged, as parts of the width.
_BEFORE_MERGING = 16
# Combinations of classes up to which they are found through an array of all instead of by sorting.
_FLAGS = 1 << 20


class BeamResult(NamedTuple):
    """What a search of limited width knows afterwards."""

    options: list[int] | None  # of every variable; None: nothing better than the incumbent
    bound: float  # s: any choice that was not looked at takes at least so long (inf: all were)


class View(NamedTuple):
    """Partitions by variable, for one step of the way back."""

    seen: tuple[tuple[int, int], ...]  # (variable, partition): what the step's tables tell apart
    remembered: tuple[tuple[int, int], ...]  # what those of later steps do, of variables chosen up to this one


def views(plan: EliminationOrder) -> list[View]:
    """Of every step, in the order of the way back."""
    pending: dict[int, int] = {}
    found = []
    for step in plan.steps:  # the way back's last step first
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
    deadline: float,
) -> BeamResult:
    """The best choice that takes less than `incumbent` seconds, looking at no more than `width` states at a time.

    eliminations: at the prices whose bounds are used, the tightest first; price inf, which bounds the bytes, as well.
    deadline: of time.perf_counter(), when it stops with the bound it has.
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
        if time.perf_counter() > deadline:
            return BeamResult(None, min(left_out, float(_tightest(states, eliminations).min())))
        first, group = _grouped(plan, states, view.seen)
        parents, options, states, bound = _extended(
            plan, step, states, first, group, eliminations, limits, _BEFORE_MERGING * width
        )
        left_out = min(left_out, bound)
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
    at = int(within[states.seconds[within].argmin()])
    chosen = [-1] * len(plan.weights)
    for step, (parents, options) in zip(plan.steps, reversed(trail), strict=True):
        chosen[step.variable] = int(options[at])
        at = int(parents[at])
    return BeamResult(chosen, left_out)


def _charged(price: float, memory: float) -> float:
    return price * memory if price else 0.0


def _tightest(states: _States, eliminations: list[Elimination]) -> np.ndarray:
    bounds = [bound for bound, e in zip(states.bounds, eliminations, strict=True) if not math.isinf(e.price)]
    return np.maximum.reduce(bounds)


def _grouped(
    plan: EliminationOrder, states: _States, view: tuple[tuple[int, int], ...]
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


def _extended(
    plan: EliminationOrder,
    step: EliminationStep,
    states: _States,
    first: np.ndarray,
    group: np.ndarray,
    eliminations: list[Elimination],
    limits: list[float],
    most: int,
) -> tuple[np.ndarray, np.ndarray, _States, float]:
    """Every state with every option that keeps all its bounds within the limits: (parents, options, states, left out).

    At most as many as `most`, by their first bound; that of the first one left out is the last thing returned.
    """
    arrays = plan.reduced.tokens.arrays
    variable, weight = step.variable, plan.weights[step.variable]
    chosen = {i: states.chosen[i][first] for factor in step.bucket for i in factor.scope if i != variable}

    def looked_up(factor: Factor, table: np.ndarray) -> np.ndarray:
        """[groups, options], or [groups, 1] of a message."""
        at = tuple(
            arrays[token] if i == variable else arrays[token][chosen[i]][:, None]
            for i, token in zip(factor.scope, factor.classes, strict=True)
        )
        return table[at] if at else table

    def increase(e: Elimination) -> np.ndarray:
        rise = e.weights[weight][None, :] + np.zeros((len(first), 1))
        for factor in step.bucket:
            rise = rise + looked_up(factor, e.tables[factor.slot])
        for factor in step.messages:
            rise = rise - looked_up(factor, e.tables[factor.slot])
        return rise

    rise = increase(eliminations[0])
    order = np.argsort(rise, axis=1, kind="stable")
    rise = np.take_along_axis(rise, order, axis=1)
    slack = limits[0] - states.bounds[0]
    largest = np.full(len(first), -math.inf)
    np.maximum.at(largest, group, slack)
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
    for n, e in enumerate(eliminations[1:], start=1):
        bound = states.bounds[n][parents] + increase(e)[group[parents], options]
        good = np.flatnonzero(bound <= limits[n])
        parents, options = parents[good], options[good]
        bounds = [earlier[good] for earlier in bounds] + [bound[good]]
    seconds, size = (arrays[token] for token in plan.distinct[weight])
    spent = seconds[None, :] + np.zeros((len(first), 1))
    for factor in step.bucket:
        if factor.slot < len(plan.edges):
            spent = spent + looked_up(factor, plan.edges[factor.slot])
    extended = _States(
        states.seconds[parents] + spent[group[parents], options],
        states.bytes[parents] + size[options],
        bounds,
        {i: before[parents] for i, before in states.chosen.items()} | {variable: options},
    )
    return parents, options, extended, left_out


def _undominated(states: _States, group: np.ndarray) -> np.ndarray:
    """States, in ascending order, of which no other in the group has no more seconds and no more bytes."""
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
