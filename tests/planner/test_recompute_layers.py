"""Recomputation of layers one after the other: its prices, what a search makes of it, and the bytes that a step has."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_selective import BATCH, HIDDEN, LENGTH, Attention
from torch import nn

import autopar
from autopar import Cluster, Plan, PlanError
from autopar.analysis.blocks import Blocks
from autopar.analysis.example import example_ahead
from autopar.costs.estimated import estimate_costs
from autopar.plan.recompute import RECOMPUTE, Recompute
from autopar.plan.stage import Stage
from autopar.planner.inter_op.atoms import gather
from autopar.planner.inter_op.memory_formula import Activations, activation_bytes
from autopar.planner.predicted_step import step_of_plan
from autopar.schedule.builders import SPLIT_BACKWARD
from benchmarks.plan_memory import Call, Subject, peaks

UNDER = 0.99
X = (torch.zeros(BATCH, LENGTH, HIDDEN),)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(HIDDEN), Attention(fused=False)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.inside = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inside(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def hand(recompute: str, model: nn.Module | None = None, **degrees: Any) -> Plan:
    n = degrees.get("pipeline", 1) * degrees.get("tensor", 1) * degrees.get("data", 1)
    cluster = Cluster.preset(f"{n}xH100")
    return Plan.by_hand(model or Model(), cluster, example_args=X, recompute=recompute, **degrees)


DEGREES: list[dict[str, Any]] = [
    {},
    {"micro_batch": 1},
    {"pipeline": 2, "micro_batch": 1},
    {"tensor": 2, "micro_batch": 2},
    {"tensor": 2, "sequence_parallel": True, "micro_batch": 2},
    {"data": 2, "zero": 3, "micro_batch": 2},
    {"pipeline": 2, "chunks": 2, "micro_batch": 1},
    {"pipeline": 2, "schedule": "zb-h1", "micro_batch": 1},
]


@pytest.mark.slow
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_layers_cost_less_than_whole_stages_in_seconds_and_at_work_and_more_in_flight(degrees: dict[str, Any]) -> None:
    none, full, stage = (hand(name, **degrees) for name in ("none", "full", "stage"))
    steps = [plan.predicted_step_time or 0.0 for plan in (none, full, stage)]
    assert steps[0] < steps[1]
    if degrees.get("schedule") not in SPLIT_BACKWARD:  # whose backward does not come in parts with layers
        assert steps[1] <= steps[2] * (1 + 1e-9)
    for kept, layers, once in zip(none.stages, full.stages, stage.stages, strict=True):
        assert (once.activation_bytes or 0) <= (layers.activation_bytes or 0) < (kept.activation_bytes or 0) / 2
        assert (layers.peak_memory or 0) < (kept.peak_memory or 0)
    if not degrees:
        assert (full.stages[0].peak_memory or 0) < 0.5 * (stage.stages[0].peak_memory or 0)


@pytest.mark.slow
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_layers_that_keep_products_lie_between_all_and_nothing(degrees: dict[str, Any]) -> None:
    none, products, full = (hand(name, **degrees) for name in ("none", "selective-op", "full"))
    steps = [plan.predicted_step_time or 0.0 for plan in (none, products, full)]
    assert steps[0] < steps[1] < steps[2]
    for most, between, least in zip(none.stages, products.stages, full.stages, strict=True):
        assert (least.activation_bytes or 0) < (between.activation_bytes or 0) < (most.activation_bytes or 0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "selective-op"])
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_a_plan_has_one_price_made_loaded_and_priced_again(degrees: dict[str, Any], mode: str) -> None:
    plan = hand(mode, **degrees)
    loaded = Plan.from_json(plan.to_json())
    assert loaded == plan
    assert all(stage.mode == RECOMPUTE[mode] for stage in loaded.stages)
    step = step_of_plan(loaded)
    assert step is not None
    assert step.timeline().step_time == pytest.approx(plan.predicted_step_time, rel=1e-6)
    again = autopar.plan(Model(), Cluster.preset(f"{len(plan.devices)}xH100"), example_args=X, plan=loaded)
    assert again.predicted_step_time == pytest.approx(plan.predicted_step_time, rel=1e-9)
    assert [stage.peak_memory for stage in again.stages] == [stage.peak_memory for stage in plan.stages]


@pytest.mark.slow
def test_plans_say_that_layers_run_again() -> None:
    none, full, stage = hand("none"), hand("full"), hand("stage")
    assert "recomputing the layers of stage 0" in " ".join(str(full).split())
    assert "recomputing stage 0" in " ".join(str(stage).split())
    assert "recomputes every layer in stage" in str(none.diff(full))


@pytest.mark.slow
def test_a_file_of_before_means_the_whole_stage_and_keeps_its_predictions() -> None:
    plan = hand("stage")
    data = json.loads(plan.to_json())
    assert "layerwise" not in data["stages"][0], "so that the checksum is that of before"
    assert Plan.from_json(json.dumps(data)).stages[0].mode == Recompute.STAGE
    assert Plan.from_json(json.dumps(data)).predicted_step_time == plan.predicted_step_time


def test_modes_are_named_and_exclude_each_other() -> None:
    split = {"inside": 0, "layers.1": 1, "layers.2": 2, "layers.4": 3, "head": 4}
    names = dict(enumerate(RECOMPUTE))
    plan = Plan.from_split(split, n_microbatches=2, recompute=names)
    assert [stage.mode for stage in plan.stages] == list(RECOMPUTE.values())
    assert [stage.mode for stage in Plan.from_split(split, n_microbatches=2, recompute=[1]).stages][
        1
    ] == Recompute.STAGE
    with pytest.raises(PlanError, match=r"stage 0 recomputes layer by layer and selectively"):
        Plan.from_split(split, n_microbatches=2, recompute={0: "full"}, selective=[0])
    with pytest.raises(PlanError, match=r"stage 0 keeps products of layers that it recomputes, but it recomputes none"):
        Plan((Stage(("cpu:0",), keeps_products=True),), 1)
    with pytest.raises(PlanError, match=r"one of none, selective, full, selective-op, stage, got 'layers'"):
        Plan.from_split(split, n_microbatches=2, recompute={0: "layers"})


@pytest.mark.slow
def test_a_model_without_layers_runs_whole_stages_again_and_says_so() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(LENGTH * HIDDEN, 8), nn.Tanh(), nn.LayerNorm(8))
    plan = hand("full", model)
    assert [stage.mode for stage in plan.stages] == [Recompute.STAGE]
    assert any("no equal layers follow" in note for note in plan.notes)


def test_layers_of_one_operator_are_kept_for_what_they_are() -> None:
    class Rectified(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.relu(layer(x))
            return x

    plan = Plan.by_hand(Rectified(), Cluster.preset("2xH100"), recompute="full", example_args=(torch.randn(8, 64),))
    (note,) = (note for note in plan.notes if note.startswith("kept"))
    assert "a single operator keeps nothing but what enters it" in note
    assert "'layers.0'" in note
    assert not any("cannot run again" in note for note in plan.notes)


# -- bytes ------------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(10), deadline=None)
@given(layers=st.integers(2, 4), data=st.data())
@pytest.mark.slow
def test_what_is_kept_is_what_enters_layers_and_what_others_save(layers: int, data: st.DataObject) -> None:
    """Counted operator by operator, for any part of the model as a stage."""
    with torch.device("meta"):
        model, x = Model(layers).train(), torch.empty(BATCH, LENGTH, HIDDEN)
    example = example_ahead(model, (x,), {}, batch_dim=None)
    costs = estimate_costs(example, Cluster.preset("1xH100"))
    names = [name for name, operator in costs.operators.items() if not operator.replicable]
    atoms = gather(costs, [(name,) for name in names])
    start = data.draw(st.integers(0, len(names) - 1))
    stop = data.draw(st.integers(start + 1, len(names)))
    inside = names[start:stop]
    kept: dict[Any, float] = {}
    at_work = 0.0
    for name in inside:
        own = costs.operators[name]
        if own.block is None:
            kept |= own.saved
        for reader in costs.graph.successors(name):
            other = costs.operators[reader].block
            if other is not None and other != own.block:
                kept |= own.results  # which the stage sends, if the reader is not in it
    everything = {own.block: {} for own in costs.operators.values() if own.block is not None}
    outside: dict[Any, float] = {}
    for name, own in costs.operators.items():
        if own.block is None:
            outside |= own.saved
            continue
        everything[own.block] |= own.saved
        for source in costs.graph.predecessors(name):
            if costs.operators[source].block != own.block:
                outside |= costs.operators[source].results
    for name in inside:
        own = costs.operators[name]
        running = own.allocated_bytes + own.output_bytes + own.gradient_bytes
        again = sum(n for s, n in everything.get(own.block, {}).items() if s not in outside)
        at_work = max(at_work, running + again)
    mine = set(range(start, stop))
    found = sum(item.nbytes for item in atoms.layers.kept if mine & set(item.atoms))
    assert found == pytest.approx(sum(kept.values()))
    assert max(atoms.layers.working[list(mine)]) == pytest.approx(at_work)
    own_bytes = Activations(1e12, 7.0, 1e12, 0.0, 0.0, found, at_work)
    assert activation_bytes(own_bytes, Recompute.FULL) == (7.0 + found, at_work)


class Unit(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm: nn.Module = nn.BatchNorm1d(16) if kind == "batch norm" else nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.act = nn.ReLU(inplace=True) if kind == "in place" else nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Units(nn.Module):
    def __init__(self, layers: int, kind: str) -> None:
        super().__init__()
        self.inside, self.head = nn.Linear(16, 16), nn.Linear(16, 16)
        self.layers = nn.ModuleList(Unit(kind) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inside(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


@pytest.mark.slow
@settings(max_examples=examples(5), deadline=None)
@given(data=st.data())
def test_workers_hold_what_stages_state(data: st.DataObject) -> None:
    layers = data.draw(st.integers(2, 6))
    model = Units(layers, data.draw(st.sampled_from(["plain", "in place", "batch norm"])))
    x = torch.randn(192, 16)
    cut = data.draw(st.sampled_from([f"layers.{i}{part}" for i in range(1, layers) for part in ("", ".up", ".down")]))
    plan = Plan.from_split(
        {"inside": 0, cut: 1},
        n_microbatches=data.draw(st.integers(2, 6)),
        schedule=data.draw(st.sampled_from(["gpipe", "1f1b", "zb-h1"])),
        recompute={s: data.draw(st.sampled_from(["full", "full", "none", "stage"])) for s in (0, 1)},
    )
    call = Call((x,), None, mean_square, torch.randn(192, 16), train_step=data.draw(st.booleans()))
    for peak in peaks(
        Subject.of(model.train(), call, 2), plan, optimizer="sgd", maker=lambda p: torch.optim.SGD(p, lr=1e-3)
    ):
        # The measured peak counts a gradient from its first use, the plan from its arrival: up to 2 % of these peaks.
        assert peak.certain * 0.975 <= peak.measured <= peak.stated / UNDER, f"{plan}: {peak}"


# -- the search -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_layers_are_the_calls_of_repeated_modules() -> None:
    with torch.device("meta"):
        example = example_ahead(Model(3).train(), (torch.empty(*X[0].shape),), {}, batch_dim=None)
    blocks = Blocks(example.program, example.batching.storages)
    assert [len(block) for block in blocks.all] == [len(blocks.layers[0])] * 3
    assert len(blocks.layers) == 3


@pytest.mark.slow
def test_the_search_recomputes_layers_where_less_does_not_fit() -> None:
    """Of one stage on one device: where whole stages were all that could run again, nothing would fit."""
    options: dict[str, Any] = {"example_args": X, "n_microbatches": 1}
    least = {name: hand(name).stages[0].peak_memory or 0 for name in ("none", "selective", "full", "stage")}
    assert least["full"] < min(least["none"], least["selective"], least["stage"])
    limit = 1.02 * least["full"]
    plan = autopar.plan(Model(), Cluster.preset("1xH100"), memory_limit=limit, **options)
    assert [stage.mode for stage in plan.stages] == [Recompute.FULL]
    assert (plan.stages[0].peak_memory or 0) <= limit
    assert plan.predicted_step_time == pytest.approx(hand("full").predicted_step_time, rel=1e-9)
    free = autopar.plan(Model(), Cluster.preset("1xH100"), **options)
    assert [stage.mode for stage in free.stages] == [Recompute.NONE]


@pytest.mark.slow
@pytest.mark.parametrize("hinted", ["layers.1", "head"])
def test_a_hint_is_met_by_layers_or_by_the_whole_stage(hinted: str) -> None:
    model = Model()
    autopar.recompute(model.get_submodule(hinted))
    plan = autopar.plan(model, Cluster.preset("1xH100"), example_args=X)
    (stage,) = plan.stages
    assert stage.mode == (Recompute.FULL if hinted == "layers.1" else Recompute.STAGE)
