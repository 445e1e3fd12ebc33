"""CostGraph -> Plan: the best partition for every number of micro-batches and devices, ranked by the simulator.

The search (`partition.py`) is exact for its objective on the cuts that `atoms.py` keeps; its optimum for every number
of micro-batches and of devices becomes a candidate, and the one that the simulator finds fastest is the plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.costgraph import CostGraph
from autopar.errors import InfeasibleError, InputError
from autopar.plan import Plan
from autopar.schedule import SCHEDULES
from autopar.search.atoms import Atoms, make_atoms
from autopar.search.partition import explain_infeasible, solve
from autopar.search.predict import (
    ACTION_OVERHEAD,
    Arrangement,
    Conditions,
    as_plan,
    atom_times,
    resident_bytes,
    simulated,
)
from autopar.search.problem import Kind, Problem, Shared, Solution
from autopar.simulate import Timeline
from cost_models import Device

# More devices must be faster by this share of the step to be preferred; plans closer than that are equally fast.
_WORTH = 0.01
_SAME = 0.002
# On one device micro-batches only pay where they fit the caches better; the plain model costs nothing else.
_WORTH_SPLITTING = 0.05


@dataclass(frozen=True)
class Options:
    """What the user fixed; None is free."""

    n_microbatches: int | None = None
    schedule: str | None = None
    max_replicas: int | None = None
    memory_limit: float | None = None  # bytes on each device
    optimizer: str = "adamw"
    one_microbatch_because: str = ""  # why the batch may not be split
    least_rows: int = 1  # samples in the smallest micro-batch
    loss_inside: bool = False  # the loss runs in the last stage (train_step): backwards need not wait for all forwards

    @property
    def conditions(self) -> Conditions:
        return Conditions(self.optimizer, self.loss_inside)


@dataclass(frozen=True)
class Candidate:
    """A partition and what the simulator says of it."""

    solution: Solution
    arrangement: Arrangement
    timeline: Timeline


def make_plan(costs: CostGraph, options: Options) -> Plan:
    """The fastest plan for `costs` that `options` allow.

    Raises InputError for options that contradict the batch and InfeasibleError if nothing fits the memory.
    """
    _check(costs, options)
    atoms = make_atoms(costs)
    kinds = _kinds(costs, options)
    counts = _microbatch_counts(costs, options)
    names = [options.schedule] if options.schedule else list(SCHEDULES)
    if not options.loss_inside and options.schedule is None:
        names = ["gpipe"]  # the caller's loss needs the whole output before the first backward
    candidates: list[Candidate] = []
    for m in counts:
        for name in names:
            candidates += _candidates(costs, atoms, kinds, options, m, name)
    if not candidates:
        raise _infeasible(costs, atoms, kinds, options, counts, names[0])
    best = _choose(candidates)
    found = as_plan(costs, atoms, best.arrangement, best.timeline, options.conditions)
    return replace(found, notes=_notes(costs, options, best, candidates))


def _choose(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest; but one device if more are hardly faster, there the plain model unless micro-batches are clearly
    faster, and of what is equally fast what needs least memory."""

    def within(share: float, some: Sequence[Candidate]) -> list[Candidate]:
        fastest = min((c.timeline.step_time for c in candidates), default=0.0)
        return [c for c in some if c.timeline.step_time <= fastest * (1 + share)]

    single = [c for c in candidates if c.arrangement.n_devices == 1]
    if within(_WORTH, single):
        plain = [c for c in single if c.arrangement.n_microbatches == 1]
        near = within(_WORTH_SPLITTING, plain) or within(_WORTH, single)
    else:
        near = within(_SAME, candidates)
    return min(
        near, key=lambda c: (max(c.timeline.peak_memory or (0,)), c.arrangement.n_microbatches, c.timeline.step_time)
    )


def _candidates(
    costs: CostGraph, atoms: Atoms, kinds: tuple[Kind, ...], options: Options, m: int, name: str
) -> list[Candidate]:
    """The optimum for each number of devices, with the times that many busy devices have."""
    found: dict[tuple[int, ...], Candidate] = {}
    most = sum(k.count for k in kinds)
    levels = sorted({min(t.workers, most) for t in costs.tables})
    for level in levels:
        problem = _problem(costs, atoms, kinds, options, m, name, level)
        for used, solution in solve(problem).items():
            busy = sum(used) if m > 1 else 1  # devices that compute at the same time
            nearest = min(levels, key=lambda w: (abs(w - busy), -w))
            if nearest != level:
                continue
            if sum(used) > 1 and m == 1 and options.n_microbatches is None and len(solution.stages) == 1:
                continue  # replicas without micro-batches to share
            spans = tuple(slice(stage.start, stage.stop) for stage in solution.stages)
            arrangement = Arrangement(spans, tuple(assign_devices(costs.devices, solution)), m, name)
            timeline = simulated(costs, atoms, arrangement, options.conditions)
            found[used] = Candidate(solution, arrangement, timeline)
    return list(found.values())


def _problem(
    costs: CostGraph, atoms: Atoms, kinds: tuple[Kind, ...], options: Options, m: int, name: str, workers: int
) -> Problem:
    share = 1 / m
    forward, backward = zip(
        *(atom_times(costs, atoms, kind.name, workers, costs.batch_size / m) for kind in kinds), strict=True
    )
    trained = [s for s, t in atoms.parameters if t and costs.training]
    return Problem(
        forward=np.array(forward),
        backward=np.array(backward),
        values=tuple(replace(v, nbytes=v.nbytes * share, grad_nbytes=v.grad_nbytes * share) for v in atoms.values),
        resident=tuple(
            Shared(resident_bytes(s.nbytes, t, costs, options.optimizer), s.atoms) for s, t in atoms.parameters
        ),
        gradient_bytes=tuple(trained),
        saved=tuple(Shared(s.nbytes * share, s.atoms) for s in atoms.saved),
        transient=atoms.transient * share,
        cut_allowed=atoms.cut_allowed,
        n_microbatches=m,
        schedule=name,
        kinds=kinds,
        max_replicas=options.max_replicas or sum(k.count for k in kinds),
    )


def _kinds(costs: CostGraph, options: Options) -> tuple[Kind, ...]:
    kinds = []
    for name in dict.fromkeys(d.kind for d in costs.devices):
        mine = [d for d in costs.devices if d.kind == name]
        links = [link for (a, b), link in costs.links.items() if any(d.name in (a, b) for d in mine)]
        memory = min(min(d.memory for d in mine), options.memory_limit or math.inf)
        latency = max((link.latency for link in links), default=0.0)
        slowest = min((link.bandwidth for link in links), default=math.inf)
        kinds.append(Kind(name, len(mine), float(memory), latency + ACTION_OVERHEAD, 1 / slowest, costs.accumulate))
    return tuple(kinds)


def _microbatch_counts(costs: CostGraph, options: Options) -> list[int]:
    if options.n_microbatches is not None:
        return [options.n_microbatches]
    if options.one_microbatch_because:
        return [1]
    most = max(1, min(costs.batch_size // options.least_rows, max(16, 4 * len(costs.devices))))
    counts = list(range(1, most + 1))
    return counts if len(counts) <= 24 else sorted({round(x) for x in np.geomspace(1, most, 24)})


def assign_devices(devices: Sequence[Device], solution: Solution) -> list[tuple[str, ...]]:
    """Names of each stage's devices: those of a kind are handed out in the order they were given."""
    kinds = list(dict.fromkeys(d.kind for d in devices))
    free = {k: [d.name for d in devices if d.kind == k] for k in kinds}
    result = []
    for stage in solution.stages:
        mine = free[kinds[stage.kind]]
        result.append(tuple(mine[: stage.replicas]))
        free[kinds[stage.kind]] = mine[stage.replicas :]
    return result


def _notes(costs: CostGraph, options: Options, best: Candidate, candidates: Sequence[Candidate]) -> tuple[str, ...]:
    notes = []
    if options.one_microbatch_because:
        notes.append(f"one micro-batch: {options.one_microbatch_because}")
    used, offered = sum(best.solution.used), len(costs.devices)
    if used < offered:
        more = [c for c in candidates if sum(c.solution.used) > used]
        if more:
            rival = min(more, key=lambda c: c.timeline.step_time)
            notes.append(
                f"uses {used} of {offered} devices: the best plan found on {sum(rival.solution.used)} takes "
                f"{rival.timeline.step_time * 1e3:.2f} ms a step, this one {best.timeline.step_time * 1e3:.2f} ms"
            )
        else:
            notes.append(f"uses {used} of {offered} devices: no feasible plan uses more")
    return tuple(notes)


def _check(costs: CostGraph, options: Options) -> None:
    m = options.n_microbatches
    if m is not None and m < 1:
        raise InputError(f"n_microbatches must be at least 1, got {m}")
    if m is not None and m > max(costs.batch_size, 1):
        raise InputError(f"n_microbatches={m}, but the batch has {costs.batch_size} samples; give at most that")
    if options.schedule is not None and options.schedule not in SCHEDULES:
        raise InputError(f"schedule must be one of {', '.join(SCHEDULES)}, got {options.schedule!r}")


def _infeasible(
    costs: CostGraph,
    atoms: Atoms,
    kinds: tuple[Kind, ...],
    options: Options,
    counts: Sequence[int],
    name: str,
) -> InfeasibleError:
    """Which stage lacks how much, in the plan and with the micro-batches that lack least."""
    most = sum(k.count for k in kinds)
    shortest = None
    for m in counts:
        found = explain_infeasible(_problem(costs, atoms, kinds, options, m, name, most))
        if found is not None and (shortest is None or found.needed - found.available < shortest[0]):
            shortest = (found.needed - found.available, found, m)
    assert shortest is not None, "the search found no plan, yet none lacks memory"
    lack, found, m = shortest
    inside = [
        costs.graph.nodes[n]["module"] for atom in atoms.nodes[found.stage.start : found.stage.stop] for n in atom
    ]
    modules = [p for p in dict.fromkeys(inside) if p] or ["the whole model"]
    return InfeasibleError(
        f"no plan fits the memory: with {m} micro-batches, stage {found.index} ({modules[0]} .. {modules[-1]}) needs "
        f"{_megabytes(found.needed)} on {kinds[found.stage.kind].name} and has {_megabytes(found.available)}, "
        f"{_megabytes(lack)} too little; give more memory or devices, a smaller batch, or an optimizer with less state"
    )


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.4g} MB"
