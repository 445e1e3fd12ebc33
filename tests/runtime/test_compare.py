"""Measured memory, and comparisons that leave the model unchanged."""

from __future__ import annotations

import copy
import dataclasses
import json
import threading
from collections.abc import Mapping

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autopar
from autopar import Comparison, InputError, Plan, PlanError
from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import CostTable
from autopar.costs.operator_cost import OperatorCost, Weight
from autopar.plan.plan import Stage
from autopar.planner.predict import ACTION_OVERHEAD, Conditions, predict
from autopar.planner.search import make_plan
from autopar.planner.search_options import SearchOptions
from autopar.report.tables import WIDTH
from autopar.runtime.memory_watch import MemoryWatch
from cost_models import Link, parse_devices

BATCH = 8
CPUS = parse_devices(["cpu", "cpu"])
INSIDE = Conditions(optimizer="none", loss_inside=True)


# -- predictions, from a cost graph made up ---------------------------------------------------------------------------


def line_of(*seconds: float, skips: tuple[tuple[int, int], ...] = ()) -> CostGraph:
    """Operators in a line, one parameter each; the i-th takes seconds[i] forward and twice that backward, whole batch.

    `skips`: who reads whom, beside the neighbours.
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


# -- memory ----------------------------------------------------------------------------------------------------------


def test_memory_is_counted_from_the_first_operator_on_a_storage_until_it_is_freed() -> None:
    watch = MemoryWatch(CPUS[:1])
    x = torch.zeros(1000)  # 4000 bytes
    with watch.step([]), watch("cpu:0"):
        y = x + 1  # 8000
        view = y.view(10, 100)  # the same storage
        z = view * 2  # 12000: the peak
        del y, view
        del x, z
        torch.zeros(500)
    assert watch.peaks == {"cpu:0": 12000}


def test_the_peak_of_a_linear_layers_step_is_known() -> None:
    """y = x w: at the gradient of w, x, w, y's gradient and w's gradient are held."""
    layer, x = nn.Linear(50, 50, bias=False), torch.randn(20, 50)
    watch = MemoryWatch(CPUS[:1])
    with watch.step([*layer.parameters()]), watch("cpu:0"):
        layer(x).backward(torch.ones(20, 50))
    (peak,) = watch.peaks.values()
    assert 4 * (20 * 50 + 50 * 50 + 20 * 50 + 50 * 50) <= peak <= 4 * (2 * 50 * 50 + 4 * 20 * 50)


def test_every_worker_counts_its_own_storages_whoever_frees_them() -> None:
    watch = MemoryWatch(CPUS)
    made: dict[str, torch.Tensor] = {}

    def work(name: str, size: int) -> None:
        with watch(name):
            made[name] = torch.zeros(size)

    for name, size in (("cpu:0", 100), ("cpu:1", 300)):
        thread = threading.Thread(target=work, args=(name, size))
        thread.start()
        thread.join()
    made.clear()
    work("cpu:0", 50)
    assert watch.peaks == {"cpu:0": 400, "cpu:1": 1200}


# -- comparisons -----------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """Batch norm and dropout: what a comparison must not disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1))
        self.second = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


HAND = Plan.from_split({"first": 0, "second": 1}, n_microbatches=2)
MIDDLE = Plan.from_split({"first.0": 0, "second.2": 1}, n_microbatches=4, schedule="gpipe")


def state_of(model: nn.Module) -> Mapping[str, torch.Tensor | None]:
    gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters()}
    return copy.deepcopy({**model.state_dict(), **gradients})


@pytest.fixture(scope="module")
def compared() -> tuple[Comparison, Mapping[str, object], Mapping[str, object]]:
    """A comparison, and all that it might disturb before and after."""
    torch.manual_seed(0)
    model, x, y = Small(), torch.randn(BATCH, 32), torch.randint(4, (BATCH,))
    model.second[0].weight.grad = torch.ones(64, 64)

    def surroundings() -> dict[str, object]:
        return {**state_of(model), "random": torch.get_rng_state(), "threads": torch.get_num_threads()}

    before = surroundings()
    with pytest.warns(autopar.AutoparWarning, match="batch norm"):
        comparison = autopar.compare(
            model,
            ["cpu", "cpu"],
            {"auto": None, "hand": HAND, "middle": MIDDLE},
            example_args=(x,),
            target=y,
            loss_fn=nn.functional.cross_entropy,
            repeats=3,
        )
    return comparison, before, surroundings()


Compared = tuple[Comparison, Mapping[str, object], Mapping[str, object]]


def test_a_comparison_leaves_the_model_and_its_surroundings_as_they_were(compared: Compared) -> None:
    _, before, after = compared
    assert before.keys() == after.keys()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=0, msg=name)


def test_every_plan_has_a_row_with_predictions_and_steps_measured_in_turn(compared: Compared) -> None:
    comparison = compared[0]
    assert [row.name for row in comparison.rows] == ["one device", "auto", "hand", "middle"]
    for row in comparison.rows:
        assert len(row.steps) == 3
        assert row.measured in row.steps
        assert row.predicted > 0
        assert row.error == pytest.approx((row.predicted - row.measured) / row.measured)
    assert comparison.speed_up(comparison.single) == 1
    assert comparison["hand"].plan.n_microbatches == 2
    assert [len(stage.operators) > 0 for stage in comparison["middle"].plan.stages] == [True, True]
    with pytest.raises(KeyError):
        comparison["nobody"]


def test_memory_is_predicted_and_measured_at_the_same_places(compared: Compared) -> None:
    comparison = compared[0]
    assert set(comparison.single.measured_memory) == {"cpu:0"}
    assert set(comparison["hand"].measured_memory) == {"cpu:0", "cpu:1"}
    for row in comparison.rows:
        assert row.predicted_memory.keys() == row.measured_memory.keys()
        for place, predicted in row.predicted_memory.items():
            assert 0.6 * row.measured_memory[place] < predicted < 1.6 * row.measured_memory[place]


def test_text_and_json_hold_every_row(compared: Compared) -> None:
    comparison = compared[0]
    text = str(comparison)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= WIDTH
    data = json.loads(comparison.to_json())
    assert [row["name"] for row in data["rows"]] == ["one device", "auto", "hand", "middle"]
    assert all(row["name"] in text for row in data["rows"])
    assert Plan.from_json(json.dumps(data["rows"][2]["plan"])) == comparison["hand"].plan


class Choosing(nn.Module):
    """Returns scores, and something without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.head(self.body(x).tanh())
        return {"out": found, "choice": found.argmax(1)}


@pytest.mark.parametrize("training", [True, False])
def test_without_a_loss_a_step_is_a_call_and_in_training_a_backward(training: bool) -> None:
    plan = Plan.from_split({"body": 0, "head": 1}, n_microbatches=2)
    found = autopar.compare(
        Choosing().train(training), ["cpu", "cpu"], {"hand": plan}, example_args=(torch.randn(4, 6),), repeats=1
    )
    assert found.training is training
    assert ("backward" in str(found)) is False
    backward = [stage.backward_time or 0.0 for stage in found["hand"].plan.stages]
    assert any(backward) is training


def test_a_batch_that_may_not_be_split_is_compared_whole() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x) - self.a(x).mean(0))

    plan = Plan.from_split({"a": 0, "b": 1}, n_microbatches=2)
    with pytest.warns(autopar.AutoparWarning, match="not split"):
        found = autopar.compare(Mixing(), ["cpu", "cpu"], {"hand": plan}, example_args=(torch.randn(4, 4),), repeats=1)
    assert found["hand"].plan.n_microbatches == 1


def test_what_does_not_fit_is_refused() -> None:
    model, x = Choosing(), torch.randn(4, 6)
    with pytest.raises(InputError, match="repeats"):
        autopar.compare(model, ["cpu"], example_args=(x,), repeats=0)
    with pytest.raises(InputError, match="example_args"):
        autopar.compare(model, ["cpu"])
    with pytest.raises(InputError, match="target"):
        autopar.compare(model, ["cpu"], example_args=(x,), loss_fn=nn.functional.mse_loss)
    with pytest.raises(PlanError, match="devices"):
        autopar.compare(
            model, ["cpu"], {"two": Plan.from_split({"body": 0, "head": 1}, n_microbatches=1)}, example_args=(x,)
        )
