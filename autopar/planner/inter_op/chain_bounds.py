"""Lower bounds on the largest load of plans with a given cut, from all the other cuts that the plan could have.

The load of the stage between cuts I and J is its work, what it receives and what it sends. A value crosses I if it is
produced before I and has a reader after it. The stage receives what crosses I, unless no reader is in it; it sends
what crosses J, unless it was produced before I:

    received = (crosses I) - (crosses I, as many readers before I as before J)
    sent     = (crosses J) - (produced before I, crosses J)

What is subtracted are matrix products for all pairs of cuts. Values whose readers come before their producer (backward
nodes may come along with forward nodes that run early) are the same thing seen from the other end. A dynamic program
over the loads from the front and one from the back meet at each cut. Only pairs whose load is below the best plan's are
kept, which are few.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autopar.planner.inter_op.problem import Problem

_ROWS = 256  # cuts at a time, to bound memory
_PAIRS = 1.2e7  # most pairs of cuts
_WORK = 1.3e10  # most multiplications


class _Pairs(NamedTuple):
    """Stages on one kind of device."""

    pool: int
    start: np.ndarray  # cut
    stop: np.ndarray  # cut
    load: np.ndarray  # s

    def reversed(self) -> _Pairs:
        order = np.argsort(self.stop, kind="stable")
        return _Pairs(self.pool, self.stop[order], self.start[order], self.load[order])


def chain_bounds(
    problem: Problem, counts: Sequence[int], cuts: np.ndarray, best: float, effort: float = 1.0
) -> np.ndarray | None:
    """[n] lower bounds in seconds on every plan that has this cut, only others among the first n of `cuts`
    [n_cuts, atoms], and is better than `best`; inf where there is no such plan.

    n is the number of cuts that can be afforded with `effort`, a share of the most there is. None where the sum of
    stages counts, stages have replicas or the first micro-batch lacks something.
    """
    if problem.sum_counts or problem.max_replicas > 1 or any(kind.space or kind.width > 1 for kind in problem.kinds):
        return None
    if problem.accumulation is not None:
        return None
    cuts = cuts[: _affordable(problem, cuts, best, effort)]
    sizes = cuts.sum(axis=1)
    if not (sizes == 0).any() or not (sizes == problem.n_atoms).any():
        return None
    least = _least_work(problem, cuts)
    order = np.lexsort((sizes, least))
    pairs = _stages(problem, cuts[order], least[order], best)
    first, last = (int(np.flatnonzero(sizes[order] == size)[0]) for size in (0, problem.n_atoms))
    ahead = _least_loads(pairs, len(cuts), counts, last)
    behind = _least_loads([p.reversed() for p in pairs], len(cuts), counts, first)
    whole = tuple(counts)
    bounds = np.full(len(cuts), np.inf)
    for used in ahead:
        rest = tuple(c - u for c, u in zip(whole, used, strict=True))
        np.minimum(bounds, np.maximum(ahead[used], behind[rest]), out=bounds)
    found = np.empty(len(cuts))
    found[order] = bounds
    return found


def _affordable(problem: Problem, cuts: np.ndarray, best: float, effort: float) -> int:
    """How many of the first cuts do not take too long."""
    n_columns = sum(1 + len(value.consumers) for value in problem.space.values)
    least, n = _least_work(problem, cuts), len(cuts)
    while n:
        ends = _ends(problem, np.sort(least[:n]), best)
        pairs = float((ends - np.arange(n)).sum())
        if pairs <= effort * _PAIRS and pairs * (cuts.shape[1] + n_columns) <= effort * _WORK:
            break
        n = n * 7 // 8
    return n


def _least_work(problem: Problem, cuts: np.ndarray) -> np.ndarray:
    """[n_cuts] seconds before each cut on the fastest kind."""
    return np.asarray(cuts @ problem.least_work.min(axis=0))


def _ends(problem: Problem, least: np.ndarray, best: float) -> np.ndarray:
    """[n_cuts]: no stage that starts at a cut and is below `best` stops at this one or a later one."""
    rounds = problem.n_microbatches * problem.chunks - 1
    return np.searchsorted(least, least + (best / rounds if rounds else np.inf), side="right")


def _stages(problem: Problem, cuts: np.ndarray, least: np.ndarray, best: float) -> list[_Pairs]:
    """The stages on each kind whose load is below `best`, by start. Cuts come by `least` (s)."""
    rounds = problem.n_microbatches * problem.chunks - 1
    ends = _ends(problem, least, best)
    values = _Transfers(problem, cuts)
    inside, sizes = cuts.astype(np.float32), cuts.sum(axis=1)
    work = problem.least_work @ cuts.T.astype(float)  # [n_kinds, n_cuts] s
    found: list[list[tuple[np.ndarray, ...]]] = [[] for _ in problem.kinds]
    for top in range(0, len(cuts), _ROWS):
        rows = slice(top, min(top + _ROWS, len(cuts)))
        columns = slice(top, int(ends[rows].max()))
        follows = inside[rows] @ inside[columns].T == sizes[rows, None]
        follows &= sizes[rows, None] < sizes[None, columns]
        arriving, leaving = values.received(rows, columns), values.sent(rows, columns)
        for kind, seconds, mine in zip(problem.kinds, work, found, strict=True):
            load = seconds[None, columns] - seconds[rows, None]
            if not problem.sends_behind:
                load += kind.seconds_per_byte * arriving + kind.send_seconds_per_byte * leaving
            load *= rounds
            start, stop = np.nonzero(follows & (load < best))
            mine.append((start + top, stop + top, load[start, stop]))
    stages = [tuple(np.concatenate(column) for column in zip(*mine, strict=True)) for mine in found]
    return [_Pairs(pool, *columns) for pool, columns in zip(problem.pools, stages, strict=True)]


class _Sent(NamedTuple):
    """A value, or several with the same producer and readers."""

    producer: int
    readers: tuple[int, ...]  # all after the producer, or all before it
    nbytes: float  # of a micro-batch, counted to stages that send it
    both_ways: float  # with its gradient, counted to stages that receive it


class _Transfers:
    """Bytes of a micro-batch that stages between cuts receive and send at least."""

    def __init__(self, problem: Problem, cuts: np.ndarray) -> None:
        total: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}
        for value in problem.space.values:
            if value.copies > 1:
                continue  # it may be scattered
            key = (value.producer, tuple(sorted(set(value.consumers) - {value.producer})))
            nbytes = np.array([value.nbytes, value.nbytes + value.grad_nbytes]) * problem.bytes_share
            if nbytes.any():
                total[key] = total.get(key, 0.0) + nbytes
        later, earlier = list[_Sent](), list[_Sent]()
        for (producer, readers), (nbytes, both_ways) in total.items():
            made = cuts[:, [producer]]
            first = (made & ~cuts[:, list(readers)]).any(axis=0)  # the producer comes before the reader in some cut
            last = (~made & cuts[:, list(readers)]).any(axis=0)
            # Readers that come before the producer in one cut and after it in another do not count.
            after = tuple(r for r, f, b in zip(readers, first, last, strict=True) if f and not b)
            before = tuple(r for r, f, b in zip(readers, first, last, strict=True) if b and not f)
            if after:
                later.append(_Sent(producer, after, nbytes, both_ways))
            if before:
                earlier.append(_Sent(producer, before, 0.0 if after else nbytes, both_ways))  # sent once
        self._later, self._earlier = _OneWay(cuts, later), _OneWay(~cuts, earlier)

    def received(self, rows: slice, columns: slice) -> np.ndarray:
        """[rows, columns] by stages from each cut of `rows` to each of `columns`."""
        return self._later.received(rows, columns) + self._earlier.received(columns, rows).T

    def sent(self, rows: slice, columns: slice) -> np.ndarray:
        """[rows, columns] by stages from each cut of `rows` to each of `columns`."""
        return self._later.sent(rows, columns) + self._earlier.sent(columns, rows).T


class _OneWay:
    """Transfers of values whose readers come after their producers."""

    def __init__(self, cuts: np.ndarray, values: list[_Sent]) -> None:
        self._produced = cuts[:, [value.producer for value in values]].astype(float)
        self._nbytes = np.array([value.nbytes for value in values])
        self._crosses = np.zeros_like(self._produced)
        self._both_ways = np.array([value.both_ways for value in values for _ in value.readers])
        # By value and number of readers before the cut.
        self._same = np.zeros((len(cuts), len(self._both_ways)))
        self._crosses_with = np.zeros_like(self._same)
        at = 0
        for column, value in enumerate(values):
            n_read = cuts[:, list(value.readers)].sum(axis=1)
            self._crosses[:, column] = self._produced[:, column] * (n_read < len(value.readers))
            for number in range(len(value.readers)):
                self._same[:, at] = n_read == number
                self._crosses_with[:, at] = self._same[:, at] * self._produced[:, column]
                at += 1
        self._arriving = self._crosses_with @ self._both_ways
        self._leaving = self._crosses @ self._nbytes

    def received(self, starts: slice, stops: slice) -> np.ndarray:
        unread = (self._crosses_with[starts] * self._both_ways) @ self._same[stops].T
        return np.asarray(self._arriving[starts, None] - unread)

    def sent(self, starts: slice, stops: slice) -> np.ndarray:
        earlier = (self._produced[starts] * self._nbytes) @ self._crosses[stops].T
        return np.asarray(self._leaving[None, stops] - earlier)


def _least_loads(
    pairs: list[_Pairs], n_cuts: int, counts: Sequence[int], goal: int
) -> dict[tuple[int, ...], np.ndarray]:
    """For every vector of device counts the least largest load [n_cuts] of stages from each cut to `goal` on at most so
    many devices."""
    starts = [np.unique(p.start, return_index=True) for p in pairs]
    best: dict[tuple[int, ...], np.ndarray] = {}
    for state in np.ndindex(*(count + 1 for count in counts)):
        here = np.full(n_cuts, np.inf)
        here[goal] = 0.0
        for stages, (rows, first) in zip(pairs, starts, strict=True):
            if state[stages.pool] and len(rows):
                rest = tuple(count - (pool == stages.pool) for pool, count in enumerate(state))
                load = np.maximum(stages.load, best[rest][stages.stop])
                here[rows] = np.minimum(here[rows], np.minimum.reduceat(load, first))
        best[state] = here
    return best
