"""The dynamic program over suffixes of a line that the stage partition asks all its questions of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

Used = tuple[int, ...]  # devices of each kind
State = tuple[Used, int]  # devices that a suffix uses, exactly, and stages it may have, at most
Cells = tuple[slice, slice]  # starts and stops of a table [b + 1, b + 1]
Edges = Callable[[int, int, int, Cells], np.ndarray]  # (kind, replicas, devices from here on, cells) -> costs of stages


class Step(NamedTuple):
    """One stage of a path, over blocks [start, stop)."""

    start: int
    stop: int
    kind: int
    replicas: int
    devices: int  # of this stage and all later ones

    def of(self, edges: Edges) -> float:
        """Its own cost among `edges`."""
        cell = slice(self.start, self.start + 1), slice(self.stop, self.stop + 1)
        return float(edges(self.kind, self.replicas, self.devices, cell)[0, 0])


class Best(NamedTuple):
    """What is known of the suffixes of one state, for their starts 0..b."""

    costs: np.ndarray  # [b + 1], inf where there is no partition
    stages: np.ndarray  # [b + 1], the fewest for that cost
    starts: slice  # all starts with a partition worth knowing


class Suffixes:
    """Least cost of each suffix [i, b) of b blocks on every choice of devices.

    The costs of a suffix's stages are combined by np.add or np.maximum:

    best[used][i] = min over kind k, replicas r, stop j of  combine(edges(k, r, sum(used))[i, j], best[used - r e_k][j])

    where best[no devices][b] is the identity of `combine`. The number of stages left counts beside `used` where
    `max_stages` binds. Of equal costs the fewest stages win. The rest of a suffix uses fewer devices than the suffix,
    so all starts and stops of a move are one array operation, over the starts of the state and those of its rest:

                   j: starts of the rest
                   +-------------------+
       i: starts   |  edges[i, j]      |   combined with best[rest][j], minimum along each row
                   +-------------------+

    `edges` may be inf for a forbidden stage, and must be for j <= i. `starts(state)` may leave out any start that no
    partition of interest has.
    """

    def __init__(
        self,
        n_blocks: int,
        edges: Edges,
        combine: np.ufunc,
        *,
        max_replicas: int,
        max_stages: int | None,
        starts: Callable[[State], slice] | None = None,
    ) -> None:
        self._edges = edges
        self._combine = combine
        self._max_replicas = max_replicas
        self._max_stages = max_stages
        self._starts = starts or (lambda state: slice(0, n_blocks))
        identity = 0.0 if combine is np.add else -math.inf
        nowhere = np.full(n_blocks, math.inf)
        self._nothing = Best(np.append(nowhere, identity), np.zeros(n_blocks + 1), slice(n_blocks, n_blocks + 1))
        self._known: dict[State, Best] = {}

    def optimum(self, used: Used) -> float:
        """Least cost of the whole line on exactly these devices, inf where no partition is allowed."""
        return float(self.best(self.whole(used)).costs[0])

    def path(self, used: Used) -> list[Step]:
        """The stages that attain `optimum(used)`, which must not be inf; the earliest cuts among equals."""
        state, start, steps = self.whole(used), 0, []
        while any(state[0]):
            cost, stages, _ = self.best(state)
            found = []
            for kind, replicas, rest in self._moves(state):
                costs, counts = self._extended(state, kind, replicas, rest, slice(start, start + 1))
                tight = np.flatnonzero((costs[0] == cost[start]) & (counts == stages[start]))
                if tight.size:
                    found.append((self.best(rest).starts.start + int(tight[0]), kind, replicas, rest))
            stop, kind, replicas, rest = min(found)
            steps.append(Step(start, stop, kind, replicas, sum(state[0])))
            state, start = rest, stop
        return steps

    def best(self, state: State) -> Best:
        """Costs of all suffixes in `state`."""
        if not any(state[0]):
            return self._nothing
        if state not in self._known:
            starts = self._starts(state)
            best, fewest = np.full_like(self._nothing.costs, math.inf), np.zeros_like(self._nothing.stages)
            for kind, replicas, rest in self._moves(state):
                costs, counts = self._extended(state, kind, replicas, rest, starts)
                if not costs.size:
                    continue
                cost = costs.min(axis=1)
                count = np.where(costs == cost[:, None], counts, math.inf).min(axis=1)
                better = (cost < best[starts]) | ((cost == best[starts]) & (count < fewest[starts]))
                best[starts] = np.where(better, cost, best[starts])
                fewest[starts] = np.where(better, count, fewest[starts])
            self._known[state] = Best(best, fewest, starts)
        return self._known[state]

    def whole(self, used: Used) -> State:
        """The state with as many stages as `used` allows."""
        devices = sum(used)
        return used, devices if self._max_stages is None else min(self._max_stages, devices)

    def _moves(self, state: State) -> Iterator[tuple[int, int, State]]:
        """The choices for the first stage: its kind, its replicas, and the state of the rest.

        Capping the stages left by the devices left keeps one state for each `used` where `max_stages` does not bind.
        """
        used, stages = state
        for kind, count in enumerate(used):
            for replicas in range(1, min(self._max_replicas, count) + 1):
                rest = (*used[:kind], count - replicas, *used[kind + 1 :])
                if stages > 1 or not any(rest):
                    yield kind, replicas, (rest, min(stages - 1, sum(rest)))

    def _extended(
        self, state: State, kind: int, replicas: int, rest: State, starts: slice
    ) -> tuple[np.ndarray, np.ndarray]:
        """Suffixes with such a first stage: costs [starts, starts of the rest], stage counts [starts of the rest]."""
        costs, stages, stops = self.best(rest)
        edges = self._edges(kind, replicas, sum(state[0]), (starts, stops))
        return self._combine(edges, costs[stops]), stages[stops] + 1
