"""The dynamic program over chains of cuts: the plan with the least sum of fills, or with the least largest fill.

For each cut I and each vector of device counts E = (e_0, e_1, ...), one number per kind, `best` is the least sum of the
fills of all stages after I on exactly E devices:

    best[I][E] = min over stages from cut I to cut J on r devices of kind k  of  fill + best[J][E - r e_k]
    best[all][0] = 0

where a stage's memory limits how many devices E - r e_k may follow it. Each stage that is pinned to a place in the plan
(first, second, ...) adds a level to `best`. For the least largest fill, the larger of fill and `best` takes the place
of their sum.

O(stages x vectors of device counts) operations. One array operation handles all stages of one first cut, kind and
number of replicas, over all vectors of device counts; with few vectors, one handles all cuts instead.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from autopar.planner.inter_op.stage_costs import Stages

# Up to this many triples (device counts, kind, replicas), array operations over all cuts at once are faster.
_FEW_STATES = 24


class SweepStep(NamedTuple):
    """One stage of a path."""

    start: int
    stop: int
    kind: int
    recompute: bool
    replicas: int
    after: int  # devices of all later stages


class Path(NamedTuple):
    """A plan: stages from first to last."""

    steps: tuple[SweepStep, ...]
    total: float  # s, sum of the fills
    used: tuple[int, ...]  # devices of each kind


class Level(NamedTuple):
    """The stages that may have one place in a plan."""

    stages: Stages
    rows: np.ndarray  # [n_cuts + 1]: stages from rows[i] to rows[i + 1] start at cut i
    best: np.ndarray  # [n_cuts, *(counts + 1)] s
    following: np.ndarray  # `best` of the next level; `best` itself where any number of stages may follow
    combine: np.ufunc  # np.add or np.maximum


def sweep(
    stages: Stages,
    pools: np.ndarray,
    n_cuts: int,
    counts: tuple[int, ...],
    places: np.ndarray,
    pinned: frozenset[int],
    exactly: bool = False,
    combine: np.ufunc = np.add,
) -> Path | None:
    """The plan with the least sum of fills on at most (or exactly) `counts` devices of each pool; None without any.

    `pools` [kinds]: the pool from which a stage of each kind takes its devices.
    `places`: for every stage the place in a plan (from 0) that it is pinned to, -1 for none, -2 for contradicting pins.
    `pinned`: all places with pins. `combine`: np.maximum for the plan whose largest fill is the least. Among equal
    plans the one with fewest devices, then the earliest cuts, is returned.
    """
    levels = [_free(_subset(stages, places == -1) if pinned else stages, pools, n_cuts, counts, combine)]
    for place in range(max(pinned, default=-1), -1, -1):
        here = _subset(stages, places == (place if place in pinned else -1))
        levels.insert(0, _level(here, pools, n_cuts, counts, levels[0].best, combine))
    totals = levels[0].best[0]
    least = float(totals[counts] if exactly else totals.min())
    if math.isinf(least):
        return None
    n_devices = _sums(counts)
    candidates = [counts] if exactly else np.argwhere(totals == least)
    used = min((tuple(int(e) for e in c) for c in candidates), key=lambda c: (n_devices[c], c))
    return Path(_trace(levels, pools, used), least, used)


def _free(stages: Stages, pools: np.ndarray, n_cuts: int, counts: tuple[int, ...], combine: np.ufunc) -> Level:
    """The level after all pins: any number of stages."""
    best = np.full((n_cuts, *(c + 1 for c in counts)), math.inf)
    best[(n_cuts - 1, *(0 for _ in counts))] = 0.0
    level = Level(stages, _rows(stages, n_cuts), best, best, combine)
    n_states = best[0].size
    moves = np.count_nonzero(np.bincount(stages.kind * (max(counts) + 1) + stages.replicas))
    if n_states * moves <= _FEW_STATES:
        _by_state(level, pools, counts)
    else:
        _by_cut(level, pools, counts)
    return level


def _level(
    stages: Stages, pools: np.ndarray, n_cuts: int, counts: tuple[int, ...], following: np.ndarray, combine: np.ufunc
) -> Level:
    """One pinned place."""
    level = Level(stages, _rows(stages, n_cuts), np.full_like(following, math.inf), following, combine)
    _by_cut(level, pools, counts)
    return level


def _by_cut(level: Level, pools: np.ndarray, counts: tuple[int, ...]) -> None:
    """Fill `level.best` from the last cut to the first."""
    stages, n_devices = level.stages, _sums(counts)
    most = sum(counts)
    group = stages.kind * (max(counts) + 1) + stages.replicas
    edges = np.flatnonzero(np.diff(group) | np.diff(stages.start)) + 1
    bounds = [0, *edges.tolist(), len(stages.start)] if len(stages.start) else [0]
    # Stages are sorted by start, so that groups from the last to the first go from the last cut to the first.
    for begin, end in zip(reversed(bounds[:-1]), reversed(bounds[1:]), strict=True):
        start, axis, replicas = int(stages.start[begin]), int(pools[stages.kind[begin]]), int(stages.replicas[begin])
        rest = _along(axis, slice(0, counts[axis] + 1 - replicas), len(counts))
        found = level.following[stages.stop[begin:end]][(slice(None), *rest)]
        found = level.combine(found, stages.fill[begin:end].reshape(-1, *(1 for _ in counts)))
        after = stages.most_after[begin:end]
        if after.min() < most - replicas:
            fits = n_devices[rest][None] <= after.reshape(-1, *(1 for _ in counts))
            found = np.where(fits, found, math.inf)
        target = level.best[start][_along(axis, slice(replicas, None), len(counts))]
        np.minimum(target, found.min(axis=0), out=target)


def _by_state(level: Level, pools: np.ndarray, counts: tuple[int, ...]) -> None:
    """Fill `level.best` for one vector of device counts after the other, all cuts at once."""
    stages, n_devices = level.stages, _sums(counts)
    n_cuts = len(level.best)
    width = max(counts) + 1
    group = (2 * stages.kind + stages.recompute) * width + stages.replicas
    moves = []
    for number in np.flatnonzero(np.bincount(group)):
        mine = group == number
        edge = np.full((n_cuts, n_cuts), math.inf)
        after = np.full((n_cuts, n_cuts), -1)
        edge[stages.start[mine], stages.stop[mine]] = stages.fill[mine]
        after[stages.start[mine], stages.stop[mine]] = stages.most_after[mine]
        moves.append((int(pools[int(number) // width // 2]), int(number) % width, edge, after))
    for state in sorted(np.ndindex(*(c + 1 for c in counts)), key=lambda s: int(n_devices[s])):
        for axis, replicas, edge, after in moves:
            if state[axis] < replicas:
                continue
            rest = (*state[:axis], state[axis] - replicas, *state[axis + 1 :])
            following = level.following[(slice(None), *rest)]
            found = np.where(after >= n_devices[rest], level.combine(edge, following[None, :]), math.inf).min(axis=1)
            target = level.best[(slice(None), *state)]
            np.minimum(target, found, out=target)


def _trace(levels: list[Level], pools: np.ndarray, used: tuple[int, ...]) -> tuple[SweepStep, ...]:
    """The stages that attain the least sum on exactly `used`; among equal ones the earliest cut."""
    steps: list[SweepStep] = []
    cut, state, place = 0, used, 0
    while place < len(levels) - 1 or any(state):
        level = levels[place]
        stages = level.stages
        goal = level.best[(cut, *state)]
        begin, end = int(level.rows[cut]), int(level.rows[cut + 1])
        found = []
        for row in range(begin, end):
            kind, replicas = int(stages.kind[row]), int(stages.replicas[row])
            axis = int(pools[kind])
            if state[axis] < replicas:
                continue
            rest = (*state[:axis], state[axis] - replicas, *state[axis + 1 :])
            if sum(rest) > stages.most_after[row]:
                continue
            if level.combine(stages.fill[row], level.following[(int(stages.stop[row]), *rest)]) == goal:
                found.append((int(stages.stop[row]), kind, bool(stages.recompute[row]), replicas, rest))
        stop, kind, recompute, replicas, rest = min(found)
        steps.append(SweepStep(cut, stop, kind, recompute, replicas, sum(rest)))
        cut, state = stop, rest
        place = min(place + 1, len(levels) - 1)
    return tuple(steps)


def _subset(stages: Stages, chosen: np.ndarray) -> Stages:
    return Stages(*(column[chosen] for column in stages))


def _rows(stages: Stages, n_cuts: int) -> np.ndarray:
    return np.searchsorted(stages.start, np.arange(n_cuts + 1))


def _sums(counts: tuple[int, ...]) -> np.ndarray:
    """[*(counts + 1)]: devices of each vector of device counts."""
    return np.asarray(sum(np.ogrid[tuple(slice(0, c + 1) for c in counts)]))


def _along(axis: int, part: slice, n_axes: int) -> tuple[slice, ...]:
    return tuple(part if a == axis else slice(None) for a in range(n_axes))
