"""Compiled stages compute the same numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from models import assert_same_gradients, gradients
from torch import nn
from torch.nn.functional import mse_loss

import autopar
from autopar import PipelinedModule, Plan


def model_with_dropout() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.GELU(),
        nn.LayerNorm(16),
        nn.Dropout(0.3),
        nn.Linear(16, 16),
        nn.Dropout(0.5),
        nn.Linear(16, 4),
    )


def pipelined(model: nn.Module, schedule: str, compile: bool | str, recompute: bool = False) -> PipelinedModule:
    stages = [0] if recompute else []
    plan = Plan.from_split({"0": 0, "4": 1}, n_microbatches=3, schedule=schedule, recompute=stages)
    return autopar.parallelize(model, ["cpu", "cpu"], plan=plan, compile=compile)


def assert_compiled_is_the_same(schedule: str, backend: bool | str, recompute: bool = False) -> None:
    model = model_with_dropout()
    x, y = torch.randn(9, 8), torch.randn(9, 4)
    found = {}
    for compiled in (False, backend):
        own = copy.deepcopy(model)
        pm = pipelined(own, schedule, compiled, recompute)
        torch.manual_seed(3)
        loss = pm.train_step(x, target=y, loss_fn=mse_loss)
        mse_loss(pm(x), y).backward()
        own.eval()
        with torch.no_grad():
            found[compiled] = loss, gradients(own), pm(x)
    plain, compiled_ = found.values()
    torch.testing.assert_close(compiled_[0], plain[0])
    assert_same_gradients(compiled_[1], plain[1])
    torch.testing.assert_close(compiled_[2], plain[2])


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_stages_give_the_same_numbers_dropout_included(schedule: str, recompute: bool) -> None:
    assert_compiled_is_the_same(schedule, "aot_eager", recompute)


@pytest.mark.slow
def test_the_default_backend_does_too() -> None:
    assert_compiled_is_the_same("1f1b", True)
