"""The search for a cluster that is planned ahead: stages on single devices and on meshes of any width.

    for each number of micro-batches m, from the usual one outwards
        skip m         if the work alone takes longer than the best step so far            `_least_step`
        add meshes     the strategies for every width and shape, as stage configurations   `_widths`
        search         best[I][e] = min over J, k, r of fill_k(I, J) + best[J][e - r width_k], for every schedule
        limits         again with fewer devices, smaller meshes, fewer replicas            `_limited`
        simulate       what is promising
    move the boundaries between stages of the fastest plans

Large searches leave out the limits, the moves, and most meshes for numbers of micro-batches beyond the best ones: none
where the meshes of the best plan so far are not promising. Where the model has few cuts, they look at everything for
the best number of micro-batches in the end.

Objective and simulator differ by a few per cent, so the least objective is not always the shortest step. The best plan
under each limit that a user could set is a candidate, too, so that no limit makes a planned step shorter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.costs.cost_graph import CostGraph
from autopar.planner.inter_op.bounds import work_bound
from autopar.planner.inter_op.candidates import Candidate, Searching
from autopar.planner.inter_op.config import Config, MeshChoices, Used
from autopar.planner.inter_op.cut_selection import PartitionResult
from autopar.planner.inter_op.partition import solve
from autopar.planner.inter_op.search_counts import MANY_DEVICES, parts_of_cluster
from autopar.planner.search_options import SearchOptions
from autopar.schedule.builders import INTERLEAVED

# The objective of a schedule is at least this share of the steps that it promises; where there is much to search, only
# schedules that promise more than the larger share are looked at.
_OBJECTIVE, _LIKELY_OBJECTIVE = 0.8, 0.9
# In total, half of them shared evenly by all numbers of micro-batches; more would take longer than the search itself.
_ACTIONS_SIMULATED = 600_000
_MICROBATCHES, _USUAL = 4, 8  # micro-batches for each mesh, and its devices, where the search starts
_FIRST_TOLERANCE = 0.01  # share of the objective that a large search first leaves unproven
_TRIES = 3  # numbers of micro-batches in a row that need not gain on many devices, whose meshes change with them
_ROOM = 1.25  # times the memory: what meshes of another shape may need less than those that are looked at first
_LOOKED_CLOSER_AT = 3  # plans of a large search, the fastest
_FEW_CUTS = 150  # up to which a large search looks at meshes for every number of micro-batches


class SearchingAhead(Searching):
    """All searches for a cluster."""

    def __init__(
        self,
        costs: CostGraph,
        options: SearchOptions,
        meshes: MeshChoices | None = None,
        apart: int | None = None,
        *,
        faster_than: float = math.inf,
    ) -> None:
        """`faster_than`: seconds of a known step; plans that cannot be faster may be left out."""
        super().__init__(costs, options, meshes, apart)
        self._without_meshes = costs
        self.least_steps: dict[int, float] = {}  # s, by number of micro-batches: no plan is faster
        self._found: dict[Config, PartitionResult] = {}
        self._actions_left = _ACTIONS_SIMULATED // 2
        self._best = faster_than  # s, the shortest step so far
        self._refused: set[Config] = set()  # whose best partitions do not fit
        self._many = sum(self.full) > MANY_DEVICES
        self._few_cuts = self.n_cuts <= _FEW_CUTS and not self._many and len(self.counts) > 1
        # Tries in a row, with more and with fewer micro-batches, in which meshes gained nothing.
        self._in_vain, self._enough = dict.fromkeys((-1, 0, 1), 0), _TRIES if self._many else 1

    def run(self) -> list[Candidate]:
        candidates: list[Candidate] = []
        start = max(1.0, _MICROBATCHES * sum(self.full) / _USUAL)
        first = min(self._with_meshes(), key=lambda m: abs(math.log(m / start)), default=1)
        for done, m in enumerate(sorted(self.counts, key=lambda m: (abs(math.log(m / first)), m))):
            if self.meshes is not None:
                self.meshes.progress(f"plans with {m} micro-batches", done / len(self.counts))
            self.least_steps[m] = self._least_step(m)
            if self.least_steps[m] < self._best:
                candidates += self._at(m, 0 if m == first else 1 if m > first else -1, candidates)
        if self.all_shapes:
            return self._with_moved(candidates)
        candidates += self._closer(candidates)
        return [*candidates, *self._everything_at_best(candidates)] if self._few_cuts else candidates

    def _everything_at_best(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """All that a search finds for the best number of micro-batches alone, as it then has few enough mesh shapes to
        look at all of them."""
        best = min(candidates, key=lambda c: c.timeline.step_time, default=None)
        if best is None:
            return []
        options = replace(self.options, n_microbatches=best.config.n_microbatches)
        alone = SearchingAhead(self._without_meshes, options, self.meshes, self.apart, faster_than=self._best)
        alone.fits, alone.bytes_factors = self.fits, dict(self.bytes_factors)
        found = alone.run()
        self.take_in(alone)
        return found

    def _closer(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """What took the least time at first sight, searched again until less is unproven."""
        chosen: dict[Config, PartitionResult] = {}
        for candidate in sorted(candidates, key=lambda c: c.timeline.step_time)[:_LOOKED_CLOSER_AT]:
            config = self.searched_config(candidate)
            problem, cutoff = self.problem_of(config), candidate.solution.objective
            better = self._solve(config, problem, cutoff, self.effort.tolerance)
            if better is not None:
                chosen[config] = PartitionResult(problem, better, self.complete)
        return self._simulate(chosen)

    def _cutoff(self, config: Config, found: dict[Config, PartitionResult]) -> float:
        if sum(config.counts) == 1:
            return math.inf
        if self.all_shapes and (len(self.pools) > 1 or config.least_width == config.most_width):
            return self._best / _OBJECTIVE  # the objective may be far above their steps: it counts sends as exposed
        share = _OBJECTIVE if self.all_shapes else _LIKELY_OBJECTIVE
        fitting = {c: result for c, result in found.items() if c not in self._refused}
        return min(super()._cutoff(config, fitting), self._best / share)

    def some_plan_uses_more(self, n_devices: int) -> bool:
        """Assumed, as another search over large clusters takes long: then the plan says that no faster one does."""
        return n_devices < sum(self.full)

    def _with_meshes(self) -> list[int]:
        """Numbers of micro-batches at which there are meshes."""
        return [m for m in self.counts if self.n_shapes(m)] or self.counts

    def _least_step(self, m: int) -> float:
        """Seconds of a step at least: the work of `m` micro-batches, divided over all devices. The shards of an
        operator together take no less than all of it on one device."""
        if not self.costs.alone:
            return 0.0
        return work_bound(self.problem_of(Config(self.schedules[0], m, self.full, most_width=1)), self.full)

    def _at(self, m: int, side: int, known: Sequence[Candidate]) -> list[Candidate]:
        """The candidates with `m` micro-batches. `side`: 1 if m is more than where the search began, -1 if less."""
        widths = self._widths(m, side, known)
        tolerance = self.effort.tolerance if self.all_shapes else _FIRST_TOLERANCE
        for some in self._in_turn(m, widths, known) if self._promising(m, widths, known, tolerance) else ():
            self.add_meshes(m, some, every_shape=self.all_shapes)
            self._search_each(m, some, tolerance)
            if not any(config.n_microbatches == m for config in self._found):
                break  # nothing promising
        for config in self.configs(m, self.full):
            self._search(config, self._found, tolerance)
        if m == 1 and self.costs.alone:  # the plain model, without any overhead
            for counts in self.device_counts():
                if sum(counts) == 1:
                    self._search(Config(self.schedules[0], 1, counts), self._found, self.effort.tolerance)
        if self.all_shapes:
            self._limited(m)
        self._actions_left = max(self._actions_left, 0) + _ACTIONS_SIMULATED // 2 // len(self.counts)
        here = {config: found for config, found in self._found.items() if config.n_microbatches == m}
        candidates = self._simulate(here)
        own = self._shortest_step(candidates)
        if widths:
            self._in_vain[side] = self._in_vain[side] + 1 if known and own >= self._best else 0
        self._best = min(self._best, own)
        return candidates

    def _shortest_step(self, candidates: Sequence[Candidate]) -> float:
        """Seconds of the fastest candidate that fits, if that is less than the shortest step so far."""
        for candidate in sorted(candidates, key=lambda c: c.timeline.step_time):
            if candidate.timeline.step_time >= self._best or self.fits(candidate):
                return candidate.timeline.step_time
            self._refused.add(self.searched_config(candidate))
        return math.inf

    def _widths(self, m: int, side: int, known: Sequence[Candidate]) -> list[int]:
        """Widths of meshes that are worth a look: all, or where they are too many, those next to the best plan's."""
        if self.meshes is None or not self.n_shapes(m):
            return []
        if self.all_shapes:
            return self.meshes.widths
        every, usual = self.widths_everywhere, self._usual_width(m)
        if self._in_vain[side] >= self._enough:
            # Few micro-batches on wide meshes are plans of another kind than many on narrow ones.
            return [self._nearest(every, usual)] if self._many or self._few_cuts else []
        used = {usual}
        if not self._in_vain[side]:
            # As long as nothing fits, micro-batches of any size may be small enough on the devices of a node.
            used |= _widths_of_best(known) if known else {self._per_node}
        return [w for w in every if any(w <= 2 * own and own <= 2 * w for own in used)]

    def _in_turn(self, m: int, widths: Sequence[int], known: Sequence[Candidate]) -> list[list[int]]:
        """Widths to look at one after the other: where there is much to search, those of the best plan first; with the
        usual one, unless there are too many cuts for that."""
        used: list[int] = []
        if not self.all_shapes and not self._many and widths:
            first = _widths_of_best(known)
            if self.complete:
                first.add(self._nearest(widths, self._usual_width(m)))
            used = [w for w in widths if w in first]
        rest = [w for w in widths if w not in used]
        return [some for some in (used, rest) if some]

    def _promising(self, m: int, widths: Sequence[int], known: Sequence[Candidate], tolerance: float) -> bool:
        """Whether there is anything promising on the fastest candidate's meshes. Unless there is, a large search looks
        at no others for `m` micro-batches."""
        if self.all_shapes or self._many or len(self.pools) > 1 or not known:
            return True
        best = _fastest(known)
        meshes = (self.costs.configuration.get(name) for name in best.arrangement.configurations)
        shapes = {mesh.shape for mesh in meshes if mesh is not None and mesh.width in widths}
        if not shapes:
            return True
        alone = sorted({math.prod(shape) for shape in shapes})
        self.add_meshes(m, alone, only=shapes)
        schedule = self.searched_as(best.config.schedule)
        configs = filter(self.has_kinds, self._of_one_width(m, alone))
        tried = sorted(configs, key=lambda config: config.schedule != schedule)
        cutoffs = {config: self._cutoff(config, self._found) for config in tried}
        for config, cutoff in cutoffs.items():
            problem, exactly = self.problem_of(config).with_room(_ROOM), config.chunks > 1
            if solve(problem, self.counts_of(config), cutoff=cutoff, tolerance=tolerance, exactly=exactly) is not None:
                return True
        self.bounds |= {config: cutoff * (1 - tolerance) for config, cutoff in cutoffs.items()}
        return False

    def _of_one_width(self, m: int, widths: Sequence[int]) -> Iterator[Config]:
        """Under every schedule, with meshes of one width alone."""
        for config in self.configs(m, self.full):
            if config.schedule not in INTERLEAVED:
                yield from (replace(config, most_width=width, least_width=width) for width in widths)
            elif config.most_width in widths:
                yield config

    @staticmethod
    def _nearest(widths: Sequence[int], width: float) -> int:
        return min(widths, key=lambda w: abs(math.log(w / width)))

    def _search_each(self, m: int, widths: Sequence[int], tolerance: float) -> None:
        """Meshes of one width alone: exact and quick. What they find cuts the search over all widths short."""
        if len(self.pools) > 1 or self._many:
            return
        for config in self._of_one_width(m, widths):
            if config.schedule not in INTERLEAVED:
                self._search(config, self._found, tolerance)

    def _usual_width(self, m: int) -> float:
        """Devices of a mesh with which a pipeline of all devices has enough of `m` micro-batches, and a mesh at least a
        sample for each share of a node."""
        return min(_MICROBATCHES * sum(self.full) / m, self._per_node * self.costs.batch_size / m)

    @property
    def _per_node(self) -> int:
        assert self.costs.cluster is not None, "only clusters have meshes"
        return sum(self.full) // self.costs.cluster.nodes

    def _limited(self, m: int) -> None:
        """Search under each limit that the best plan without it breaks; on parts of the cluster that could do the work
        in time, also under each further limit, as a search for such a part would."""
        missing: list[Config] = []  # nothing promising under these
        found, parts = self._found, self._parts(m)
        configs = [c for c in found if c.n_microbatches == m and c.least_width == 1]
        for config in configs:  # grows
            for limited in self.limited(config):
                fewer = limited == replace(config, counts=limited.counts)
                if fewer and limited.counts in parts and config.counts == self.full:
                    configs.append(limited)
                if any(limited.within(other) for other in missing):
                    continue
                if any(limited.within(c) and _keeps(f, limited) for c, f in found.items()):
                    continue
                self._search(limited, found, self.effort.tolerance)
                if limited not in found:
                    missing.append(limited)
        for counts in parts:
            for config in self.configs(m, counts):
                if config.schedule in INTERLEAVED:
                    self._search(config, found, self.effort.tolerance)

    def _parts(self, m: int) -> list[Used]:
        """Numbers of devices of smaller clusters that could do the work in less than the best step."""
        if len(self.pools) > 1:
            return []
        best = min([self._best, *(f.solution.objective for c, f in self._found.items() if c.n_microbatches == m)])
        least = self.least_steps[m] * sum(self.full)
        assert self.costs.cluster is not None, "only clusters have parts"
        parts = parts_of_cluster(self.full, self.costs.cluster.nodes)
        return [some for some in parts if some != self.full and least < best * sum(some)]

    def _worth_simulating(self, found: dict[Config, PartitionResult]) -> list[Config]:
        """All that are promising, the best first, as many as time allows."""
        chosen: list[Config] = []
        for config in sorted(found, key=lambda c: found[c].solution.objective):
            if found[config].solution.objective > self._cutoff(config, self._found):
                continue
            self._actions_left -= found[config].solution.n_actions(config.n_microbatches)
            if self._actions_left > 0 or not chosen:
                chosen.append(config)
        return chosen


def _widths_of_best(known: Sequence[Candidate]) -> set[int]:
    """Devices of the meshes of the fastest candidate."""
    if not known:
        return set()
    return {len(group.devices) for groups in _fastest(known).arrangement.groups for group in groups}


def _fastest(known: Sequence[Candidate]) -> Candidate:
    return min(known, key=lambda c: c.timeline.step_time)


def _keeps(found: PartitionResult, limit: Config) -> bool:
    """Whether a partition keeps the limits of a configuration."""
    kinds = found.problem.kinds
    return (
        all(used <= count for used, count in zip(found.solution.used, limit.counts, strict=True))
        and all(stage.replicas <= (limit.most_replicas or math.inf) for stage in found.solution.stages)
        and all(kinds[stage.kind].width <= (limit.most_width or math.inf) for stage in found.solution.stages)
    )
