"""The stage partition search against its definition, applied to every partition there is."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from examples import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from partition_oracle import (
    OracleStage,
    Stages,
    all_partitions,
    lacking,
    most_groups,
    most_in_flight,
    objective,
    problems,
    stage_time,
)

from autopar.planner.inter_op import needed_devices, partition, stage_seconds
from autopar.planner.inter_op.bounds import relaxed_bound
from autopar.planner.inter_op.cuts import line_cuts
from autopar.planner.inter_op.device_kind import DeviceKind
from autopar.planner.inter_op.partition import explain_infeasible, solve
from autopar.planner.inter_op.problem import Problem
from autopar.planner.inter_op.refused_stages import RefusedStage
from autopar.planner.inter_op.solution import Solution
from autopar.planner.inter_op.space import Space
from autopar.planner.inter_op.stage_bytes import Shared, Value
from autopar.planner.inter_op.stage_costs import Costs
from autopar.planner.inter_op.stage_seconds import KnownSeconds


def as_oracle(problem: Problem, solution: Solution) -> Stages:
    cuts = problem.space.cuts
    return tuple(
        OracleStage(frozenset(np.flatnonzero(cuts[s.stop] & ~cuts[s.start]).tolist()), s.kind, s.replicas, s.recompute)
        for s in solution.stages
    )


def least_objective(problem: Problem, counts: tuple[int, ...]) -> float:
    fitting = (s for s in all_partitions(problem, counts) if lacking(problem, s, counts) <= 0)
    return min((objective(problem, s) for s in fitting), default=math.inf)


@pytest.mark.slow
@settings(max_examples=examples(25), deadline=None)
@given(problems())
def test_solve_equals_brute_force_over_all_convex_partitions(problem: Problem) -> None:
    counts = problem.counts
    least = least_objective(problem, counts)
    found = solve(problem)
    assert (found is None) == math.isinf(least)
    if found is not None:
        assert found.objective == pytest.approx(least, rel=1e-9)
        assert found.bound == found.objective


def with_in_flight(problem: Problem, stages: Stages) -> Iterator[tuple[frozenset[int], OracleStage, int]]:
    """(atoms before it, stage, micro-batches that it holds)."""
    groups, before = most_groups(problem, problem.counts), frozenset[int]()
    for index, stage in enumerate(stages):
        after = sum(later.replicas for later in stages[index + 1 :])
        yield (
            before,
            stage,
            most_in_flight(problem.schedule, problem.n_microbatches, stage.replicas, after, groups),
        )
        before |= stage.atoms


@pytest.mark.slow
@settings(max_examples=examples(25), deadline=None)
@given(problems(most=4), st.data())
def test_refused_stages_are_in_no_plan_and_the_best_of_the_others_is_found(
    problem: Problem, data: st.DataObject
) -> None:
    """One by one, as those of each plan found are refused."""
    refused: list[tuple[frozenset[int], OracleStage, int]] = []

    def is_refused(before: frozenset[int], stage: OracleStage, n: int) -> bool:
        return any(
            (before, stage.atoms, stage.kind, stage.recompute) == (b, s.atoms, s.kind, s.recompute) and n >= least
            for b, s, least in refused
        )

    row = {frozenset(np.flatnonzero(cut).tolist()): cut for cut in problem.space.cuts}
    fitting = [s for s in all_partitions(problem, problem.counts) if lacking(problem, s, problem.counts) <= 0]
    for _ in range(3):
        given = tuple(
            RefusedStage(
                problem.schedule,
                problem.n_microbatches,
                (problem.pools[s.kind], problem.kinds[s.kind].name),
                s.recompute,
                row[b],
                row[b | s.atoms],
                n,
            )
            for b, s, n in refused
        )
        found = solve(replace(problem, refused=given))
        left = [s for s in fitting if not any(itertools.starmap(is_refused, with_in_flight(problem, s)))]
        least = min((objective(problem, s) for s in left), default=math.inf)
        assert (found is None) == math.isinf(least)
        if found is None:
            return
        assert found.objective == pytest.approx(least, rel=1e-9)
        stages = list(with_in_flight(problem, as_oracle(problem, found)))
        refused.append(data.draw(st.sampled_from(stages)))


@pytest.mark.slow
@settings(max_examples=examples(30), deadline=None)
@given(problems(most=4), st.sampled_from([1, 3_000_000]))
def test_problems_of_one_search_are_solved_as_if_each_were_alone(problem: Problem, most_pairs: int) -> None:
    """They share the seconds of stages on equal kinds, even if few of these are kept at a time."""
    faster = [dataclasses.replace(kind, latency=0.0, exchange=None, optimizer=None) for kind in problem.kinds]
    roomier = [dataclasses.replace(kind, memory=math.inf, count=kind.count + 1) for kind in problem.kinds]
    changes: list[dict[str, Any]] = [
        {"schedule": "gpipe", "weight": None},
        {"n_microbatches": problem.n_microbatches + 1, "share": None},
        {"kinds": tuple(faster)},
        {"kinds": tuple(roomier)},
        {"launches": None, "cores": None, "blocks": None},
        *(
            {name: 2 * getattr(problem, name)}
            for name in ("forward", "backward", "once")
            if vars(problem)[name] is not None
        ),
        {"accumulation": None},
        {"overlapping": None, "cores": None, "blocks": None},
        {"space": dataclasses.replace(problem.space, gradients=(), stepped=())},
        {},
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_seconds, "_MOST_PAIRS", most_pairs)
        for change in changes:
            one = dataclasses.replace(problem, **change)
            alone = dataclasses.replace(one, known=KnownSeconds())
            assert one.known is problem.known
            assert solve(one) == solve(alone), change


@pytest.mark.slow
@settings(max_examples=examples(30), deadline=None)
@given(problems(most=4, widths=True))
def test_solve_equals_brute_force_over_stages_of_any_width(problem: Problem) -> None:
    least = least_objective(problem, problem.counts)
    found = solve(problem)
    assert (found is None) == math.isinf(least)
    if found is not None:
        assert found.objective == pytest.approx(least, rel=1e-9)
        assert found.bound == found.objective
        assert relaxed_bound(problem, problem.counts) <= found.objective * (1 + 1e-9)


@pytest.mark.slow
@settings(max_examples=examples(30), deadline=None)
@given(problems(most=4, widths=True))
def test_with_many_states_plans_of_any_width_fit_and_bounds_hold(problem: Problem) -> None:
    """Replicas are recorded, not counted: a better plan may be missed, but the bound says so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "_FEW_STATES", 0)
        found = solve(problem)
    least = least_objective(problem, problem.counts)
    if found is not None:
        assert lacking(problem, as_oracle(problem, found), problem.counts) <= 0
        assert objective(problem, as_oracle(problem, found)) == pytest.approx(found.objective, rel=1e-9)
        assert found.bound * (1 - 1e-9) <= least <= found.objective * (1 + 1e-9)


@pytest.mark.slow
@settings(max_examples=examples(30), deadline=None)
@given(st.one_of(problems(), problems(widths=True)))
def test_every_stage_costs_what_the_definition_says_with_every_number_of_replicas(problem: Problem) -> None:
    costs, cuts = Costs(problem, problem.counts), problem.space.cuts
    for mode in costs.modes:
        for start, stop in itertools.combinations(range(len(cuts)), 2):
            pair, atoms = costs.pair(start, stop), cuts[stop] & ~cuts[start]
            if pair < 0 or math.isinf(costs.terms[mode].fill[pair]):
                continue
            for replicas in costs.replicas(mode.kind):
                stage = OracleStage(frozenset(np.flatnonzero(atoms).tolist()), mode.kind, replicas, mode.recompute)
                terms = costs.terms_of(mode, replicas)
                assert terms.time[pair] == pytest.approx(stage_time(problem, stage))
                whole = terms.fill[pair] + costs.max_term(mode, replicas)[pair]
                before = frozenset(np.flatnonzero(cuts[start]).tolist())
                assert whole == pytest.approx(objective(problem, (stage,), before))


@pytest.mark.slow
@settings(max_examples=examples(30), deadline=None)
@given(problems(widths=True))
def test_the_best_plan_is_the_best_with_its_own_kinds_alone(problem: Problem) -> None:
    trains = problem.backward.any(axis=1)
    assume(trains.all() == trains.any())  # a training step has a backward on every kind
    best = solve(problem)
    if best is not None:
        alone = solve(problem.only({stage.kind for stage in best.stages}))
        assert alone is not None
        # Where meshes differ in width, the search over all kinds may end with a gap.
        assert alone.objective <= best.objective * (1 + 1e-9)
        assert best.bound <= alone.objective * (1 + 1e-9)


@settings(max_examples=examples(25), deadline=None)
@given(problems(), st.data())
@pytest.mark.slow
def test_solve_equals_brute_force_for_fewer_devices(problem: Problem, data: st.DataObject) -> None:
    counts = tuple(data.draw(st.integers(0, count)) for count in problem.counts)
    if any(counts):
        found = solve(problem, counts)
        assert (math.inf if found is None else found.objective) == pytest.approx(least_objective(problem, counts))


@pytest.mark.slow
@settings(max_examples=examples(25), deadline=None)
@given(st.one_of(problems(), problems(most=4, widths=True)))
def test_solutions_are_plans_that_cost_what_they_say(problem: Problem) -> None:
    found = solve(problem)
    if found is None:
        return
    stages, counts = as_oracle(problem, found), problem.counts
    assert sorted(a for s in stages for a in s.atoms) == list(range(problem.n_atoms))
    assert stages in set(all_partitions(problem, counts))
    assert lacking(problem, stages, counts) <= 0
    assert objective(problem, stages) == pytest.approx(found.objective, rel=1e-9)
    used = tuple(
        sum(s.replicas * problem.kinds[s.kind].width for s in stages if problem.pools[s.kind] == k)
        for k in range(len(counts))
    )
    assert found.used == used
    assert [s.time for s in found.stages] == pytest.approx([stage_time(problem, s) for s in stages])


@pytest.mark.slow
@settings(max_examples=examples(20), deadline=None)
@given(problems(), st.floats(0.0, 0.3))
def test_a_tolerance_keeps_its_bound_and_stays_within_it(problem: Problem, tolerance: float) -> None:
    best, near = solve(problem), solve(problem, tolerance=tolerance)
    assert (best is None) == (near is None)
    if best is not None and near is not None:
        assert near.bound <= best.objective * (1 + 1e-9)
        assert near.objective * (1 - tolerance) <= best.objective * (1 + 1e-9)


@pytest.mark.slow
@settings(max_examples=examples(20), deadline=None)
@given(problems(), st.floats(0.5, 2.0))
def test_a_cutoff_keeps_plans_below_it_and_only_those(problem: Problem, factor: float) -> None:
    best = solve(problem)
    if best is None:
        return
    cutoff = best.objective * factor
    found = solve(problem, cutoff=cutoff)
    assert (found is not None) == (best.objective < cutoff)
    assert found is None or found.objective == pytest.approx(best.objective)


@pytest.mark.slow
@settings(max_examples=examples(25), deadline=None)
@given(problems())
def test_no_plan_is_below_the_relaxed_bound(problem: Problem) -> None:
    best = solve(problem)
    if best is not None:
        assert relaxed_bound(problem, problem.counts) <= best.objective * (1 + 1e-9)


def test_the_bound_says_where_parameters_need_more_than_all_devices_have() -> None:
    """6 bytes as whole parameters, or 2 x 4 on meshes of two devices, for two devices with 3 bytes each."""
    cuts, times = line_cuts(2), np.ones((2, 2))
    one, mesh = (
        Space(cuts, (), tuple(Shared(nbytes, (atom,)) for atom in range(2)), (), (), np.zeros(2))
        for nbytes in (3.0, 2.0)
    )
    roomy = DeviceKind("single", 2, 3.0, 0.0, 0.0, 0.0, pool=0)
    kinds = (roomy, DeviceKind("pair", 2, 3.0, 0.0, 0.0, 0.0, pool=0, space=replace(mesh, cuts=cuts), width=2))
    problem = Problem(one, times, np.zeros((2, 2)), 2, "gpipe", kinds, max_replicas=1)
    assert math.isfinite(relaxed_bound(problem, (2,)))
    assert solve(problem) is not None
    scarce = replace(problem, kinds=tuple(replace(kind, memory=2.9) for kind in kinds))
    assert math.isinf(relaxed_bound(scarce, (2,)))
    assert solve(scarce) is None
    assert math.isinf(relaxed_bound(replace(problem, chunks=3), (2,)))  # a device counts for each of its chunks


@pytest.mark.slow
@settings(max_examples=examples(20), deadline=None)
@given(problems())
def test_infeasibility_is_explained_by_the_least_lack_of_memory(problem: Problem) -> None:
    counts = problem.counts
    least = min((lacking(problem, s, counts) for s in all_partitions(problem, counts)), default=math.inf)
    if least == math.inf:
        with pytest.raises(ValueError, match="the hints allow no partition"):
            explain_infeasible(problem)
        return
    found = explain_infeasible(problem)
    assert (found is None) == (least <= 0) == (solve(problem) is not None)
    if found is not None:
        assert found.needed - found.available == pytest.approx(least)
        assert found.available == problem.kinds[found.stage.kind].memory


@pytest.mark.slow
@settings(max_examples=examples(25), deadline=None)
@given(problems())
def test_the_largest_stage_alone_may_be_the_objective(problem: Problem) -> None:
    # Layers that run again have a backward in one part, which is not behind the largest stage but does not count here.
    blocks = problem.blocks if problem.weight is None else None
    problem = dataclasses.replace(problem, sum_counts=False, blocks=blocks)
    found = solve(problem)
    assert (math.inf if found is None else found.objective) == pytest.approx(least_objective(problem, problem.counts))


def line(seconds: list[float], counts: tuple[int, ...] = (2,), **changes: object) -> Problem:
    """Atoms that take so long on every kind, each reading the one before; free links and no memory unless changed."""
    n = len(seconds)
    space = Space(line_cuts(n), tuple(Value(a, (a + 1,), 1.0, 1.0) for a in range(n - 1)), (), (), (), np.zeros(n))
    in_space = {name: changes.pop(name) for name in ("values", "gradients", "saved", "pinned") if name in changes}
    problem = Problem(
        space=dataclasses.replace(space, **in_space),
        forward=np.tile(np.array(seconds), (len(counts), 1)),
        backward=np.zeros((len(counts), n)),
        n_microbatches=4,
        schedule="1f1b",
        kinds=tuple(DeviceKind(f"kind{k}", count, math.inf, 0.0, 0.0, 0.0) for k, count in enumerate(counts)),
        max_replicas=1,
        share=1.0,
    )
    return dataclasses.replace(problem, **changes)  # type: ignore[arg-type]


def shape(solution: Solution | None) -> list[tuple[int, int, int]]:
    assert solution is not None
    return [(s.start, s.stop, s.replicas) for s in solution.stages]


@pytest.mark.slow
@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 4))
def test_costly_transfers_and_scarce_memory_are_traded_exactly_in_deep_pipelines(seed: int, m: int) -> None:
    random = np.random.default_rng(seed)
    n = 9
    problem = line(
        list(random.uniform(0.5, 1.5, n)),
        (4,),
        values=tuple(Value(a, (a + 1,), nbytes, 0.0) for a, nbytes in enumerate(random.exponential(1.0, n - 1))),
        saved=tuple(Shared(nbytes, (a,)) for a, nbytes in enumerate(random.uniform(0.0, 9.0, n))),
        n_microbatches=m,
        kinds=(DeviceKind("", 4, math.inf, 0.0, seconds_per_byte=1.0, reduce_seconds_per_byte=0.0),),
    )
    free = dataclasses.replace(problem, kinds=(dataclasses.replace(problem.kinds[0], memory=0.0),))
    deep = [lacking(free, s, (4,)) for s in all_partitions(free, (4,)) if len(s) == 4]
    memory = float(np.quantile(deep, 0.3, method="higher")) * (1 + 1e-9)
    tight = dataclasses.replace(problem, kinds=(dataclasses.replace(problem.kinds[0], memory=memory),))
    found = solve(tight)
    assert (math.inf if found is None else found.objective) == pytest.approx(least_objective(tight, (4,)), rel=1e-9)


@st.composite
def deep_pipelines(draw: st.DrawFn) -> Problem:
    """Lines of many atoms on many devices: stages with replicas that take memory, gradients and transfers; meshes of
    one or two widths."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, devices = draw(st.integers(6, 12)), draw(st.integers(4, 8))
    widths = draw(st.sampled_from([(1,), (2,), (1, 2)]))
    problem = line(
        list(random.uniform(0.1, 1.0, n)),
        (devices,) * len(widths),
        values=tuple(Value(a, (a + 1,), nbytes, 0.0) for a, nbytes in enumerate(random.exponential(0.2, n - 1))),
        saved=tuple(Shared(nbytes, (a,)) for a, nbytes in enumerate(random.uniform(0.0, 9.0, n))),
        gradients=tuple(Shared(nbytes, (a,)) for a, nbytes in enumerate(random.uniform(0.0, 1.0, n))),
        n_microbatches=draw(st.integers(1, 12)),
        max_replicas=draw(st.integers(1, 4)),
        schedule=draw(st.sampled_from(["gpipe", "1f1b"])),
    )
    memory = draw(st.sampled_from([math.inf, 40.0, 20.0]))
    kinds = tuple(DeviceKind(f"{w}", devices, memory, 0.01, 0.1, 0.1, pool=0, width=w) for w in widths)
    seconds = np.stack([problem.forward[0] * w**-0.9 for w in widths])
    return dataclasses.replace(problem, kinds=kinds, forward=seconds, backward=seconds)


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(deep_pipelines(), st.floats(0.0, 0.1), st.floats(0.5, 2.0))
def test_what_plans_need_rules_out_no_better_plan(problem: Problem, tolerance: float, factor: float) -> None:
    plain = solve(problem)
    least = math.inf if plain is None else plain.objective
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(needed_devices, "_FEWEST_CUTS", 1)
        best, near, below = solve(problem), solve(problem, tolerance=tolerance), solve(problem, cutoff=least * factor)
    assert (best is None) == (near is None) == (plain is None)
    assert (below is None) == (plain is None or factor <= 1)
    for found, share in ((best, 0.0), (near, tolerance), (below, 0.0)):
        if found is not None and plain is not None:
            # Where meshes differ in width, a search may end with a gap.
            assert plain.bound * (1 - 1e-9) <= found.objective
            assert found.bound <= least * (1 + 1e-9)
            if plain.bound == least and found.bound >= found.objective * (1 - share):
                assert found.objective <= least / (1 - share) * (1 + 1e-9)
            else:
                assert len({kind.width for kind in problem.kinds}) > 1


@pytest.mark.parametrize(("devices", "m"), [(1, 1), (3, 4), (4, 9), (6, 2), (64, 128)])
def test_a_uniform_line_is_cut_evenly_and_takes_m_plus_p_minus_1_stages(devices: int, m: int) -> None:
    n = max(12, devices)
    best = solve(line([0.5] * n, (devices,), n_microbatches=m))
    assert best is not None
    assert best.objective == pytest.approx((m + devices - 1) * 0.5 * n / devices if m > 1 else 0.5 * n)
    if m > 1:
        assert {stage.stop - stage.start for stage in best.stages} == {n // devices}


def test_replicas_are_chosen_where_one_atom_cannot_be_cut() -> None:
    problem = line([1.0, 8.0, 1.0], (4,), max_replicas=4, n_microbatches=8)
    assert shape(solve(problem)) == [(0, 3, 4)]
    kinds = (DeviceKind("", 4, math.inf, 0.0, 0.0, reduce_seconds_per_byte=1.0),)
    heavy = dataclasses.replace(problem.space, gradients=(Shared(100.0, (0,)),))
    assert shape(solve(dataclasses.replace(problem, space=heavy, kinds=kinds))) == [(0, 1, 1), (1, 3, 3)]


def test_a_stage_recomputes_only_where_memory_is_short() -> None:
    problem = line([4.0, 4.0], (2,), saved=(Shared(10.0, (0,)), Shared(10.0, (1,))), may_recompute=True)
    roomy = solve(problem)
    assert roomy is not None
    assert [s.recompute for s in roomy.stages] == [False, False]
    # In flight: two micro-batches on the first stage (20 bytes), one on the last (10, and 1 received).
    tight = dataclasses.replace(problem, kinds=(dataclasses.replace(problem.kinds[0], memory=15.0),))
    found = solve(tight)
    assert found is not None
    assert [s.recompute for s in found.stages] == [True, False]
    assert found.stages[0].time == 8.0
    assert solve(dataclasses.replace(tight, may_recompute=False)) is None


def test_a_pinned_atom_is_in_its_stage_whatever_that_costs() -> None:
    problem = line([1.0] * 6, (3,), pinned=((5, 1), (0, 0)))
    found = solve(problem)
    assert found is not None
    assert len(found.stages) == 2
    assert shape(solve(line([1.0] * 6, (3,), pinned=((1, 1),)))) == [(0, 1, 1), (1, 3, 1), (3, 6, 1)]
    assert solve(line([1.0] * 3, (3,), pinned=((0, 1),))) is None  # nothing can run before the first atom


def test_two_branches_are_cut_side_by_side_where_that_is_better_than_any_line() -> None:
    # 0 -> 2 and 1 -> 3 -> join 4: {0 2}, {1 3} as stages, which the order 0 1 2 3 4 does not have.
    values = (Value(0, (2,), 9.0, 0.0), Value(1, (3,), 9.0, 0.0), Value(2, (4,), 1.0, 0.0), Value(3, (4,), 1.0, 0.0))
    base = line([1.0, 1.0, 1.0, 1.0, 0.0], (2,), n_microbatches=8, values=values)
    kinds = (DeviceKind("", 2, math.inf, 0.0, 1.0, 0.0),)
    order = dataclasses.replace(base, kinds=kinds)
    both = np.array([[False] * 5, [True, False, True, False, False], [True] * 5])
    more = dataclasses.replace(order.space, cuts=both)
    on_line, on_graph = solve(order), solve(dataclasses.replace(order, space=more))
    assert on_line is not None
    assert on_graph is not None
    assert on_graph.objective < on_line.objective


def test_a_shared_value_is_received_once_by_each_stage_that_reads_it() -> None:
    skip = (Value(0, (1, 2, 2, 3), 10.0, 0.0),)
    kinds = (DeviceKind("", 4, math.inf, latency=0.5, seconds_per_byte=1.0, reduce_seconds_per_byte=0.0),)
    solution = solve(line([100.0] * 4, (4,), values=skip, kinds=kinds))
    assert solution is not None
    assert [stage.time for stage in solution.stages] == [100.0, 110.5, 110.5, 110.5]


def test_bytes_that_are_not_whole_leave_no_message_where_none_crosses() -> None:
    values = (Value(2, (3,), 0.3, 0.3), Value(1, (3,), 0.2, 0.2), Value(0, (3,), 0.1, 0.1))
    assert (0.1 + 0.2) + 0.3 > (0.3 + 0.2) + 0.1
    kinds = (DeviceKind("", 5, math.inf, latency=1.0, seconds_per_byte=0.0, reduce_seconds_per_byte=0.0),)
    solution = solve(line([100.0] * 5, (5,), values=values, kinds=kinds))
    assert solution is not None
    assert [stage.time for stage in solution.stages] == [100.0, 100.0, 100.0, 102.0, 100.0]


def test_of_equal_plans_the_one_on_fewest_devices_is_taken() -> None:
    assert shape(solve(line([0.0] * 5, (5,), max_replicas=3))) == [(0, 5, 1)]


def test_a_line_of_hundreds_of_atoms_is_solved_as_by_enumeration_of_its_cuts() -> None:
    random = np.random.default_rng(0)
    n, m = 200, 6
    crossing = random.uniform(0.0, 5e3, n - 1)
    values = tuple(Value(atom, (atom + 1,), float(nbytes), 0.0) for atom, nbytes in enumerate(crossing))
    kinds = (DeviceKind("", 2, math.inf, 0.1, 1e-3, 0.0),)
    problem = line(list(random.uniform(0.0, 1.0, n)), values=values, n_microbatches=m, kinds=kinds)
    head = np.cumsum(problem.forward[0])[:-1]
    tail = problem.forward[0].sum() - head + 0.1 + crossing * 1e-3
    found = solve(problem, exactly=True)
    assert found is not None
    assert found.objective == pytest.approx((head + tail + (m - 1) * np.maximum(head, tail)).min())


@pytest.mark.parametrize(
    ("where", "changes", "message"),
    [
        ("problem", {"forward": np.array([[1.0, math.nan, 1.0]])}, "forward must be finite"),
        ("problem", {"backward": np.array([[1.0, -1.0, 1.0]])}, "backward must be finite and >= 0, got -1.0"),
        ("problem", {"backward": np.zeros((1, 4))}, r"backward must have shape \(1, 3\)"),
        ("space", {"transient": np.array([1.0, math.inf, 1.0])}, "transient must be finite"),
        ("space", {"cuts": np.ones((3, 3), dtype=bool)}, "cuts go from none to all"),
        ("space", {"cuts": np.ones((3, 3))}, "cuts must be an array of bool"),
        ("space", {"cuts": line_cuts(3)[[0, 2, 1, 3]]}, "sorted by the number of atoms"),
        ("problem", {"kinds": ()}, "at least one kind"),
        ("problem", {"kinds": (DeviceKind("cpu", 0, 1.0, 0.0, 0.0, 0.0),)}, "'cpu' must have at least 1 device"),
        ("problem", {"kinds": (DeviceKind("cpu", 1, math.nan, 0.0, 0.0, 0.0),)}, "'cpu': memory"),
        ("problem", {"kinds": (DeviceKind("cpu", 1, 1.0, -1.0, 0.0, 0.0),)}, "'cpu': latency"),
        ("space", {"values": (Value(1, (3,), 1.0, 1.0),)}, r"values\[0\] names an atom outside 0..2"),
        ("space", {"values": (Value(0, (1,), -1.0, 1.0),)}, "values: nbytes"),
        ("space", {"saved": (Shared(math.inf, (0,)),)}, "saved: nbytes"),
        ("space", {"resident": (Shared(1.0, (-1,)),)}, r"resident\[0\] names an atom outside"),
        ("space", {"pinned": ((7, 0),)}, "a hint names an atom outside"),
        ("problem", {"n_microbatches": 0}, "n_microbatches must be at least 1"),
        ("problem", {"max_replicas": 0}, "max_replicas must be at least 1"),
    ],
)
def test_a_meaningless_problem_is_refused_by_name(where: str, changes: dict[str, object], message: str) -> None:
    problem = line([1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(problem if where == "problem" else problem.space, **changes)  # type: ignore[type-var]
