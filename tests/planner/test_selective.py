"""Selective recomputation: which operators run again, and what that takes and saves."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_prices import INSIDE, OPTIONS, SAME
from torch import fx, nn

import autopar
from autopar import Cluster, Plan, PlanError
from autopar.analysis.attention import attention_cores
from autopar.analysis.example import example_ahead
from autopar.analysis.operators import operator_name
from autopar.costs.estimated import estimate_costs
from autopar.plan.recompute import Recompute
from autopar.planner.arrangement import Arrangement
from autopar.planner.inter_op.candidates import Searching
from autopar.planner.inter_op.stage_costs import Costs
from autopar.planner.inter_op.stage_tables import Mode
from autopar.planner.predicted_step import step_of_plan
from autopar.planner.priced_step import predicted_step

HIDDEN, LENGTH, BATCH = 64, 128, 8


class Attention(nn.Module):
    """By its definition, or as one operator."""

    def __init__(self, fused: bool, heads: int = 4) -> None:
        super().__init__()
        self.fused, self.heads = fused, heads
        self.query, self.key, self.value, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        if self.fused:
            y = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(HIDDEN // self.heads)
            y = nn.functional.dropout(torch.softmax(scores, -1), 0.1, self.training) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Blocks(nn.Module):
    def __init__(self, layers: int = 4, fused: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(fused) for _ in range(layers))
        self.mlps = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for attention, mlp in zip(self.layers, self.mlps, strict=True):
            x = x + attention(x)
            x = x + torch.relu(mlp(x))
        return x.square().mean()


def graph_of(model: nn.Module, *args: torch.Tensor) -> fx.Graph:
    return example_ahead(model.train(), args, {}, batch_dim=None).program.graph


def names(core: frozenset[fx.Node]) -> list[str]:
    return sorted(map(operator_name, core))


# -- the cores --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_core_goes_from_the_product_of_queries_and_keys_to_the_product_with_values() -> None:
    cores = attention_cores(graph_of(Blocks(3), torch.zeros(2, 8, HIDDEN)))
    assert [names(core) for core in cores] == [["div", "dropout", "matmul", "matmul", "softmax"]] * 3


@pytest.mark.slow
def test_an_attention_in_one_operator_is_a_core() -> None:
    cores = attention_cores(graph_of(Blocks(2, fused=True), torch.zeros(2, 8, HIDDEN)))
    assert [names(core) for core in cores] == [["scaled_dot_product_attention"]] * 2


def test_a_softmax_over_classes_and_products_with_parameters_are_no_cores() -> None:
    class Classes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.head = nn.Parameter(torch.randn(HIDDEN, HIDDEN)), nn.Linear(HIDDEN, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gates = torch.softmax(x @ self.weight, -1)
            return torch.softmax(self.head(gates), -1).sum()

    assert attention_cores(graph_of(Classes(), torch.zeros(2, 8, HIDDEN))) == ()


def test_a_core_may_have_several_products_of_scores() -> None:
    """As the disentangled attention of DeBERTa (He et al., 2021)."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, p, v = (layer(x) for layer in self.layers)
            scores = q @ k.transpose(-1, -2) + (q @ p.transpose(-1, -2)).relu()
            return (torch.softmax(scores, -1) @ v).sum()

    (core,) = attention_cores(graph_of(Two(), torch.zeros(2, 8, HIDDEN)))
    assert names(core) == ["add", "matmul", "matmul", "matmul", "relu", "softmax"]


def test_a_core_with_a_parameter_inside_is_left_out() -> None:
    """As talking heads (Shazeer et al., 2020): what lies behind the parameter's product is not of one attention."""

    class Talking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.mix = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3)), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (layer(x) for layer in self.layers)
            return (self.mix(torch.softmax(q @ k.transpose(-1, -2), -1)) @ v).sum()

    assert attention_cores(graph_of(Talking(), torch.zeros(2, 8, HIDDEN))) == ()


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["gpt2", "bert", "t5"])
def test_every_layer_of_published_models_has_a_core(kind: str, attention: str) -> None:
    transformers = pytest.importorskip("transformers")
    if kind == "gpt2":
        config = transformers.GPT2Config(n_layer=3, n_embd=32, n_head=4, vocab_size=64, attn_implementation=attention)
        model, n = transformers.GPT2LMHeadModel(config), 3
    elif kind == "bert":
        sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
        config = transformers.BertConfig(vocab_size=64, attn_implementation=attention, **sizes)
        model, n = transformers.BertForMaskedLM(config), 3
    else:
        if attention == "sdpa":
            pytest.skip("T5 has an attention of its own")
        start = {"decoder_start_token_id": 0, "pad_token_id": 0}
        config = transformers.T5Config(d_model=32, d_ff=64, d_kv=8, num_heads=4, num_layers=2, vocab_size=64, **start)
        model, n = transformers.T5ForConditionalGeneration(config), 2 + 2 * 2  # self and cross attention
    ids = torch.zeros(2, 8, dtype=torch.long)
    example = example_ahead(model.train(), (), {"input_ids": ids, "labels": ids}, batch_dim=None)
    cores = attention_cores(example.program.graph)
    assert len(cores) == n
    wanted = {"scaled_dot_product_attention"} if attention == "sdpa" else {"softmax", "scaled_dot_product_attention"}
    assert all(wanted & set(names(core)) for core in cores)


# -- prices -----------------------------------------------------------------------------------------------------------

DEGREES: list[dict[str, Any]] = [
    {},
    {"micro_batch": 1},
    {"pipeline": 2, "micro_batch": 1},
    {"tensor": 2, "micro_batch": 2},
    {"pipeline": 2, "chunks": 2, "micro_batch": 1},
    {"pipeline": 2, "schedule": "zb-h1", "micro_batch": 1},
]


def plan_with(recompute: str, degrees: dict[str, Any], *, fused: bool = False) -> Plan:
    n = degrees.get("pipeline", 1) * degrees.get("tensor", 1)
    example = (torch.zeros(BATCH, LENGTH, HIDDEN),)
    cluster = Cluster.preset(f"{n}xH100")
    return Plan.by_hand(Blocks(fused=fused), cluster, example_args=example, recompute=recompute, **degrees)


def held(plan: Plan) -> list[int]:
    return [stage.activation_bytes or 0 for stage in plan.stages]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("degrees", DEGREES)
@pytest.mark.slow
def test_selective_lies_between_none_and_full_in_seconds_and_in_bytes_for_each_micro_batch(
    degrees: dict[str, Any], fused: bool
) -> None:
    none, selective, full = (plan_with(name, degrees, fused=fused) for name in ("none", "selective", "full"))
    steps = [plan.predicted_step_time or 0.0 for plan in (none, selective, full)]
    assert steps == sorted(steps)
    assert steps[0] < steps[1] < steps[2]
    for most, between, least in zip(held(none), held(selective), held(full), strict=True):
        assert least < between <= most
        assert between < most or fused
    if not fused:
        assert all(
            (a.peak_memory or 0) < (b.peak_memory or 0) for a, b in zip(selective.stages, none.stages, strict=True)
        )


@pytest.mark.slow
def test_scores_are_not_kept_and_those_of_one_layer_are_there_at_work() -> None:
    """Korthikanti et al., 2022, table 2: 5 a s / h of the 34 + 5 a s / h bytes per value of a layer; here in float32,
    with masks as large as what they drop."""
    none, selective = (plan_with(name, {"micro_batch": 2}) for name in ("none", "selective"))
    scores = 2 * 4 * LENGTH * LENGTH * 4  # bytes: samples x heads x length x length in float32
    saved = held(none)[0] - held(selective)[0]
    assert 4 * 2 * scores <= saved <= 4 * 4 * scores  # 4 layers: softmax, dropped and perhaps masks
    (stage,), (kept) = selective.stages, none.stages[0]
    # The peak without recomputation is rehearsed, the other one is that of the formula.
    assert saved / 2 <= (kept.peak_memory or 0) - (stage.peak_memory or 0) <= saved


@pytest.mark.slow
@pytest.mark.parametrize("degrees", DEGREES)
def test_a_selective_plan_has_one_price_made_loaded_and_priced_again(degrees: dict[str, Any]) -> None:
    plan = plan_with("selective", degrees)
    loaded = Plan.from_json(plan.to_json())
    assert loaded == plan
    assert [stage.selective for stage in loaded.stages] == [True] * len(plan.stages)
    step = step_of_plan(loaded)
    assert step is not None
    assert step.timeline().step_time == pytest.approx(plan.predicted_step_time, rel=1e-6)
    n = len(plan.devices)
    example = (torch.zeros(BATCH, LENGTH, HIDDEN),)
    again = autopar.plan(Blocks(), Cluster.preset(f"{n}xH100"), example_args=example, plan=loaded)
    assert again.predicted_step_time == pytest.approx(plan.predicted_step_time, rel=1e-9)
    assert [stage.peak_memory for stage in again.stages] == [stage.peak_memory for stage in plan.stages]


@pytest.mark.slow
def test_plans_say_that_they_recompute_attention() -> None:
    none, selective = plan_with("none", {}), plan_with("selective", {})
    assert "recomputing attention of stage 0" in " ".join(str(selective).split())
    assert "recomputes attention in stage" in str(none.diff(selective))
    assert "recomputing" not in str(none)


def test_a_stage_recomputes_all_of_its_forward_or_attention_alone() -> None:
    with pytest.raises(PlanError, match=r"stage 1 recomputes all of its forward and selectively"):
        Plan.from_split({"layers": 0, "mlps": 1}, n_microbatches=2, recompute=[1], selective=[0, 1])
    with pytest.raises(PlanError, match=r"selective names 5, but there are stages 0\.\.1"):
        Plan.from_split({"layers": 0, "mlps": 1}, n_microbatches=2, selective=[5])


@pytest.mark.slow
def test_a_plan_of_before_selective_recomputation_loads() -> None:
    plan = plan_with("full", {})
    data = json.loads(plan.to_json())
    del data["checksum"]
    for stage in data["stages"]:
        for field in ("selective", "recompute_time", "hidden_time"):
            stage.pop(field, None)  # fields without a value are not saved
    assert Plan.from_json(json.dumps(data)).stages[0].mode == Recompute.FULL


@pytest.mark.slow
def test_the_search_recomputes_attention_where_that_is_faster_than_all_and_less_does_not_fit() -> None:
    example, cluster = (torch.zeros(BATCH, LENGTH, HIDDEN),), Cluster.preset("1xH100")
    options: dict[str, Any] = {"example_args": example, "n_microbatches": 1, "loss_fn": None}
    none, selective = (plan_with(name, {}).stages[0].peak_memory or 0 for name in ("none", "selective"))
    assert selective < none
    limit = (selective + none) / 2
    plan = autopar.plan(Blocks(), cluster, memory_limit=limit, **options)
    assert [stage.mode for stage in plan.stages] == [Recompute.SELECTIVE]
    assert (plan.stages[0].peak_memory or 0) <= limit
    free = autopar.plan(Blocks(), cluster, **options)
    assert [stage.mode for stage in free.stages] == [Recompute.NONE]
    assert (free.predicted_step_time or 0) < (plan.predicted_step_time or 0)
    again = plan_with("selective", {})
    assert plan.predicted_step_time == pytest.approx(again.predicted_step_time, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("m", [2, 4])
def test_the_objective_of_a_stage_that_recomputes_attention_is_its_simulated_step(schedule: str, m: int) -> None:
    with torch.device("meta"):
        model, x = Blocks().train(), torch.empty(BATCH, LENGTH, HIDDEN)
    costs = estimate_costs(example_ahead(model, (x,), {}, batch_dim=None), Cluster.preset("1xH100"))
    searching = Searching(costs, OPTIONS)
    problem = searching.problem(m, schedule, searching.full)
    problem = replace(problem, kinds=tuple(replace(kind, memory=1.0) for kind in problem.kinds))
    found = Costs(problem, problem.counts)
    everything = tuple(range(len(searching.atoms.nodes)))
    for mode in set(Recompute) - {Recompute.OPERATORS}:  # which the search does not try
        arrangement = Arrangement((everything,), ((costs.groups[0],),), m, schedule, (mode,))
        step = predicted_step(costs, searching.atoms, arrangement, INSIDE).timeline().step_time
        pair = found.pair(0, -1)
        terms = found.terms_of(Mode(0, mode), 1)
        assert terms.fill[pair] + found.max_term(Mode(0, mode), 1)[pair] == pytest.approx(step, rel=SAME)
