"""Lower bounds on the largest load of plans with a given cut, from all the other cuts that the plan could have.

The load of the stage between cuts I and J is its work, what it receives and what it sends. A value crosses I if it is
produced before I and has a reader after it. The stage receives what crosses I, unless no reader is in it; it sends
what crosses J, unless it was produced before I:

    received = (crosses I) - (crosses I, as many readers before I as before J)
    sent     = (crosses J) - (produced before I, crosses J)

What is subtracted are matrix products for all pairs of cuts. Values whose readers come before their producer (backward
nodes may come along with forward nodes that run early) are the same thing seen from the other end.

The least loads of the stages before each cut, by the devices that these take, are a dynamic program from the front; the
least loads of those after it are one from the back, over the same pairs of cuts. Where all loads must stay below a
limit, the devices before a cut must suffice for the work before it, and the devices after it for the
rest (`bounds.cut_bounds`). Under a limit hardly above the least possible one these are few cuts for every number of
devices, and the pairs to look at are those of neighbours:

    devices before    0   1   2   3         cuts by the work before them
                      |  ===  |  |  |
                      '-> === ------> ===
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autopar.planner.inter_op.problem import Problem

_ROWS = 512  # cuts at a time, to bound memory
_PAIRS = 4e8  # most pairs of cuts

State = tuple[int, ...]  # devices of each pool


class _Pairs(NamedTuple):
    """Stages on a device of one pool that may come after some devices and before others."""

    pool: int
    before: tuple[State, ...]  # devices that may come before it
    start: np.ndarray  # cut
    stop: np.ndarray  # cut
    load: np.ndarray  # s


def chain_bounds(
    problem: Problem,
    counts: Sequence[int],
    cuts: np.ndarray,
    splits: Mapping[State, tuple[np.ndarray, np.ndarray]],
    limit: float,
) -> np.ndarray | None:
    """[n] lower bounds in seconds on every plan that has this cut, only others among the first n of `cuts`
    [n_cuts, atoms], and is better than `limit`; inf where there is no such plan.

    `splits`: `cut_bounds` of the cuts. n is the number of cuts that can be afforded. None where the sum of stages
    counts, stages have replicas or the first micro-batch lacks something.
    """
    if problem.sum_counts or problem.max_replicas > 1 or any(kind.space or kind.width > 1 for kind in problem.kinds):
        return None
    if problem.accumulation is not None:
        return None
    states = _allowed(splits, counts, limit)
    n = _affordable(states, counts)
    cuts, states = cuts[:n], {state: allowed[:n] for state, allowed in states.items()}
    sizes = cuts.sum(axis=1)
    if not (sizes == 0).any() or not (sizes == problem.n_atoms).any():
        return None
    first, last = (int(np.flatnonzero(sizes == size)[0]) for size in (0, problem.n_atoms))
    stages = _Stages(problem, cuts, limit)
    ahead = {state: np.full(n, np.inf) for state in states}
    nothing = (0,) * len(counts)
    ahead[nothing][first] = 0.0
    pairs = []
    for some in _stages_in_order(stages, states, ahead, counts):
        pairs.append(some)
        for state in some.before:
            np.minimum.at(ahead[_with(state, some.pool)], some.stop, np.maximum(ahead[state][some.start], some.load))
    # From the back, by the devices that may come before the cut.
    behind = {state: np.full(n, np.inf) for state in states}
    for state in behind:
        behind[state][last] = 0.0
    for some in reversed(pairs):
        for state in reversed(some.before):
            np.minimum.at(behind[state], some.start, np.maximum(behind[_with(state, some.pool)][some.stop], some.load))
    bounds = np.minimum.reduce([np.maximum(ahead[state], behind[state]) for state in states])
    return np.where(bounds < limit, bounds, np.inf)


def _allowed(
    splits: Mapping[State, tuple[np.ndarray, np.ndarray]], counts: Sequence[int], limit: float
) -> dict[State, np.ndarray]:
    """[n_cuts] for every number of devices of each pool, whether they may come before each cut."""
    return {state: (splits[state][0] < limit) & (splits[state][1] < limit) for state in _states(counts)}


def _states(counts: Sequence[int]) -> Iterator[State]:
    """All numbers of devices; those of the last pool come first."""
    return itertools.product(*(range(count + 1) for count in counts))


def _with(state: State, pool: int) -> State:
    """One device more."""
    return tuple(count + (index == pool) for index, count in enumerate(state))


def _affordable(states: Mapping[State, np.ndarray], counts: Sequence[int]) -> int:
    """How many of the first cuts do not take too long."""
    sums = {state: np.cumsum(allowed, dtype=float) for state, allowed in states.items()}
    pairs = np.zeros(len(next(iter(sums.values()))))
    for state, after in sums.items():
        for pool, count in enumerate(counts):
            if state[pool] < count:
                pairs += after * sums[_with(state, pool)]
    return int(np.searchsorted(pairs, _PAIRS, side="right"))


def _stages_in_order(
    stages: _Stages, states: Mapping[State, np.ndarray], ahead: Mapping[State, np.ndarray], counts: Sequence[int]
) -> Iterator[_Pairs]:
    """The stages that come after cuts with known loads, `ahead`, which grow with every stage that is yielded.

    A pool's first device is that after which all devices of later pools may come, so stages that it may run after any
    of them are looked at together.
    """
    for state in _states(counts):
        for pool, used in enumerate(state):
            if not used or (pool == 0 and any(state[1:])):
                continue
            here = tuple(count - (index == pool) for index, count in enumerate(state))
            before: tuple[State, ...] = (here,)
            if pool == 0:
                rest = _states(counts[1:])
                before = tuple((used - 1, *others) for others in rest)
            reached = np.logical_or.reduce([np.isfinite(ahead[one]) for one in before])
            wanted = np.logical_or.reduce([states[_with(one, pool)] for one in before])
            start, stop, load = stages.between(pool, np.flatnonzero(reached), np.flatnonzero(wanted))
            yield _Pairs(pool, before, start, stop, load)


class _Stages:
    """The loads of stages between cuts."""

    def __init__(self, problem: Problem, cuts: np.ndarray, limit: float) -> None:
        self._problem, self._cuts, self._limit = problem, cuts, limit
        self._rounds = problem.n_microbatches * problem.chunks - 1
        self._work = problem.least_work @ cuts.T.astype(float)  # [n_kinds, n_cuts] s
        self._transfers = _Transfers(problem, cuts)
        self._longest = float(self._work.max(initial=0.0)) + self._transfers.longest(problem)  # s, of any stage

    def between(self, pool: int, starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(start, stop, load in s) of all stages below the limit from cuts of `starts` to cuts of `stops`."""
        found: list[tuple[np.ndarray, ...]] = []
        for kind, of_pool in enumerate(self._problem.pools):
            if of_pool != pool or not (starts.size and stops.size):
                continue
            work = self._work[kind]
            starts, stops = starts[np.argsort(work[starts])], stops[np.argsort(work[stops])]
            ascending = work[stops]
            for at in range(0, len(starts), _ROWS):
                rows = starts[at : at + _ROWS]
                # Work never falls from a cut to a later one, and is below the limit.
                most = work[rows[-1]] + (self._limit / self._rounds if self._rounds else np.inf)
                low, high = np.searchsorted(ascending, [work[rows[0]] * (1 - 1e-12), most])
                found.append(self._below(kind, rows, stops[low:high]))
        if not found:
            return np.zeros(0, dtype=int), np.zeros(0, dtype=int), np.zeros(0)
        start, stop, load = (np.concatenate(column) for column in zip(*found, strict=True))
        return start, stop, load

    def _below(self, number: int, rows: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The stages from `rows` to `columns`. One matrix product adds up all that a load consists of, and more than
        any stage takes for each atom that is before the first cut and not before the second."""
        kind, work = self._problem.kinds[number], self._work[number]
        before, after = self._cuts[rows], ~self._cuts[columns]
        differ = before.any(axis=0) & after.any(axis=0)
        ones, all_ones = np.ones((len(rows), 1)), np.ones((len(columns), 1))
        too_much = 2 * self._longest + 1.0
        left = [-work[rows, None], ones, too_much * before[:, differ]]
        right = [all_ones, work[columns, None], after[:, differ]]
        if not self._problem.sends_behind:
            received, sent = kind.seconds_per_byte, kind.send_seconds_per_byte
            for a, b in self._transfers.factors(rows, columns, received, sent):
                left.append(a)
                right.append(b)
        load = np.concatenate(left, axis=1) @ np.concatenate(right, axis=1).T
        row, column = np.nonzero((load < too_much / 2) & (self._rounds * load < self._limit))
        other = rows[row] != columns[column]
        row, column = row[other], column[other]
        return rows[row], columns[column], self._rounds * load[row, column]


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

    def longest(self, problem: Problem) -> float:
        """Seconds in which the slowest kind receives and sends all values."""
        received = max(kind.seconds_per_byte for kind in problem.kinds)
        sent = max(kind.send_seconds_per_byte for kind in problem.kinds)
        return self._later.longest(received, sent) + self._earlier.longest(received, sent)

    def factors(
        self, rows: np.ndarray, columns: np.ndarray, received: float, sent: float
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Pairs of [rows, n] and [columns, n] whose products add up to what stages from each cut of `rows` to each of
        `columns` receive, at `received` s per byte, and send, at `sent`."""
        for a, b in self._later.factors(rows, columns, received, sent):
            yield a, b
        for a, b in self._earlier.factors(columns, rows, received, sent):
            yield b, a


class _OneWay:
    """Transfers of values whose readers come after their producers."""

    def __init__(self, cuts: np.ndarray, values: list[_Sent]) -> None:
        self._produced = cuts[:, [value.producer for value in values]]
        self._nbytes = np.array([value.nbytes for value in values])
        self._crosses = np.zeros_like(self._produced)
        self._both_ways = np.array([value.both_ways for value in values for _ in value.readers])
        # By value and number of readers before the cut.
        self._same = np.zeros((len(cuts), len(self._both_ways)), dtype=bool)
        self._crosses_with = np.zeros_like(self._same)
        at = 0
        for column, value in enumerate(values):
            n_read = cuts[:, list(value.readers)].sum(axis=1)
            self._crosses[:, column] = self._produced[:, column] & (n_read < len(value.readers))
            for number in range(len(value.readers)):
                self._same[:, at] = n_read == number
                self._crosses_with[:, at] = self._same[:, at] & self._produced[:, column]
                at += 1
        self._arriving = self._crosses_with @ self._both_ways
        self._leaving = self._crosses @ self._nbytes

    def longest(self, received: float, sent: float) -> float:
        """See `_Transfers`."""
        return float(received * self._both_ways.sum() + sent * self._nbytes.sum())

    def factors(
        self, starts: np.ndarray, stops: np.ndarray, received: float, sent: float
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """See `_Transfers`; none for what costs nothing."""
        if received:
            yield received * self._arriving[starts, None], np.ones((len(stops), 1))
            yield _product(self._crosses_with[starts], self._same[stops], -received * self._both_ways)
        if sent:
            yield np.ones((len(starts), 1)), sent * self._leaving[stops, None]
            yield _product(self._produced[starts], self._crosses[stops], -sent * self._nbytes)


def _product(rows: np.ndarray, columns: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Factors of the sums of the weights that count in both a row and a column."""
    counts = rows.any(axis=0) & columns.any(axis=0)
    return rows[:, counts] * weights[counts], columns[:, counts]
