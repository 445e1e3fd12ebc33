"""Stages of a partition as arrays: their terms for every pair of cuts, those that a sweep looks at, and those that no
better plan needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Mode(NamedTuple):
    """How a stage runs."""

    kind: int
    recompute: int  # a `Recompute`


@dataclass(frozen=True)
class Terms:
    """Costs of the stage between every pair of cuts, [n_pairs], in one mode."""

    time: np.ndarray  # s, of the first micro-batch
    each_more: np.ndarray  # s, of every other one: less where sends run behind computing
    fill: np.ndarray  # s that the stage adds to the time of the first micro-batch; inf where there is no such stage
    delayed: np.ndarray  # s of `time` that run at the end of the step instead
    once: np.ndarray  # bytes held all the time
    each: np.ndarray  # bytes held for each micro-batch in flight


class Stages(NamedTuple):
    """Stages that a plan may have: one per row, sorted by start, then pool, units, replicas and stop."""

    start: np.ndarray
    stop: np.ndarray
    kind: np.ndarray
    recompute: np.ndarray
    replicas: np.ndarray
    pool: np.ndarray
    units: np.ndarray  # of devices that all replicas take from the pool
    fill: np.ndarray  # s
    most_after: np.ndarray  # the most replicas that later stages may have; with more, the stage's memory is too small


class WantedStages(NamedTuple):
    """The plans that a sweep looks for."""

    most: float  # s: their max term is at most this
    goal: float = math.inf  # s: their objective is less than this
    least: float = 0.0  # s: their max term is at least this


@dataclass(frozen=True)
class Needless:
    """For every pair of cuts the best stage on few devices."""

    term: np.ndarray  # s
    replicas: np.ndarray
    after: np.ndarray

    @classmethod
    def none(cls, n_pairs: int) -> Needless:
        return cls(np.full(n_pairs, math.inf), np.zeros(n_pairs, dtype=np.int32), np.full(n_pairs, -1, dtype=np.int32))

    def uncovered(self, pairs: np.ndarray, term: np.ndarray, replicas: int, after: np.ndarray) -> np.ndarray:
        """[pairs] whether the stage may make a plan better than those on fewer devices; it is remembered where it takes
        less time, or lets more follow at the same."""
        old = self.term[pairs]
        covered = old <= term
        covered &= self.replicas[pairs] <= replicas
        covered &= self.after[pairs] >= after
        better = ~covered & ((term < old) | ((term == old) & (after > self.after[pairs])))
        new = pairs[better]
        self.term[new], self.after[new], self.replicas[new] = term[better], after[better], replicas
        return ~covered
