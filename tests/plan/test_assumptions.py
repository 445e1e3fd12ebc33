"""Plans for clusters record what their prices assume, and are priced again with it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autopar
from autopar import Cluster, Plan, PlanError
from autopar.plan.assumptions import Assumptions

CLUSTER = Cluster.preset("2xH100")
BATCH, WIDTH = 16, 512
CALL: dict[str, Any] = {
    "example_args": (torch.empty(BATCH, WIDTH, device="meta", dtype=torch.bfloat16),),
    "target": torch.empty(BATCH, WIDTH, device="meta", dtype=torch.bfloat16),
    "loss_fn": nn.functional.mse_loss,
}
OTHERS: list[dict[str, Any]] = [
    {"launch": "eager-functions"},
    {"launch": "cuda-graphs", "overlap": "all"},
    {"compile": True},
    {"precision": "bf16-mixed"},
    {"optimizer_step": "for-loop"},
    {"optimizer": "sgd"},
]


def layers() -> nn.Module:
    with torch.device("meta"):
        parts = [nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(3)]
        return nn.Sequential(*parts)


def planned(**options: Any) -> Plan:
    return autopar.plan(layers(), CLUSTER, **{"n_microbatches": 2, **CALL, **options})


def priced(plan: Plan, **options: Any) -> Plan:
    return autopar.plan(layers(), CLUSTER, plan=plan, **CALL, **options)


@pytest.mark.slow
@pytest.mark.parametrize("options", OTHERS, ids=str)
def test_a_loaded_plan_keeps_its_price_without_naming_the_options_again(options: dict[str, Any]) -> None:
    plan = planned(**options)
    again = priced(Plan.from_json(plan.to_json()))
    assert again.predicted_step_time == pytest.approx(plan.predicted_step_time, rel=1e-9)
    as_usual = priced(plan, **STANDARD)
    assert again.predicted_step_time != pytest.approx(as_usual.predicted_step_time)
    assert again.assumed == plan.assumed
    assert not any("the plan was made with" in note for note in again.notes)


STANDARD: dict[str, Any] = {
    "launch": "eager",
    "precision": "bf16",
    "optimizer_step": "foreach",
    "overlap": "sends",
    "optimizer": "adamw",
}


@pytest.mark.slow
def test_an_edited_plan_still_records_what_it_was_priced_with() -> None:
    plan = planned(launch="eager-functions")
    data = json.loads(plan.to_json())
    data["n_microbatches"] = 4
    edited = Plan.from_json(json.dumps(data))
    assert edited.predicted_step_time is None
    assert edited.assumed == plan.assumed
    wanted = priced(edited.with_decision("t", n_microbatches=4), launch="eager-functions")
    assert priced(edited).predicted_step_time == pytest.approx(wanted.predicted_step_time, rel=1e-9)


@pytest.mark.slow
def test_other_options_of_the_call_count_and_a_sentence_says_so() -> None:
    plan = planned(launch="eager-functions", optimizer="sgd")
    other = priced(plan, launch="eager", optimizer="adamw")
    assert other.assumed is not None
    assert (other.assumed.launch, other.assumed.optimizer) == ("eager", "adamw")
    (note,) = (note for note in other.notes if "the plan was made with" in note)
    assert "launch=eager, optimizer=adamw" in note
    assert "launch=eager-functions, optimizer=sgd" in note
    back = priced(other, launch="eager-functions", optimizer="sgd")
    assert back.predicted_step_time == pytest.approx(plan.predicted_step_time, rel=1e-9)


@pytest.mark.slow
def test_plans_by_hand_record_them_and_the_text_and_the_difference_show_them() -> None:
    how: dict[str, Any] = {"launch": "compiled", "overlap": "none"}
    plan = Plan.by_hand(layers(), CLUSTER, **CALL, pipeline=2, micro_batch=4, **how)
    assert plan.assumed == Assumptions("compiled", overlap="none")
    assert priced(Plan.from_json(plan.to_json())).predicted_step_time == pytest.approx(plan.predicted_step_time)
    other = priced(plan, overlap="sends")
    assert other.predicted_step_time != pytest.approx(plan.predicted_step_time)
    assert "launch=compiled" in str(plan)
    difference = plan.diff(Plan.by_hand(layers(), CLUSTER, **CALL, pipeline=2, micro_batch=4))
    assert difference.same_decisions
    assert not difference.same
    assert "launch=eager" in str(difference)


@pytest.mark.slow
def test_a_comparison_prices_each_plan_as_it_records() -> None:
    plans = {"slow": planned(launch="eager-functions"), "fast": planned(launch="cuda-graphs")}
    compared = autopar.compare(layers(), CLUSTER, dict(plans), **CALL)
    for name, plan in plans.items():
        assert compared[name].plan.predicted_step_time == pytest.approx(plan.predicted_step_time, rel=1e-9)
    assert "launch=cuda-graphs" in str(compared)


@pytest.mark.slow
def test_a_file_from_before_assumptions_were_recorded_still_loads() -> None:
    data = json.loads(planned().to_json())
    del data["assumed"]
    loaded = Plan.from_json(json.dumps(data))
    assert loaded.assumed is None
    assert priced(loaded).predicted_step_time == pytest.approx(planned().predicted_step_time, rel=1e-9)


@pytest.mark.parametrize(
    ("field", "value"),
    [("launch", "fast"), ("precision", "fp8"), ("optimizer_step", "x"), ("overlap", "y"), ("speed", 1)],
)
def test_assumptions_that_do_not_exist_are_refused_by_name(field: str, value: Any) -> None:
    data = json.loads(planned().to_json())
    data["assumed"][field] = value
    with pytest.raises(PlanError, match=rf"assumed\.{field}"):
        Plan.from_json(json.dumps(data))


def test_measured_plans_assume_nothing() -> None:
    plan = autopar.plan(nn.Linear(8, 8), ["cpu"], example_args=(torch.ones(4, 8),))
    assert plan.assumed is None


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["eager", "compiled", "cuda-graphs", "eager-functions"]),
    st.sampled_from([None, "bf16-mixed", "fp32"]),
    st.sampled_from([None, "fused", "foreach", "for-loop"]),
    st.sampled_from(["none", "all", "sends", "gradients+parameters"]),
    st.sampled_from(["adamw", "sgd", "none"]),
)
def test_assumptions_are_the_same_after_a_round_trip(
    launch: str, precision: str | None, step: str | None, overlap: str, optimizer: str
) -> None:
    assumed = Assumptions(launch, precision, step, overlap, optimizer)
    plan = dataclasses.replace(Plan.from_split({"0": 0, "1": 1}, n_microbatches=1), assumed=assumed)
    assert Plan.from_json(plan.to_json()).assumed == assumed
