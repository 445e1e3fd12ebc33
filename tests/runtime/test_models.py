"""For every model family, a pipelined model's outputs, losses and gradients are those of the original."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import (
    CASES,
    Case,
    assert_same_gradients,
    assert_same_outputs,
    clip,
    clip_inputs,
    gradients,
    loss_of,
)
from torch import nn

import autopar
from autopar import Plan
from autopar.analysis import example as runtime_example
from autopar.capture.program import Program, capture

pytestmark = pytest.mark.usefixtures("shared_exports")

BATCH = 5  # three micro-batches of 2, 2 and 1 samples


@dataclass(frozen=True)
class Oracle:
    """What the original model computes for one call."""

    case: Case
    model: nn.Module
    inputs: dict[str, Any]
    target: torch.Tensor
    output: Any
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]


def run_original(case: Case, model: nn.Module, batch: int) -> Oracle:
    torch.manual_seed(2)
    inputs, target = case.inputs(batch), torch.randn(batch)
    output = model(**inputs)
    loss = loss_of(output, target)
    loss.backward()
    return Oracle(case, model, inputs, target, output, loss, gradients(model))


@pytest.fixture(scope="module", params=CASES, ids=[case.name.replace(" ", "-") for case in CASES])
def oracle(request: pytest.FixtureRequest) -> Iterator[Oracle]:
    """The same model, inputs and captured graph for all plans: capturing takes most of a test's time."""
    case = request.param
    model = case.model()
    # Before the original runs: capturing registers transformers caches as pytrees, which `loss_of` needs as well.
    program = capture(model, (), case.inputs(BATCH))
    original = run_original(case, model, BATCH)

    def capture_once(other: nn.Module, *args: Any, **kwargs: Any) -> Program:
        return program if other is model else capture(other, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime_example, "capture", capture_once)
        yield original


PLANS = {
    "two stages, whole batch": lambda case: Plan.from_split(case.two, n_microbatches=1, schedule="gpipe"),
    "two stages, 1f1b": lambda case: Plan.from_split(case.two, n_microbatches=2, schedule="1f1b"),
    "two stages, gpipe, uneven": lambda case: Plan.from_split(case.two, n_microbatches=3, schedule="gpipe"),
    "three stages, 1f1b, uneven": lambda case: Plan.from_split(case.three, n_microbatches=3, schedule="1f1b"),
    "replicas": lambda case: replicas(case, 2, "gpipe"),
    "replicas, 1f1b, uneven": lambda case: replicas(case, 3, "1f1b"),
    "replicated second stage": lambda case: Plan.from_split(
        case.two, n_microbatches=3, devices=["cpu:0", ("cpu:1", "cpu:2")]
    ),
}


def replicas(case: Case, n_microbatches: int, schedule: str) -> Plan:
    return Plan.from_split(
        dict.fromkeys(case.two, 0), n_microbatches=n_microbatches, schedule=schedule, devices=[("cpu:0", "cpu:1")]
    )


@pytest.mark.parametrize("plan", PLANS.values(), ids=[name.replace(" ", "-").replace(",", "") for name in PLANS])
def test_outputs_and_gradients_are_the_originals(oracle: Oracle, plan: Any) -> None:
    followed = plan(oracle.case)
    pm = autopar.parallelize(oracle.model, ["cpu"] * 3, plan=followed)
    try:
        output = pm(**oracle.inputs)
        assert_same_outputs(output, oracle.output)
        loss = loss_of(output, oracle.target)
        loss.backward()
        torch.testing.assert_close(loss, oracle.loss, rtol=1e-5, atol=0)
        assert_same_gradients(gradients(pm), oracle.gradients)

        stepped = pm.train_step(**oracle.inputs, target=oracle.target, loss_fn=loss_of)
        assert not stepped.requires_grad
        torch.testing.assert_close(stepped, oracle.loss.detach(), rtol=1e-5, atol=0)
        assert_same_gradients(gradients(pm), oracle.gradients)

        with torch.no_grad():
            assert_same_outputs(pm(**oracle.inputs), oracle.output)
        assert pm.plan is not None
        assert pm.plan.n_microbatches == followed.n_microbatches
        assert len(pm.stages) == len(followed.stages)
    finally:
        pm.close()


@pytest.mark.parametrize("batch", [2, 7])
def test_a_captured_model_takes_batches_of_other_sizes(oracle: Oracle, batch: int) -> None:
    pm = autopar.parallelize(oracle.model, ["cpu"] * 2, plan=Plan.from_split(oracle.case.two, n_microbatches=3))
    try:
        pm(**oracle.inputs)
        other = run_original(oracle.case, oracle.model, batch)
        output = pm(**other.inputs)
        assert_same_outputs(output, other.output)
        loss_of(output, other.target).backward()
        assert_same_gradients(gradients(pm), other.gradients)
    finally:
        pm.close()


@pytest.mark.slow
@pytest.mark.parametrize("forced", [False, True], ids=["free", "two-microbatches"])
def test_an_automatic_plan_gives_the_originals_numbers(oracle: Oracle, forced: bool) -> None:
    limits: dict[str, Any] = {"max_replicas": 1, "n_microbatches": 2} if forced else {}
    before = {name: tensor.clone() for name, tensor in oracle.model.state_dict().items()}
    pm = autopar.parallelize(
        oracle.model,
        ["cpu", "cpu"],
        example_kwargs=oracle.inputs,
        target=oracle.target,
        loss_fn=loss_of,
        **limits,
    )
    try:
        assert all(p.grad is None for p in oracle.model.parameters()), "planning left gradients behind"
        for name, tensor in oracle.model.state_dict().items():
            assert torch.equal(tensor, before[name]), f"planning changed {name}"
        assert pm.plan is not None
        assert pm.plan.n_microbatches == 2 or not forced
        assert_same_outputs(pm(**oracle.inputs), oracle.output)
        loss = pm.train_step(**oracle.inputs, target=oracle.target, loss_fn=loss_of)
        torch.testing.assert_close(loss, oracle.loss.detach(), rtol=1e-5, atol=0)
        assert_same_gradients(gradients(pm), oracle.gradients)
    finally:
        pm.close()


@pytest.mark.slow
def test_clip_is_split_up_to_its_similarities() -> None:
    model, inputs, target = clip().train(), clip_inputs(BATCH), torch.randn(BATCH)
    original = model(**inputs)
    loss_of(original, target).backward()
    expected = gradients(model)
    plan = Plan.from_split({"text_model": 0, "vision_model": 1}, n_microbatches=2)
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan)
    output = pm(**inputs)
    assert_same_outputs(output, original)
    loss_of(output, target).backward()
    assert_same_gradients(gradients(pm), expected)
    assert pm.plan is not None
    assert pm.plan.n_microbatches == 2
    pm.close()
