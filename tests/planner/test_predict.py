"""Predictions of plans, from made-up cost graphs whose step times can be worked out by hand."""

from __future__ import annotations

import dataclasses

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar import Plan
from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import CostTable
from autopar.costs.operator_cost import OperatorCost, Weight
from autopar.costs.python_overhead import ACTION_OVERHEAD, NOT_MEASURED, SPLIT_OVERHEAD, PythonOverhead
from autopar.costs.rank_costs import RankCosts
from autopar.plan.stage import Stage
from autopar.planner.arrangement import Conditions
from autopar.planner.predict import predict
from autopar.planner.predicted_step import step_of_plan
from autopar.planner.search import make_plan
from autopar.planner.search_options import SearchOptions
from autopar.schedule.builders import SPLIT_BACKWARD
from cost_models import Cluster, Link, parse_devices

BATCH = 8
CPUS = parse_devices(["cpu", "cpu"])
INSIDE = Conditions(optimizer="none", loss_inside=True)


def line_of(*seconds: float, skips: tuple[tuple[int, int], ...] = ()) -> CostGraph:
    """Operators in a line, one parameter each; the i-th takes seconds[i] forward and twice that backward, whole batch.

    `skips`: further edges (from, to) between operators that are no neighbours.
    """
    graph = nx.DiGraph()
    for i in range(len(seconds)):
        cost = OperatorCost(
            key=f"m{i}/op#0",
            operator="op",
            module=f"m{i}",
            source="",
            position=i,
            replicable=False,
            weight_share=0.5,
            repeatable=True,
            output_bytes=800.0,
            gradient_bytes=800.0,
            allocated_bytes=800.0,
            saved={i: 1600.0},
            parameters={f"p{i}": Weight(4000, True, (1000,))},
        )
        graph.add_node(f"n{i}", cost=cost)
    for a, b in {*((i, i + 1) for i in range(len(seconds) - 1)), *skips}:
        graph.add_edge(f"n{a}", f"n{b}", nbytes=800.0)
    graph.graph.update(fused=[], outputs=[f"n{len(seconds) - 1}"])
    whole = np.array([seconds])
    names = tuple(graph)
    tables = tuple(
        CostTable(CPUS[0].kind, workers, names, (BATCH,), whole, 2 * whole, np.zeros((1, 2))) for workers in (1, 2)
    )
    link = Link(0.0, np.inf)
    return CostGraph(graph, BATCH, True, tables, CPUS, {(a.name, b.name): link for a in CPUS for b in CPUS}, 1e-9)


def two_stages(n_microbatches: int) -> Plan:
    return Plan((Stage(("cpu:0",)), Stage(("cpu:1",))), n_microbatches, "gpipe")


@given(
    seconds=st.lists(st.floats(0.01, 1.0), min_size=2, max_size=6),
    n_microbatches=st.sampled_from([1, 2, 4, 8]),
    data=st.data(),
)
def test_a_pipeline_of_two_takes_both_stages_and_the_slower_one_for_every_further_microbatch(
    seconds: list[float], n_microbatches: int, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(1, len(seconds) - 1))
    stage_of = {f"n{i}": int(i >= cut) for i in range(len(seconds))}
    found = predict(line_of(*seconds), two_stages(n_microbatches), stage_of, INSIDE)
    a, b = (sum(s for i, s in enumerate(seconds) if int(i >= cut) == k) / n_microbatches for k in (0, 1))
    expected = sum(
        f * (a + ACTION_OVERHEAD / f)
        + f * (b + ACTION_OVERHEAD / f)
        + (n_microbatches - 1) * f * (max(a, b) + ACTION_OVERHEAD / f)
        for f in (1, 2)  # a backward takes twice as long as a forward
    )
    assert found.predicted_step_time == pytest.approx(expected)
    assert found.single_device_time == pytest.approx(3 * sum(seconds))


def on_ranks(costs: CostGraph, handling: float) -> CostGraph:
    """One process for each device; each process takes `handling` seconds for its end of a message."""
    alike = Cluster.preset("cpu", nodes=2)
    cluster = Cluster(alike.node, 2, alike.intra_node, alike.inter_node, CPUS, costs.links)
    return dataclasses.replace(costs, ranks=RankCosts(cluster, 1, (), handling))


@given(
    a=st.floats(0.01, 1.0), b=st.floats(0.01, 1.0), handling=st.floats(0.0, 0.5), n_microbatches=st.sampled_from([1, 4])
)
def test_each_end_of_a_message_between_processes_takes_its_time(
    a: float, b: float, handling: float, n_microbatches: int
) -> None:
    """As if every pass of both stages took that much longer, from costs and from the plan's file."""
    n, more = n_microbatches, handling * n_microbatches
    stage_of, plan = {"n0": 0, "n1": 1}, two_stages(n)
    found = predict(on_ranks(line_of(a, b), handling), plan, stage_of, INSIDE)
    passes = (((a + more) / n, (b + more) / n), ((2 * a + more) / n, (2 * b + more) / n))
    expected = sum(sum(each) + (n - 1) * max(each) + (n + 1) * ACTION_OVERHEAD for each in passes)
    assert found.predicted_step_time == pytest.approx(expected)
    assert [stage.forward_time for stage in found.stages] == pytest.approx([a / n, b / n])
    saved = step_of_plan(Plan.from_json(found.to_json()))
    assert saved is not None
    assert saved.timeline().step_time == pytest.approx(expected)


@pytest.mark.slow
def test_where_messages_take_longer_there_are_fewer_and_none_if_that_is_faster() -> None:
    options = SearchOptions(max_replicas=1, loss_inside=True)
    by_handling = {h: make_plan(on_ranks(line_of(*[0.1] * 8), h), options) for h in (0.0, 0.01, 0.1, 10.0)}
    messages = [plan.n_microbatches * (len(plan.stages) - 1) for plan in by_handling.values()]
    assert messages == sorted(messages, reverse=True)
    assert messages[0] > messages[1] > messages[-1] == 0
    steps = [plan.predicted_step_time or 0.0 for plan in by_handling.values()]
    assert steps == sorted(steps)


@pytest.mark.parametrize("n_microbatches", [1, 4])
def test_a_backward_in_two_parts_costs_python_for_every_operator(n_microbatches: int) -> None:
    stage_of = {f"n{i}": int(i >= 2) for i in range(5)}
    whole, parts = (
        predict(
            line_of(0.1, 0.2, 0.3, 0.2, 0.1),
            dataclasses.replace(two_stages(n_microbatches), schedule=schedule),
            stage_of,
            INSIDE,
        )
        for schedule in ("1f1b", "zb-h1")
    )
    for operators, before, after in zip((2, 3), whole.stages, parts.stages, strict=True):
        assert after.forward_time == before.forward_time
        assert after.backward_time == pytest.approx((before.backward_time or 0) + operators * SPLIT_OVERHEAD)


def test_bubbles_are_filled_where_that_gains_more_than_python_takes() -> None:
    def chosen(seconds: float, python: PythonOverhead = NOT_MEASURED) -> str:
        options = SearchOptions(n_microbatches=4, max_replicas=1, loss_inside=True)
        plan = make_plan(dataclasses.replace(line_of(*[4 * seconds] * 12), python=python), options)
        assert len(plan.used_devices) == 2
        return plan.schedule

    assert chosen(1e-2) in SPLIT_BACKWARD
    assert chosen(4e-5) not in SPLIT_BACKWARD
    assert chosen(4e-5, PythonOverhead(busy=1e-6, alone=1e-6, splitting=0.0)) in SPLIT_BACKWARD


def test_operators_of_a_stage_need_not_be_neighbours() -> None:
    """n0 -> n1 -> n2, and n0 -> n2: with n1 alone on the second stage but for the last operator."""
    costs = line_of(0.1, 0.2, 0.3, 0.4, skips=((0, 2), (2, 3)))
    costs.graph.remove_edge("n1", "n2")
    costs.graph.add_edge("n1", "n3", nbytes=800.0)
    found = predict(costs, two_stages(2), {"n0": 0, "n1": 1, "n2": 0, "n3": 1}, INSIDE)
    assert [stage.forward_time for stage in found.stages] == pytest.approx([0.2, 0.3])
    assert [stage.operators for stage in found.stages] == [("m0/op#0", "m2/op#0"), ("m1/op#0", "m3/op#0")]
    assert [(link.source, link.target, link.forward_bytes) for link in found.transfers] == [(0, 1, 800)]  # n0 and n2


def test_memory_is_parameters_gradients_optimizer_state_and_what_is_in_flight() -> None:
    costs, plan = line_of(0.1, 0.1, 0.1), two_stages(4)
    stage_of = {"n0": 0, "n1": 0, "n2": 1}
    none, adam = (
        predict(costs, plan, stage_of, dataclasses.replace(INSIDE, optimizer=name)) for name in ("none", "adam")
    )
    transient = (800 + 800 + 800) // 4  # result, its copy and its gradient, of one micro-batch
    assert none.stages[0].peak_memory == 2 * 2 * 4000 + 2 * 1600 + transient  # gpipe holds all four micro-batches
    assert none.stages[1].peak_memory == 2 * 4000 + 1600 + 800 + transient  # and what it received
    assert adam.stages[0].peak_memory == none.stages[0].peak_memory + 2 * 2 * 4000


@pytest.mark.parametrize(
    "options", [SearchOptions(), SearchOptions(max_replicas=1, loss_inside=True), SearchOptions(n_microbatches=3)]
)
def test_pricing_a_plan_that_the_search_made_gives_its_own_numbers(options: SearchOptions) -> None:
    costs = line_of(0.2, 0.1, 0.3, 0.1, 0.2)
    plan = make_plan(costs, options)
    key_of = {key: index for index, stage in enumerate(plan.stages) for key in stage.operators}
    stage_of = {name: key_of[operator.key] for name, operator in costs.operators.items()}
    again = predict(costs, plan, stage_of, options.conditions)
    assert again.predicted_step_time == pytest.approx(plan.predicted_step_time)
    assert [s.peak_memory for s in again.stages] == [s.peak_memory for s in plan.stages]
    assert (again.notes, again.transfers, again.bubble) == (plan.notes, plan.transfers, pytest.approx(plan.bubble))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_plans_own_numbers_give_the_step_that_was_predicted(schedule: str) -> None:
    """The timeline of a saved plan is the one that the search simulated."""
    costs = line_of(0.3, 0.2, 0.3, 0.2)
    stage_of = {"n0": 0, "n1": 0, "n2": 1, "n3": 1}
    plan = predict(costs, dataclasses.replace(two_stages(4), schedule=schedule), stage_of, INSIDE)
    step = step_of_plan(Plan.from_json(plan.to_json()))
    assert step is not None
    assert step.timeline().step_time == pytest.approx(plan.predicted_step_time)
    assert step.timeline().bubble == pytest.approx(plan.bubble)


def accumulating(costs: CostGraph, added: np.ndarray) -> CostGraph:
    """Measured with one sample, too: then the times of some samples do not depend on `added`."""

    def with_one(whole: np.ndarray) -> np.ndarray:
        return np.concatenate([whole / BATCH, whole])

    tables = [
        dataclasses.replace(
            table,
            rows=(1, BATCH),
            forward=with_one(table.forward),
            backward=with_one(table.backward),
            loss=with_one(table.loss),
            accumulation=added,
        )
        for table in costs.tables
    ]
    return dataclasses.replace(costs, tables=tuple(tables))


@pytest.mark.parametrize(("m", "replicas"), [(1, 1), (4, 1), (2, 2), (4, 2)])
def test_the_first_micro_batch_of_every_replica_adds_its_gradients_to_none(m: int, replicas: int) -> None:
    """So a step takes as much less as one accumulation, from costs and from the plan's file."""
    plan = Plan((Stage(tuple(f"cpu:{i}" for i in range(replicas))),), m, "gpipe")
    costs, added = line_of(0.4, 0.2), np.array([0.05, 0.01])
    before, after = (predict(one, plan, {"n0": 0, "n1": 0}, INSIDE) for one in (costs, accumulating(costs, added)))
    assert before.predicted_step_time is not None
    assert after.predicted_step_time == pytest.approx(before.predicted_step_time - added.sum())
    assert before.single_device_time is not None
    assert after.single_device_time == pytest.approx(before.single_device_time - added.sum())
    saved = step_of_plan(Plan.from_json(after.to_json()))
    assert saved is not None
    assert saved.timeline().step_time == pytest.approx(after.predicted_step_time)


@pytest.mark.parametrize("slower", [0, 1])
def test_a_stage_before_the_slowest_one_ends_with_a_micro_batch_that_adds_up_gradients(slower: int) -> None:
    """GPipe: the slowest stage waits for the first backward of a later stage, and an earlier one ends with its last."""
    costs, added = line_of(*((0.4, 0.2) if slower == 0 else (0.2, 0.4))), np.array([0.05, 0.01])
    stage_of, m = {"n0": 0, "n1": 1}, 4
    before, after = (predict(one, two_stages(m), stage_of, INSIDE) for one in (costs, accumulating(costs, added)))
    assert before.predicted_step_time is not None
    less = added.sum() if slower == 0 else added[1]
    assert after.predicted_step_time == pytest.approx(before.predicted_step_time - less)
