"""What a stage costs: the terms of the objective and of the memory limit, as edges of `autopar.search.suffixes`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autopar.schedule import in_flight_limit
from autopar.search.problem import Problem, Solution, StageChoice
from autopar.search.suffixes import Cells, Edges, Step, Used
from autopar.search.tables import interval_tables

_ALL: Cells = (slice(None), slice(None))


class Costs:
    """Costs of a problem's stages, in the notation of `autopar.search.partition`.

    Stages are intervals of blocks: of the atoms between neighbouring allowed cuts.

    The methods with the arguments (kind, replicas, devices of the stage and all later ones, cells) are edges.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._tables = tables = interval_tables(problem)
        self.n_blocks = len(tables.cuts) - 1
        self._once = tables.resident + tables.transient
        self._is_interval = np.triu(np.ones(self._once.shape, dtype=bool), k=1)
        self._max_terms: dict[tuple[int, int, int], np.ndarray] = {}

    def needed(self, kind: int, replicas: int, devices: int, cells: Cells) -> np.ndarray:
        """Bytes on each device of a stage; the same for every kind."""
        return self._once[cells] + self._in_flight(replicas, devices) * self._tables.activation[cells]

    def lacking(self, kind: int, replicas: int, devices: int, cells: Cells) -> np.ndarray:
        """Bytes needed beyond the device's memory, below 0 where there is room; inf where the cell is no interval."""
        lacking = self.needed(kind, replicas, devices, cells) - self.problem.kinds[kind].memory
        return np.where(self._is_interval[cells], lacking, math.inf)

    def max_terms(self, kind: int, replicas: int, devices: int, cells: Cells) -> np.ndarray:
        """p_s in seconds, inf where the memory does not suffice."""
        key = kind, replicas, self._in_flight(replicas, devices)  # all that the whole table depends on
        if key not in self._max_terms:
            rounds = math.ceil(self.problem.n_microbatches / replicas) - 1
            seconds_per_byte = (replicas - 1) * self.problem.kinds[kind].reduce_seconds_per_byte
            terms = rounds * self._tables.time[kind] + seconds_per_byte * self._tables.gradient
            self._max_terms[key] = np.where(self.lacking(kind, replicas, devices, _ALL) <= 0, terms, math.inf)
        return self._max_terms[key][cells]

    def times_within(self, bound: float) -> Edges:
        """t_s in seconds where p_s <= bound < inf, else inf."""

        def edges(kind: int, replicas: int, devices: int, cells: Cells) -> np.ndarray:
            allowed = self.max_terms(kind, replicas, devices, cells) <= bound
            return np.where(allowed, self._tables.time[kind][cells], math.inf)

        return edges

    def least_sum(self, used: Used) -> float:
        """Seconds that no plan's sum of stage times is below: every atom on its fastest kind, transfers free."""
        seconds = (self.problem.forward + self.problem.backward)[[count > 0 for count in used]]
        return float(seconds.min(axis=0).sum())

    def max_term(self, path: Sequence[Step]) -> float:
        return max(step.of(self.max_terms) for step in path)

    def stages(self, path: Sequence[Step]) -> tuple[StageChoice, ...]:
        cuts, time = self._tables.cuts, self._tables.time
        return tuple(
            StageChoice(
                start=int(cuts[step.start]),
                stop=int(cuts[step.stop]),
                kind=step.kind,
                replicas=step.replicas,
                time=float(time[step.kind, step.start, step.stop]),
            )
            for step in path
        )

    def solution(self, path: Sequence[Step], used: Used) -> Solution:
        stages = self.stages(path)
        return Solution(stages, sum(stage.time for stage in stages) + self.max_term(path), used)

    def _in_flight(self, replicas: int, devices: int) -> int:
        return in_flight_limit(self.problem.schedule, self.problem.n_microbatches, replicas, devices)
