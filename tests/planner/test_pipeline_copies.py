"""Clusters with many devices: the search copies the whole pipeline, with a part of the batch for each copy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from partition_oracle import OracleStage, objective
from torch import nn

import autopar
from autopar import Cluster
from autopar.analysis.example import example_ahead
from autopar.costs.estimated import estimate_costs
from autopar.planner.inter_op import ahead, search_counts, search_space
from autopar.planner.inter_op.candidates import Searching
from autopar.planner.inter_op.config import Config
from autopar.planner.inter_op.partition import solve
from autopar.planner.search_options import SearchOptions

pytestmark = pytest.mark.usefixtures("shared_exports")
BATCH = 16


def mlp() -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        layers = [part for _ in range(4) for part in (nn.Linear(2048, 2048), nn.GELU())]
        return nn.Sequential(*layers).train(), torch.empty(BATCH, 512, 2048)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("memory_limit", [None, 3e8])
def test_copies_have_the_price_of_as_many_replicas(schedule: str, memory_limit: float | None) -> None:
    model, x = mlp()
    costs = estimate_costs(example_ahead(model, (x,), {}, batch_dim=None), Cluster.preset("8xH100"))
    searching = Searching(costs, SearchOptions(loss_inside=True, memory_limit=memory_limit))
    alone = Config(schedule, 8, (8,))
    whole = searching.problem_of(alone)
    best = solve(whole, (8,))
    assert best is not None
    for copies in (2, 4):
        config = dataclasses.replace(alone, copies=copies)
        one = solve(searching.problem_of(config), searching.counts_of(config))
        if one is None:
            continue
        found = one.copied(copies)
        cuts = whole.space.cuts
        stages = tuple(
            OracleStage(
                frozenset(np.flatnonzero(cuts[s.stop] & ~cuts[s.start]).tolist()), s.kind, s.replicas, s.recompute
            )
            for s in found.stages
        )
        assert all(stage.replicas % copies == 0 for stage in found.stages)
        assert found.used[0] <= 8
        assert objective(whole, stages) == pytest.approx(found.objective)
        assert best.objective <= found.objective * (1 + 1e-9)


@pytest.mark.slow
def test_many_devices_get_a_plan_whose_stages_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = mlp()
    call = {"example_args": (x,), "target": x, "loss_fn": nn.functional.mse_loss}
    exact = autopar.plan(model, Cluster.preset("8xH100", 2), **call)
    for room in (search_counts, search_space, ahead):
        monkeypatch.setattr(room, "MANY_DEVICES", 4)
    for room in (search_counts, search_space):
        monkeypatch.setattr(room, "FEW_DEVICES", 2)
    monkeypatch.setattr(search_counts, "MANY_MESHES", 4)
    copied = autopar.plan(model, Cluster.preset("8xH100", 2), **call)
    assert exact.predicted_step_time is not None
    assert copied.predicted_step_time is not None
    assert exact.predicted_step_time <= copied.predicted_step_time * 1.001
    assert copied.predicted_step_time <= exact.predicted_step_time * 1.25
