"""Modules pinned to stages, and layouts asked for inside of them: a mesh for every stage."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import assert_same_gradients, assert_same_outputs, gradients, sum_of_squares
from shardings import Mlp
from torch import nn

import autopar
from autopar import Layout, Plan, PlanError


def pinned(*stages: int) -> nn.Sequential:
    """A block for each of the stages it is to run in."""
    torch.manual_seed(0)
    return nn.Sequential(*(autopar.pipeline_stage(Mlp(), stage) for stage in stages))


def assert_trains(model: nn.Module, n_devices: int, x: torch.Tensor, **options: Any) -> Plan:
    original = copy.deepcopy(model)
    autopar.clear_hints(original)
    pm = autopar.parallelize(model, ["cpu"] * n_devices, **options)
    for module in (pm, original):
        for _ in range(2):
            sum_of_squares(module(x)).backward()
    assert_same_outputs(pm(x), original(x), 1e-5)
    assert_same_gradients(gradients(model), gradients(original), 1e-5)
    assert pm.plan is not None
    return pm.plan


@pytest.mark.slow
@pytest.mark.parametrize("n_devices", [2, 4, 6])
def test_every_stage_has_as_many_devices_and_does_as_asked(n_devices: int) -> None:
    model, n = pinned(0, 0, 1), n_devices // 2
    autopar.shard(model[0].up, ((1, n),), parameter_plan={"weight": (1, n)})
    autopar.shard(model[2], ((n, 1),), ((n, 1),))
    plan = assert_trains(model, n_devices, torch.randn(24, 12))
    assert [len(stage.devices) for stage in plan.stages] == [n, n]
    assert plan.n_microbatches == 4
    if n == 1:
        assert [stage.sharding for stage in plan.stages] == [None, None]
        return
    first, second = (dict(stage.sharding.texts[0]) for stage in plan.stages if stage.sharding is not None)
    assert first["0.up/linear#0"] == "S1 S1 P -> P"
    assert second["2/alias#0"] == second["2/alias#1"] == "S0 -> S0"


@pytest.mark.slow
def test_a_plan_that_was_saved_follows_the_hints_and_others_do_not() -> None:
    model, x = pinned(0, 1), torch.randn(8, 12)
    autopar.shard(model[1].up, ((2, 1),))
    plan = Plan.from_json(assert_trains(model, 4, x).to_json())
    assert_trains(model.requires_grad_(True), 4, x, plan=plan)
    autopar.clear_hints(model[1].up)
    autopar.shard(model[1].up, ((1, 2),))
    with pytest.raises(PlanError, match="does not follow the hints"):
        autopar.parallelize(model, ["cpu"] * 4, plan=plan)(x)


def test_meshes_by_names_are_those_of_a_stage() -> None:
    model, mesh = pinned(0, 1), Layout((2, 2), ("dp", "mp"))
    autopar.shard(model[0].up, (mesh("dp", None),), parameter_plan={"weight": mesh("mp", None)})
    autopar.shard(model[1].down, (mesh("dp", "mp"),))
    plan = assert_trains(model, 8, torch.randn(16, 12))
    assert [stage.sharding.axes for stage in plan.stages if stage.sharding is not None] == [("dp", "mp")] * 2


@pytest.mark.slow
def test_microbatches_are_those_asked_for_or_as_many_as_come_apart() -> None:
    def found(batch: int, **options: Any) -> int:
        model = pinned(0, 1)
        autopar.shard(model[1].up, ((2, 1),))
        return assert_trains(model, 4, torch.randn(batch, 12), **options).n_microbatches

    assert found(8) == 4
    assert found(8, n_microbatches=2, schedule="gpipe") == 2
    assert found(4) == 1  # four micro-batches of one sample could not be cut in two
    assert found(6) == 1


def test_a_stage_that_recomputes_is_one_of_several() -> None:
    model = pinned(0, 1)
    autopar.recompute(model[0])
    autopar.shard(model[1].up, ((2, 1),))
    plan = assert_trains(model, 4, torch.randn(8, 12))
    assert [stage.recompute for stage in plan.stages] == [True, False]


def test_it_is_planned_for_machines_that_are_not_here() -> None:
    model = pinned(0, 1)
    autopar.shard(model[1].up, ((2, 1),))
    plan = autopar.plan(model, autopar.Cluster.preset("4xH100"), example_args=(torch.randn(8, 12),))
    assert [len(stage.devices) for stage in plan.stages] == [2, 2]
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("stages", "n_devices", "message"),
    [
        ((0, 1), 3, "3 devices do not make 2 stages of as many devices"),
        ((0, 2), 6, "no module is put on stage 1"),
    ],
)
def test_pins_that_devices_do_not_fit_are_refused(stages: tuple[int, ...], n_devices: int, message: str) -> None:
    model = pinned(*stages)
    autopar.shard(model[1].up, ((1, 1),))
    with pytest.raises(PlanError, match=message):
        autopar.plan(model, ["cpu"] * n_devices, example_args=(torch.randn(24, 12),))
