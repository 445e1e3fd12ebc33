"""Loops of Accelerate with a pipelined module: the losses and weights of the plain model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import gpt2, mlp, tokens
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autopar
from autopar import PipelinedModule, Plan
from autopar.integrations.accelerate_on_ranks import step_once

accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install accelerate")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def _new_accelerators() -> Iterator[None]:
    """Accelerators of one process share their settings."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def pipelined(model: nn.Module, split: dict[str, int]) -> PipelinedModule:
    return autopar.parallelize(
        copy.deepcopy(model), ["cpu", "cpu"], plan=Plan.from_split(split, n_microbatches=3), cache=False
    )


def trained(model: nn.Module, place: Path, **options: Any) -> tuple[list[float], dict[str, Any]]:
    """Losses and weights of a loop with accumulation, clipping, and a checkpoint that is loaded again in between."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
    torch.manual_seed(2)
    data = TensorDataset(torch.randn(36, 16), torch.randn(36, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8))
    losses: list[float] = []
    for epoch in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        if epoch == 0:
            accelerator.save_state(str(place))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            accelerator.load_state(str(place))
    return losses, accelerator.unwrap_model(model, keep_fp32_wrapper=False).state_dict()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_loop_trains_as_with_the_plain_model(precision: str, tmp_path: Path) -> None:
    model = mlp()
    pm = pipelined(model, {"0": 0, "3": 1})
    found = trained(pm, tmp_path / "mine", mixed_precision=precision)
    expected = trained(model, tmp_path / "plain", mixed_precision=precision)
    close = {"rtol": 1e-4, "atol": 1e-5} if precision == "no" else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found, expected, **close)
    assert len(pm.stages) == 2


@pytest.mark.slow
def test_what_accelerate_unwraps_is_the_pipelined_module() -> None:
    """With mixed precision, Accelerate replaces `forward`, and looks through its wrappers to undo that."""
    pm = pipelined(gpt2(), {"transformer.h.0": 0, "transformer.h.1": 1})
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    ids = tokens(6)
    expected = pm.unwrap()(input_ids=ids).logits
    prepared = accelerator.prepare(pm)
    assert prepared(input_ids=ids).logits.dtype == torch.float32, "converted by the wrapper"
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert unwrapped is pm
    assert unwrapped.forward.__func__ is pm.__dict__["_forward_function"]
    torch.testing.assert_close(unwrapped(input_ids=ids).logits, expected)


@pytest.mark.parametrize("total", [0, 3])
def test_a_schedule_that_steps_once_has_the_rates_of_one_process(monkeypatch: pytest.MonkeyPatch, total: int) -> None:
    """On each of four processes. Also after the last step of OneCycleLR, where Accelerate in one process stays."""

    def rates(*, processes: int) -> list[float]:
        with monkeypatch.context() as patched:
            accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
            inner = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
            schedule: Any = (
                torch.optim.lr_scheduler.OneCycleLR(inner, 1.0, total_steps=total)
                if total
                else torch.optim.lr_scheduler.StepLR(inner, 2, gamma=0.5)
            )
            optimizer, schedule = accelerator.prepare(inner, schedule)
            if processes > 1:
                patched.setitem(accelerate.state.PartialState._shared_state, "num_processes", processes)
                with pytest.warns(autopar.AutoparWarning, match="Accelerate would step it 4 times"):
                    step_once(schedule)
            found = []
            for _ in range(10):
                with accelerator.accumulate():
                    optimizer.step()
                    schedule.step()
                found += schedule.get_last_lr()
            return found

    assert rates(processes=4) == rates(processes=1)
