"""Parts that no tracer captures run as opaque operators of a pipeline, and the plain model is the oracle."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Plan
from tests.support.uncaptured_models import CASES, Case

DEVICES = ["cpu", "cpu"]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autopar.AutoparWarning)
        yield


def loss_of(output: Any) -> torch.Tensor:
    parts = output if isinstance(output, tuple) else (output,)
    return sum(part.square().mean() for part in parts)  # type: ignore[return-value]


def pipelined(model: nn.Module, case: Case, schedule: str, n_microbatches: int = 3) -> Any:
    plan = Plan.from_split(case.split, n_microbatches=n_microbatches, schedule=schedule)
    return autopar.parallelize(model, DEVICES, plan=plan, cache=False)


def same_training(pm: Any, model: nn.Module, run: Any, plain: Any) -> None:
    """Both models give the same results, gradients and buffers."""
    torch.testing.assert_close(run(), plain())
    wanted = {name: p.grad for name, p in model.named_parameters()}
    assert [*wanted] == [name for name, _ in pm.named_parameters()]
    for name, parameter in pm.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], msg=name)
    for name, buffer in pm.named_buffers():
        torch.testing.assert_close(buffer, model.get_buffer(name), msg=name)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_outputs_and_gradients_are_those_of_the_model(case: Case, schedule: str) -> None:
    model = case.model()
    pm = pipelined(copy.deepcopy(model), case, schedule)
    for n in (6, 9):

        def step(module: Any, n: int = n) -> Any:
            output = module(*case.inputs(n))
            loss_of(output).backward()
            return output

        same_training(pm, model, lambda: step(pm), lambda: step(model))
    assert pm.plan.n_microbatches == 3
    assert len(pm.stages) == 2
    assert case.opaque in str(pm.plan)
    pm.close()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("case", [c for c in CASES if c.name != "branch"], ids=lambda case: case.name)
def test_train_step_is_that_of_the_model(case: Case, schedule: str) -> None:
    model = case.model()
    pm = pipelined(copy.deepcopy(model), case, schedule)
    inputs = case.inputs(6)
    target = torch.randn_like(model(*inputs))

    def plain() -> torch.Tensor:
        loss = nn.functional.mse_loss(model(*inputs), target)
        loss.backward()
        return loss.detach()

    same_training(pm, model, lambda: pm.train_step(*inputs, target=target, loss_fn=nn.MSELoss()), plain)
    pm.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_evaluation_is_that_of_the_model(case: Case) -> None:
    model = case.model().eval()
    pm = pipelined(copy.deepcopy(model), case, "gpipe")
    with torch.no_grad():
        torch.testing.assert_close(pm(*case.inputs(6)), model(*case.inputs(6)))
    pm.close()


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.name)
def test_replicas_and_recomputed_stages_run_it_too(case: Case) -> None:
    model = case.model()
    devices = [["cpu:0"], ["cpu:1", "cpu:2"]]
    plan = Plan.from_split(case.split, n_microbatches=4, devices=devices, recompute={0, 1})
    pm = autopar.parallelize(copy.deepcopy(model), ["cpu"] * 3, plan=plan, cache=False)

    def step(module: Any) -> Any:
        output = module(*case.inputs(8))
        loss_of(output).backward()
        return output

    same_training(pm, model, lambda: step(pm), lambda: step(model))
    pm.close()
