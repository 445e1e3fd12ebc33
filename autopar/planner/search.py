"""CostGraph -> Plan: the best partition for every schedule, number of micro-batches and of devices, simulated.

The partition search (`inter_op/partition.py`) finds the best partition for each of them under one objective. The
simulator then lays out the most promising ones; it also knows warm-ups, uneven micro-batches and the links between
single devices. The fastest simulated step is the plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autopar.costs.cost_graph import CostGraph
from autopar.costs.shared_hardware import one_worker_per_gpu, shared_gpu_notes
from autopar.errors import InputError
from autopar.plan.plan import ONE_MICROBATCH, Plan, with_unproven_split
from autopar.plan.stage import RunnerUp
from autopar.planner.explain import explanation, why_no_more
from autopar.planner.explainers import Explainer, with_explainer
from autopar.planner.fitting_candidates import find_fitting
from autopar.planner.inter_op.candidates import Candidate, Searching
from autopar.planner.inter_op.config import MeshChoices
from autopar.planner.inter_op.mesh_configuration import MeshConfiguration
from autopar.planner.inter_op.optimality import proof
from autopar.planner.intra_op.explain import InsideExplained, Solved, operator_explainer
from autopar.planner.no_plan_fits import check_total, no_plan_fits, no_rehearsed_step_fits
from autopar.planner.predict import as_plan
from autopar.planner.search_options import SearchOptions
from autopar.schedule.builders import SCHEDULES


@dataclass(frozen=True)
class _Preference:
    """Shares of the step that a plan must gain to be preferred to a simpler one."""

    several: float  # devices to one
    # Micro-batches on one device to the plain model, which has no overhead and fits the caches worse; and more of them
    # on replicas of the whole model to fewer.
    splitting: float
    same: float  # plans whose steps differ by less count as equally fast


_MEASURED = _Preference(several=0.01, splitting=0.05, same=0.002)
_AHEAD = _Preference(several=1e-4, splitting=1e-4, same=1e-4)  # nothing is measured, so predictions alone decide
_RUNNERS_UP = 4


def make_plan(costs: CostGraph, options: SearchOptions, meshes: MeshChoices | None = None) -> Plan:
    """The fastest plan for `costs` that `options` allow. `meshes`: that its stages may have.

    Raises InputError for options that contradict the batch and InfeasibleError if nothing fits the memory.
    """
    return find_plans(costs, options, 1, meshes)[0]


def find_plans(costs: CostGraph, options: SearchOptions, most: int, meshes: MeshChoices | None = None) -> list[Plan]:
    """Up to `most` different plans, by predicted time. Raises like `make_plan`.

    Of the workers that share a GPU they use one, unless hints or meshes ask for more.
    """
    _check(costs, options)
    check_total(costs, options)
    offered = costs.devices
    if not options.constraints.stage_of and meshes is None:
        costs = one_worker_per_gpu(costs)
    found = find_fitting(costs, options, _choose, meshes)
    searching, candidates, best = found.searching, found.candidates, found.best
    if best is None:
        raise no_plan_fits(searching) if math.isinf(found.excess) else no_rehearsed_step_fits(found.excess)
    costs = searching.costs  # with the meshes that were looked at
    others = [c for c in _distinct(candidates) if c is not best]
    runners_up = tuple(RunnerUp(str(c.arrangement), c.timeline.step_time) for c in others[:_RUNNERS_UP])
    plans = []
    for candidate in itertools.chain([best], itertools.islice(filter(found.fits, others), most - 1)):
        plan = as_plan(
            costs,
            searching.atoms,
            candidate.arrangement,
            candidate.step,
            candidate.timeline,
            options.optimizer,
            found.peaks_of(candidate),
        )
        proven = proof(searching, candidate)
        names = tuple(device.name for device in offered)
        shared = shared_gpu_notes(names, used=plan.used_devices)
        plan = replace(
            plan,
            stages=tuple(stage.within(options.memory_limit) for stage in plan.stages),
            devices=names,
            device_kinds=tuple(device.kind for device in offered),
            notes=(
                *_notes(searching, candidate, candidates),
                *found.peaks_of(candidate).notes,
                *shared,
                *candidate.step.notes,
            ),
            objective=candidate.solution.objective,
            bound=proven.bound,
            searched_bound=proven.searched,
            optimality=proven.sentence,
            runners_up=runners_up,
        )
        plan = with_unproven_split(plan, options.unproven)
        inside = _operators_explained(costs, candidate.arrangement.configurations) if costs.configurations else None
        again = partial(make_plan, meshes=meshes)
        plans.append(with_explainer(plan, Explainer(explanation(searching, candidate, candidates, again), inside)))
    return plans


def _operators_explained(costs: CostGraph, configurations: Sequence[str]) -> Callable[[Plan, str], InsideExplained]:
    def solved(stage: int) -> Solved | None:
        configuration = costs.configuration.get(configurations[stage])
        return configuration.solved() if isinstance(configuration, MeshConfiguration) else None

    return operator_explainer(solved)


def _choose(costs: CostGraph, candidates: Sequence[Candidate]) -> Candidate:
    """The fastest candidate, with five preferences.

    0. No more CPU workers than cores, unless more are faster by more than `several`.
    1. One device group, if several are faster by less than `several`.
    2. On one group the plain model, unless micro-batches are faster by more than `splitting`.
    3. On replicas of the whole model the fewest micro-batches, unless more are faster by more than `splitting`: small
       ones take longer among other work than when they were measured.
    4. Among equally fast ones (`same`) the one on the fewest devices, and then with the lowest peak of memory.
    """
    ahead = costs.cluster is not None
    prefer = _AHEAD if ahead else _MEASURED

    def within(share: float, some: Sequence[Candidate]) -> list[Candidate]:
        fastest = min((c.timeline.step_time for c in candidates), default=0.0)
        return [c for c in some if c.timeline.step_time <= fastest * (1 + share)]

    alone = [c for c in candidates if costs.crowding(c.arrangement.n_groups) <= 1]
    candidates = alone if within(prefer.several, alone) else candidates
    # One mesh is one group; at hand it is preferred to several groups only where it is faster.
    single = [c for c in candidates if c.arrangement.n_groups == 1 and (ahead or c.arrangement.n_devices == 1)]
    if within(prefer.several, single):
        plain = [c for c in single if c.arrangement.plain]
        near = within(prefer.splitting, plain) or within(prefer.several, single)
    else:
        near = within(prefer.same, candidates)
        if not ahead and any(c.arrangement.replicates_the_model for c in near):
            replicas = [c for c in within(prefer.splitting, candidates) if c.arrangement.replicates_the_model]
            least = min(c.arrangement.n_microbatches for c in replicas)
            near = [c for c in replicas if c.arrangement.n_microbatches == least]
    simplest = {name: place for place, name in enumerate(SCHEDULES)}
    return min(
        near,
        key=lambda c: (
            c.arrangement.n_devices,
            max(c.timeline.peak_memory or (0,)),
            c.arrangement.n_microbatches,
            simplest[c.arrangement.schedule],
            c.timeline.step_time,
        ),
    )


def _distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates by predicted time; of those that differ only in the number of micro-batches, the fastest."""
    found: dict[tuple[object, ...], Candidate] = {}
    for candidate in sorted(candidates, key=lambda c: (c.timeline.step_time, c.arrangement.n_microbatches)):
        arrangement = candidate.arrangement
        key = (arrangement.stages, arrangement.groups, arrangement.recompute, arrangement.schedule)
        found.setdefault(key, candidate)
    return list(found.values())


def _notes(searching: Searching, best: Candidate, candidates: Sequence[Candidate]) -> tuple[str, ...]:
    costs, options = searching.costs, searching.options
    notes = list(costs.notes)
    if options.one_microbatch_because:
        notes.append(f"{ONE_MICROBATCH}{options.one_microbatch_because}")
    used, offered = best.arrangement.n_devices, len(costs.devices)
    if costs.crowding(offered) > 1:
        notes.append(
            f"{offered if costs.ranks is None else costs.ranks.per_machine} CPU workers share {costs.cores} cores: "
            "more workers than cores wait for each other, and are priced so"
        )
    if used < offered:
        more = [c for c in candidates if c.arrangement.n_devices > used]
        if more:
            rival = min(more, key=lambda c: c.timeline.step_time)
            mine, its = (one.timeline.step_time * 1e3 for one in (best, rival))
            than = f"{its:.3g} ms a step, this one {mine:.3g} ms" if f"{its:.3g}" != f"{mine:.3g}" else "as long"
            on = rival.arrangement.n_devices
            notes.append(f"uses {used} of {offered} devices: the best plan on {on} takes {than}")
        else:
            notes.append(f"uses {used} of {offered} devices: {why_no_more(searching, best)}")
    return tuple(notes)


def _check(costs: CostGraph, options: SearchOptions) -> None:
    m = options.n_microbatches
    if not costs.devices:
        raise InputError("no devices to plan for; give at least one")
    if m is not None and m < 1:
        raise InputError(f"n_microbatches must be at least 1, got {m}")
    if m is not None and m > max(costs.batch_size, 1):
        raise InputError(f"n_microbatches={m}, but the batch has {costs.batch_size} samples; give at most that")
    if options.schedule is not None and options.schedule not in SCHEDULES:
        raise InputError(f"schedule must be one of {', '.join(SCHEDULES)}, got {options.schedule!r}")
    for table in costs.tables:
        for what, array in (("forward", table.forward), ("backward", table.backward)):
            for name, seconds in zip(table.nodes, array.min(axis=0), strict=True):
                if not (math.isfinite(seconds) and seconds >= 0):
                    raise InputError(
                        f"the {what} time of {costs.operators[name].key} on {table.kind} is {seconds} s; "
                        "times must be finite and not negative"
                    )
