"""Compiled stages are priced as such: what they take over what captured ones do, by the size of the micro-batch."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_prices import INSIDE, OPTIONS, SAME, line_of, objective, one_stage
from test_search import STEP, costs_of

from autopar.costs.compiled import CompiledRatio, left_alone_under, microbatches_to_compile
from autopar.costs.cost_graph import CostGraph
from autopar.plan.recompute import Recompute
from autopar.planner.inter_op.atom_times import atom_times
from autopar.planner.inter_op.atoms import make_atoms
from autopar.planner.inter_op.candidates import Searching
from autopar.planner.inter_op.stage_costs import Costs, Mode
from autopar.planner.predicted_step import step_of_plan
from autopar.planner.priced_step import predicted_step
from autopar.planner.search import make_plan
from autopar.schedule.builders import SPLIT_BACKWARD
from cost_models import Cluster


def compiled(costs: CostGraph, ratio: CompiledRatio) -> CostGraph:
    return dataclasses.replace(costs, compiled={table.kind: ratio for table in costs.tables})


def test_ratios_are_those_of_the_measured_sizes_and_between_them() -> None:
    ratio = CompiledRatio((2, 8), (0.4, 0.8))
    assert [ratio.at(rows) for rows in (1, 2, 8, 100)] == [0.4, 0.4, 0.8, 0.8]
    assert ratio.at(4) == pytest.approx(0.6), "half way in the logarithm"


@pytest.mark.parametrize(("rows", "ratios"), [((), ()), ((4, 2), (1, 1)), ((2, 4), (1,)), ((2,), (0.0,))])
def test_ratios_that_are_no_prices_are_refused(rows: tuple[float, ...], ratios: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"ratio"):
        CompiledRatio(rows, ratios)


def test_no_size_is_compiled_that_the_plan_cannot_have() -> None:
    assert microbatches_to_compile(32, 32, None) == [1, 8]
    assert microbatches_to_compile(32, 4, None) == [1, 4]
    assert microbatches_to_compile(32, 1, None) == [1]
    assert microbatches_to_compile(32, 32, 4) == [4]


@pytest.mark.slow
def test_launches_of_compiled_stages_make_a_plan_with_fewer_and_larger_micro_batches() -> None:
    """Compiled stages that launching bounds take the same time for micro-batches of any size."""
    costs = costs_of(8, (2,), batch=16)
    options = dataclasses.replace(STEP, max_replicas=1, schedule="1f1b")
    rows = (1.0, 2.0, 4.0, 8.0, 16.0)
    bound = CompiledRatio(rows, tuple(0.8 / r**0.9 for r in rows))
    even = CompiledRatio((1,), (0.8,))
    plans = [make_plan(one, options) for one in (costs, compiled(costs, even), compiled(costs, bound))]
    assert plans[2].n_microbatches < plans[1].n_microbatches
    for plan, factor in zip(plans, (1.0, 0.8, bound.at(16)), strict=True):
        assert plan.single_device_time == pytest.approx(factor * (plans[0].single_device_time or 0.0))
        again = step_of_plan(plan)
        assert again is not None
        assert again.timeline().step_time == pytest.approx(plan.predicted_step_time)


@pytest.mark.parametrize("of_one", [False, True])
def test_cuda_graphs_multiply_the_seconds_of_one_busy_gpu_as_their_replays_do_not_wait_for_the_interpreter(
    of_one: bool,
) -> None:
    costs = costs_of(3, (1,), batch=8)
    (table,) = costs.tables
    crowded = dataclasses.replace(table.slower(3.0, 2), loss=2 * table.loss)
    costs = dataclasses.replace(costs, tables=(table, crowded))
    priced = compiled(costs, CompiledRatio((8,), (0.5,), of_one=of_one))
    atoms = make_atoms(costs, STEP.constraints)
    one, two = (atom_times(costs, atoms, table.kind, workers, 8).kernels for workers in (1, 2))
    found = atom_times(priced, atoms, table.kind, 2, 8)
    assert found.kernels.forward == pytest.approx(0.5 * (one if of_one else two).forward)
    assert found.kernels.backward == pytest.approx(0.5 * (one if of_one else two).backward)
    assert found.captured is not None
    assert found.captured.forward == pytest.approx(two.forward), "stages that are not recorded do wait"


@pytest.mark.parametrize("graphs", [False, True])
def test_stages_that_are_not_compiled_take_what_captured_ones_take(graphs: bool) -> None:
    costs = costs_of(3, (1,), batch=8)
    priced = compiled(costs, CompiledRatio((8,), (0.5,), left_alone_under(graphs)))
    kind = costs.tables[0].kind
    captured, fast = (atom_times(one, make_atoms(one, STEP.constraints), kind, 1, 8) for one in (costs, priced))
    every = range(len(make_atoms(costs, STEP.constraints).nodes))
    for mode in Recompute:
        alone = mode.by_layer or mode is Recompute.SELECTIVE or (graphs and mode is Recompute.STAGE)
        usual, now = (one.running(mode).stage(every, recompute=mode) for one in (captured, fast))
        assert now.forward == pytest.approx((1.0 if alone else 0.5) * usual.forward)
        assert now.backward == pytest.approx((1.0 if alone else 0.5) * usual.backward)
        assert now.weight == (pytest.approx(usual.weight) if alone else 0.0), "a compiled backward comes in one part"


@given(
    seconds=st.lists(st.floats(1e-3, 1e-1), min_size=1, max_size=4),
    replicas=st.integers(1, 3),
    m=st.sampled_from([1, 2, 4, 8]),
    schedule=st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    ratio=st.floats(0.1, 2.0),
    graphs=st.booleans(),
)
def test_the_objective_of_compiled_stages_is_the_simulated_step(
    seconds: list[float], replicas: int, m: int, schedule: str, ratio: float, graphs: bool
) -> None:
    replicas = min(replicas, m)
    costs = compiled(
        line_of(seconds, [4] * len(seconds), Cluster.preset("4xH100")),
        CompiledRatio((1, 16), (ratio, 1.0), left_alone_under(graphs)),
    )
    searching = Searching(costs, OPTIONS)
    problem = searching.problem(m, schedule, (replicas,))
    arrangement = one_stage(searching, replicas, m, schedule)
    step = predicted_step(costs, searching.atoms, arrangement, INSIDE).timeline().step_time
    price = objective(problem, 0, replicas)
    assert price == pytest.approx(step, rel=SAME)
    assert float(problem.least_work.sum()) <= price * (1 + SAME)
    if m == 1 and schedule not in SPLIT_BACKWARD:
        again = dataclasses.replace(arrangement, recompute=(Recompute.STAGE,))
        step = predicted_step(costs, searching.atoms, again, INSIDE).timeline().step_time
        found = Costs(problem, problem.counts)
        assert found.terms_of(Mode(0, Recompute.STAGE), 1).time[found.pair(0, -1)] == pytest.approx(step, rel=SAME)
