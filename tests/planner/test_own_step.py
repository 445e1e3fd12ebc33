"""A plan's own numbers make the step that it predicts, and changes of them count from there."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from autopar import Plan
from autopar.planner.explain import own_explanation
from autopar.planner.other_networks import network_sensitivity
from autopar.planner.predicted_step import step_of_plan
from autopar.planner.sensitivity import sensitivity
from cost_models import Cluster

pytestmark = pytest.mark.slow

DEGREES: tuple[dict[str, Any], ...] = (
    {"data": 4},
    {"tensor": 4},
    {"pipeline": 4, "micro_batch": 4},
    {"pipeline": 4, "micro_batch": 4, "schedule": "zb-h1"},
    {"pipeline": 2, "tensor": 2, "micro_batch": 4},
    {"pipeline": 2, "data": 2, "micro_batch": 4, "recompute": "full"},
)


def model_and_call(loss_inside: bool) -> tuple[nn.Module, dict[str, Any]]:
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(4)]
        model, x = nn.Sequential(*layers).train(), torch.empty(64, 1024)
    call: dict[str, Any] = {"example_args": (x,)}
    if loss_inside:
        call |= {"target": x, "loss_fn": nn.functional.mse_loss}
    return model, call


@cache
def priced(number: int, loss_inside: bool) -> Plan:
    model, call = model_and_call(loss_inside)
    return Plan.by_hand(model, Cluster.preset("4xH100"), **DEGREES[number], **call)


@pytest.mark.parametrize("loss_inside", [False, True])
@pytest.mark.parametrize("number", range(len(DEGREES)))
def test_a_plan_s_own_numbers_make_the_step_that_it_predicts(number: int, loss_inside: bool) -> None:
    """On a mesh, with a loss of the caller that holds all backwards back, and without."""
    plan = priced(number, loss_inside)
    assert plan.predicted_step_time is not None
    step = step_of_plan(Plan.from_json(plan.to_json()))
    assert step is not None
    assert step.timeline().step_time == pytest.approx(plan.predicted_step_time, rel=1e-9)


@pytest.mark.parametrize("number", range(len(DEGREES)))
def test_nothing_that_gets_faster_makes_a_step_longer(number: int) -> None:
    plan = priced(number, False)
    faster = [one for one in sensitivity(plan) if "faster" in one.what or "twice as fast" in one.what]
    slower = [one for one in sensitivity(plan) if "slower" in one.what or "half as fast" in one.what]
    faster += [one for one in own_explanation(plan).helps if "faster" in one.what]
    assert faster
    assert slower
    assert min(one.gain(plan) for one in faster) >= -1e-9
    assert max(one.gain(plan) for one in slower) <= 1e-9


def test_networks_count_as_they_do_for_a_plan_that_is_priced_on_them() -> None:
    """Faster networks: the price of the same decisions on a cluster with other line rates."""
    plan, cluster = priced(0, True), Cluster.preset("4xH100")
    changes = {one.what: one.step_time for one in network_sensitivity(plan)}
    slower, faster = changes["all networks half as fast"], changes["all networks twice as fast"]
    assert plan.predicted_step_time is not None
    assert faster < plan.predicted_step_time < slower
    inside = dataclasses.replace(cluster.intra_node, line_rate=cluster.intra_node.line_rate / 2)
    model, call = model_and_call(True)
    again = Plan.by_hand(model, dataclasses.replace(cluster, intra_node=inside), **DEGREES[0], **call)
    assert slower == pytest.approx(again.predicted_step_time)
    assert network_sensitivity(Plan.from_json(plan.to_json())) == (), "a plan from a file knows no model"
    report = plan.report(search=True).only("Sensitivity")
    assert "all networks half as fast" in str(report)
