"""The stage partition problem by its definition, applied to every partition there is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from hypothesis import strategies as st

from autopar.costs.gradient_reduction import ReductionCurve
from autopar.planner.inter_op.atom_times import PassSeconds
from autopar.planner.inter_op.problem import DeviceKind, Gradients, Launches, Problem, Space
from autopar.planner.inter_op.stage_bytes import Shared, Stepped, Value
from autopar.schedule.builders import make_schedule
from autopar.schedule.clock import Phase
from cost_models import HostCosts
from cost_models.memory.optimizer_step import NO_STEP, OptimizerRates, StepShare


def all_reduce(replicas: int) -> ReductionCurve:
    """Latency and bytes of a made-up network, where the problem's bytes are few."""
    return ReductionCurve.of(lambda nbytes: (replicas - 1) * (0.5 + nbytes / 8))


@dataclass(frozen=True)
class OracleStage:
    atoms: frozenset[int]
    kind: int
    replicas: int
    recompute: bool


Stages = tuple[OracleStage, ...]


def closed_sets(n: int, edges: set[tuple[int, int]]) -> list[frozenset[int]]:
    """All sets of atoms that are closed under predecessors."""
    subsets = (frozenset(s) for size in range(n + 1) for s in itertools.combinations(range(n), size))
    return [s for s in subsets if all(a in s for a, b in edges if b in s)]


def cut_matrix(n: int, cuts: list[frozenset[int]]) -> np.ndarray:
    return np.array([[atom in cut for atom in range(n)] for cut in cuts])


def space_of(problem: Problem, stage: OracleStage) -> Space:
    """What the stage holds and sends on its kind of devices."""
    return problem.kinds[stage.kind].space or problem.space


def received(problem: Problem, stage: OracleStage) -> list[Value]:
    atoms = stage.atoms
    return [v for v in space_of(problem, stage).values if v.producer not in atoms and atoms & set(v.consumers)]


def pass_times(problem: Problem, stage: OracleStage) -> tuple[float, float, float]:
    """Forward, backward and its weight part: each pass takes the longer of its kernels and its launches."""
    k, host = stage.kind, problem.launches
    nothing = np.zeros_like(problem.forward)
    arrays = problem.forward, problem.backward, nothing if problem.weight is None else problem.weight
    launched = (nothing, nothing, nothing) if host is None else host.each
    start = 0.0 if host is None else float(host.start[k])

    def total(array: np.ndarray) -> float:
        return float(sum(array[k, a] for a in stage.atoms))

    def longer(kernels: float, launches: float) -> float:
        return max(kernels, launches + start) if kernels else max(kernels, launches)

    (f, b, w), (lf, lb, lw) = map(total, arrays), map(total, launched)
    if problem.weight is None:
        return longer(f, lf), longer(b, lb), 0.0
    return longer(f, lf), longer(b - w, lb - lw) + longer(w, lw), longer(w, lw)


def optimizer_time(problem: Problem, stage: OracleStage) -> float:
    rates = problem.kinds[stage.kind].optimizer
    shares = [s.share for s in space_of(problem, stage).stepped if stage.atoms & set(s.atoms)]
    return 0.0 if rates is None else float(rates.seconds(StepShare(*map(sum, zip(NO_STEP, *shares, strict=True)))))


def stage_time(problem: Problem, stage: OracleStage) -> float:
    kind, share = problem.kinds[stage.kind], problem.bytes_share
    forward, backward, _ = pass_times(problem, stage)
    seconds = forward + backward
    seconds += forward if stage.recompute else 0.0
    actions = 1 if not problem.backward.any() else 2 if problem.weight is None else 3
    seconds += actions * problem.overhead_of(stage.recompute)
    values = received(problem, stage)
    for nbytes in (sum(v.nbytes for v in values), sum(v.grad_nbytes for v in values)):
        if nbytes > 0:
            seconds += kind.latency + nbytes * share * kind.seconds_per_byte
    sent = [v for v in space_of(problem, stage).values if v.producer in stage.atoms and set(v.consumers) - stage.atoms]
    return float(seconds + sum(v.nbytes for v in sent) * share * kind.send_seconds_per_byte)


def shared_bytes(items: tuple[Shared, ...], atoms: frozenset[int]) -> float:
    return sum(item.nbytes for item in items if atoms & set(item.atoms))


@cache
def most_in_flight(schedule: str, n_microbatches: int, replicas: int, after: int, devices: int) -> int:
    """Micro-batches that a replica holds at most, counted in the schedule's table.

    The stage has `after` of the `devices` behind it, and all others before it.
    """
    before = devices - replicas - after
    ranks = [*([before] if before else []), replicas, *[1] * after]
    table = make_schedule(schedule, n_microbatches, ranks)
    most = 0
    for slot in table.slots_of(1 if before else 0):
        held = 0
        for action in table.actions[slot]:
            held += action.phase is Phase.FORWARD
            most = max(most, held)
            held -= action.phase in (Phase.BACKWARD, Phase.WEIGHT)
    return most


def needed_bytes(problem: Problem, stages: Stages, index: int, devices: int) -> float:
    stage, share = stages[index], problem.bytes_share
    after = sum(later.replicas for later in stages[index + 1 :])
    held = most_in_flight(problem.schedule, problem.n_microbatches, stage.replicas, after, devices)
    space = space_of(problem, stage)
    arriving = sum(v.nbytes for v in received(problem, stage))
    saved = shared_bytes(space.saved, stage.atoms)
    once = shared_bytes(space.resident, stage.atoms) + share * max(space.transient[a] for a in stage.atoms)
    if stage.recompute:
        return float(once + share * saved + held * (share * arriving))
    return float(once + held * (share * (saved + arriving)))


def objective(problem: Problem, stages: Stages) -> float:
    total, slowest, m = 0.0, 0.0, problem.n_microbatches
    for stage in stages:
        time = stage_time(problem, stage)
        weight = pass_times(problem, stage)[2]
        delayed = min(2 * (weight + problem.overhead_of(stage.recompute)), time) if problem.weight is not None else 0.0
        gradient = shared_bytes(space_of(problem, stage).gradients, stage.atoms)
        kind = problem.kinds[stage.kind]
        reduction = float(kind.reduction(stage.replicas, Gradients(np.array(gradient))))
        reduction += 0.0 if problem.once is None else sum(problem.once[stage.kind, a] for a in stage.atoms)
        reduction += shared_bytes(space_of(problem, stage).once, stage.atoms) + optimizer_time(problem, stage)
        tied = sum(
            g.nbytes
            for g in space_of(problem, stage).gradients
            if stage.atoms & set(g.atoms) and set(g.atoms) - stage.atoms
        )
        reduction += float(kind.exchanged(Gradients(np.array(tied))))
        total += (time - delayed) if problem.sum_counts else 0.0
        slowest = max(slowest, (math.ceil(m / stage.replicas) - 1) * time + delayed + reduction)
    return total + slowest


def lacking(problem: Problem, stages: Stages, devices: int) -> float:
    memory = [problem.kinds[s.kind].memory for s in stages]
    return max(needed_bytes(problem, stages, i, devices) - memory[i] for i in range(len(stages)))


def all_partitions(problem: Problem, counts: tuple[int, ...]) -> Iterator[Stages]:
    """Every chain of the problem's cuts with every choice of devices that hints allow, whether or not it fits."""
    cuts = [frozenset(np.flatnonzero(row).tolist()) for row in problem.space.cuts]
    most = min(problem.max_replicas, problem.n_microbatches)
    recompute = (False, True) if problem.may_recompute or problem.space.recomputed else (False,)
    everything = cuts[-1]

    def extend(done: frozenset[int], left: tuple[int, ...], place: int) -> Iterator[Stages]:
        if done == everything:
            yield ()
            return
        for cut in cuts:
            if not done < cut:
                continue
            atoms = cut - done
            pins = {p for a, p in problem.space.pinned if a in atoms}
            must = any(a in atoms for a in problem.space.recomputed)
            may = not any(a in atoms for a in problem.space.unrepeatable)
            if pins - {place}:
                continue
            for kind, pool in enumerate(problem.pools):
                for replicas in range(1, min(most, left[pool]) + 1):
                    rest = (*left[:pool], left[pool] - replicas, *left[pool + 1 :])
                    for again in recompute:
                        if may if again else not must:
                            stage = OracleStage(atoms, kind, replicas, again)
                            for later in extend(cut, rest, place + 1):
                                yield (stage, *later)

    return extend(frozenset(), counts, 0)


@st.composite
def problems(draw: st.DrawFn, *, line: bool = False, most: int = 5) -> Problem:
    """Small problems over all cuts of a small graph, with small whole costs, where ties, zeros and memory limits that
    just fit are common."""
    n = draw(st.integers(1, most))
    counts = draw(st.sampled_from([(1,), (2,), (4,), (1, 1), (2, 1), (1, 3)]))
    pools = draw(st.sampled_from([(0,), (0, 0)])) if len(counts) == 1 else draw(st.sampled_from([(0, 1), (0, 1, 0)]))
    whole = st.integers(0, 9).map(float)
    atoms = st.integers(0, n - 1)

    def array(*shape: int) -> np.ndarray:
        size = math.prod(shape)
        return np.array(draw(st.lists(whole, min_size=size, max_size=size))).reshape(shape)

    values = []
    for producer in range(n - 1):
        consumers = draw(st.lists(st.integers(producer + 1, n - 1), max_size=3))
        values.append(Value(producer, tuple(consumers), draw(whole), draw(whole)))
    edges = {(v.producer, c) for v in values for c in v.consumers}
    if line:
        edges |= {(a, a + 1) for a in range(n - 1)}
    shared = st.lists(st.builds(Shared, whole, st.lists(atoms, max_size=3).map(tuple)), max_size=4).map(tuple)
    share = st.builds(StepShare, whole, whole, st.just(1.0))
    stepped = st.lists(st.builds(Stepped, share, st.lists(atoms, max_size=3).map(tuple)), max_size=2).map(tuple)
    memory = st.one_of(st.integers(0, 120).map(float), st.just(math.inf))
    third = st.integers(0, 9).map(lambda thirds: thirds / 3)
    m = draw(st.sampled_from([1, 2, 3, 4, 8]))
    pinned = draw(st.one_of(st.just(()), st.lists(st.tuples(atoms, st.integers(0, 2)), max_size=2).map(tuple)))
    pinned = tuple({atom: (atom, place) for atom, place in pinned}.values())
    space = Space(
        cuts=cut_matrix(n, closed_sets(n, edges)),
        values=tuple(values),
        resident=draw(shared),
        gradients=draw(shared),
        saved=draw(shared),
        transient=array(n),
        stepped=draw(stepped),
        pinned=_gathered(pinned),
        recomputed=draw(st.one_of(st.just(()), st.lists(atoms, max_size=2).map(tuple))),
        unrepeatable=draw(st.one_of(st.just(()), st.lists(atoms, max_size=1).map(tuple))),
    )
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "zb-h1"]))
    backward = array(len(pools), n)

    weight = np.minimum(array(len(pools), n), backward) if schedule == "zb-h1" else None

    def launched() -> Launches:
        back = array(len(pools), n)
        each = PassSeconds(array(len(pools), n), back, np.minimum(array(len(pools), n), back))
        return Launches(each, array(len(pools)))

    def other() -> Space:
        """The same cuts and hints, other bytes."""
        held = {name: draw(shared) for name in ("resident", "gradients", "saved", "once")} | {"stepped": draw(stepped)}
        sent = tuple(replace(v, nbytes=draw(whole), grad_nbytes=draw(whole)) for v in space.values)
        return replace(space, values=sent, transient=array(n), **held)

    return Problem(
        space=space,
        forward=array(len(pools), n),
        backward=backward,
        weight=weight,
        launches=launched() if draw(st.booleans()) else None,
        n_microbatches=m,
        schedule=schedule,
        kinds=tuple(
            DeviceKind(
                *(str(kind), counts[pool], draw(memory), draw(third), draw(third), draw(third), draw(third)),
                pool=pool,
                space=other() if pools.count(pool) > 1 else None,
                all_reduce=draw(st.sampled_from([None, all_reduce])),
                exchange=draw(st.sampled_from([None, all_reduce(2)])),
                optimizer=draw(st.sampled_from([None, OptimizerRates(2.0, HostCosts(1, 0, 1, 0, 0.5, 0.25))])),
            )
            for kind, pool in enumerate(pools)
        ),
        overhead=draw(st.sampled_from([0.0, 0.5])),
        once=draw(st.sampled_from([None, array(len(pools), n)])),
        max_replicas=draw(st.integers(1, 4)),
        may_recompute=draw(st.booleans()),
        share=draw(st.sampled_from([1.0, 0.5])),  # whole bytes and halves: sums that fit exactly do so in floats, too
    )


def _gathered(pinned: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """At most one atom a place: what is pinned together is one atom before it comes to the search."""
    return tuple({place: (atom, place) for atom, place in pinned}.values())
