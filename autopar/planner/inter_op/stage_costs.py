"""What a stage costs: the terms of the objective and of the memory limit, for every pair of cuts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar.planner.inter_op.atom_times import PassSeconds, passes
from autopar.planner.inter_op.memory_formula import activation_bytes
from autopar.planner.inter_op.problem import Gradients, Problem
from autopar.schedule.builders import in_flight_limit, interleaved_in_flight_limit

# Beyond this many devices, only numbers of replicas that change ceil(m / r) are candidates: 2 sqrt(m) of them.
_ALL_REPLICAS = 64


class Mode(NamedTuple):
    """How a stage runs."""

    kind: int
    recompute: bool


@dataclass(frozen=True)
class Terms:
    """Costs of the stage between every two cuts, [n_cuts, n_cuts], in one mode."""

    time: np.ndarray  # s, of a micro-batch
    fill: np.ndarray  # s that the stage adds to the time of the first micro-batch; inf where there is no such stage
    delayed: np.ndarray  # s of `time` that run at the end of the step instead
    once: np.ndarray  # bytes held all the time
    each: np.ndarray  # bytes held for each micro-batch in flight


class Stages(NamedTuple):
    """Stages that a plan may have: one per row, sorted by start, then kind, replicas and stop."""

    start: np.ndarray
    stop: np.ndarray
    kind: np.ndarray
    recompute: np.ndarray
    replicas: np.ndarray
    fill: np.ndarray  # s
    most_after: np.ndarray  # the most devices that later stages may have; with more, the stage's memory is too small


class Costs:
    """Costs of a problem's stages on at most `counts` devices of each pool, in the notation of `partition`."""

    def __init__(self, problem: Problem, counts: tuple[int, ...], extra_memory: float = 0.0) -> None:
        """`extra_memory`: bytes added to every device, to find out how much is lacking."""
        self.problem = problem
        self.counts = counts
        self.n_devices = sum(counts)
        self._extra = extra_memory
        self._known_limits: dict[int, tuple[int, ...]] = {}
        self._known_gradients: dict[int, Gradients] = {}
        self._known_once: dict[int, np.ndarray] = {}
        self._known_passes: dict[int, PassSeconds[np.ndarray]] = {}
        self.modes = [
            Mode(kind, recompute)
            for kind, pool in enumerate(problem.pools)
            if counts[pool]
            for recompute in (False, True)
            if not recompute or problem.may_recompute or problem.space.recomputed
        ]
        self.terms = {mode: self._terms(mode) for mode in self.modes}
        self._choices = {mode: list(self._replicated(mode)) for mode in self.modes}

    @property
    def n_cuts(self) -> int:
        return len(self.problem.space.cuts)

    def replicas(self, kind: int) -> list[int]:
        """Candidate numbers of replicas."""
        m = self.problem.n_microbatches
        most = min(self.problem.max_replicas, m, self.counts[self.problem.pools[kind]])
        every = range(1, most + 1)
        if most <= _ALL_REPLICAS:
            return list(every)
        return [r for r in every if r == 1 or math.ceil(m / r) < math.ceil(m / (r - 1))]

    def max_term(self, mode: Mode, replicas: int) -> np.ndarray:
        """p_s in seconds."""
        terms, kind = self.terms[mode], self.problem.kinds[mode.kind]
        rounds = math.ceil(self.problem.n_microbatches * self.problem.chunks / replicas) - 1
        reduction = kind.reduction(replicas, self._gradients(mode.kind))
        return rounds * terms.time + reduction + self._once(mode.kind) + terms.delayed

    def stages(self, bound: float) -> Stages:
        """All stages whose max term is at most `bound` (s), less those that others with fewer replicas make needless.

        Fewer replicas leave more devices to others and let earlier stages hold fewer micro-batches; the time of a
        micro-batch is the same. So more replicas are kept only where they let more devices follow. Where the sum of
        fills does not count, max terms take their place, which more replicas make smaller.
        """
        sum_counts = self.problem.sum_counts
        found: list[tuple[np.ndarray, ...]] = []
        for mode in self.modes:
            terms = self.terms[mode]
            followed = np.full(terms.fill.shape, -1)
            for replicas, max_term, most_after in self._choices[mode]:
                after = np.where(max_term <= bound, most_after, -1)
                rows, columns = np.nonzero(after > (followed if sum_counts else -1))
                if rows.size:
                    same = np.full(rows.size, replicas)
                    kept = after[rows, columns]
                    term = terms.fill if sum_counts else max_term
                    mode_of = np.full(rows.size, mode.kind), np.full(rows.size, mode.recompute)
                    found.append((rows, columns, *mode_of, same, term[rows, columns], kept))
                    followed[rows, columns] = kept
        if not found:
            nothing = np.zeros(0, dtype=int)
            return Stages(nothing, nothing, nothing, nothing.astype(bool), nothing, nothing.astype(float), nothing)
        joined = [np.concatenate(columns) for columns in zip(*found, strict=True)]
        order = np.lexsort((joined[1], joined[3], joined[4], joined[2], joined[0]))
        return Stages(*(column[order] for column in joined))

    def in_flight(self, replicas: int, after: int) -> int:
        """Micro-batches that a device of a stage holds at most, with `after` devices in later stages."""
        p = self.problem
        if p.chunks > 1 and p.schedule != "gpipe":
            whole = interleaved_in_flight_limit(p.n_microbatches, self.n_devices // p.chunks, p.chunks, 0)
            return math.ceil(whole / p.chunks)
        return in_flight_limit(p.schedule, p.n_microbatches, replicas, replicas + after, self.n_devices)

    def needed(self, mode: Mode, replicas: int, after: int, start: int, stop: int) -> float:
        """Bytes on each device of a stage."""
        terms = self.terms[mode]
        return float(terms.once[start, stop] + self.in_flight(replicas, after) * terms.each[start, stop])

    def memory(self, kind: int) -> float:
        """Bytes that one stage may use on a device of `kind`."""
        return self.problem.kinds[kind].memory / self.problem.chunks + self._extra

    def lacks(self) -> np.ndarray:
        """Every number of bytes, ascending, that a stage of some plan could lack."""
        values = []
        for mode in self.modes:
            terms, memory = self.terms[mode], self.memory(mode.kind)
            valid = np.isfinite(terms.fill)
            for replicas in self.replicas(mode.kind):
                for held in dict.fromkeys(self._limits(replicas)):
                    values.append((terms.once + held * terms.each - memory)[valid])
        return np.unique(np.concatenate(values)) if values else np.zeros(0)

    def _terms(self, mode: Mode) -> Terms:
        problem, tables = self.problem, self.problem.tables(mode.kind)
        kind, share = problem.kinds[mode.kind], problem.bytes_share
        forward, backward, weight = self._passes(mode.kind)
        time = (2 if mode.recompute else 1) * forward + backward
        overhead = problem.overhead_of(mode.recompute)
        time = time + kind.latency * tables.messages + overhead * problem.n_actions
        time += kind.seconds_per_byte * share * (tables.received + tables.received_gradient)
        time += kind.send_seconds_per_byte * share * tables.sent
        delayed = np.zeros_like(time)
        if problem.weight is not None:
            delayed = np.minimum(2 * (weight + overhead), time)
        fill = (time - delayed) / problem.chunks if problem.sum_counts else np.zeros_like(time)
        allowed = tables.follows & (tables.may_recompute if mode.recompute else ~tables.must_recompute)
        in_flight, working = activation_bytes(tables.saved, tables.received, tables.transient, mode.recompute)
        once = tables.resident + share * working
        return Terms(time, np.where(allowed, fill, math.inf), delayed, once, share * in_flight)

    def _passes(self, kind: int) -> PassSeconds[np.ndarray]:
        """Seconds of a micro-batch, [n_cuts, n_cuts]; the weight part counts only where the backward is split."""
        if kind not in self._known_passes:
            problem, split = self.problem, self.problem.weight is not None
            weight = np.zeros(()) if problem.weight is None else self._between(problem.weight[kind])
            known = PassSeconds(self._between(problem.forward[kind]), self._between(problem.backward[kind]), weight)
            if problem.launches is not None:
                host = PassSeconds(*(self._between(each[kind]) for each in problem.launches.each))
                known = passes(known, host, problem.launches.start[kind], split=split)
            self._known_passes[kind] = known
        return self._known_passes[kind]

    def _gradients(self, kind: int) -> Gradients:
        if kind not in self._known_gradients:
            self._known_gradients[kind] = Gradients(self.problem.tables(kind).gradients)
        return self._known_gradients[kind]

    def _once(self, kind: int) -> np.ndarray:
        """Seconds once a step, whatever the replicas: collectives of the mesh, gradients of tied parameters, and the
        optimizer's step."""
        if kind not in self._known_once:
            tables, of_kind = self.problem.tables(kind), self.problem.kinds[kind]
            own = tables.once + of_kind.exchanged(Gradients(tables.tied_gradients)) + of_kind.stepped(tables)
            if self.problem.once is not None:
                own = own + self._between(self.problem.once[kind])
            self._known_once[kind] = own
        return self._known_once[kind]

    def _between(self, weights: np.ndarray) -> np.ndarray:
        """Sum of `weights` [n] over the atoms between every two cuts."""
        before = self.problem.space.cuts.astype(float) @ weights
        return np.maximum(before[None, :] - before[:, None], 0.0)

    def _at_once(self, mode: Mode) -> np.ndarray:
        """Micro-batches that the memory has room for, [n_cuts, n_cuts]."""
        terms, memory = self.terms[mode], self.memory(mode.kind)
        most = self.problem.n_microbatches  # no schedule holds more
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.floor((memory - terms.once) / terms.each)
        room = np.where(terms.each > 0, room, np.where(terms.once <= memory, most, -1))
        room = np.clip(np.nan_to_num(room, nan=-1.0, posinf=most, neginf=-1), -1, most).astype(int)
        # Division rounds; the limit is a product.
        room = np.where((room < most) & (terms.once + (room + 1) * terms.each <= memory), room + 1, room)
        return np.where((room >= 0) & (terms.once + room * terms.each > memory), room - 1, room)

    def _replicated(self, mode: Mode) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """For every number of replicas the max terms, and how many devices later stages may have so that a stage's
        micro-batches in flight fit; -1: none do, or there is no such stage."""
        at_once = np.where(np.isfinite(self.terms[mode].fill), self._at_once(mode), -1)
        for replicas in self.replicas(mode.kind):
            after = np.searchsorted(self._limits(replicas), at_once, side="right") - 1
            yield replicas, self.max_term(mode, replicas), after.astype(np.int32)

    def _limits(self, replicas: int) -> tuple[int, ...]:
        """Micro-batches in flight for 0, 1, 2, ... devices in later stages; never falls."""
        if replicas not in self._known_limits:
            most = self.n_devices - replicas
            self._known_limits[replicas] = tuple(self.in_flight(replicas, after) for after in range(most + 1))
        return self._known_limits[replicas]
