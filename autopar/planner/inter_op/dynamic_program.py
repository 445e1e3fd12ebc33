"""The dynamic program over chains of cuts: the plan with the least sum of fills, or with the least largest fill.

For each cut I and each vector of device counts E = (e_0, e_1, ...), one number per pool, `best` is the least sum of the
fills of all stages after I on exactly E devices:

    best[I][E] = min over stages from cut I to cut J of r replicas of width w  of  fill + best[J][E - r w]
    best[all][0] = 0

where a stage's memory limits how many replicas may follow it. Their number n is known from E where all meshes of a
pool have one width. Otherwise there are three ways to treat it (`Following`):

    relaxed   n is at least as many as if all meshes had the largest width. The result is a bound on all plans.
    counted   n is a further axis of `best`. Exact, with as many times the states.
    recorded  n is that of the stages that attain best[J][E - r w]. Every plan fits, but a better one may be missed.

Each stage that is pinned to a place in the plan (first, second, ...) adds a level to `best`. For the least largest
fill, the larger of fill and `best` takes the place of their sum.

O(stages x states) operations. One array operation handles all stages of one first cut and number of devices, over all
states; with few states, one handles all cuts instead.
"""

from __future__ import annotations

import enum
import math
from functools import cache
from typing import NamedTuple

import numpy as np

from autopar.plan.recompute import Recompute
from autopar.planner.inter_op.needed_devices import Needs
from autopar.planner.inter_op.stage_tables import Stages

# Up to this many pairs (state, numbers of devices and replicas), array operations over all cuts at once are faster.
_FEW_STATES = 24


class Following(enum.Enum):
    """How a sweep knows the number of replicas that follow a stage; see the head of this file."""

    RELAXED = "relaxed"
    COUNTED = "counted"
    RECORDED = "recorded"


class SweepStep(NamedTuple):
    """One stage of a path."""

    start: int
    stop: int
    kind: int
    recompute: int  # a `Recompute`
    replicas: int
    after: int  # replicas of all later stages


class Path(NamedTuple):
    """A plan: stages from first to last."""

    steps: tuple[SweepStep, ...]
    total: float  # s, sum of the fills
    used: tuple[int, ...]  # units of devices of each pool


class Grid(NamedTuple):
    """The states: vectors of device counts, and with `Following.COUNTED` the number of replicas as a last axis."""

    shape: tuple[int, ...]
    devices: np.ndarray  # [*shape] units of all pools
    replicas: np.ndarray  # [*shape] replicas in these devices, or the fewest that there can be
    most_groups: int  # the most replicas that there can be in all devices
    counted: bool

    @classmethod
    def of(cls, units: tuple[int, ...], widths: tuple[int, ...], most_groups: int, counted: bool) -> Grid:
        """`units`: of devices of each pool. `widths`: the largest in each pool, in units."""
        shape = (*(u + 1 for u in units), most_groups + 1) if counted else tuple(u + 1 for u in units)
        axes = np.ogrid[tuple(slice(0, n) for n in shape)]
        devices = sum(axes[: len(units)]) + np.zeros(shape, dtype=int)
        fewest = sum(-(-axis // width) for axis, width in zip(axes, widths, strict=False)) + np.zeros(shape, dtype=int)
        known = axes[-1] + np.zeros(shape, dtype=int) if counted else fewest
        return cls(shape, devices, known, most_groups, counted)

    def move(
        self, pool: int, units: int, replicas: int, least: int = 0, most: int | None = None
    ) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """(states that a stage leads to, the states that it leaves for later stages). Of one pool: states that leave
        at least `least` units, and that have at most `most`."""
        steps = [units if axis == pool else 0 for axis in range(len(self.shape) - self.counted)]
        steps += [replicas] if self.counted else []
        to = [slice(step, n) for n, step in zip(self.shape, steps, strict=True)]
        rest = [slice(0, n - step) for n, step in zip(self.shape, steps, strict=True)]
        if most is not None:
            to[0], rest[0] = slice(least + units, most + 1), slice(least, most + 1 - units)
        return tuple(to), tuple(rest)

    def rest(self, state: tuple[int, ...], pool: int, units: int, replicas: int) -> tuple[int, ...] | None:
        """The state that a stage leaves of `state`; None if that has too little."""
        left = [n - (units if axis == pool else 0) for axis, n in enumerate(state)]
        if self.counted:
            left[-1] -= replicas
        return tuple(left) if min(left) >= 0 else None


class Level(NamedTuple):
    """The stages that may have one place in a plan."""

    stages: Stages
    rows: np.ndarray  # [n_cuts + 1]: stages from rows[i] to rows[i + 1] start at cut i
    best: np.ndarray  # [n_cuts, *states] s
    held: np.ndarray | None  # [n_cuts, *states] replicas of the stages that attain `best`, where they are recorded
    following: np.ndarray  # `best` of the next level; `best` itself where any number of stages may follow
    following_held: np.ndarray | None


def sweep(
    stages: Stages,
    n_cuts: int,
    grid: Grid,
    places: np.ndarray,
    pinned: frozenset[int],
    *,
    exactly: bool = False,
    recorded: bool = False,
    combine: np.ufunc = np.add,
    needs: Needs | None = None,
) -> Path | None:
    """The plan with the least sum of fills in the states of `grid`; None without any.

    `places`: for every stage the place in a plan (from 0) that it is pinned to, -1 for none, -2 for contradicting pins.
    `pinned`: all places with pins. `exactly`: use all devices. `recorded`: see `Following`. `combine`: np.maximum for
    the plan whose largest fill is the least. Among equal plans the one with fewest devices, then the earliest cuts, is
    returned. `needs`: of the stages before and after each cut, in a grid of one pool; no plan needs fewer units.
    """
    program = _Program(n_cuts, grid, recorded, combine, needs)
    levels = [program.free(_subset(stages, places == -1) if pinned else stages)]
    for place in range(max(pinned, default=-1), -1, -1):
        here = _subset(stages, places == (place if place in pinned else -1))
        levels.insert(0, program.level(here, levels[0]))
    totals = levels[0].best[0]
    if exactly:
        totals = np.where(grid.devices == grid.devices.max(), totals, math.inf)
    least = float(totals.min())
    if math.isinf(least):
        return None
    candidates = [tuple(int(e) for e in c) for c in np.argwhere(totals == least)]
    used = min(candidates, key=lambda c: (grid.devices[c], c))
    return Path(program.trace(levels, used), least, used[:-1] if grid.counted else used)


class _Program:
    def __init__(self, n_cuts: int, grid: Grid, recorded: bool, combine: np.ufunc, needs: Needs | None) -> None:
        self._n_cuts, self._grid, self._recorded, self._combine = n_cuts, grid, recorded, combine
        self._move = cache(grid.move)
        self._needs = needs

    def free(self, stages: Stages) -> Level:
        """The level after all pins: any number of stages."""
        best = np.full((self._n_cuts, *self._grid.shape), math.inf)
        best[-1].flat[0] = 0.0
        held = np.zeros(best.shape, dtype=np.int32) if self._recorded else None
        level = Level(stages, _rows(stages, self._n_cuts), best, held, best, held)
        n_moves = np.count_nonzero(np.bincount(_moves(stages)))
        if best[0].size * n_moves <= _FEW_STATES and not self._recorded:
            self._by_state(level)
        else:
            self._by_cut(level)
        return level

    def level(self, stages: Stages, following: Level) -> Level:
        """One pinned place."""
        best = np.full_like(following.best, math.inf)
        held = np.zeros(best.shape, dtype=np.int32) if self._recorded else None
        level = Level(stages, _rows(stages, self._n_cuts), best, held, following.best, following.held)
        self._by_cut(level)
        return level

    def _by_cut(self, level: Level) -> None:
        """Fill `level.best` from the last cut to the first."""
        stages, column = level.stages, (-1, *(1 for _ in self._grid.shape))
        # The number of replicas makes a difference only where it is part of a state, or recorded.
        moves = _moves(stages, self._grid.counted or self._recorded)
        edges = np.flatnonzero(np.diff(moves) | np.diff(stages.start)) + 1
        bounds = [0, *edges.tolist(), len(stages.start)] if len(stages.start) else [0]
        fewest, most = self._limits(stages, bounds)
        # Stages are sorted by start, so that groups from the last to the first go from the last cut to the first.
        for group in range(len(bounds) - 2, -1, -1):
            begin, end = bounds[group], bounds[group + 1]
            start, stop = int(stages.start[begin]), stages.stop[begin:end]
            replicas = int(stages.replicas[begin])
            units = int(stages.units[begin])
            to, rest = self._move(int(stages.pool[begin]), units, replicas, fewest[group], most[group])
            found = self._combine(level.following[stop][(slice(None), *rest)], stages.fill[begin:end].reshape(column))
            after = stages.most_after[begin:end]
            held = None if level.following_held is None else level.following_held[stop][(slice(None), *rest)]
            if after.min() < self._grid.most_groups:
                follow = self._grid.replicas[rest][None] if held is None else held
                found = np.where(follow <= after.reshape(column), found, math.inf)
            target = level.best[start][to]
            if level.held is None or held is None:
                np.minimum(target, found.min(axis=0), out=target)
                continue
            first = found.argmin(axis=0)[None]
            least = np.take_along_axis(found, first, axis=0)[0]
            better = least < target
            target[better] = least[better]
            level.held[start][to][better] = np.take_along_axis(held, first, axis=0)[0][better] + replicas

    def _limits(self, stages: Stages, bounds: list[int]) -> tuple[list[int], list[int | None]]:
        """For each group of stages: the fewest units that can follow it, and the most that it can have together with
        what follows."""
        n = len(bounds) - 1
        if self._needs is None or not n:
            return [0] * n, [None] * n
        total = self._grid.shape[0] - 1
        fewest = np.minimum.reduceat(self._needs.after[stages.stop], bounds[:-1])
        most = total - self._needs.before[stages.start[bounds[:-1]]]
        return fewest.astype(int).tolist(), most.astype(int).tolist()

    def _by_state(self, level: Level) -> None:
        """Fill `level.best` for one state after the other, all cuts at once."""
        stages, grid = level.stages, self._grid
        shape = (self._n_cuts, self._n_cuts)
        modes = len(Recompute)
        number = modes * (_moves(stages) + (int(_moves(stages).max(initial=0)) + 1) * stages.kind) + stages.recompute
        moves = []
        for mine in (number == one for one in np.unique(number)):
            first = int(np.argmax(mine))
            edge, after = np.full(shape, math.inf), np.full(shape, -1)
            edge[stages.start[mine], stages.stop[mine]] = stages.fill[mine]
            after[stages.start[mine], stages.stop[mine]] = stages.most_after[mine]
            moves.append((int(stages.pool[first]), int(stages.units[first]), int(stages.replicas[first]), edge, after))
        for state in sorted(np.ndindex(*grid.shape), key=lambda s: int(grid.devices[s])):
            for pool, units, replicas, edge, after in moves:
                rest = grid.rest(state, pool, units, replicas)
                if rest is None:
                    continue
                following = level.following[self._cuts_at(rest)]
                fits = after >= grid.replicas[rest]
                found = np.where(fits, self._combine(edge, following[None, :]), math.inf).min(axis=1)
                target = level.best[self._cuts_at(state)]
                np.minimum(target, found, out=target)

    @staticmethod
    def _cuts_at(state: tuple[int, ...]) -> tuple[slice | int, ...]:
        """All cuts, in one state."""
        return (slice(None), *state)

    def trace(self, levels: list[Level], used: tuple[int, ...]) -> tuple[SweepStep, ...]:
        """The stages that attain the least sum on exactly `used`; among equal ones the earliest cut."""
        steps: list[SweepStep] = []
        cut, state, place = 0, used, 0
        while place < len(levels) - 1 or any(state):
            step, state = min(self._attaining(levels[place], cut, state))
            steps.append(step)
            cut, place = step.stop, min(place + 1, len(levels) - 1)
        followed, found = 0, []
        for step in reversed(steps):
            found.append(step._replace(after=followed))
            followed += step.replicas
        return tuple(reversed(found))

    def _attaining(self, level: Level, cut: int, state: tuple[int, ...]) -> list[tuple[SweepStep, tuple[int, ...]]]:
        """Stages from `cut` that attain `level.best`, each with the state that it leaves."""
        stages, goal = level.stages, level.best[(cut, *state)]
        rows = np.arange(int(level.rows[cut]), int(level.rows[cut + 1]))
        rows = rows[stages.units[rows] <= np.array(state)[stages.pool[rows]]]
        if self._grid.counted:
            rows = rows[stages.replicas[rows] <= state[-1]]
        rest = self._rest_of(rows, stages, state)
        following = level.following[(stages.stop[rows], *rest)]
        attained = self._combine(stages.fill[rows], following) == goal
        follow = self._grid.replicas[rest]
        if level.held is not None and level.following_held is not None:
            follow = level.following_held[(stages.stop[rows], *rest)]
            attained &= follow + stages.replicas[rows] == level.held[(cut, *state)]
        chosen = np.flatnonzero(attained & (follow <= stages.most_after[rows]))
        found = []
        for row, place in zip(rows[chosen].tolist(), chosen.tolist(), strict=True):
            columns = (stages.stop, stages.kind, stages.recompute, stages.replicas)
            stop, kind, recompute, replicas = (int(column[row]) for column in columns)
            found.append((SweepStep(cut, stop, kind, recompute, replicas, 0), tuple(int(axis[place]) for axis in rest)))
        return found

    def _rest_of(self, rows: np.ndarray, stages: Stages, state: tuple[int, ...]) -> tuple[np.ndarray, ...]:
        """The state that each stage leaves of `state`, by axis [rows]."""
        pool, units = stages.pool[rows], stages.units[rows]
        left = [n - np.where(pool == axis, units, 0) for axis, n in enumerate(state)]
        if self._grid.counted:
            left[-1] = state[-1] - stages.replicas[rows]
        return tuple(left)


def _moves(stages: Stages, by_replicas: bool = True) -> np.ndarray:
    """[stages] a number for each pool and number of devices; and each number of replicas, if that counts."""
    most_units, most_replicas = (int(column.max(initial=0)) + 1 for column in (stages.units, stages.replicas))
    devices = stages.pool * most_units + stages.units
    return devices * most_replicas + stages.replicas if by_replicas else devices


def _subset(stages: Stages, chosen: np.ndarray) -> Stages:
    return Stages(*(column[chosen] for column in stages))


def _rows(stages: Stages, n_cuts: int) -> np.ndarray:
    return np.searchsorted(stages.start, np.arange(n_cuts + 1))
