"""The partitions worth simulating: one search per schedule, number of micro-batches and vector of device counts.

1. search     every configuration, cut short where it cannot be near the best        `_search`
2. between    numbers of micro-batches between those tried, near the best            `_between`
3. refine     the best plans again, over cuts near theirs                            `_refine`
4. simulate   the most promising ones                                                `_simulate`
5. prove      search again wherever a better plan could have been left out           `prove`
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autopar.costs.cost_graph import CostGraph
from autopar.costs.device_group import DeviceGroup
from autopar.costs.python_overhead import ACTION_OVERHEAD
from autopar.plan.validation import places
from autopar.planner.arrangement import Arrangement
from autopar.planner.inter_op.atom_times import AtomTimes, PassSeconds, atom_times
from autopar.planner.inter_op.atoms import make_atoms
from autopar.planner.inter_op.bounds import relaxed_bound
from autopar.planner.inter_op.cut_selection import (
    PartitionResult,
    along_orders,
    cuts_along_orders,
    cuts_worth_looking_at,
    most_cuts,
    over_all_cuts,
    refine,
)
from autopar.planner.inter_op.cuts import AtomGraph
from autopar.planner.inter_op.device_assignment import assign_groups
from autopar.planner.inter_op.device_pools import kind_of_pool, pools_of
from autopar.planner.inter_op.memory_formula import resident_bytes
from autopar.planner.inter_op.optimizer_seconds import stepped
from autopar.planner.inter_op.partition import solve
from autopar.planner.inter_op.problem import DeviceKind, Launches, Problem, Solution, Space
from autopar.planner.inter_op.search_budget import COARSE, EXACT, EXACT_STATES, ONE_OF_SEVERAL
from autopar.planner.inter_op.stage_bytes import Shared
from autopar.planner.predict import predicted_step
from autopar.planner.predicted_step import PredictedStep
from autopar.planner.search_options import SearchOptions
from autopar.schedule.builders import SCHEDULES
from autopar.schedule.micro_batches import largest_size
from autopar.schedule.timeline import Timeline

# A partition is a candidate if its objective is at most this share above the best one of its schedule.
_PROMISING = 0.04
_FEWEST_SIMULATED = 1
_ACTIONS_SIMULATED = 300_000  # in total; more would take longer than the search itself
_MOST_PREFIXES = 2000  # cuts of a search along one order
_ORDER_TOLERANCE = 5e-4  # share of the objective that it leaves unproven
_FEW_DEVICES = 8  # up to this many devices, every vector of device counts is searched
_FIRST_TOLERANCE = 5e-3  # share of the objective that the first look leaves unproven

Used = tuple[int, ...]


@dataclass(frozen=True)
class Config:
    """What one search fixes."""

    schedule: str
    n_microbatches: int
    counts: Used  # most devices of each kind
    chunks: int = 1


@dataclass(frozen=True)
class Candidate:
    """A partition and its predicted step."""

    config: Config
    found: PartitionResult
    arrangement: Arrangement
    step: PredictedStep
    timeline: Timeline

    @property
    def solution(self) -> Solution:
        return self.found.solution


class Searching:
    """All searches for one cost graph under given options."""

    def __init__(self, costs: CostGraph, options: SearchOptions) -> None:
        self.costs = costs
        self.options = options
        self.atoms = make_atoms(costs, options.constraints)
        self.pools = pools_of(costs.groups)
        self.kinds = tuple(
            kind_of_pool(costs, pool, min(map(self._memory, pool)), options.optimizer) for pool in self.pools
        )
        self.full: Used = tuple(len(pool) for pool in self.pools)
        self.effort = EXACT if math.prod(c + 1 for c in self.full) <= EXACT_STATES else COARSE
        if options.one_of_several:
            self.effort = ONE_OF_SEVERAL
        table = costs.tables[0]
        self.graph: AtomGraph = self.atoms.graph(
            np.maximum(self.atoms.sums(table.nodes, table.forward[-1] + table.backward[-1]), 0.0)
        )
        self._most_cuts = most_cuts(self.full, self.effort.cuts)
        cuts, self.complete = cuts_worth_looking_at(self.graph, self._most_cuts)
        self.n_cuts = len(cuts)
        self._space = self._space_of(cuts)
        self.counts = self._microbatch_counts()
        self.schedules = self._schedules()
        self.most_replicas = options.max_replicas or len(costs.groups)
        self._known_times: dict[tuple[str, int, float], AtomTimes] = {}
        self._configured: dict[str, Space] = {}  # the space with the bytes of a stage configuration, by its name
        self._bounds: dict[Config, float] = {}  # s: no partition that was looked at has a smaller objective
        self._along: set[Config] = set()  # searched along whole orders
        self._anywhere: dict[Config, float] = {}  # s: no partition has, whatever its cuts

    # -- searching --------------------------------------------------------------------------------------------------

    def run(self) -> list[Candidate]:
        """The promising partitions, simulated; none if nothing fits."""
        found: dict[Config, PartitionResult] = {}
        for counts in self._device_counts():
            for m in self._by_promise(self.counts):
                self._search(m, counts, found)
        if len(self.counts) < self.most_counts() and not self.costs.meshes:
            self._between(found)
        if not self.complete:
            self._refine(found)
        return self._simulate(found)

    def most_counts(self) -> int:
        """The largest number of micro-batches that the batch allows."""
        return max(1, self.costs.batch_size // self.options.least_rows)

    def _search(self, m: int, counts: Used, found: dict[Config, PartitionResult]) -> None:
        """The best partition for `m` micro-batches on `counts` devices under every schedule, if it is promising."""
        for config in self._configs(m, counts):
            if config in self._bounds:
                continue
            # Objectives of different schedules neglect different effects, so they cannot be compared.
            rivals = [f.solution.objective for c, f in found.items() if c.schedule == config.schedule]
            cutoff = min([self.options.rival, *rivals]) * (1 + _PROMISING) if sum(counts) > 1 else math.inf
            problem = self.problem(m, config.schedule, config.counts, chunks=config.chunks)
            solution = self._solve(config, problem, cutoff, max(self.effort.tolerance, _FIRST_TOLERANCE))
            if solution is not None:
                found[config] = PartitionResult(problem, solution, self.complete)

    def _solve(self, config: Config, problem: Problem, cutoff: float, tolerance: float) -> Solution | None:
        counts = tuple(c * config.chunks for c in config.counts)
        solution = solve(problem, counts, cutoff=cutoff, tolerance=tolerance, exactly=config.chunks > 1)
        self._bounds[config] = cutoff * (1 - tolerance) if solution is None else solution.bound
        return solution

    def prove(self, chosen: Candidate) -> list[Candidate]:
        """Search again, to the end, wherever a plan under the same schedule could still have a smaller objective.

        Returns the better plans.
        """
        schedule = self._searched_as(chosen.config.schedule)
        better = self._better_along_orders(chosen, replace(chosen.config, schedule=schedule))
        best = min(c.solution.objective for c in [chosen, *better])
        for config in sorted(self._bounds, key=lambda c: self._bounds[c]) if self.effort.tolerance == 0 else ():
            if config.schedule != schedule or self._bounds[config] >= best:
                continue
            problem = self._problem_of(config)
            solution = self._solve(config, problem, math.nextafter(best, math.inf), self.effort.tolerance)
            if solution is not None and solution.objective < best:
                best = solution.objective
                better += self._candidates(config, PartitionResult(problem, solution, self.complete))
        return better

    def _better_along_orders(self, chosen: Candidate, config: Config) -> list[Candidate]:
        """A better partition than the chosen one along a whole order, if there is any."""
        if self.complete or self.effort.refined == 0 or config in self._along or sum(config.counts) == 1:
            return []
        found = self._along_orders(config, chosen.found)
        return [] if found is chosen.found else list(self._candidates(config, found))

    def _relaxed(self, config: Config) -> float:
        """A bound in seconds on every partition, whatever its cuts."""
        counts = tuple(c * config.chunks for c in config.counts)
        return max(self._anywhere.get(config, 0.0), relaxed_bound(self._problem_of(config), counts))

    def _configs(self, m: int, counts: Used) -> Iterator[Config]:
        total = sum(counts)
        for name in self.schedules[:1] if total == 1 else self.schedules:
            if name != "interleaved-1f1b" or total == 1:
                yield Config(name, m, counts)
            elif m > 1 and sum(c > 0 for c in counts) == 1 and not self._space.pinned and not self.costs.meshes:
                for chunks in self.effort.chunks:
                    if total * chunks < self.n_cuts:
                        yield Config(name, m, counts, chunks)

    def _between(self, found: dict[Config, PartitionResult]) -> None:
        """Search numbers of micro-batches between those tried: halve the gaps next to the best one."""
        tried = set(self.counts)
        device_counts = self._device_counts()[: self.effort.halved]
        for _ in range(self.effort.halvings if found else 0):
            best = min(found, key=lambda c: found[c].solution.objective).n_microbatches
            ordered = sorted(tried)
            at = ordered.index(best)
            gaps = itertools.pairwise(ordered[max(0, at - 1) : at + 2])
            new = {(a + b) // 2 for a, b in gaps} - tried
            if not new:
                break
            tried |= new
            for m in sorted(new):
                for counts in device_counts:
                    self._search(m, counts, found)
        self.counts = sorted(tried)

    def _simulate(self, found: dict[Config, PartitionResult]) -> list[Candidate]:
        """Candidates with their timelines: the best of all, and the best for every vector of device counts."""
        by_objective = sorted(found, key=lambda c: (found[c].solution.objective, SCHEDULES.index(c.schedule)))
        chosen: dict[Config, None] = {}
        left = _ACTIONS_SIMULATED
        for config in by_objective[: self.effort.simulated]:
            left -= 2 * config.n_microbatches * len(found[config].solution.stages)
            if left < 0 and len(chosen) >= _FEWEST_SIMULATED:
                break
            chosen[config] = None
        if left > 0:
            for counts in dict.fromkeys(c.counts for c in by_objective):
                chosen.update(dict.fromkeys([c for c in by_objective if c.counts == counts][:2]))
        chosen.update(dict.fromkeys(c for c in found if sum(c.counts) == 1 and c.n_microbatches == 1))
        seen: set[Arrangement] = set()
        candidates = []
        for config in chosen:
            for candidate in self._candidates(config, found[config]):
                if candidate.arrangement not in seen:
                    seen.add(candidate.arrangement)
                    candidates.append(candidate)
        return candidates

    def _refine(self, found: dict[Config, PartitionResult]) -> None:
        """Improve the best partitions of each schedule over more cuts."""
        for schedule in self.schedules:
            mine = sorted((c for c in found if c.schedule == schedule), key=lambda c: found[c].solution.objective)
            for config in mine[: self.effort.refined]:
                if sum(config.counts) > 1:
                    along = config is mine[0]
                    found[config] = self._refined(config, found[config], along)

    def _refined(self, config: Config, found: PartitionResult, along: bool) -> PartitionResult:
        """`found`, or a better partition: along whole orders, near its cuts, and over all cuts of the graph."""
        if along:
            found = self._along_orders(config, found)
        if config.chunks > 1:
            return found

        def problem_of(cuts: np.ndarray) -> Problem:
            return self._problem_of(config, self._space_of(cuts))

        counts, limit, tolerance = config.counts, self._most_cuts, self.effort.tolerance
        rounds = self.effort.rounds
        found = refine(self.graph, found, problem_of, counts=counts, limit=limit, rounds=rounds, tolerance=tolerance)
        best = over_all_cuts(self.graph, found, problem_of, counts=counts, limit=limit, tolerance=tolerance) or found
        self._anywhere[config] = best.bound
        return best

    def _along_orders(self, config: Config, found: PartitionResult) -> PartitionResult:
        """`found`, or a better partition along one of the usual orders."""
        self._along.add(config)
        problems = [self._problem_of(config, space) for space in self._order_spaces]
        counts = tuple(c * config.chunks for c in config.counts)
        tolerance, exactly = max(self.effort.tolerance, _ORDER_TOLERANCE), config.chunks > 1
        return along_orders(found, problems, counts=counts, tolerance=tolerance, exactly=exactly) or found

    @cached_property
    def _order_spaces(self) -> list[Space]:
        """One over the prefixes of each of the usual orders; none if a search over so many cuts takes too long."""
        if self.graph.n >= most_cuts(self.full, _MOST_PREFIXES):
            return []
        return [self._space_of(cuts) for cuts in cuts_along_orders(self.graph)]

    def _problem_of(self, config: Config, space: Space | None = None) -> Problem:
        return self.problem(config.n_microbatches, config.schedule, config.counts, config.chunks, space)

    def some_plan_uses_more(self, n_groups: int) -> bool:
        """Whether a plan on more than `n_groups` device groups fits the memory and the options, however slow it is."""
        vectors = self._device_counts() if sum(self.full) <= _FEW_DEVICES else [self.full]
        return any(
            solve(self.problem(m, self.schedules[0], counts), counts, cutoff=math.inf, tolerance=1.0, exactly=True)
            for counts in vectors
            if sum(counts) > n_groups
            for m in self.counts
        )

    def _candidates(self, config: Config, found: PartitionResult) -> Iterator[Candidate]:
        """The partition under its schedule, and under gpipe where the schedule is free and gpipe was not searched."""
        stages = tuple(tuple(np.flatnonzero(inside).tolist()) for inside in found.stages())
        groups = assign_groups(self.costs, self.pools, self.atoms, stages, found, config.chunks)
        names = tuple(found.problem.kinds[s.kind].name for s in found.solution.stages) if self.costs.meshes else ()
        schedules = [config.schedule]
        if self.options.schedule is None and self._searched_as("gpipe") == config.schedule != "gpipe":
            schedules.append("gpipe")
        for schedule in schedules:
            recompute = tuple(s.recompute for s in found.solution.stages)
            arrangement = Arrangement(stages, groups, config.n_microbatches, schedule, recompute, names)
            step = predicted_step(self.costs, self.atoms, arrangement, self.options.conditions)
            timeline = step.timeline()
            if self._fits(arrangement, timeline):
                yield Candidate(replace(config, schedule=schedule), found, arrangement, step, timeline)

    def _fits(self, arrangement: Arrangement, timeline: Timeline) -> bool:
        groups = [group for rank in arrangement.ranks for group in rank]
        peaks = timeline.peak_memory or (0,) * len(groups)
        return all(peak <= self._memory(group) * (1 + 1e-9) for group, peak in zip(groups, peaks, strict=True))

    # -- what is searched -------------------------------------------------------------------------------------------

    def problem(self, m: int, schedule: str, counts: Used, chunks: int = 1, space: Space | None = None) -> Problem:
        """The partition problem for `m` micro-batches, with the times of operators on that many busy devices."""
        costs, rows = self.costs, self.costs.batch_size / m
        busy = sum(counts) if m > 1 else 1
        space = space or self._space
        kinds = self._kinds(m, space)
        times = [self._times(kind.name, busy, rows) for kind in kinds]
        # If the caller computes the loss, all forwards come first: then every schedule holds what gpipe holds, and no
        # schedule can delay work into bubbles.
        phased = costs.training and not self.options.loss_inside
        split = schedule == "zb-h1" and not phased
        held = "1f1b" if schedule == "interleaved-1f1b" else schedule
        return Problem(
            space=space,
            forward=np.maximum([t.kernels.forward for t in times], 0.0),
            backward=np.maximum([t.kernels.backward for t in times], 0.0),
            weight=np.maximum([t.kernels.weight for t in times], 0.0) if split else None,
            launches=_launches(times),
            once=np.array([t.once for t in times]),
            n_microbatches=m,
            schedule="gpipe" if phased else held,
            kinds=tuple(replace(kind, count=max(1, kind.count * chunks)) for kind in kinds),
            max_replicas=1 if chunks > 1 else self.most_replicas,
            overhead=ACTION_OVERHEAD,
            plain=m == sum(counts) == 1,
            may_recompute=costs.training,
            chunks=chunks,
            share=largest_size(costs.batch_size, m) / costs.batch_size,  # of the largest micro-batch
        )

    def _kinds(self, m: int, space: Space) -> tuple[DeviceKind, ...]:
        """Kinds of devices; of meshes every stage configuration for `m` micro-batches."""
        found = []
        for pool, kind in enumerate(self.kinds):
            for configuration in self.costs.configurations:
                if configuration.kind == kind.name and configuration.n_microbatches == m:
                    own = self._configured_space(space, configuration.name)
                    found.append(replace(kind, name=configuration.name, pool=pool, space=own))
        return tuple(found) or self.kinds

    def _configured_space(self, space: Space, configuration: str) -> Space:
        if space is not self._space:  # cuts near one plan, which no other problem has
            return self._space_of(space.cuts, configuration)
        if configuration not in self._configured:
            self._configured[configuration] = self._space_of(space.cuts, configuration)
        return self._configured[configuration]

    def _times(self, kind: str, busy: int, rows: float) -> AtomTimes:
        key = (kind, busy, rows)
        if key not in self._known_times:
            self._known_times[key] = atom_times(self.costs, self.atoms, kind, busy, rows)
        return self._known_times[key]

    def _space_of(self, cuts: np.ndarray, configuration: str = "") -> Space:
        costs, atoms = self.costs, self.atoms.of(configuration)
        held = [(s.atoms, resident_bytes(w, self.options.optimizer, costs.training)) for s, w in atoms.parameters]
        return Space(
            cuts=cuts,
            values=atoms.values,
            resident=tuple(Shared(one.total, readers) for readers, one in held),
            gradients=tuple(Shared(one.gradient, readers) for readers, one in held if one.gradient),
            saved=atoms.saved,
            transient=atoms.transient,
            once=tuple(Shared(w.once, s.atoms) for s, w in atoms.parameters if w.once),
            stepped=stepped(costs, atoms, self.options.optimizer),
            pinned=atoms.pinned,
            recomputed=atoms.recomputed if costs.training else (),
            unrepeatable=atoms.unrepeatable,
        )

    def _memory(self, group: DeviceGroup) -> float:
        return min(group.memory, self.options.memory_limit or math.inf)

    def _schedules(self) -> list[str]:
        """Schedules to search; gpipe's partitions are those of 1f1b where they fit."""
        if self.options.schedule is not None:
            return [self.options.schedule]
        if not self.costs.training or not self.options.loss_inside:
            # All forwards come before the caller's loss: no schedule holds fewer micro-batches than gpipe.
            return ["gpipe", "interleaved-1f1b"]
        return ["1f1b", "zb-h1", "interleaved-1f1b"]

    def _device_counts(self) -> list[Used]:
        """Vectors of device counts: all of them for few devices, otherwise all devices, and their numbers halved."""
        if sum(self.full) <= _FEW_DEVICES and self.effort.fewer:
            every = itertools.product(*(range(c + 1) for c in self.full))
            return sorted((u for u in every if any(u)), key=lambda u: (-sum(u), u))
        found = {self.full, *(tuple(max(1, c >> shift) for c in self.full) for shift in self.effort.fewer)}
        for kind, count in enumerate(self.full):
            alone = {count, 1} if self.effort.fewer else {count}
            found |= {tuple(c if k == kind else 0 for k in range(len(self.full))) for c in alone}
        return sorted(found, key=lambda u: (-sum(u), u))

    def _microbatch_counts(self) -> list[int]:
        if self.options.n_microbatches is not None:
            return [self.options.n_microbatches]
        if self.options.one_microbatch_because:
            return [1]
        if self.costs.meshes:
            return sorted({configuration.n_microbatches for configuration in self.costs.configurations})
        most = self.most_counts()
        if most <= self.effort.counts + 4:
            return list(range(1, most + 1))
        return sorted({round(x) for x in np.geomspace(1, most, self.effort.counts)})

    def _by_promise(self, counts: Sequence[int]) -> list[int]:
        """Numbers of micro-batches, the lowest relaxed bound first: a good plan cuts later searches short."""
        if len(counts) == 1:
            return list(counts)
        name = self.schedules[0]
        return sorted(counts, key=lambda m: relaxed_bound(self.problem(m, name, self.full), self.full))

    # -- proof and description -----------------------------------------------------------------------------------------

    def proof(self, candidate: Candidate) -> tuple[float, str]:
        """A lower bound (s) on every plan's objective, and a sentence that says how far the plan is proven best."""
        config = candidate.config
        schedule = self._searched_as(config.schedule)
        objective = candidate.solution.objective
        looked_at = f"{len(self.counts)} numbers of micro-batches from {self.counts[0]} to {self.counts[-1]}"
        if len(self.counts) == 1:
            looked_at = f"{self.counts[0]} micro-batch" + ("es" if self.counts[0] > 1 else "")
        space = f"{looked_at}, {'all' if self.complete else 'the most promising'} {self.n_cuts} cuts"
        bounds = [bound for c, bound in self._bounds.items() if c.schedule == schedule]
        bound = min([objective, *bounds])
        if config.chunks > 1:
            bound = min(bound, self._balanced(config))
            space += ", chunks balanced one by one"
        if self.complete and config.chunks == 1 and bound >= objective * (1 - 1e-12):
            return objective, f"proven optimal under {config.schedule} for the search's objective: {space}"
        near = f"within {_gap(objective, bound)} of a bound that no plan under {config.schedule} is below: {space}"
        if self.complete:
            return bound, near
        anywhere = min([bound, *(self._relaxed(c) for c in self._bounds if c.schedule == schedule)])
        return anywhere, f"{near}; within {_gap(objective, anywhere)} of one for any cuts"

    def _searched_as(self, schedule: str) -> str:
        """The schedule whose partitions serve `schedule`."""
        return "1f1b" if schedule == "gpipe" and "gpipe" not in self.schedules else schedule

    def _balanced(self, config: Config) -> float:
        """Seconds of an interleaved plan with equally loaded devices and free transfers."""
        problem = self.problem(config.n_microbatches, config.schedule, config.counts)
        work = problem.least_work[[k for k, c in enumerate(config.counts) if c]].sum()
        return float(work * (1 / config.chunks + (config.n_microbatches - 1 / config.chunks) / sum(config.counts)))

    def describe(self, candidate: Candidate) -> str:
        """A plan in a line."""
        arrangement = candidate.arrangement
        ranks = [[device for group in rank for device in group.devices] for rank in arrangement.ranks]
        where = places(ranks, arrangement.chunks)
        n_stages, m = len(arrangement.stages), arrangement.n_microbatches
        text = f"{n_stages} stage{'s' if n_stages > 1 else ''} on {where}, {m} micro-batch{'es' if m > 1 else ''}, "
        text += arrangement.schedule
        if any(arrangement.recompute):
            text += f", recomputing {', '.join(str(s) for s, again in enumerate(arrangement.recompute) if again)}"
        return text


def _launches(times: Sequence[AtomTimes]) -> Launches | None:
    """By kind; None where no kind has times of the host."""
    if not any(t.start or any(each.any() for each in t.host) for t in times):
        return None
    each = PassSeconds(*map(np.array, zip(*(t.host for t in times), strict=True)))
    return Launches(each, np.array([t.start for t in times]))


def _gap(objective: float, bound: float) -> str:
    return f"{objective / bound - 1 if bound > 0 else math.inf:.2%}"
