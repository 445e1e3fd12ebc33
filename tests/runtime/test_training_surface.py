"""What surrounds forward and backward in a training script means the same in one process as with torch alone."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar import InputError, Plan


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, Any]:
    """A model and the same on two workers, with equal gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    plan = Plan.from_split({"0": 0, "2": 1}, n_microbatches=2)
    return model, autopar.parallelize(copy.deepcopy(model), ["cpu", "cpu"], plan=plan)


def test_clipping_accumulation_and_scaling_in_one_process(trained: tuple[nn.Module, Any]) -> None:
    model, pm = trained
    x = torch.randn(8, 6)
    ours, theirs = (
        make("cpu", init_scale=8.0, growth_interval=1) for make in (autopar.GradScaler, torch.amp.GradScaler)
    )
    mine, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (pm, model))
    for step in range(3):
        for _ in range(2):
            with pm.accumulate():
                pm.train_step(x, target=x, loss_fn=lambda out, y: ours.scale(functional.mse_loss(out, y)))
            theirs.scale(functional.mse_loss(model(x), x)).backward()
        if step == 1:
            for m in (pm, model):
                next(m.parameters()).grad.fill_(torch.inf)
        ours.unscale_(mine)
        theirs.unscale_(plain)
        norm = autopar.clip_grad_norm_(pm if step else pm.parameters(), 0.01)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(model.parameters(), 0.01))
        for scaler, optimizer in ((ours, mine), (theirs, plain)):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert ours.get_scale() == theirs.get_scale()
        for a, b in zip(pm.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("value", ["a", None, [1.0], torch.ones(2)])
def test_clipping_by_what_is_no_number_is_refused(trained: tuple[nn.Module, Any], value: Any) -> None:
    """For a pipelined module and for any other; and a number may be in a tensor, or be called "inf", as for torch."""
    for module in trained:
        for name in ("max_norm", "norm_type"):
            with pytest.raises(InputError, match=f"{name} must be a number, such as .*, got {re.escape(repr(value))}"):
                autopar.clip_grad_norm_(module, **{"max_norm": 1.0, name: value})
        autopar.clip_grad_norm_(module, torch.tensor(1.0), norm_type="inf")  # type: ignore[arg-type]


def test_shares_of_a_batch_need_several_processes(trained: tuple[nn.Module, Any]) -> None:
    model, _ = trained
    with pytest.raises(InputError, match="data='per-rank' is for one process a device"):
        autopar.parallelize(model, ["cpu", "cpu"], data="per-rank")
    with pytest.raises(InputError, match="data must be one of 'whole', 'per-rank', got 'own'"):
        autopar.parallelize(model, ["cpu", "cpu"], data="own")
