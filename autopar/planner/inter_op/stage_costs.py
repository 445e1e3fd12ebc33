"""What a stage costs: the terms of the objective and of the memory limit, for every pair of cuts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autopar.costs.sends import Lane
from autopar.plan.recompute import Recompute
from autopar.planner.inter_op.bounds import LeastTerms, least_terms
from autopar.planner.inter_op.cut_tables import Tables
from autopar.planner.inter_op.memory_formula import activation_bytes
from autopar.planner.inter_op.needed_devices import NeededDevices, Needs
from autopar.planner.inter_op.problem import Problem
from autopar.planner.inter_op.stage_tables import Mode, Needless, Stages, Terms, WantedStages
from autopar.schedule.builders import INTERLEAVED, in_flight_limit, interleaved_in_flight_limit

# Beyond this many devices, only numbers of replicas that change ceil(m / r) are candidates: 2 sqrt(m) of them.
_ALL_REPLICAS = 8
_NOT_REFUSED = np.iinfo(np.int64).max  # micro-batches
_ROUNDING = 1e-12  # share of an objective that may be due to rounding


class _Choice(NamedTuple):
    """Stages with one number of replicas, by pair of cuts."""

    max_term: np.ndarray  # s; inf where the stage never fits, or there is no such stage
    most_after: np.ndarray  # as in `Stages`; -1 where `max_term` is inf
    least: float  # s, the smallest max term; inf if no stage fits


class Costs:
    """Costs of a problem's stages on at most `counts` devices of each pool, in the notation of `partition`."""

    def __init__(self, problem: Problem, counts: tuple[int, ...], extra_memory: float = 0.0) -> None:
        """`extra_memory`: bytes added to every device, to find out how much is lacking."""
        self.problem = problem
        self.counts = counts
        self._extra = extra_memory
        widths = problem.widths(counts)
        self.widths = tuple((min(own, default=1), max(own, default=1)) for own in widths)  # of each pool
        # Devices of a pool are counted in units that all its widths are multiples of.
        self.unit = tuple(math.gcd(*own) if own else 1 for own in widths)
        self.units = tuple(c // u if own else 0 for c, u, own in zip(counts, self.unit, widths, strict=True))
        self.most_groups = problem.most_groups(counts)
        self._known_limits: dict[int, tuple[int, ...]] = {}
        self.modes = [
            Mode(kind, recompute)
            for kind, pool in enumerate(problem.pools)
            if counts[pool] >= problem.kinds[kind].width
            for recompute in self._recompute()
        ]
        self._pairs = problem.space.tables.pairs
        nothing = np.full(len(self._pairs.start), _NOT_REFUSED)
        self._refused_from = {mode: self._in_flight_refused(mode, nothing) for mode in self.modes}
        self._seconds = {kind: problem.seconds_of(kind) for kind in dict.fromkeys(mode.kind for mode in self.modes)}
        self._known_terms: dict[tuple[Mode, Lane, bool, bool], Terms] = {}
        self.terms: dict[Mode, Terms] = {}
        for mode in self.modes:
            terms = self._helpful(mode)
            if terms is not None:
                self.terms[mode] = terms
        self.modes = list(self.terms)
        self._choices = {mode: dict(self._replicated(mode)) for mode in self.modes}

    def _recompute(self) -> list[Recompute]:
        """What stages may run again."""
        problem, modes = self.problem, [Recompute.NONE]
        if problem.may_recompute and problem.cores is not None:
            modes.append(Recompute.SELECTIVE)
        if problem.may_recompute and problem.blocks is not None:
            modes.append(Recompute.FULL)
        return [*modes, Recompute.STAGE] if problem.may_recompute or problem.space.recomputed else modes

    def _helpful(self, mode: Mode) -> Terms | None:
        """The terms of a mode for stages that it may help, because hints demand it or all that are faster may not fit;
        None where there are none.

        A mode does not help a stage for which a faster one fits with as many micro-batches as any schedule holds, or
        for which a faster one needs no more bytes with any number of them.
        """
        most = max(self._limits(replicas)[-1] for replicas in self.replicas(mode.kind))
        memory, faster = self.memory(mode.kind), [m for m in self.terms if m.kind == mode.kind]
        # Layers need not take longer than attention, and a stage that runs again as one has a backward in two parts.
        in_parts = mode.recompute == Recompute.STAGE and self.problem.weight is not None
        if self.problem.captured is not None:  # which may be faster than compiled ones, whatever they run again
            alone = self.problem.captured.modes
            faster = [m for m in faster if (m.recompute in alone) == (mode.recompute in alone)]
        apart = {Recompute.FULL: Recompute.SELECTIVE, Recompute.STAGE: Recompute.FULL if in_parts else None}
        faster = [m for m in faster if m.recompute != apart.get(Recompute(mode.recompute))]
        roomy = np.zeros(len(self._pairs.start), dtype=bool)  # whether a faster mode always fits
        for other in faster:
            known = self.terms[other]
            roomy |= self._possible(other, most) & (known.once + most * known.each <= memory)
        if mode.recompute and roomy.all():
            return None
        terms, needless = self.terms_of(mode, 1), roomy if mode.recompute else np.zeros_like(roomy)
        for other in faster:
            known = self.terms[other]
            no_more = (known.once + k * known.each <= terms.once + k * terms.each for k in (1, most))
            needless = needless | (self._possible(other, most) & np.logical_and(*no_more))
        fill = np.where(needless, math.inf, terms.fill)
        return replace(terms, fill=fill) if np.isfinite(fill).any() or not mode.recompute else None

    def _possible(self, mode: Mode, in_flight: int) -> np.ndarray:
        """Whether there is such a stage, and none with so many micro-batches in flight is refused, [n_pairs]."""
        return np.isfinite(self.terms[mode].fill) & (self._refused_from[mode] > in_flight)

    def _in_flight_refused(self, mode: Mode, nothing: np.ndarray) -> np.ndarray:
        """The fewest micro-batches in flight with which a stage is refused, [n_pairs]; `nothing` if none is."""
        kind, cuts = (self.problem.pools[mode.kind], self.problem.kinds[mode.kind].name), self.problem.space.cuts
        mine = [one for one in self.problem.refused if one.kind == kind and one.recompute == mode.recompute]
        if not mine:
            return nothing
        fewest, number = nothing.copy(), {cut.tobytes(): place for place, cut in enumerate(cuts)}
        for one in mine:
            start, stop = number.get(one.start.tobytes()), number.get(one.stop.tobytes())
            if start is not None and stop is not None:
                pair = self.pair(start, stop)
                fewest[pair] = min(fewest[pair], one.in_flight)
        return fewest

    @property
    def one_width(self) -> bool:
        """Whether all meshes of a pool have the same width, so that devices tell how many there are."""
        return all(least == most for least, most in self.widths)

    @property
    def n_cuts(self) -> int:
        return len(self.problem.space.cuts)

    def pair(self, start: int, stop: int) -> int:
        """The number of a pair of cuts; negative cuts count from the end."""
        return int(self._pairs.number[start, stop])

    def replicas(self, kind: int) -> list[int]:
        """Candidate numbers of replicas."""
        m = self.problem.n_microbatches
        meshes = self.counts[self.problem.pools[kind]] // self.problem.kinds[kind].width
        most = min(self.problem.max_replicas, m, meshes)
        every = range(1, most + 1)
        if most <= _ALL_REPLICAS:
            return list(every)
        return [r for r in every if r == 1 or math.ceil(m / r) < math.ceil(m / (r - 1))]

    def max_term(self, mode: Mode, replicas: int) -> np.ndarray:
        """p_s in seconds, [n_pairs]."""
        problem, terms, seconds = self.problem, self.terms_of(mode, replicas), self._seconds[mode.kind]
        passes = self._rounds(replicas) * terms.each_more + terms.delayed
        split, single = problem.weight is not None, self._single(replicas)
        if problem.accumulation is not None and (split or not single):
            passes = np.maximum(passes - problem.chunks * seconds.lacking(mode.recompute), 0.0)
        after = seconds.reduced(replicas * problem.kinds[mode.kind].copies) + seconds.once
        ends_with_others = split and self._delayed_parts(single) > 1
        if not problem.sum_counts or problem.chunks > 1 or ends_with_others:
            return passes + after
        meanwhile = seconds.meanwhile + self._overhead_before
        if single:  # what it delays runs behind earlier stages, too
            return np.maximum(passes + after - meanwhile, 0.0)
        return passes + np.maximum(after - meanwhile, 0.0)

    @cached_property
    def _overhead_before(self) -> np.ndarray:
        """Seconds of an action of the stage before, [n_pairs]; the first stage has none."""
        return np.where(self._pairs.start > 0, self.problem.overhead, 0.0)

    def _rounds(self, replicas: int) -> int:
        """Micro-batches of a replica after its first; of a device, pairs of a stage and a micro-batch."""
        return math.ceil(self.problem.n_microbatches * self.problem.chunks / replicas) - 1

    def _single(self, replicas: int) -> bool:
        """Whether a replica has one micro-batch.

        Its backward adds its gradients to none, and has one weight part to delay. A later micro-batch lacks nothing. It
        is the last one of stages before the slowest one, so that of all stages with several micro-batches only the
        slowest one counts as lacking the accumulation, in its max term; with one, all do, in their fills.
        """
        return not self._rounds(replicas)

    def _delayed_parts(self, single: bool) -> int:
        """Weight parts of a split backward that run in the bubble."""
        return 1 if single else self.problem.most_delayed_parts

    def max_term_of(self, mode: Mode, replicas: int, start: int, stop: int) -> float:
        """p_s in seconds of a stage that fits the memory."""
        return float(self._choices[mode][replicas].max_term[self.pair(start, stop)])

    def stages(self, wanted: WantedStages, exactly: bool = False, needs: Needs | None = None) -> Stages:
        """All stages that a wanted plan may have, less those that others on no more devices make needless.

        A stage makes another of the same atoms needless if it takes no longer and no more devices and replicas, and
        lets as many replicas follow. So more replicas are kept only where they let more others follow. Where the sum
        of fills does not count, max terms take their place, which more replicas make smaller. `exactly`: plans must use
        all devices, so only stages on as many devices are compared. `needs`: of the wanted plans.
        """
        found: list[tuple[np.ndarray, ...]] = []
        known: dict[tuple[int, int], Needless] = {}
        start, stop = self._pairs.start, self._pairs.stop
        most = wanted.goal * (1 + _ROUNDING) - self._around
        left = None if needs is None else self.units[0] - needs.before[start] - needs.after[stop]
        for pool, units, replicas, mode in self._by_units:
            choice = self._choices[mode][replicas]
            if choice.least > wanted.most:
                continue
            able = choice.max_term <= wanted.most
            if left is not None:
                able &= left >= units
            allowed = np.flatnonzero(able)
            term = choice.max_term[allowed]
            if self.problem.sum_counts:
                fill = self.terms_of(mode, replicas).fill[allowed]
                near = np.maximum(term, wanted.least) + fill <= most[allowed]
                allowed, term = allowed[near], fill[near]
            needless = known.setdefault((pool, units if exactly else 0), Needless.none(start.size))
            mine = needless.uncovered(allowed, term, replicas, choice.most_after[allowed])
            if mine.any():
                kept = allowed[mine]
                numbers = (mode.kind, mode.recompute, replicas, pool, units)
                of_mode = (np.full(kept.size, number) for number in numbers)
                found.append((start[kept], stop[kept], *of_mode, term[mine], choice.most_after[kept]))
        if not found:
            no = np.zeros(0, dtype=int)
            return Stages(no, no, no, no, no, no, no, no.astype(float), no)
        stages = Stages(*(np.concatenate(columns) for columns in zip(*found, strict=True)))
        # Within a start they are in order already. A stable sort of small integers takes linear time.
        order = np.argsort(stages.start.astype(np.min_scalar_type(self.n_cuts)), kind="stable")
        return Stages(*(column[order] for column in stages))

    def fits(self, mode: Mode, replicas: int, after: int, start: int, stop: int) -> bool:
        """Whether a stage fits its devices with `after` replicas of later stages."""
        if self.in_flight(replicas, after) >= self._refused_from[mode][self.pair(start, stop)]:
            return False
        return self.needed(mode, replicas, after, start, stop) <= self.memory(mode.kind)

    def in_flight(self, replicas: int, after: int) -> int:
        """Micro-batches that a replica of a stage holds at most, with `after` replicas of later stages."""
        return in_flight(self.problem, self.most_groups, replicas, after)

    def needed(self, mode: Mode, replicas: int, after: int, start: int, stop: int) -> float:
        """Bytes on each device of a stage."""
        return max(self.passing(mode, replicas, after, start, stop), self.stepping(mode.kind, start, stop))

    def passing(self, mode: Mode, replicas: int, after: int, start: int, stop: int) -> float:
        """Bytes on each device of a stage while its passes run."""
        terms, pair = self.terms[mode], self.pair(start, stop)
        return float(terms.once[pair] + self.in_flight(replicas, after) * terms.each[pair])

    def stepping(self, kind: int, start: int, stop: int) -> float:
        """Bytes on each device of a stage while the optimizer steps."""
        return float(self._stepping(kind)[self.pair(start, stop)])

    def _stepping(self, kind: int) -> np.ndarray:
        """Bytes on each device while the optimizer steps, [n_pairs]."""
        tables = self.problem.tables(kind)
        return tables.resident if tables.stepped is None else np.asarray(tables.resident + tables.stepped.held)

    def memory(self, kind: int) -> float:
        """Bytes that one stage may use on a device of `kind`."""
        return self.problem.kinds[kind].memory / self.problem.chunks + self._extra

    def terms_of(self, mode: Mode, replicas: int) -> Terms:
        """The terms of stages with `replicas`, which share the network cards of their nodes."""
        lane = self.problem.kinds[mode.kind].lane(replicas)
        key = (mode, lane, self._single(replicas), replicas == 1)
        if key not in self._known_terms:
            self._known_terms[key] = self._terms(*key)
        return self._known_terms[key]

    def _terms(self, mode: Mode, lane: Lane, single: bool, alone: bool) -> Terms:
        """`single`: see `_single`. `alone`: without replicas."""
        problem, tables = self.problem, self.problem.tables(mode.kind)
        kind, share = problem.kinds[mode.kind], problem.bytes_share
        forward, backward, weight = self._seconds[mode.kind].passes(mode.recompute)
        overhead = np.full_like(forward, problem.overhead_of(mode.recompute, alone=False))
        if alone:
            overhead[self.pair(0, -1)] = problem.overhead_of(mode.recompute, alone=True)
        back = backward + (problem.n_actions - 1) * overhead + (forward if mode.recompute == Recompute.STAGE else 0.0)
        there = forward + overhead + kind.send_seconds_per_byte * share * tables.sent
        arriving = tables.arriving(lane.across)
        if problem.handling:  # of a message from the stage before, one to the stage after, and gradients the other way
            messages = problem.handling * (1.0 * (arriving[0] > 0) + (tables.sent > 0))
            there, back = there + messages, back + (messages if problem.n_actions > 1 else 0.0)
        rate = lane.seconds_per_byte * share
        in_there, in_back = (np.where(n > 0, lane.latency, 0.0) + rate * n for n in arriving)
        time = there + back + in_there + in_back
        each_more = time
        if problem.sends_behind and problem.schedule == "gpipe":
            each_more = np.maximum(there, in_there) + np.maximum(back, in_back)
        elif problem.sends_behind:  # forwards and backwards take turns, and links carry both at once
            each_more = np.maximum(there + back, np.maximum(in_there, in_back))
        delayed = np.zeros_like(time)
        if problem.weight is not None:
            delayed = np.minimum(self._delayed_parts(single) * (weight + overhead), back)
        fill = (time - delayed) / problem.chunks if problem.sum_counts else np.zeros_like(time)
        if single and problem.weight is None and problem.accumulation is not None and problem.sum_counts:
            fill = fill - self._seconds[mode.kind].lacking(mode.recompute)
        in_flight, working = activation_bytes(tables.activations, mode.recompute)
        once = tables.resident + share * working
        possible = np.where(_allowed(tables, mode.recompute), fill, math.inf)
        return Terms(time, each_more, possible, delayed, once, share * in_flight)

    def _at_once(self, mode: Mode) -> np.ndarray:
        """Micro-batches that the memory has room for, [n_pairs]; -1 where the optimizer has none to step."""
        terms, memory = self.terms[mode], self.memory(mode.kind)
        most = self.problem.n_microbatches  # no schedule holds more
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.floor((memory - terms.once) / terms.each)
        room = np.where(terms.each > 0, room, np.where(terms.once <= memory, most, -1))
        room = np.clip(np.nan_to_num(room, nan=-1.0, posinf=most, neginf=-1), -1, most).astype(int)
        # Division rounds; the limit is a product.
        room = np.where((room < most) & (terms.once + (room + 1) * terms.each <= memory), room + 1, room)
        room = np.where((room >= 0) & (terms.once + room * terms.each > memory), room - 1, room)
        room = np.minimum(room, self._refused_from[mode] - 1)
        return np.where(self._stepping(mode.kind) > memory, -1, room)

    def _replicated(self, mode: Mode) -> Iterator[tuple[int, _Choice]]:
        """For every number of replicas the max terms, and how many replicas later stages may have so that a stage's
        micro-batches in flight fit."""
        room = 1 + np.where(np.isfinite(self.terms[mode].fill), self._at_once(mode), -1)
        numbers = np.arange(-1, self.problem.n_microbatches + 1)  # that there may be room for
        never = np.full(room.shape, math.inf)
        for replicas in self.replicas(mode.kind):
            by_number = np.searchsorted(self._limits(replicas), numbers, side="right") - 1
            most_after = by_number.astype(np.int32)[room]
            fits = most_after >= 0
            max_term = np.where(fits, self.max_term(mode, replicas), math.inf) if fits.any() else never
            yield replicas, _Choice(max_term, most_after, float(max_term.min(initial=math.inf)))

    @cached_property
    def least(self) -> LeastTerms:
        """What no plan is below."""
        return least_terms(self.problem, self.counts)

    @cached_property
    def _around(self) -> np.ndarray:
        """Seconds that the stages before and after each stage add to the time of the first micro-batch at least,
        [n_pairs]."""
        return np.asarray(self.least.before[self._pairs.start] + self.least.after[self._pairs.stop])

    @cached_property
    def needed_devices(self) -> NeededDevices | None:
        """What plans need, whose stages these are; None where it is not known (`NeededDevices`)."""
        choices = ((units, self._choices[mode][n].max_term) for _, units, n, mode in self._by_units)
        return NeededDevices.of(self._pairs, self.units, choices)

    @cached_property
    def _by_units(self) -> list[tuple[int, int, int, Mode]]:
        """(pool, units of devices, replicas, mode), of each pool the fewest devices first."""
        found = []
        for mode, choices in self._choices.items():
            pool = self.problem.pools[mode.kind]
            width = self.problem.kinds[mode.kind].width // self.unit[pool]
            found += [(pool, replicas * width, replicas, mode) for replicas in choices]
        return sorted(found)

    def _limits(self, replicas: int) -> tuple[int, ...]:
        """Micro-batches in flight for 0, 1, 2, ... replicas of later stages; never falls."""
        if replicas not in self._known_limits:
            most = self.most_groups - replicas
            self._known_limits[replicas] = tuple(self.in_flight(replicas, after) for after in range(most + 1))
        return self._known_limits[replicas]


def in_flight(problem: Problem, most_groups: int, replicas: int, after: int) -> int:
    """Micro-batches that a replica of a stage holds at most, with `after` replicas of later stages.

    All replicas of a plan count as `most_groups` where a schedule's limit depends on their number.
    """
    m, schedule = problem.n_microbatches, problem.schedule
    if schedule in INTERLEAVED:
        whole = interleaved_in_flight_limit(schedule, m, most_groups // problem.chunks, problem.chunks, 0)
        return math.ceil(whole / problem.chunks)
    return in_flight_limit(schedule, m, replicas, replicas + after, most_groups)


def _allowed(tables: Tables, recompute: int) -> np.ndarray:
    """The stages that may run so, by hints and operators, and for which it saves anything."""
    if recompute == Recompute.STAGE:
        return tables.may_recompute
    if recompute == Recompute.FULL:
        return np.asarray(tables.layered & ~tables.must_as_one)
    return ~tables.must_recompute & ((tables.rebuilt > 0) | (recompute == Recompute.NONE))
