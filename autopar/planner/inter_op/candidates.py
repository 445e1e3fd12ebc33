"""The partitions worth simulating: one search per schedule, number of micro-batches and vector of device counts.

1. search     every configuration, cut short where it cannot be near the best        `_search`
2. between    numbers of micro-batches between those tried, near the best            `_between`
3. refine     the best plans again, over cuts near theirs                            `_refine`
4. simulate   the most promising ones                                                `_simulate`
5. move       boundaries between stages, as long as simulated steps get shorter      `_with_moved`
6. prove      search again wherever a better plan could have been left out           `prove`

Clusters that are planned ahead are searched in another order (`ahead`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autopar.costs.cost_graph import CostGraph
from autopar.costs.device_group import DeviceGroup
from autopar.planner.arrangement import Arrangement
from autopar.planner.inter_op.bounds import relaxed_bound
from autopar.planner.inter_op.config import Config, MeshChoices
from autopar.planner.inter_op.cut_selection import (
    PartitionResult,
    along_orders,
    cuts_along_orders,
    most_cuts,
    over_all_cuts,
    refine,
)
from autopar.planner.inter_op.device_assignment import assign_groups
from autopar.planner.inter_op.moved_boundaries import partitions_near
from autopar.planner.inter_op.partition import solve
from autopar.planner.inter_op.problem import Problem
from autopar.planner.inter_op.refused_stages import RefusedStage
from autopar.planner.inter_op.search_counts import FEW_DEVICES
from autopar.planner.inter_op.search_space import SearchSpace
from autopar.planner.inter_op.solution import Solution
from autopar.planner.inter_op.space import Space
from autopar.planner.inter_op.stage_costs import in_flight
from autopar.planner.predicted_step import PredictedStep
from autopar.planner.priced_step import predicted_step
from autopar.planner.search_options import SearchOptions
from autopar.schedule.builders import SCHEDULES, ranks_of_stages
from autopar.schedule.micro_batches import largest_size
from autopar.schedule.timeline import Timeline

# A partition is a candidate if its objective is at most this share above the best one of its schedule.
_PROMISING = 0.04
_FEWEST_SIMULATED = 1
_ACTIONS_SIMULATED = 300_000  # in total; more would take longer than the search itself
_MOST_PREFIXES = 2000  # cuts of a search along one order
_ORDER_TOLERANCE = 5e-4  # share of the objective that it leaves unproven
_FIRST_TOLERANCE = 1e-3  # share of the objective that the first look leaves unproven
# Boundaries of plans are moved whose step takes up to this share longer than the fastest: under its schedule, others.
_MOVED, _MOVED_OTHERS = 0.15, 0.05
_GAIN = 1e-4  # share of the step that moving one must gain
_ROUNDS_MOVED = 8  # with this many micro-batches for each stage, a step is nearly as long as the objective says
_ACTIONS_MOVED = 400_000  # simulated for that under each schedule: a few seconds


@dataclass(frozen=True)
class Candidate:
    """A partition and its predicted step."""

    config: Config
    found: PartitionResult
    arrangement: Arrangement
    step: PredictedStep
    timeline: Timeline  # of one of its equal pipelines (`PredictedStep.one_copy`)

    @property
    def solution(self) -> Solution:
        return self.found.solution


class Searching(SearchSpace):
    """All searches for one cost graph under given options."""

    def __init__(
        self, costs: CostGraph, options: SearchOptions, meshes: MeshChoices | None = None, apart: int | None = None
    ) -> None:
        super().__init__(costs, options, meshes, apart)
        self.bounds: dict[Config, float] = {}  # s: no partition that was looked at has a smaller objective
        self._along: set[Config] = set()  # searched along whole orders
        self._anywhere: dict[Config, float] = {}  # s: no partition has, whatever its cuts
        # Whether a candidate's rehearsed step fits, too; by the formula all do.
        self.fits: Callable[[Candidate], bool] = lambda _: True

    def run(self) -> list[Candidate]:
        """The promising partitions, simulated; none if nothing fits."""
        found: dict[Config, PartitionResult] = {}
        for counts in self.device_counts():
            for m in self._by_promise():
                for config in self.configs(m, counts):
                    self._search(config, found, max(self.effort.tolerance, _FIRST_TOLERANCE))
        if len(self.counts) < self.most_counts() and self.costs.alone:
            self._between(found)
        if not self.complete:
            self._refine(found)
        return self._with_moved(self._simulate(found))

    def _search(self, config: Config, found: dict[Config, PartitionResult], tolerance: float) -> None:
        """The best partition under `config`, if it is promising and every pool has devices or meshes for it."""
        if config in self.bounds or not self.has_kinds(config):
            return
        problem = self.problem_of(config)
        solution = self._solve(config, problem, self._cutoff(config, found), tolerance)
        if solution is not None:
            found[config] = PartitionResult(problem, solution, self.complete)

    def _cutoff(self, config: Config, found: dict[Config, PartitionResult]) -> float:
        """Seconds from which on a partition is not promising. Objectives of different schedules neglect different
        effects, so they cannot be compared. All of them take micro-batches as equal: where the batch does not divide,
        the step of a rival may take longer by what its largest micro-batch is above the mean."""
        batch = self.costs.batch_size

        def at_most(rival: Config, objective: float) -> float:
            m = rival.n_microbatches
            return objective * largest_size(batch, m) * m / batch

        alike = [c for c in found if (c.schedule, c.sends_behind) == (config.schedule, config.sends_behind)]
        rivals = [at_most(c, found[c].solution.objective) for c in alike]
        return min(rivals, default=math.inf) * (1 + _PROMISING)

    def _solve(self, config: Config, problem: Problem, cutoff: float, tolerance: float) -> Solution | None:
        counts = self.counts_of(config)
        solution = solve(problem, counts, cutoff=cutoff, tolerance=tolerance, exactly=config.chunks > 1)
        bound = cutoff * (1 - tolerance) if solution is None else solution.bound
        if config in self.bytes_factors or problem.refused:  # plans with more bytes may fit, too
            bound = min(bound, self.bounds.get(config, self.relaxed(config)))
        self.bounds[config] = bound
        return None if solution is None else solution.copied(config.copies)

    def searched_config(self, candidate: Candidate) -> Config:
        """The search that found a candidate."""
        return replace(candidate.config, schedule=self.searched_as(candidate.config.schedule))

    def searched_again(self, config: Config) -> list[Candidate]:
        """The best partition under `config`, as far as its `bytes_factor` lets it fit."""
        problem, exactly = self.problem_of(config), config.chunks > 1
        solution = solve(problem, self.counts_of(config), tolerance=self.effort.tolerance, exactly=exactly)
        if solution is None:
            return []
        found = PartitionResult(problem, solution.copied(config.copies), self.complete)
        return self._with_moved(list(self._candidates(config, found)))

    def refused_stages(self, candidate: Candidate, numbers: Sequence[int]) -> list[RefusedStage]:
        """Some stages of a candidate, for `refused`."""
        config, problem, stages = candidate.config, candidate.found.problem, candidate.solution.stages
        replicas = [stage.replicas // config.copies for stage in stages]
        most_groups = problem.most_groups(self.counts_of(config))
        found = []
        for number in numbers:
            one, kind = stages[number], problem.kinds[stages[number].kind]
            cuts, pool = problem.space.cuts, problem.pools[one.kind]
            own, after = replicas[number], sum(replicas[number + 1 :])
            n = in_flight(problem, most_groups, own, after)
            where = (pool, kind.name), one.recompute, cuts[one.start], cuts[one.stop]
            found.append(RefusedStage(config.schedule, config.n_microbatches, *where, n))
        return found

    def take_in(self, other: Searching) -> None:
        """Add the meshes of another search for the same devices, and its bounds."""
        self._add(other.costs.configurations)
        for config, bound in other.bounds.items():
            self.bounds[config] = min(bound, self.bounds.get(config, bound))

    def prove(self, chosen: Candidate) -> list[Candidate]:
        """Search again, to the end, wherever a plan under the same schedule could still have a smaller objective.

        Returns the better plans.
        """
        schedule = self.searched_as(chosen.config.schedule)
        better = self._better_along_orders(chosen, self.searched_config(chosen))
        best = min(c.solution.objective for c in [chosen, *better])
        for config in sorted(self.bounds, key=lambda c: self.bounds[c]) if self.effort.tolerance == 0 else ():
            if config.schedule != schedule or self.bounds[config] >= best:
                continue
            problem = self.problem_of(config)
            solution = self._solve(config, problem, math.nextafter(best, math.inf), self.effort.tolerance)
            if solution is not None and solution.objective < best:
                best = solution.objective
                better += self._candidates(config, PartitionResult(problem, solution, self.complete))
        return better

    def _better_along_orders(self, chosen: Candidate, config: Config) -> list[Candidate]:
        """A better partition than the chosen one along a whole order, if there is any."""
        whole = sum(config.counts) > 1 and config.copies == 1
        if self.complete or self.effort.refined == 0 or config in self._along or not whole:
            return []
        found = self._along_orders(config, chosen.found)
        return [] if found is chosen.found else list(self._candidates(config, found))

    def relaxed(self, config: Config) -> float:
        """A bound in seconds on every partition, whatever its cuts."""
        counts = self.counts_of(config)
        problem = self.problem_of(config, rehearsed=False)
        return max(self._anywhere.get(config, 0.0), relaxed_bound(problem, counts))

    def _between(self, found: dict[Config, PartitionResult]) -> None:
        """Search numbers of micro-batches between those tried: halve the gaps next to the best one."""
        tried = set(self.counts)
        device_counts = self.device_counts()[: self.effort.halved]
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
                for config in itertools.chain(*(self.configs(m, counts) for counts in device_counts)):
                    self._search(config, found, max(self.effort.tolerance, _FIRST_TOLERANCE))
        self.counts = sorted(tried)

    def _simulate(self, found: dict[Config, PartitionResult]) -> list[Candidate]:
        """Candidates with their timelines."""
        seen: set[Arrangement] = set()
        candidates = []
        for config in self._worth_simulating(found):
            for candidate in self._candidates(config, found[config]):
                if candidate.arrangement not in seen:
                    seen.add(candidate.arrangement)
                    candidates.append(candidate)
        return candidates

    def _with_moved(self, candidates: list[Candidate], before: Sequence[Candidate] = ()) -> list[Candidate]:
        """The candidates, and the best that moving boundaries of the fastest ones leads to. `before`: whose boundaries
        have been moved."""
        moved = []
        every = sorted([*candidates, *before], key=lambda c: c.timeline.step_time)
        seen = {candidate.arrangement for candidate in every}
        fastest = every[0].timeline.step_time if every else 0.0
        of_schedule = {c.config.schedule: c.timeline.step_time for c in reversed(every)}  # of the fastest one
        left = dict.fromkeys(of_schedule, _ACTIONS_MOVED)  # of each schedule, as in a search for it alone
        for candidate in sorted(candidates, key=lambda c: c.timeline.step_time):
            config, best = candidate.config, candidate
            near = _MOVED if config.schedule == every[0].config.schedule else _MOVED_OTHERS
            if candidate.timeline.step_time > fastest * (1 + near):
                continue
            most = _ROUNDS_MOVED * len(candidate.arrangement.stages)
            # Interleaved plans have many boundaries: on a cluster those of the fastest plan under a schedule are moved.
            fastest_here = candidate.timeline.step_time == of_schedule[config.schedule]
            too_many = config.chunks > 1 and not (self.ahead and fastest_here)
            if config.copies > 1 or config.n_microbatches >= most or too_many:
                continue
            # Adding up the stages of one of them takes about as long as simulating half as many actions as operators.
            each = candidate.solution.n_actions(config.n_microbatches) + len(self.costs.graph) // 2
            better: Candidate | None = candidate
            while better is not None:
                best = better
                others = self._moved(best, left[config.schedule] // each)
                tried = [one for one in others if one.arrangement not in seen]
                seen |= {one.arrangement for one in tried}
                left[config.schedule] -= len(tried) * each
                enough = best.timeline.step_time * (1 - _GAIN)
                shorter = (one for one in tried if one.timeline.step_time < enough)
                better = min(shorter, key=lambda c: c.timeline.step_time, default=None)
            if best is not candidate:
                moved.append(best)
        return [*candidates, *moved]

    def _moved(self, candidate: Candidate, most: int) -> Iterator[Candidate]:
        """The candidate with other boundaries, in at most `most` ways, where its step may be shorter."""
        config = self.searched_config(candidate)

        def problem_of(cuts: np.ndarray) -> Problem:
            return self.problem_of(config, self._space_of(cuts))

        cuts, weight = self._space.cuts, self.graph.weight
        for busy, found in partitions_near(candidate.found, cuts, weight, problem_of, self.counts_of(config), most):
            if busy < candidate.timeline.step_time:
                here = self._candidates(config, found)
                yield from (one for one in here if one.config.schedule == candidate.config.schedule)

    def _worth_simulating(self, found: dict[Config, PartitionResult]) -> list[Config]:
        """The best of all, and the best of each schedule for every vector of device counts."""
        by_objective = sorted(found, key=lambda c: (found[c].solution.objective, SCHEDULES.index(c.schedule)))
        chosen: dict[Config, None] = {}
        left = _ACTIONS_SIMULATED
        most = self.effort.simulated
        exposed, behind = ([c for c in by_objective if c.sends_behind == behind][:most] for behind in (False, True))
        for config in [*exposed, *behind]:
            left -= found[config].solution.n_actions(config.n_microbatches)
            if left < 0 and len(chosen) >= _FEWEST_SIMULATED:
                break
            chosen[config] = None
        if left > 0:
            for counts in dict.fromkeys(c.counts for c in by_objective):
                mine = [c for c in by_objective if c.counts == counts]
                # Objectives of different schedules neglect different effects.
                best = {(c.schedule, c.sends_behind): c for c in reversed(mine)}
                names = itertools.product(self.schedules, (False, True))
                chosen.update(dict.fromkeys(best[name] for name in names if name in best))
                chosen.update(dict.fromkeys(mine[:2]))
        chosen.update(dict.fromkeys(c for c in found if sum(c.counts) == 1 and c.n_microbatches == 1))
        return list(chosen)

    def _refine(self, found: dict[Config, PartitionResult]) -> None:
        """Improve the best partitions of each schedule over more cuts."""
        for name in itertools.product(self.schedules, (False, True)):
            alike = [c for c in found if (c.schedule, c.sends_behind) == name]
            mine = sorted(alike, key=lambda c: found[c].solution.objective)
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
            return self.problem_of(config, self._space_of(cuts))

        counts, limit, tolerance = config.counts, self._most_cuts, self.effort.tolerance
        rounds = self.effort.rounds
        found = refine(self.graph, found, problem_of, counts=counts, limit=limit, rounds=rounds, tolerance=tolerance)
        best = over_all_cuts(self.graph, found, problem_of, counts=counts, limit=limit, tolerance=tolerance) or found
        self._anywhere[config] = best.bound
        return best

    def _along_orders(self, config: Config, found: PartitionResult) -> PartitionResult:
        """`found`, or a better partition along one of the usual orders. Stages may have the meshes that it has."""
        self._along.add(config)
        problems = [self.problem_of(config, space) for space in self._order_spaces]
        if self.costs.configurations:
            problems = [problem.only({stage.kind for stage in found.solution.stages}) for problem in problems]
        counts = tuple(c * config.chunks for c in config.counts)
        tolerance, exactly = max(self.effort.tolerance, _ORDER_TOLERANCE), config.chunks > 1
        return along_orders(found, problems, counts=counts, tolerance=tolerance, exactly=exactly) or found

    @cached_property
    def _order_spaces(self) -> list[Space]:
        """One over the prefixes of each of the usual orders; none if a search over their cuts takes too long."""
        if self.graph.n >= most_cuts(self.full, _MOST_PREFIXES):
            return []
        return [self._space_of(cuts) for cuts in cuts_along_orders(self.graph)]

    def some_plan_uses_more(self, n_devices: int) -> bool:
        """Whether a plan on more than `n_devices` fits the memory and the options, however slow it is."""
        vectors = self.device_counts() if sum(self.full) <= FEW_DEVICES else [self.full]
        return any(
            solve(
                self.problem_of(Config(self.schedules[0], m, counts), rehearsed=False),
                counts,
                cutoff=math.inf,
                tolerance=1.0,
                exactly=True,
            )
            for counts in vectors
            if sum(counts) > n_devices
            for m in self.counts
        )

    def _candidates(self, config: Config, found: PartitionResult) -> Iterator[Candidate]:
        """The partition under its schedule, and where the schedule is free, under those that were not searched."""
        stages = tuple(tuple(np.flatnonzero(inside).tolist()) for inside in found.stages())
        rank_of = ranks_of_stages(config.schedule, len(stages) // config.chunks, config.chunks)
        groups = assign_groups(self.costs, self.pools, self.atoms, stages, found, rank_of)
        if groups is None:
            return
        kinds = [found.problem.kinds[stage.kind].name for stage in found.solution.stages]
        names = tuple(kinds) if self.costs.configurations else ()
        for schedule in self._simulated_as(config.schedule):
            recompute = tuple(s.recompute for s in found.solution.stages)
            arrangement = Arrangement(stages, groups, config.n_microbatches, schedule, recompute, names)
            step = predicted_step(self.costs, self.atoms, arrangement, self.options.conditions)
            copy = step.one_copy()
            timeline = copy.timeline()
            of_copy = [group for rank, n in zip(arrangement.ranks, copy.replicas, strict=True) for group in rank[:n]]
            if self._fit(of_copy, timeline):
                yield Candidate(replace(config, schedule=schedule), found, arrangement, step, timeline)

    def _fit(self, groups: Sequence[DeviceGroup], timeline: Timeline) -> bool:
        """Whether what each slot holds fits its group of devices."""
        peaks = timeline.peak_memory or (0,) * len(groups)
        return all(peak <= self.memory(group) * (1 + 1e-9) for group, peak in zip(groups, peaks, strict=True))

    def searched_as(self, schedule: str) -> str:
        """The schedule whose partitions serve `schedule`."""
        return "1f1b" if schedule == "gpipe" and schedule not in self.schedules else schedule

    def _simulated_as(self, searched: str) -> list[str]:
        """The schedules that partitions found for one of them are simulated under."""
        if self.options.schedule is not None:
            return [searched]
        return [searched, *(["gpipe"] if searched == self.searched_as("gpipe") != "gpipe" else [])]

    def _by_promise(self) -> list[int]:
        """Numbers of micro-batches, the lowest relaxed bound first: a good plan cuts later searches short."""
        if len(self.counts) == 1:
            return list(self.counts)
        name = self.schedules[0]
        return sorted(self.counts, key=lambda m: relaxed_bound(self.problem(m, name, self.full), self.full))
