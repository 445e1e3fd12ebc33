"""The search chooses ZeRO over the devices of a mesh: for the optimizer's time, and where memory is short."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import assert_same_gradients, gradients
from torch import nn

import autopar
from autopar import Cluster, Plan
from autopar.planner.inter_op.meshes import MeshProgram
from autopar.sharding.stage_sharding import Stored

pytestmark = pytest.mark.usefixtures("shared_exports")


def mlp(width: int, layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU())))


def planned(cluster: Cluster, share: float | None = None, *, rows: int = 256, **options: Any) -> Plan:
    """`share`: of 16 bytes a parameter, which each device has."""
    with torch.device("meta"):
        model, x = mlp(1024, 8).train(), torch.empty(16, rows, 1024)
    memory = None if share is None else share * 16 * sum(parameter.numel() for parameter in model.parameters())
    call: dict[str, Any] = {"example_args": (x,), "target": x, "loss_fn": nn.functional.mse_loss}
    return autopar.plan(model, cluster, memory_limit=memory, max_replicas=1, **call, **options)


def stored(plan: Plan) -> list[Stored]:
    return [one for stage in plan.stages if stage.sharding is not None for _, one in stage.sharding.parameters]


@pytest.mark.slow
def test_the_state_is_divided_where_the_optimizer_then_steps_faster() -> None:
    plans = [planned(Cluster.preset("2xT4"), rows=1024, n_microbatches=1, optimizer=name) for name in ("adamw", "none")]
    adam, none = ([one.state != one.layout for one in stored(plan)] for plan in plans)
    assert any(adam), "AdamW reads and writes 28 bytes a parameter"
    assert not any(none), "nothing is gained without an optimizer"


@pytest.mark.slow
def test_gradients_are_scattered_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster.preset("4xH100")
    assert not any(one.scattered for one in stored(planned(cluster, n_microbatches=2))), "it takes longer"
    short = planned(cluster, 0.7, n_microbatches=2)
    assert any(one.scattered for one in stored(short))
    whole = MeshProgram.task
    monkeypatch.setattr(MeshProgram, "task", lambda *args: replace(whole(*args), scatters=False))
    without = planned(cluster, 0.7, n_microbatches=2)
    assert short.predicted_step_time is not None
    assert without.predicted_step_time is not None
    assert short.predicted_step_time < without.predicted_step_time


@pytest.mark.slow
def test_a_plan_with_scattered_gradients_runs_with_the_gradients_of_the_model() -> None:
    cluster = Cluster.preset("4xH100")
    model, x = mlp(16, 4), torch.randn(8, 16)
    call: dict[str, Any] = {"example_args": (x,), "target": x, "loss_fn": nn.functional.mse_loss}
    plan = Plan.by_hand(model, cluster, data=2, pipeline=2, zero=2, micro_batch=2, **call)
    names = {name: f"cpu:{i}" for i, name in enumerate(plan.devices)}
    stages = tuple(replace(s, devices=tuple(names[d] for d in s.devices)) for s in plan.stages)
    here = replace(plan, stages=stages, devices=tuple(names.values()), device_kinds=())
    plain = copy.deepcopy(model)
    pm = autopar.parallelize(model, ["cpu"] * 4, plan=Plan.from_json(here.to_json()))
    pm.train_step(x, target=x, loss_fn=nn.functional.mse_loss)
    nn.functional.mse_loss(plain(x), x).backward()
    assert_same_gradients(gradients(model), gradients(plain))
    pm.close()
