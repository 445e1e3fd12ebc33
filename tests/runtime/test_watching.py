"""What a pipeline watches while it runs: NaN, a lack of memory, and operators too small for threads."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from losses import in_worker
from models import assert_same_gradients, gradients, mlp
from torch import nn
from torch.nn.functional import mse_loss

import autopar
from autopar import NotANumberError, PipelinedModule, Plan


class Logarithm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.last(torch.sqrt(hidden.abs()) + torch.log(hidden))


class Root(nn.Module):
    """Its gradient at zero is infinite, and NaN before that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.sqrt(self.first(x) * 0))


def watched(model: nn.Module, n_microbatches: int = 2, **more: Any) -> PipelinedModule:
    plan = Plan.from_split({"first": 0, "last": 1}, n_microbatches=n_microbatches)
    return autopar.parallelize(model, ["cpu", "cpu"], plan=plan, watch_nan=True, **more)


def test_the_first_operator_that_makes_a_nan_is_named() -> None:
    model = Logarithm()
    nn.init.eye_(model.first.weight)
    nn.init.zeros_(model.first.bias)
    pm = watched(model)
    x = torch.ones(4, 4)
    pm(x)
    x[3] = -1  # in the second micro-batch
    with pytest.raises(NotANumberError, match=r"aten.log.default in module '\(root\)' \(.*test_watching.py") as caught:
        pm(x)
    assert "in the forward of stage 0 (cpu:0), micro-batch 1" in "\n".join(caught.value.__notes__)
    assert isinstance(caught.value, FloatingPointError)


def test_a_nan_in_the_inputs_is_reported_as_one_of_the_inputs() -> None:
    with pytest.raises(NotANumberError, match="inputs have NaN"):
        watched(mlp_of_two())(torch.full((4, 4), torch.nan))


def test_a_nan_in_gradients_names_stage_and_micro_batch() -> None:
    pm = watched(Root())
    x = torch.randn(4, 4)
    pm(x)
    with pytest.raises(NotANumberError, match=r"gradients.*detect_anomaly") as caught:
        pm(x.requires_grad_()).sum().backward()
    assert "in the backward of stage 0" in "\n".join(caught.value.__notes__)


class Compared(nn.Module):
    """Its end compares all samples, and takes a logarithm of them. `shift` makes it one of a negative number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, target: torch.Tensor, shift: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.last(torch.relu(self.first(x)))
        scores = (x @ x.T).square() + 1
        return {"loss": nn.functional.cross_entropy((scores + shift).log(), target)}


def call_of_compared(shift: float = 0.0, first: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.ones(4, 4), torch.arange(first, first + 4), torch.tensor(shift)


def test_a_nan_of_the_end_of_the_model_is_named_too() -> None:
    pm = watched(Compared())
    pm(*call_of_compared())
    with pytest.raises(
        NotANumberError, match=r"aten.log.default in module .*test_watching.py:\d+\) in the end of the model"
    ):
        pm(*call_of_compared(shift=-1e6))


def test_an_error_in_the_end_of_the_model_names_the_line_of_the_model() -> None:
    pm = watched(Compared())
    pm(*call_of_compared())
    with pytest.raises(IndexError, match="out of bounds") as caught:
        pm(*call_of_compared(first=2))
    (note,) = caught.value.__notes__
    assert "in the end of the model, which runs on the whole batch, at aten.cross_entropy_loss" in note
    assert "nn.functional.cross_entropy((scores + shift).log(), target)" in note


def test_infinities_pass_since_masks_are_made_of_them() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.softmax(self.first(x).masked_fill(x < 0, -torch.inf), -1).nan_to_num())

    watched(Masked())(torch.randn(4, 4).abs() + 1)


def test_without_watch_nan_a_nan_passes_as_any_other_value() -> None:
    plan = Plan.from_split({"first": 0, "last": 1}, n_microbatches=2)
    pm = autopar.parallelize(mlp_of_two(), ["cpu", "cpu"], plan=plan)
    assert pm(torch.full((4, 4), torch.nan)).isnan().all()


def mlp_of_two() -> nn.Module:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.relu(self.first(x)))

    return Two()


@pytest.mark.slow
def test_a_lack_of_memory_names_the_stage_its_prediction_and_the_available_bytes() -> None:
    x = torch.randn(8, 8)
    by_hand = Plan.from_split({"0": 0, "3": 1}, n_microbatches=2)
    predicted = replace(by_hand, stages=tuple(replace(s, peak_memory=12345) for s in by_hand.stages))

    def greedy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.mean() + torch.empty(1 << 50).sum()

    for plan, prediction in (
        (predicted, "was predicted to need 12,345 bytes"),
        (by_hand, "has a plan without predictions"),
    ):
        pm = autopar.parallelize(mlp(8, 4), ["cpu", "cpu"], plan=plan)
        with pytest.raises(RuntimeError, match="allocate memory") as caught:
            pm.train_step(x, target=x, loss_fn=greedy)
        notes = "\n".join(caught.value.__notes__)
        assert f"out of memory: cpu:1 with stage 1 {prediction}" in notes
        assert "bytes are available now" in notes


@pytest.mark.parametrize(("seconds", "one"), [(0.0, True), (1.0, False)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_tiny_operators_are_run_by_one_worker_and_large_ones_by_all(
    seconds: float, one: bool, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`seconds`: CPU time of each worker per execution, by a faked clock."""
    clock = threading.local()

    def thread_time() -> float:
        clock.now = getattr(clock, "now", 0.0) + seconds
        return clock.now

    monkeypatch.setattr("autopar.runtime.step.execution.time.thread_time", thread_time)
    seen: set[str] = set()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if in_worker():
            seen.add(threading.current_thread().name)
        return mse_loss(output, target)

    model = mlp_of_two()
    pm = autopar.parallelize(
        model, ["cpu", "cpu"], plan=Plan.from_split({"first": 0, "last": 1}, n_microbatches=3, schedule=schedule)
    )
    x, target = torch.randn(7, 4), torch.randn(7, 2)
    mse_loss(model(x), target).backward()
    wanted = gradients(model)
    for step in range(3):
        seen.clear()
        model.zero_grad()
        pm.train_step(x, target=target, loss_fn=loss)
        assert seen == ({threading.current_thread().name} if one and step else {"autopar-cpu:1"})
        assert_same_gradients(gradients(model), wanted)
    model.zero_grad()
    mse_loss(pm(x), target).backward()
    assert_same_gradients(gradients(model), wanted)
