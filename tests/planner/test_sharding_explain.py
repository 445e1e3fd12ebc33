"""Why operators are split as they are: what the explanation says is what solving again finds."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from printed_tables import table_in
from sharded_plans import INF, chosen
from torch import nn
from torch.nn import functional

import autopar
from autopar import Plan, PlanError
from autopar.capture.repeated_layers.fold import fold
from autopar.planner.intra_op.explain import InsideExplained, Solved, Whole, operator_explainer
from autopar.planner.intra_op.strategy_search import ShardingProblem, choose
from autopar.sharding.stage_sharding import parse_strategy, strategy_text
from cost_models import Cluster


def explained(plan: Plan, path: str) -> InsideExplained:
    found = plan.explain(path)
    assert isinstance(found, InsideExplained)
    return found


PATHS = {"mlp": "up", "gpt2": "model.transformer.h.1.mlp.c_fc/addmm", "llama": "model.model.layers.1.mlp.down_proj"}


@pytest.mark.slow
@pytest.mark.parametrize("name", PATHS)
def test_with_a_strategy_given_the_whole_takes_what_choosing_anew_finds(name: str) -> None:
    plan, problem, found, keys, _ = chosen(name)
    (one,) = explained(plan, PATHS[name]).operators
    node = next(node for node, key in keys.items() if key == one.key)
    assert one.chosen is not None
    assert one.chosen.strategy == strategy_text(found.strategies[node])
    assert (one.chosen.whole and one.chosen.whole.seconds) == found.seconds
    assert one.others
    by_text = {strategy_text(strategy): strategy for strategy in problem.options[node][1].strategies}
    for other in one.others:
        anew = choose(problem.task, problem.mesh, fixed={node: by_text[other.strategy]})
        assert other.whole is not None
        assert other.whole.seconds == pytest.approx(anew.seconds)
        assert other.whole.seconds >= found.seconds * (1 - 1e-9)
        assert other.whole.seconds <= found.seconds + cost(other) - cost(one.chosen) + 1e-12


def cost(one: Any) -> float:
    return float(one.seconds + one.exchanged)


@pytest.mark.parametrize("name", ["mlp", "llama"])
def test_collectives_beside_an_operator_are_what_the_whole_takes_more_if_all_others_stay(name: str) -> None:
    plan, problem, found, keys, _ = chosen(name)
    (one,) = explained(plan, PATHS[name]).operators
    node = next(node for node, key in keys.items() if key == one.key)
    by_text = {strategy_text(strategy): strategy for strategy in problem.options[node][1].strategies}
    assert one.chosen is not None
    for other in one.others:
        staying = problem.solve(INF, {**found.strategies, node: by_text[other.strategy]})
        assert cost(other) - cost(one.chosen) == pytest.approx(staying.seconds - found.seconds, abs=1e-12)


@pytest.mark.slow
def test_an_operator_of_equal_layers_is_explained_as_one_of_them() -> None:
    plan, problem, _, keys, _ = chosen("llama 6")
    layers = fold(problem.task.module)
    folded_task = replace(problem.task, module=layers.module, copies=layers.copies, again=layers.again)
    few = ShardingProblem(folded_task, problem.mesh)
    kept = {key: layers.kept(node) for node, key in keys.items()}
    explain = operator_explainer(lambda _: Solved(few, few.solve(INF, {}), kept))
    path = "model.model.layers.3.mlp.down_proj"
    (known,) = explained(plan, path).operators
    (one,) = explain(plan, path).operators
    assert (known.alike, one.alike) == (1, layers.copies[kept[one.key]])
    assert one.alike > 1
    assert one.chosen is not None
    assert known.chosen is not None
    assert one.chosen.strategy == known.chosen.strategy
    mine = {other.strategy: other for other in (one.chosen, *one.others)}
    for other in (known.chosen, *known.others):
        if other.strategy in mine:
            assert mine[other.strategy].seconds == other.seconds
            assert mine[other.strategy].exchanged == pytest.approx(other.exchanged)
            assert mine[other.strategy].kept == pytest.approx(other.kept)


def test_within_a_limit_of_the_memory_every_alternative_fits_it_or_is_said_not_to() -> None:
    plan, _, found, _, memory = chosen("mlp", 0.5)
    (one,) = explained(plan, "up").operators
    wholes = [other.whole for other in one.others if other.fits]
    assert all(isinstance(whole, Whole) and whole.nbytes <= memory for whole in wholes)
    assert all(whole.seconds >= found.bound * (1 - 1e-9) for whole in wholes if whole is not None)


def test_the_text_of_an_explanation_lists_the_candidates_and_says_why_the_chosen_one_won() -> None:
    plan = chosen("mlp")[0]
    text = str(plan.explain("down"))
    (one,) = explained(plan, "down/linear").operators
    assert one.chosen is not None
    printed = {cell for row in table_in(text, "chosen") for cell in row}
    assert {alternative.strategy for alternative in (one.chosen, *one.others)} <= printed
    assert re.search(r"- chosen (for|as)", text)
    assert f"... and {one.more} more" in text
    for exchange in one.exchanges:
        assert f"{exchange.collective.replace('_', '-')} along {exchange.axis}" in text


@pytest.mark.slow
def test_an_unknown_path_is_refused_with_names_close_to_it() -> None:
    plan = chosen("llama")[0]
    with pytest.raises(PlanError, match=re.escape("'model.model.layers.0.mlp.up_proj'")):
        plan.explain("model.model.layer.0.mlp.up_proj")
    with pytest.raises(PlanError, match="names no operators"):
        Plan.from_split({"a": 0}, n_microbatches=1).explain("a")


@pytest.mark.slow
def test_a_loaded_plan_tells_what_its_own_numbers_say_of_an_operator() -> None:
    plan = chosen("llama")[0]
    loaded = Plan.from_json(plan.to_json())
    path = PATHS["llama"]
    (found,), (known,) = explained(loaded, path).operators, explained(plan, path).operators
    assert found.chosen is None
    assert (found.strategy, found.exchanges, found.repeated) == (known.strategy, known.exchanges, known.repeated)
    text = str(loaded.explain(path))
    assert found.strategy is not None
    assert any(found.strategy in row for row in table_in(text, "operators"))
    assert "only a new search can tell" in text


class Hinted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = autopar.shard(nn.Linear(64, 256), in_strategy=((2, 2),)), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.relu(self.up(x)))


def test_a_plan_for_hints_explains_within_what_they_allow() -> None:
    plan = autopar.plan(Hinted(), Cluster.preset("4xH100"), example_args=(torch.randn(8, 64),))
    (one,) = explained(plan, "up").operators
    assert one.chosen is not None
    for alternative in (one.chosen, *one.others):
        operands, _ = parse_strategy(alternative.strategy)
        assert sorted(operands[0]) == [0, 1]
    stage = plan.stages[0]
    each = (stage.forward_time or 0.0) + (stage.backward_time or 0.0)
    once = (stage.sync_time or 0.0) + (stage.optimizer_time or 0.0)
    assert plan.n_microbatches * each + once == pytest.approx(plan.predicted_step_time)
    assert "mesh" in str(plan)
