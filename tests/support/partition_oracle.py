"""The stage partition problem by its definition, applied to every partition there is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st

from autopar.costs.gradient_reduction import ReductionCurve
from autopar.costs.sends import Lane
from autopar.plan.recompute import Recompute
from autopar.planner.inter_op.atom_times import Behind, CoreSeconds, PassSeconds
from autopar.planner.inter_op.device_kind import DeviceKind, Gradients
from autopar.planner.inter_op.problem import Launches, Overlapping, Problem
from autopar.planner.inter_op.space import Space
from autopar.planner.inter_op.stage_bytes import Shared, Stepped, Value
from autopar.schedule.builders import INTERLEAVED, SCHEDULES, SPLIT_BACKWARD, V_SHAPED, make_schedule
from autopar.schedule.clock import Phase
from cost_models import HostCosts
from cost_models.collectives.overlap import SLOWDOWN
from cost_models.memory.optimizer_step import NO_STEP, OptimizerRates, StepShare


def all_reduce(replicas: int) -> ReductionCurve:
    """Latency and bytes of a made-up network, where the problem's bytes are few."""
    return ReductionCurve.of(lambda nbytes: (replicas - 1) * (0.5 + nbytes / 8))


@dataclass(frozen=True)
class OracleStage:
    atoms: frozenset[int]
    kind: int
    replicas: int
    recompute: int  # a `Recompute`


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
    if stage.recompute == Recompute.SELECTIVE and problem.cores is not None:
        b += total(problem.cores.kernels)
        if problem.launches is not None or problem.overlapping is not None:  # else times have no host apart
            lb += total(problem.cores.host)
    nf, nb, nw = network_times(problem, stage)
    if stage.recompute == Recompute.SELECTIVE and problem.cores is not None and problem.overlapping is not None:
        nb += total(problem.cores.network)
    full = stage.recompute == Recompute.FULL and problem.blocks is not None
    if full and problem.blocks is not None:
        b += total(problem.blocks.kernels)
        if problem.launches is not None or problem.overlapping is not None:
            lb += total(problem.blocks.host)
        nb += total(problem.blocks.network) if problem.overlapping is not None else 0.0
    if problem.weight is None:
        return max(longer(f, lf), nf), max(longer(b, lb), nb), 0.0
    weight = max(longer(w, lw), nw)
    return max(longer(f, lf), nf), max(longer(b - w, lb - lw), nb - nw) + weight, 0.0 if full else weight


def network_times(problem: Problem, stage: OracleStage) -> tuple[float, float, float]:
    """Of all collectives in a forward, a backward and its weight part; 0 where none runs behind kernels."""
    if problem.overlapping is None:
        return 0.0, 0.0, 0.0
    forward, backward, weight = (
        float(sum(array[stage.kind, a] for a in stage.atoms)) for array in problem.overlapping.network
    )
    return forward, backward, weight


def not_hidden(problem: Problem, stage: OracleStage, reduction: float) -> float:
    """What a step takes longer by `reduction` and by collectives once a step that run behind passes.

    The last of the gradients and the first of the parameters, a bucket of each, have nothing to run behind. While the
    others run, kernels do 1 / (1 + SLOWDOWN) of their work.
    """
    if problem.overlapping is None:
        return reduction
    kind, (gradients, parameters, buckets) = problem.kinds[stage.kind], problem.overlapping.behind
    g, p = (float(sum(array[stage.kind, a] for a in stage.atoms)) for array in (gradients, parameters))
    bucket = float(buckets[stage.kind])
    if problem.overlapping.reductions:
        g, reduction = g + reduction, 0.0
        bucket += kind.bucket(stage.replicas)
    plain = replace(stage, recompute=Recompute.NONE)  # gradients are there when the backward proper makes them
    (forward, backward, weight), (nf, nb, nw) = pass_times(problem, plain), network_times(problem, stage)
    total = reduction
    for seconds, taken in ((g, backward - nb if problem.weight is None else weight - nw), (p, forward - nf)):
        apart = min(bucket, seconds)
        done_meanwhile = (seconds - apart) / (1 + SLOWDOWN)
        total += apart + max(0.0, seconds - apart - taken, seconds - apart - done_meanwhile)
    return total


def optimizer_time(problem: Problem, stage: OracleStage) -> float:
    rates = problem.kinds[stage.kind].optimizer
    shares = [s.share for s in space_of(problem, stage).stepped if stage.atoms & set(s.atoms)]
    return 0.0 if rates is None else float(rates.seconds(StepShare(*map(sum, zip(NO_STEP, *shares, strict=True)))))


def n_actions(problem: Problem) -> int:
    return 1 if not problem.backward.any() else 2 if problem.weight is None else 3


def overhead(problem: Problem, stage: OracleStage) -> float:
    """Seconds of every action of a stage: of the only one others than of one among several."""
    alone = len(stage.atoms) == problem.n_atoms and stage.replicas == 1
    return problem.overhead_of(stage.recompute, alone=alone)


def way_back(problem: Problem, stage: OracleStage) -> float:
    """Seconds of all of a stage's actions but the forward."""
    forward, backward, _ = pass_times(problem, stage)
    again = forward if stage.recompute == Recompute.STAGE else 0.0
    actions = (n_actions(problem) - 1) * overhead(problem, stage)
    return float(backward + again + actions + (handling(problem, stage) if n_actions(problem) > 1 else 0.0))


def stage_time(problem: Problem, stage: OracleStage) -> float:
    kind, share = problem.kinds[stage.kind], problem.bytes_share
    forward, backward, _ = pass_times(problem, stage)
    seconds = forward + backward
    seconds += forward if stage.recompute == Recompute.STAGE else 0.0
    actions = n_actions(problem)
    seconds += actions * overhead(problem, stage)
    seconds += sum(arriving(problem, stage, backward) for backward in (False, True))
    seconds += min(actions, 2) * handling(problem, stage)
    return float(seconds + sum(v.nbytes for v in sent(problem, stage)) * share * kind.send_seconds_per_byte)


def sent(problem: Problem, stage: OracleStage) -> list[Value]:
    return [v for v in space_of(problem, stage).values if v.producer in stage.atoms and set(v.consumers) - stage.atoms]


def handling(problem: Problem, stage: OracleStage) -> float:
    """Of the messages of a pass: one to later stages and one from earlier ones, as far as there are any."""
    ends = [any(v.nbytes for v in values) for values in (sent(problem, stage), received(problem, stage))]
    return problem.handling * sum(ends)


def each_more(problem: Problem, stage: OracleStage) -> float:
    """Seconds of every micro-batch but the first. Sends behind passes: a forward goes on while the next input comes."""
    if not problem.sends_behind:
        return stage_time(problem, stage)
    kind = problem.kinds[stage.kind]
    forward, backward = pass_times(problem, stage)[0], way_back(problem, stage)
    nbytes = sum(v.nbytes for v in sent(problem, stage)) * problem.bytes_share
    forward += overhead(problem, stage) + nbytes * kind.send_seconds_per_byte + handling(problem, stage)
    there, back = (arriving(problem, stage, way) for way in (False, True))
    if problem.schedule in INTERLEAVED:
        return float(max(forward + backward, there, back))
    return float(max(forward, there) + max(backward, back))


def arriving(problem: Problem, stage: OracleStage, backward: bool) -> float:
    """Seconds of what comes in before a pass; between nodes each value whole or scattered, as is faster."""
    lane, known = problem.kinds[stage.kind].lane(stage.replicas), space_of(problem, stage).lane
    values = [(v, v.grad_nbytes if backward else v.nbytes) for v in received(problem, stage)]
    if not any(nbytes for _, nbytes in values):
        return 0.0
    seconds = lane.latency
    for value, nbytes in values:
        if lane.across and known and value.copies > 1 and nbytes:
            nbytes = min(nbytes, nbytes / value.copies + value.gather / known)
        seconds += nbytes * lane.seconds_per_byte * problem.bytes_share
    return seconds


def lanes(latency: float, seconds_per_byte: float, more: float, most: int) -> Callable[[int], Lane]:
    """Of stages that lie in a node with up to `most` replicas, and fill nodes with more."""
    inside, across = Lane(latency, seconds_per_byte), Lane(latency + 0.5, seconds_per_byte + more, across=True)
    return lambda replicas: inside if replicas <= most else across


def shared_bytes(items: tuple[Shared, ...], atoms: frozenset[int]) -> float:
    return sum(item.nbytes for item in items if atoms & set(item.atoms))


@cache
def most_in_flight(schedule: str, n_microbatches: int, replicas: int, after: int, groups: int) -> int:
    """Micro-batches that a replica holds at most, counted in the schedule's table.

    The stage has `after` of the `groups`, devices or meshes, behind it, and all others before it.
    """
    if schedule in V_SHAPED:  # half of what a slot holds of both stages
        return math.ceil(make_schedule(schedule, n_microbatches, (1,) * groups, chunks=2).in_flight(0) / 2)
    if schedule in INTERLEAVED:  # counted as on the first of as many ranks as there can be
        replicas, after = 1, groups - 1
    before = groups - replicas - after
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


def most_groups(problem: Problem, counts: tuple[int, ...]) -> int:
    """Devices or meshes that a plan has at most."""
    kinds = list(zip(problem.kinds, problem.pools, strict=True))
    widths = [[kind.width for kind, own in kinds if own == pool] for pool in range(len(counts))]
    return sum(max(count // width for width in own) for count, own in zip(counts, widths, strict=True))


def needed_bytes(problem: Problem, stages: Stages, index: int, groups: int) -> float:
    stage = stages[index]
    after = sum(later.replicas for later in stages[index + 1 :])
    held = most_in_flight(problem.schedule, problem.n_microbatches, stage.replicas, after, groups)
    space = space_of(problem, stage)
    arriving = sum(v.nbytes for v in received(problem, stage))
    shares = [s.share for s in space.stepped if stage.atoms & set(s.atoms)]
    stepping = shared_bytes(space.resident, stage.atoms) + sum(share.held for share in shares)
    return max(stepping, bytes_of_passes(problem, stage, held, arriving))


def bytes_of_passes(problem: Problem, stage: OracleStage, held: int, arriving: float) -> float:
    """`held`: micro-batches in flight. `arriving`: bytes that the stage receives of the whole batch."""
    space, share = space_of(problem, stage), problem.bytes_share
    saved = shared_bytes(space.saved, stage.atoms)
    once = shared_bytes(space.resident, stage.atoms) + share * max(space.transient[a] for a in stage.atoms)
    if stage.recompute == Recompute.STAGE:
        return float(once + share * saved + held * (share * arriving))
    if stage.recompute == Recompute.FULL:
        assert space.block is not None
        once = shared_bytes(space.resident, stage.atoms) + share * max(space.block[a] for a in stage.atoms)
        return float(once + held * (share * (shared_bytes(space.kept, stage.atoms) + arriving)))
    if stage.recompute == Recompute.SELECTIVE:
        assert space.core is not None
        once += share * max(space.core[a] for a in stage.atoms)
        saved -= shared_bytes(space.rebuilt, stage.atoms)
    return float(once + held * (share * (saved + arriving)))


def objective(problem: Problem, stages: Stages, before: frozenset[int] = frozenset()) -> float:
    """`before`: atoms of stages before these."""
    total, slowest, m = 0.0, 0.0, problem.n_microbatches
    for stage in stages:
        time = stage_time(problem, stage)
        weight = pass_times(problem, stage)[2]
        single, split = m <= stage.replicas and problem.chunks == 1, problem.weight is not None
        parts = 1 if single else problem.most_delayed_parts
        delayed = min(parts * (weight + overhead(problem, stage)), way_back(problem, stage)) if split else 0.0
        gradient = shared_bytes(space_of(problem, stage).gradients, stage.atoms)
        kind = problem.kinds[stage.kind]
        reduction = not_hidden(problem, stage, float(kind.reduction(stage.replicas, Gradients(np.array(gradient)))))
        reduction += 0.0 if problem.once is None else sum(problem.once[stage.kind, a] for a in stage.atoms)
        reduction += shared_bytes(space_of(problem, stage).once, stage.atoms) + optimizer_time(problem, stage)
        tied = sum(
            g.nbytes
            for g in space_of(problem, stage).gradients
            if stage.atoms & set(g.atoms) and set(g.atoms) - stage.atoms
        )
        reduction += float(kind.exchanged(Gradients(np.array(tied))))
        total += (time - delayed) if problem.sum_counts else 0.0
        passes = (math.ceil(m / stage.replicas) - 1) * each_more(problem, stage) + delayed
        if single and not split:
            total -= lacking_accumulation(problem, stage) if problem.sum_counts else 0.0
        else:
            passes = max(0.0, passes - lacking_accumulation(problem, stage))
        if not problem.sum_counts or problem.chunks > 1 or (split and parts > 1) or not before:
            behind = 0.0
        else:
            _, backward, weight = pass_times(problem, replace(stage, atoms=before, recompute=Recompute.NONE))
            behind = backward - weight + problem.overhead
        late = passes + reduction - behind if single else passes + max(0.0, reduction - behind)
        slowest = max(slowest, late)
        before |= stage.atoms
    return total + slowest


def lacking_accumulation(problem: Problem, stage: OracleStage) -> float:
    """What the first micro-batch of a replica takes less, which adds its gradients to none."""
    if problem.accumulation is None:
        return 0.0
    _, backward, weight = pass_times(problem, stage)
    own = float(sum(problem.accumulation[stage.kind, a] for a in stage.atoms))
    return min(own, backward if problem.weight is None else weight)


def lacking(problem: Problem, stages: Stages, counts: tuple[int, ...]) -> float:
    """Bytes that a device of some stage lacks. Zero-bubble schedules hold as with as many groups as possible."""
    memory, groups = [problem.kinds[s.kind].memory for s in stages], most_groups(problem, counts)
    return max(needed_bytes(problem, stages, i, groups) - memory[i] for i in range(len(stages)))


def allowed(space: Space, again: Recompute, atoms: frozenset[int], may: bool, must: bool) -> bool:
    """Whether a stage may recompute so, and gains anything by it."""
    if again == Recompute.STAGE:
        return may
    if again == Recompute.FULL:
        return not atoms.isdisjoint(space.layered) and atoms.isdisjoint(space.outside)
    return not must and (again == Recompute.NONE or shared_bytes(space.rebuilt, atoms) > 0)


def all_partitions(problem: Problem, counts: tuple[int, ...]) -> Iterator[Stages]:
    """Every chain of the problem's cuts with every choice of devices that hints allow, whether or not it fits."""
    cuts = [frozenset(np.flatnonzero(row).tolist()) for row in problem.space.cuts]
    most = min(problem.max_replicas, problem.n_microbatches)
    modes = [Recompute.NONE]
    if problem.may_recompute or problem.space.recomputed:
        modes.append(Recompute.STAGE)
    if problem.may_recompute and problem.cores is not None:
        modes.append(Recompute.SELECTIVE)
    if problem.may_recompute and problem.blocks is not None:
        modes.append(Recompute.FULL)
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
                width = problem.kinds[kind].width
                for replicas in range(1, min(most, left[pool] // width) + 1):
                    rest = (*left[:pool], left[pool] - replicas * width, *left[pool + 1 :])
                    for again in modes:
                        space = problem.kinds[kind].space or problem.space
                        if allowed(space, again, atoms, may, must):
                            stage = OracleStage(atoms, kind, replicas, again)
                            for later in extend(cut, rest, place + 1):
                                yield (stage, *later)

    return extend(frozenset(), counts, 0)


@st.composite
def problems(draw: st.DrawFn, *, line: bool = False, most: int = 5, widths: bool = False) -> Problem:
    """Small problems over all cuts of a small graph, with small whole costs, where ties, zeros and memory limits that
    just fit are common. `widths`: kinds are meshes of up to three devices, and a pool has several."""
    n = draw(st.integers(1, most))
    counts = draw(st.sampled_from([(4,), (5,), (3, 2)] if widths else [(1,), (2,), (4,), (1, 1), (2, 1), (1, 3)]))
    pools = draw(st.sampled_from([(0,), (0, 0)])) if len(counts) == 1 else draw(st.sampled_from([(0, 1), (0, 1, 0)]))
    whole = st.integers(0, 9).map(float)
    atoms = st.integers(0, n - 1)

    def array(*shape: int) -> np.ndarray:
        size = math.prod(shape)
        return np.array(draw(st.lists(whole, min_size=size, max_size=size))).reshape(shape)

    values = []
    for producer in range(n - 1):
        consumers = draw(st.lists(st.integers(producer + 1, n - 1), max_size=3))
        alike = draw(st.sampled_from([(1, 0.0), (2, 0.5), (4, 0.0), (4, 2.0)]))
        values.append(Value(producer, tuple(consumers), draw(whole), draw(whole), *alike))
    edges = {(v.producer, c) for v in values for c in v.consumers}
    if line:
        edges |= {(a, a + 1) for a in range(n - 1)}
    shared = st.lists(st.builds(Shared, whole, st.lists(atoms, max_size=3).map(tuple)), max_size=4).map(tuple)
    share = st.builds(StepShare, whole, whole, st.just(1.0), whole)
    stepped = st.lists(st.builds(Stepped, share, st.lists(atoms, max_size=3).map(tuple)), max_size=2).map(tuple)

    def rebuilt(saved: tuple[Shared, ...]) -> dict[str, object]:
        """Some of what is saved, and what of it is there at once; less than all of it."""
        some = tuple(saved[: draw(st.integers(0, len(saved)))])
        total = sum(one.nbytes for one in some)
        return {"rebuilt": some, "core": np.minimum(array(n), total)}

    def layers() -> dict[str, Any]:
        """What stages keep and have at work that make layers again, of which some atoms have operators."""
        return {"kept": draw(shared), "block": array(n)}

    memory = st.one_of(st.integers(0, 120).map(float), st.just(math.inf))
    third = st.integers(0, 9).map(lambda thirds: thirds / 3)
    m = draw(st.sampled_from([1, 2, 3, 4, 8]))
    pinned = draw(st.one_of(st.just(()), st.lists(st.tuples(atoms, st.integers(0, 2)), max_size=2).map(tuple)))
    pinned = tuple({atom: (atom, place) for atom, place in pinned}.values())
    kept = draw(shared)
    space = Space(
        cuts=cut_matrix(n, closed_sets(n, edges)),
        values=tuple(values),
        resident=draw(shared),
        gradients=draw(shared),
        saved=kept,
        transient=array(n),
        **rebuilt(kept),
        **layers(),
        layered=draw(st.lists(atoms, max_size=3).map(tuple)),
        outside=draw(st.lists(atoms, max_size=1).map(tuple)),
        stepped=draw(stepped),
        pinned=_gathered(pinned),
        recomputed=draw(st.one_of(st.just(()), st.lists(atoms, max_size=2).map(tuple))),
        unrepeatable=draw(st.one_of(st.just(()), st.lists(atoms, max_size=1).map(tuple))),
        lane=draw(st.sampled_from([0.0, 0.5, 1.0])),
    )
    schedule = draw(st.sampled_from(SCHEDULES))
    backward = array(len(pools), n)

    weight = np.minimum(array(len(pools), n), backward) if schedule in SPLIT_BACKWARD else None

    def launched() -> Launches:
        back = array(len(pools), n)
        each = PassSeconds(array(len(pools), n), back, np.minimum(array(len(pools), n), back))
        return Launches(each, array(len(pools)))

    def overlapping() -> Overlapping:
        back = array(len(pools), n)
        network = PassSeconds(array(len(pools), n), back, np.minimum(array(len(pools), n), back))
        once = array(len(pools), n), array(len(pools), n), array(len(pools))
        return Overlapping(network, Behind(*once), draw(st.booleans()))

    forward = array(len(pools), n)
    launches, overlap = launched() if draw(st.booleans()) else None, overlapping() if draw(st.booleans()) else None

    def again() -> CoreSeconds[np.ndarray]:
        """Some of what a forward does."""
        nothing = np.zeros((len(pools), n))
        host = nothing if launches is None else launches.each.forward
        network = nothing if overlap is None else overlap.network.forward
        return CoreSeconds(*(np.minimum(array(len(pools), n), of) for of in (forward, host, network)))

    def other() -> Space:
        """The same cuts and hints, other bytes."""
        held = {name: draw(shared) for name in ("resident", "gradients", "saved", "once")} | {"stepped": draw(stepped)}
        held |= rebuilt(held["saved"]) | layers()
        sent = tuple(replace(v, nbytes=draw(whole), grad_nbytes=draw(whole)) for v in space.values)
        return replace(space, values=sent, transient=array(n), lane=draw(st.sampled_from([0.0, 0.25])), **held)

    return Problem(
        space=space,
        forward=forward,
        backward=backward,
        weight=weight,
        launches=launches,
        overlapping=overlap,
        n_microbatches=m,
        schedule=schedule,
        most_delayed_parts=draw(st.integers(1, 3)),
        kinds=tuple(
            DeviceKind(
                *(str(kind), counts[pool], draw(memory), *received, draw(third), draw(third)),
                lanes=lanes(*received, draw(third), draw(st.integers(0, 1))) if draw(st.booleans()) else None,
                pool=pool,
                space=other() if pools.count(pool) > 1 else None,
                width=draw(st.integers(1, 3)) if widths else 1,
                all_reduce=draw(st.sampled_from([None, all_reduce])),
                exchange=draw(st.sampled_from([None, all_reduce(2)])),
                optimizer=draw(st.sampled_from([None, OptimizerRates(2.0, HostCosts(1, 0, 1, 0, 0.5, 0.25))])),
            )
            for kind, pool in enumerate(pools)
            for received in [(draw(third), draw(third))]
        ),
        overhead=draw(st.sampled_from([0.0, 0.5])),
        overhead_alone=draw(st.sampled_from([None, 0.25])),
        plain=draw(st.booleans()),
        handling=draw(st.sampled_from([0.0, 0.25])),
        cores=again() if draw(st.booleans()) else None,
        blocks=again() if draw(st.booleans()) else None,
        once=draw(st.sampled_from([None, array(len(pools), n)])),
        accumulation=draw(st.sampled_from([None, np.minimum(array(len(pools), n), backward)])),
        max_replicas=1 if schedule in INTERLEAVED else draw(st.integers(1, 4)),
        may_recompute=draw(st.booleans()),
        sends_behind=schedule in ("gpipe", *INTERLEAVED) and draw(st.booleans()),
        share=draw(st.sampled_from([1.0, 0.5])),  # whole bytes and halves: sums that fit exactly do so in floats, too
    )


def _gathered(pinned: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """At most one atom a place: what is pinned together is one atom before it comes to the search."""
    return tuple({place: (atom, place) for atom, place in pinned}.values())
