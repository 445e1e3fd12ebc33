"""Plans for a cluster beside each other: what is predicted of each, and what they differ in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar import Cluster, ClusterComparison, InfeasibleError, InputError, Plan, PlanError

WIDTH, BATCH = 1024, 64


def mlp(layers: int = 4) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


CALL = {
    "example_args": (torch.empty(BATCH, WIDTH, device="meta"),),
    "target": torch.empty(BATCH, WIDTH, device="meta"),
    "loss_fn": nn.functional.mse_loss,
}


def compared(cluster: Cluster, **plans: Plan | None) -> ClusterComparison:
    result = autopar.compare(mlp(), cluster, plans, **CALL)
    assert isinstance(result, ClusterComparison)
    return result


@pytest.mark.slow
def test_a_step_is_that_of_the_plan_and_utilisation_is_by_the_models_flops() -> None:
    cluster = Cluster.preset("4xH100")
    hand = Plan.by_hand(mlp(), cluster, tensor=2, pipeline=2, micro_batch=16, **CALL)
    comparison = compared(cluster, auto=None, hand=hand)
    row = comparison["hand"]
    assert row.seconds == pytest.approx(hand.predicted_step_time)
    # Forward, gradients of weights, and gradients of inputs but for the first layer.
    flops = (3 * 4 - 1) * 2 * BATCH * WIDTH * WIDTH
    assert comparison.flops == pytest.approx(flops)
    peak = 4 * cluster.specs["H100"].by_dtype()[torch.float32]
    assert row.utilisation == pytest.approx(flops / peak / row.seconds)
    assert row.throughput == pytest.approx(BATCH / row.seconds)  # samples: there are no tokens
    automatic = comparison["auto"]
    assert automatic.seconds == autopar.plan(mlp(), cluster, **CALL).predicted_step_time
    assert comparison.fastest is min(comparison.rows, key=lambda row: row.seconds)
    with pytest.raises(KeyError):
        comparison["other"]


@pytest.mark.slow
def test_tokens_count_where_the_model_reads_them() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 100))
    tokens = torch.zeros(16, 32, dtype=torch.long, device="meta")
    loss = lambda y, t: nn.functional.cross_entropy(y.flatten(0, 1), t.flatten())  # noqa: E731
    result = autopar.compare(model, Cluster.preset("2xH100"), example_args=(tokens,), target=tokens, loss_fn=loss)
    assert isinstance(result, ClusterComparison)
    assert result["auto"].throughput == pytest.approx(16 * 32 / result["auto"].seconds)


@pytest.mark.slow
def test_communication_is_that_of_the_stages_exchanges() -> None:
    cluster = Cluster.preset("4xH100")
    hand = Plan.by_hand(mlp(), cluster, data=2, tensor=2, micro_batch=8, recompute="stage", **CALL)
    (stage,) = hand.stages
    assert stage.sharding is not None
    each = sum(one.seconds for one in stage.sharding.exchanges if not one.once)
    again = sum(one.seconds for one in stage.sharding.exchanges if not (one.once or one.backward))
    once = sum(one.seconds for one in stage.sharding.exchanges if one.once)
    row = compared(cluster, hand=hand)["hand"]
    assert row.communication == pytest.approx(4 * (each + again) + once)


@pytest.mark.slow
def test_a_plan_that_does_not_fit_is_said_and_not_the_fastest() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(20_000, 20_000) for _ in range(4)))
    call = {**CALL, "example_args": (torch.empty(8, 20_000, device="meta"),)}
    call["target"] = torch.empty(8, 20_000, device="meta")
    cluster = Cluster.preset("4xT4")
    whole = Plan.by_hand(model, cluster, **call)
    cut = Plan.by_hand(model, cluster, zero=3, **call)
    result = autopar.compare(model, cluster, {"whole": whole, "cut": cut}, **call)
    assert isinstance(result, ClusterComparison)
    assert not result["whole"].fits
    assert result["cut"].fits
    assert result.fastest.name == "cut"
    assert "whole does not fit: it needs" in str(result)


@pytest.mark.slow
def test_each_stage_has_to_fit_its_own_devices_and_no_others() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(16_384, 16_384, bias=False) for _ in range(4)))
        rows = torch.empty(16, 16_384)
    call = {**CALL, "example_args": (rows,), "target": rows}
    cluster = Cluster.preset("1xA100-80+1xT4")
    hand = Plan.by_hand(model, cluster, pipeline=2, micro_batch=1, **call)
    result = autopar.compare(model, cluster, {"auto": None, "hand": hand}, **call)
    assert isinstance(result, ClusterComparison)
    (stage,) = result["auto"].plan.stages
    t4 = min(spec.memory for spec in cluster.node)
    assert t4 < (stage.peak_memory or 0) < result["auto"].usable
    assert result["auto"].fits
    assert result.fastest.name == "auto"


def test_a_memory_limit_holds_for_plans_by_hand_too() -> None:
    cluster = Cluster.preset("2xH100")
    hand = Plan.by_hand(mlp(), cluster, **CALL)
    needed = max(stage.peak_memory or 0 for stage in hand.stages)
    for limit, fits in ((needed, True), (needed - 1, False)):
        result = autopar.compare(mlp(), cluster, {"hand": hand}, memory_limit=limit, **CALL)
        assert isinstance(result, ClusterComparison)
        assert result["hand"].fits == fits
        assert result["hand"].usable == limit
        assert ("hand does not fit: it needs" in str(result)) != fits


@pytest.mark.slow
def test_plans_by_hand_are_shown_where_no_plan_of_the_search_fits(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(20_000, 20_000) for _ in range(4)))
        rows = torch.empty(8, 20_000)
    call = {**CALL, "example_args": (rows,), "target": rows}
    cluster = Cluster.preset("1xT4")
    hand = Plan.by_hand(model, cluster, **call)
    result = autopar.compare(model, cluster, {"auto": None, "hand": hand}, **call)
    assert isinstance(result, ClusterComparison)
    assert [row.name for row in result.rows] == ["hand"]
    assert "auto has no row: no plan fits" in " ".join(str(result).split())
    assert "no plan fits" in json.loads(result.to_json())["missing"]["auto"]
    with pytest.raises(KeyError, match="no plan fits"):
        result["auto"]
    result.report().save(tmp_path / "page.html")
    assert "auto has no row" in (tmp_path / "page.html").read_text()
    with pytest.raises(InfeasibleError, match="1 device has"):
        autopar.compare(model, cluster, **call)


@pytest.mark.slow
def test_the_text_and_the_json_hold_every_plan() -> None:
    cluster = Cluster.preset("2xH100")
    hand = Plan.by_hand(mlp(), cluster, tensor=2, **CALL)
    comparison = compared(cluster, auto=None, hand=hand)
    text = str(comparison)
    for part in ("auto", "hand", "MFU", "bubble", "samples", "against", "1 replica on meshes of 2"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 80
    rows = json.loads(comparison.to_json())["rows"]
    assert [row["name"] for row in rows] == ["auto", "hand"]
    assert rows[1]["seconds"] == pytest.approx(hand.predicted_step_time)
    assert {row["unit"] for row in rows} == {"samples/s"}


def test_what_the_fastest_plan_decides_otherwise_is_said() -> None:
    cluster = Cluster.preset("2xH100")
    plans = {
        "slow": Plan.by_hand(mlp(), cluster, pipeline=2, micro_batch=1, schedule="gpipe", recompute="stage", **CALL),
        "fast": Plan.by_hand(mlp(), cluster, data=2, zero=1, **CALL),
    }
    comparison = compared(cluster, **plans)
    assert comparison.fastest.name == "fast"
    text = " ".join(str(comparison).split())
    assert (
        "It has 1 stage instead of 2; 1 micro-batch instead of 64; schedule 1f1b instead of gpipe; meshes: data 2; "
        "ZeRO 1 instead of 0; recomputed stages: none (before: 0, 1)."
    ) in text
    data = json.loads(comparison.to_json())
    assert data["fastest"] == "fast"
    slow, fast = (row["fastest_does_otherwise"] for row in data["rows"])
    assert fast == []
    assert {"name": "micro-batches", "before": 64, "after": 1} in slow
    assert {"name": "recomputed stages", "before": "0, 1", "after": None} in slow


def test_equal_meshes_of_neighbouring_stages_are_counted() -> None:
    cluster = Cluster.preset("4xH100")
    hand = Plan.by_hand(mlp(), cluster, pipeline=2, tensor=2, micro_batch=16, **CALL)
    other = Plan.by_hand(mlp(), cluster, pipeline=4, micro_batch=16, **CALL)
    (meshes,) = (one for one in other.diff(hand).settings if one.name == "meshes")
    assert (meshes.before, meshes.after) == (None, "tensor 2")


def test_a_plan_for_other_devices_is_refused() -> None:
    hand = Plan.by_hand(mlp(), Cluster.preset("4xH100"), tensor=4, **CALL)
    with pytest.raises(PlanError, match="4 devices"):
        compared(Cluster.preset("2xH100"), hand=hand)


def test_unknown_options_are_named() -> None:
    with pytest.raises(InputError, match="compare has no option 'micro_batches'"):
        autopar.compare(mlp(), Cluster.preset("2xH100"), **CALL, micro_batches=2)  # type: ignore[call-arg]


def test_an_error_names_the_plan_and_the_devices_that_it_lacks() -> None:
    mine = autopar.plan(mlp(), Cluster.preset("2xT4"), **CALL)
    with pytest.raises(PlanError, match=r"^mine: the plan needs . devices? of kind T4 that \w+ not offered"):
        compared(Cluster.preset("2xH100"), mine=mine)
