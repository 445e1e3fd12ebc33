"""A plan with sharded stages has one price: as the search found it, from a file, and edited back and forth."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Cluster, Plan, PlanError
from autopar.sharding.layouts import parts

CLUSTER = Cluster.preset("4xH100")
WIDTH, BATCH = 4096, 64


def layers(n: int) -> nn.Module:
    with torch.device("meta"):
        block = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(n)]
        return nn.Sequential(*block)


CALL: dict[str, Any] = {
    "example_args": (torch.empty(BATCH, WIDTH, device="meta"),),
    "target": torch.empty(BATCH, WIDTH, device="meta"),
    "loss_fn": nn.functional.mse_loss,
}
SPACES: list[dict[str, Any]] = [
    {"memory_limit": "3GB"},  # one stage on a mesh of all devices
    {"memory_limit": "3GB", "n_microbatches": 4},
    {"memory_limit": "4GB", "max_shards": 2},  # replicas, or stages, of meshes of two
    {"memory_limit": "4GB", "max_shards": 2, "n_microbatches": 8, "schedule": "1f1b"},
]


@pytest.fixture(scope="module")
def found() -> list[Plan]:
    return [autopar.plan(layers(4), CLUSTER, **CALL, **space) for space in SPACES]


def numbers(plan: Plan) -> list[Any]:
    own = ("forward_time", "backward_time", "weight_time", "sync_time", "parameter_bytes", "activation_bytes")
    stages = [[getattr(stage, name) for name in (*own, "peak_memory")] for stage in plan.stages]
    return [plan.predicted_step_time, plan.bubble, *(x for stage in stages for x in stage)]


@pytest.mark.parametrize("place", range(len(SPACES)))
@pytest.mark.slow
def test_a_plan_of_the_search_keeps_its_price_whichever_way_it_comes(found: list[Plan], place: int) -> None:
    plan = found[place]
    assert any(stage.sharding is not None for stage in plan.stages)
    for given in (plan, Plan.from_json(plan.to_json()), plan.without_predictions("for the test")):
        priced = autopar.plan(layers(4), CLUSTER, plan=given, **CALL)
        assert numbers(priced) == pytest.approx(numbers(plan), rel=1e-9)
        assert [stage.sharding for stage in priced.stages] == [stage.sharding for stage in plan.stages]


@pytest.mark.slow
def test_an_edited_plan_is_priced_as_what_it_has_become(found: list[Plan]) -> None:
    plan = found[0]
    data = json.loads(plan.to_json())
    data["n_microbatches"] = 2 * plan.n_microbatches
    edited = Plan.from_json(json.dumps(data))
    assert edited.predicted_step_time is None
    priced = autopar.plan(layers(4), CLUSTER, plan=edited, **CALL)
    assert priced.predicted_step_time is not None
    assert priced.n_microbatches == 2 * plan.n_microbatches
    again = autopar.plan(
        layers(4), CLUSTER, plan=priced.with_decision("back", n_microbatches=plan.n_microbatches), **CALL
    )
    assert numbers(again) == pytest.approx(numbers(plan), rel=1e-9)


@pytest.mark.slow
def test_what_is_stored_whole_instead_of_cut_needs_more_memory(found: list[Plan]) -> None:
    plan, name, operator = found[0], "0.0.weight", "0.0/linear#0"
    sharding = plan.stages[0].sharding
    assert sharding is not None
    cut = parts(sharding.stored[name].layout, sharding.mesh)
    assert cut > 1
    whole = replace(
        sharding,
        parameters=tuple(pair for pair in sharding.parameters if pair[0] != name),
        strategies=tuple(pair for pair in sharding.strategies if pair[0] != operator),
    )
    assert (len(whole.parameters), len(whole.strategies)) == (
        len(sharding.parameters) - 1,
        len(sharding.strategies) - 1,
    )
    edited = replace(plan.without_predictions("for the test"), stages=(replace(plan.stages[0], sharding=whole),))
    priced = autopar.plan(layers(4), CLUSTER, plan=Plan.from_json(edited.to_json()), **CALL)
    before, after = (p.stages[0].parameter_bytes or 0 for p in (plan, priced))
    assert after - before == pytest.approx(4 * 4 * WIDTH * WIDTH * (1 - 1 / cut), rel=1e-6)
    assert (priced.predicted_step_time or 0) > (plan.predicted_step_time or 0)


@pytest.mark.slow
def test_strategies_that_do_not_exist_and_batches_that_do_not_divide_are_refused(found: list[Plan]) -> None:
    plan = found[0]
    data = json.loads(plan.to_json())
    axes = len(data["stages"][0]["sharding"]["mesh"])
    wrong = " ".join(["S1" + "R" * (axes - 1)] * 3) + " -> P"
    data["stages"][0]["sharding"].setdefault("strategies", {})[wrong] = "0.0: linear"
    with pytest.raises(PlanError, match=r"0\.0/linear#0"):
        autopar.plan(layers(4), CLUSTER, plan=Plan.from_json(json.dumps(data)), **CALL)
    with pytest.raises(PlanError, match="7 micro-batches do not divide the batch of 64"):
        autopar.plan(layers(4), CLUSTER, plan=plan.with_decision("for the test", n_microbatches=7), **CALL)
