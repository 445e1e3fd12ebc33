"""The joint search over mesh sizes: one search per number of devices in a mesh; the fastest plan of all wins.

    mesh size      1 (single devices)      2      4      8      ...
                   |                       |      |      |
    search         stages x replicas       stages x replicas x strategies (`Meshes.of` gives the cost graph)

The sizes are tried from a likely good one outwards, because a known plan cuts later searches short.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from autopar.costs.cost_graph import CostGraph
from autopar.errors import InfeasibleError
from autopar.plan.plan import Plan, RunnerUp
from autopar.planner.inter_op.meshes import Meshes, Subject
from autopar.planner.search import find_plans
from autopar.planner.search_options import SearchOptions

log = logging.getLogger(__name__)

_FIRST = 8  # devices per mesh in the first search
# Micro-batches per mesh: with fewer, meshes are idle; more gain little. The first search of a size uses `_ROUNDS`; the
# `_CLOSER` best sizes are searched again with `_OTHER_ROUNDS`.
_ROUNDS, _OTHER_ROUNDS, _CLOSER = (2,), (1, 4), 2
_FEW = 5  # up to this many mesh sizes, all are searched
_RUNNERS_UP = 4
# Larger meshes must be faster by this share of the step.
_WORTH = 0.01


def plan_with_meshes(
    costs: CostGraph,
    options: SearchOptions,
    subject: Subject,
    *,
    max_shards: int | None = None,
    progress: Callable[[str, float], None] = lambda what, done: None,
) -> Plan:
    """The fastest plan that `options` allow on single devices or on meshes. `costs`: of single devices.

    `max_shards`: the most devices in a mesh. Every stage has meshes of its own, with their shape, strategies, replicas
    and recomputation; only the number of devices per mesh is the same in all stages. Raises InputError and
    InfeasibleError like `make_plan`.
    """
    search = _SizeSearch(costs, options, Meshes(costs, subject, options.memory_limit), max_shards, progress)
    search.all_sizes()
    search.best_sizes_again()
    if not search.found:
        raise search.impossible[0]
    return _best(search.found)


class _SizeSearch:
    """The searches of one joint search, and the plans that they found."""

    def __init__(
        self,
        costs: CostGraph,
        options: SearchOptions,
        meshes: Meshes,
        max_shards: int | None,
        progress: Callable[[str, float], None],
    ) -> None:
        self._costs, self._options, self._meshes, self._progress = costs, options, meshes, progress
        self._sizes = [size for size in (1, *meshes.sizes()) if max_shards is None or size <= max_shards]
        # Numbers of micro-batches that the user or the model fixed; empty if the search chooses.
        self._fixed = [1] if options.one_microbatch_because else [m for m in (options.n_microbatches,) if m]
        self._n_searches = itertools.count()
        self.found: list[Plan] = []
        self.impossible: list[InfeasibleError] = []  # of sizes without a plan

    def all_sizes(self) -> None:
        """Search a likely good size, then smaller ones, then larger ones, then single devices."""
        sizes = self._sizes
        first = min(sizes, key=lambda size: abs(math.log2(size / _FIRST)))
        larger, smaller = [s for s in sizes if s > first], [s for s in reversed(sizes) if 1 < s < first]
        for side in ([first], smaller, larger):
            for size in side:
                better = self._search(size, self._fixed or self._meshes.counts(size, _ROUNDS))
                # With many sizes, stop in this direction at the first one without a faster plan.
                if not better and self.found and len(sizes) > _FEW:
                    break
        if first > 1:
            self._search(1, self._fixed)

    def best_sizes_again(self) -> None:
        """Search the best sizes with other numbers of micro-batches, unless the number is fixed."""
        best = {_shards(plan): plan for plan in sorted(self.found, key=_seconds, reverse=True)}
        for size in sorted(best, key=lambda size: _seconds(best[size]))[:_CLOSER]:
            more = sorted({*self._meshes.counts(size, _OTHER_ROUNDS)} - {*self._meshes.counts(size, _ROUNDS)})
            if size > 1 and more and not self._fixed:
                own = {stage.sharding.mesh for stage in best[size].stages if stage.sharding is not None}
                self._search(size, more, self._meshes.shapes(size) if len(self._sizes) <= _FEW else own)

    def _search(self, size: int, counts: Sequence[int], shapes: Collection[tuple[int, ...]] = ()) -> bool:
        """Search one mesh size; returns whether it has a faster plan than all before."""
        done = next(self._n_searches) / (len(self._sizes) + _CLOSER)
        self._progress(f"plans with {size} devices a micro-batch", min(0.99, done))
        costs = self._costs if size == 1 else self._meshes.of(size, counts, shapes)
        rival = min(map(_seconds, self.found), default=math.inf)
        options = replace(self._options, rival=rival, one_of_several=True)
        try:
            plans = find_plans(costs, options, 1) if costs is not None else []
        except InfeasibleError as error:
            self.impossible.append(error)
            return False
        log.info("%d devices a micro-batch, %s: %s s", size, counts, [plan.predicted_step_time for plan in plans])
        self.found.extend(plans)
        return bool(plans) and _seconds(plans[0]) < rival


def _best(found: Sequence[Plan]) -> Plan:
    """The plan with the smallest meshes among those within `_WORTH` of the fastest; the others become runners-up."""
    fastest = min(map(_seconds, found))
    near = [plan for plan in found if _seconds(plan) <= fastest * (1 + _WORTH)]
    best = min(near, key=lambda plan: (_shards(plan), _seconds(plan)))
    rivals = [RunnerUp(_described(plan), _seconds(plan)) for plan in found if plan is not best]
    rivals += [r for plan in found if _shards(plan) == 1 or plan is best for r in plan.runners_up]
    return replace(best, runners_up=tuple(sorted(rivals, key=lambda r: r.step_time)[:_RUNNERS_UP]))


def _shards(plan: Plan) -> int:
    return max(stage.shards for stage in plan.stages)


def _seconds(plan: Plan) -> float:
    return plan.predicted_step_time or 0.0


def _described(plan: Plan) -> str:
    shapes = dict.fromkeys(stage.sharding.mesh for stage in plan.stages if stage.sharding is not None)
    meshes = ", ".join("x".join(map(str, shape)) for shape in shapes)
    replicas = "+".join(str(stage.replicas) for stage in plan.stages)
    n = len(plan.stages)
    text = f"{n} stage{'s' if n > 1 else ''}, {replicas} replicas"
    text += f" of meshes of {meshes}" if meshes else ""
    return f"{text}, {plan.n_microbatches} micro-batches, {plan.schedule}"
