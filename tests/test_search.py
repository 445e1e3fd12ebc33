"""The stage partition search against its definition, applied to every partition there is."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.schedule import in_flight_limit
from autopar.search import Kind, Problem, Shared, StageChoice, Value, explain_infeasible, solve


def stage_time(problem: Problem, start: int, stop: int, kind: int) -> float:
    inside = range(start, stop)
    device = problem.kinds[kind]
    seconds = sum(problem.forward[kind, atom] + problem.backward[kind, atom] for atom in inside)
    received = [v for v in problem.values if v.producer < start and any(atom in inside for atom in v.consumers)]
    for nbytes in (sum(v.nbytes for v in received), sum(v.grad_nbytes for v in received)):
        if nbytes > 0:
            seconds += device.latency + nbytes * device.seconds_per_byte
    return seconds


def shared_bytes(items: tuple[Shared, ...], start: int, stop: int) -> float:
    return sum(item.nbytes for item in items if any(start <= atom < stop for atom in item.atoms))


def needed_bytes(problem: Problem, stages: tuple[StageChoice, ...], index: int) -> float:
    stage = stages[index]
    start, stop = stage.start, stage.stop
    received = sum(
        v.nbytes for v in problem.values if v.producer < start and any(start <= atom < stop for atom in v.consumers)
    )
    in_flight = in_flight_limit(
        problem.schedule, problem.n_microbatches, stage.replicas, sum(later.replicas for later in stages[index:])
    )
    activations = in_flight * (shared_bytes(problem.saved, start, stop) + received)
    return shared_bytes(problem.resident, start, stop) + activations + max(problem.transient[start:stop])


def objective(problem: Problem, stages: tuple[StageChoice, ...]) -> float:
    total, slowest = 0.0, 0.0
    for stage in stages:
        time = stage_time(problem, stage.start, stage.stop, stage.kind)
        gradient = shared_bytes(problem.gradient_bytes, stage.start, stage.stop)
        reduction = (stage.replicas - 1) * gradient * problem.kinds[stage.kind].reduce_seconds_per_byte
        total += time
        slowest = max(slowest, (math.ceil(problem.n_microbatches / stage.replicas) - 1) * time + reduction)
    return total + slowest


def lacking(problem: Problem, stages: tuple[StageChoice, ...]) -> float:
    return max(needed_bytes(problem, stages, i) - problem.kinds[s.kind].memory for i, s in enumerate(stages))


def devices_used(problem: Problem, stages: tuple[StageChoice, ...]) -> tuple[int, ...]:
    return tuple(sum(s.replicas for s in stages if s.kind == kind) for kind in range(len(problem.kinds)))


def all_partitions(problem: Problem) -> Iterator[tuple[StageChoice, ...]]:
    """Every partition that the problem's structure allows, whether or not its memory suffices."""
    n = problem.forward.shape[1]
    inner = [cut for cut in range(1, n) if problem.cut_allowed[cut]]
    most = min(problem.max_replicas, problem.n_microbatches)
    seats = [(k, r) for k, kind in enumerate(problem.kinds) for r in range(1, min(most, kind.count) + 1)]
    devices = sum(kind.count for kind in problem.kinds)
    for n_cuts in range(min(len(inner), devices - 1, (problem.max_stages or n) - 1) + 1):
        for cuts in itertools.combinations(inner, n_cuts):
            for chosen in itertools.product(seats, repeat=n_cuts + 1):
                bounds = itertools.pairwise((0, *cuts, n))
                stages = tuple(
                    StageChoice(start, stop, kind, replicas, stage_time(problem, start, stop, kind))
                    for (start, stop), (kind, replicas) in zip(bounds, chosen, strict=True)
                )
                used = devices_used(problem, stages)
                if all(count <= kind.count for count, kind in zip(used, problem.kinds, strict=True)):
                    yield stages


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Small problems with small whole costs, where ties, zeros and memory limits that just fit are common."""
    n = draw(st.integers(1, 6))
    counts = draw(st.sampled_from([(1,), (2,), (4,), (1, 1), (2, 1), (2, 2), (1, 3)]))
    whole = st.integers(0, 9).map(float)
    atoms = st.integers(0, n - 1)

    def array(*shape: int) -> np.ndarray:
        size = math.prod(shape)
        return np.array(draw(st.lists(whole, min_size=size, max_size=size))).reshape(shape)

    def values() -> Iterator[Value]:
        for producer in range(n - 1):
            consumers = draw(st.lists(st.integers(producer + 1, n - 1), max_size=3))
            yield Value(producer, tuple(consumers), draw(whole), draw(whole))

    shared = st.lists(st.builds(Shared, whole, st.lists(atoms, max_size=3).map(tuple)), max_size=4).map(tuple)
    memory = st.one_of(st.integers(0, 120).map(float), st.just(math.inf))
    third = st.integers(0, 9).map(lambda thirds: thirds / 3)
    return Problem(
        forward=array(len(counts), n),
        backward=array(len(counts), n),
        values=tuple(values()),
        resident=draw(shared),
        gradient_bytes=draw(shared),
        saved=draw(shared),
        transient=array(n),
        cut_allowed=np.array(draw(st.lists(st.booleans(), min_size=n + 1, max_size=n + 1)))
        | draw(st.booleans()),  # half of the problems may be cut anywhere
        n_microbatches=draw(st.integers(1, 8)),
        schedule=draw(st.sampled_from(["gpipe", "1f1b"])),
        kinds=tuple(
            Kind(str(kind), count, draw(memory), draw(third), draw(third), draw(third))
            for kind, count in enumerate(counts)
        ),
        max_replicas=draw(st.integers(1, 4)),
        max_stages=draw(st.one_of(st.none(), st.integers(1, 4))),
    )


def line(seconds: list[float], counts: tuple[int, ...] = (2,), **changes: object) -> Problem:
    """Atoms that take so long on every kind, each reading the one before; free links and no memory unless changed."""
    n = len(seconds)
    problem = Problem(
        forward=np.tile(np.array(seconds), (len(counts), 1)),
        backward=np.zeros((len(counts), n)),
        values=tuple(Value(atom, (atom + 1,), 1.0, 1.0) for atom in range(n - 1)),
        resident=(),
        gradient_bytes=(),
        saved=(),
        transient=np.zeros(n),
        cut_allowed=np.ones(n + 1, dtype=bool),
        n_microbatches=4,
        schedule="1f1b",
        kinds=tuple(Kind(f"kind{k}", count, math.inf, 0.0, 0.0, 0.0) for k, count in enumerate(counts)),
        max_replicas=1,
    )
    return dataclasses.replace(problem, **changes)  # type: ignore[arg-type]


@settings(max_examples=300, deadline=None)
@given(problems())
def test_solve_equals_brute_force_for_every_vector_of_device_counts(problem: Problem) -> None:
    least: dict[tuple[int, ...], float] = {}
    for stages in all_partitions(problem):
        if lacking(problem, stages) <= 0:
            used = devices_used(problem, stages)
            least[used] = min(objective(problem, stages), least.get(used, math.inf))
    solutions = solve(problem)
    assert {used: solution.objective for used, solution in solutions.items()} == pytest.approx(least, rel=1e-9)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 4))
def test_costly_transfers_and_scarce_memory_are_traded_exactly_in_deep_pipelines(seed: int, m: int) -> None:
    random = np.random.default_rng(seed)
    n = 9
    problem = line(
        list(random.uniform(0.5, 1.5, n)),
        (4,),
        values=tuple(
            Value(atom, (atom + 1,), nbytes, 0.0) for atom, nbytes in enumerate(random.exponential(1.0, n - 1))
        ),
        saved=tuple(Shared(nbytes, (atom,)) for atom, nbytes in enumerate(random.uniform(0.0, 9.0, n))),
        n_microbatches=m,
        kinds=(Kind("", 4, math.inf, 0.0, seconds_per_byte=1.0, reduce_seconds_per_byte=0.0),),
    )
    plans = [stages for stages in all_partitions(problem) if len(stages) == 4]
    largest = [max(needed_bytes(problem, stages, index) for index in range(4)) for stages in plans]
    memory = float(np.quantile(largest, 0.3, method="higher")) * (1 + 1e-9)
    problem = dataclasses.replace(problem, kinds=(dataclasses.replace(problem.kinds[0], memory=memory),))
    least = min(objective(problem, stages) for stages in plans if lacking(problem, stages) <= 0)
    assert solve(problem)[4,].objective == pytest.approx(least, rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(problems())
def test_solutions_are_partitions_that_cost_what_they_say(problem: Problem) -> None:
    for used, solution in solve(problem).items():
        stages = solution.stages
        assert solution.used == used == devices_used(problem, stages)
        assert [s.start for s in stages] == [0, *(s.stop for s in stages[:-1])]
        assert stages[-1].stop == problem.n_atoms
        assert all(problem.cut_allowed[s.start] for s in stages[1:])
        assert all(1 <= s.replicas <= min(problem.max_replicas, problem.n_microbatches) for s in stages)
        assert len(stages) <= (problem.max_stages or len(stages))
        assert lacking(problem, stages) <= 0
        assert [s.time for s in stages] == pytest.approx(
            [stage_time(problem, s.start, s.stop, s.kind) for s in stages], rel=1e-9, abs=1e-12
        )
        assert solution.objective == pytest.approx(objective(problem, stages), rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(problems())
def test_infeasibility_is_explained_by_the_least_lack_of_memory(problem: Problem) -> None:
    least = min(lacking(problem, stages) for stages in all_partitions(problem))
    found = explain_infeasible(problem)
    assert (found is None) == (least <= 0) == bool(solve(problem))
    if found is not None:
        assert found.needed - found.available == least
        assert found.available == problem.kinds[found.stage.kind].memory
        attained = (stages for stages in all_partitions(problem) if lacking(problem, stages) == least)
        assert any(
            len(stages) > found.index
            and (stages[found.index].start, stages[found.index].stop) == (found.stage.start, found.stage.stop)
            and needed_bytes(problem, stages, found.index) == found.needed
            for stages in attained
        )


@pytest.mark.parametrize(("devices", "m"), [(1, 1), (3, 4), (4, 9), (6, 2)])
def test_a_uniform_line_is_cut_evenly_and_takes_m_plus_p_minus_1_stages(devices: int, m: int) -> None:
    solutions = solve(line([0.5] * 12, (devices,), n_microbatches=m))
    assert sorted(solutions) == [(used,) for used in range(1, devices + 1)]
    best = solutions[devices,]
    assert best.objective == pytest.approx((m + devices - 1) * 6.0 / devices if m > 1 else 6.0)
    if m > 1:
        assert {stage.stop - stage.start for stage in best.stages} == {12 // devices}


def test_replicas_are_chosen_where_one_atom_cannot_be_cut() -> None:
    problem = line([1.0, 8.0, 1.0], (4,), max_replicas=4, n_microbatches=8)
    assert [(s.start, s.stop, s.replicas) for s in solve(problem)[4,].stages] == [(0, 3, 4)]
    heavy = Shared(100.0, (0,))
    problem = dataclasses.replace(
        problem, gradient_bytes=(heavy,), kinds=(Kind("", 4, math.inf, 0.0, 0.0, reduce_seconds_per_byte=1.0),)
    )
    assert [(s.start, s.stop, s.replicas) for s in solve(problem)[4,].stages] == [(0, 1, 1), (1, 3, 3)]


def test_a_shared_value_is_received_once_by_each_stage_that_reads_it() -> None:
    skip = (Value(0, (1, 2, 2, 3), 10.0, 0.0),)
    kinds = (Kind("", 4, math.inf, latency=0.5, seconds_per_byte=1.0, reduce_seconds_per_byte=0.0),)
    solution = solve(line([1.0] * 4, (4,), values=skip, kinds=kinds))[4,]
    assert [stage.time for stage in solution.stages] == [1.0, 11.5, 11.5, 11.5]


def test_bytes_that_are_not_whole_leave_no_message_where_none_crosses() -> None:
    values = (Value(2, (3,), 0.3, 0.3), Value(1, (3,), 0.2, 0.2), Value(0, (3,), 0.1, 0.1))
    assert (0.1 + 0.2) + 0.3 > (0.3 + 0.2) + 0.1
    kinds = (Kind("", 5, math.inf, latency=1.0, seconds_per_byte=0.0, reduce_seconds_per_byte=0.0),)
    solution = solve(line([1.0] * 5, (5,), values=values, kinds=kinds))[5,]
    assert [stage.time for stage in solution.stages] == [1.0, 1.0, 1.0, 3.0, 1.0]


def test_equal_plans_are_told_apart_by_fewest_stages_then_earliest_cuts() -> None:
    solutions = solve(line([0.0] * 5, (5,), max_replicas=3))
    assert [[stage.stop for stage in solutions[used,].stages] for used in (1, 3, 5)] == [[5], [5], [1, 5]]


def test_a_line_of_hundreds_of_atoms_is_solved_as_by_enumeration_of_its_cuts() -> None:
    random = np.random.default_rng(0)
    n, m = 200, 6
    problem = line(list(random.uniform(0.0, 1.0, n)), values=(), n_microbatches=m)
    kinds = (dataclasses.replace(problem.kinds[0], latency=0.1, seconds_per_byte=1e-3),)
    crossing = random.uniform(0.0, 5e3, n - 1)
    values = tuple(Value(atom, (atom + 1,), float(nbytes), 0.0) for atom, nbytes in enumerate(crossing))
    problem = dataclasses.replace(problem, kinds=kinds, values=values)
    head = np.cumsum(problem.forward[0])[:-1]
    tail = problem.forward[0].sum() - head + 0.1 + crossing * 1e-3
    assert solve(problem)[2,].objective == pytest.approx((head + tail + (m - 1) * np.maximum(head, tail)).min())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forward": np.array([[1.0, math.nan, 1.0]])}, "forward must be finite"),
        ({"backward": np.array([[1.0, -1.0, 1.0]])}, "backward must be finite and >= 0, got -1.0"),
        ({"backward": np.zeros((1, 4))}, r"backward must have shape \(1, 3\)"),
        ({"transient": np.array([1.0, math.inf, 1.0])}, "transient must be finite"),
        ({"cut_allowed": np.ones(3, dtype=bool)}, r"cut_allowed must have shape \(4,\)"),
        ({"cut_allowed": np.ones(4)}, "cut_allowed must be an array of bool"),
        ({"forward": np.zeros((1, 0))}, "at least one atom"),
        ({"kinds": ()}, "at least one kind"),
        ({"kinds": (Kind("cpu", 0, 1.0, 0.0, 0.0, 0.0),)}, "'cpu' must have at least 1 device"),
        ({"kinds": (Kind("cpu", 1, math.nan, 0.0, 0.0, 0.0),)}, "'cpu': memory"),
        ({"kinds": (Kind("cpu", 1, 1.0, -1.0, 0.0, 0.0),)}, "'cpu': latency"),
        ({"values": (Value(1, (1,), 1.0, 1.0),)}, r"values\[0\] has a consumer that is not after"),
        ({"values": (Value(1, (3,), 1.0, 1.0),)}, r"values\[0\] names an atom outside 0..2"),
        ({"values": (Value(0, (1,), -1.0, 1.0),)}, "values: nbytes"),
        ({"saved": (Shared(math.inf, (0,)),)}, "saved: nbytes"),
        ({"resident": (Shared(1.0, (-1,)),)}, r"resident\[0\] names an atom outside"),
        ({"n_microbatches": 0}, "n_microbatches must be at least 1"),
        ({"max_replicas": 0}, "max_replicas must be at least 1"),
        ({"max_stages": 0}, "max_stages must be at least 1"),
    ],
)
def test_a_meaningless_problem_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        line([1.0, 1.0, 1.0], **changes)  # type: ignore[arg-type]
