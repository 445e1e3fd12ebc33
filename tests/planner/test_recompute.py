"""Stages that recompute give what those that keep their activations give, from their inputs alone."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from models import assert_same_gradients, gradients, mlp
from torch import nn

import autopar
from autopar import PipelinedModule, Plan, PlanError
from autopar.runtime.memory_watch import MemoryWatch
from autopar.runtime.stages.stage_replica import StageReplica
from autopar.runtime.step.passes import Passes
from autopar.schedule.builders import SCHEDULES
from cost_models import parse_devices

pytestmark = [
    pytest.mark.filterwarnings("ignore:batch norm uses"),
    pytest.mark.filterwarnings("ignore:the batch is not split"),
]
BOTH = {"0": 0, "6": 1}
CPUS = parse_devices(["cpu", "cpu"])


def square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def normed() -> nn.Sequential:
    """Random numbers and running statistics in both stages of the split `BOTH`."""
    torch.manual_seed(0)
    first = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 8), nn.Tanh()]
    return nn.Sequential(*first, nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))


def pipelined(model: nn.Module, recompute: bool, schedule: str = "1f1b", **options: Any) -> PipelinedModule:
    stages = (0, 1) if recompute else ()
    plan = Plan.from_split(BOTH, n_microbatches=3, schedule=schedule, recompute=stages, **options)
    return autopar.parallelize(model, ["cpu"] * 4, plan=plan)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["call and backward", "train_step"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_recomputing_does_not_change_a_bit(schedule: str, way: str) -> None:
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    seen = []
    for recompute in (False, True):
        model, mine = normed(), x.clone().requires_grad_()
        pm = pipelined(model, recompute, schedule)
        torch.manual_seed(1)
        for _ in range(2):
            if way == "train_step":
                loss = pm.train_step(mine, target=y, loss_fn=square)
            else:
                loss = square(pm(mine), y)
                loss.backward()
        seen.append({"loss": loss.detach(), "input": mine.grad, **gradients(model), **dict(model.named_buffers())})
    plain, again = seen
    for name, tensor in plain.items():
        assert tensor is not None, name
        assert torch.equal(tensor, again[name]), name  # type: ignore[arg-type]


def test_recomputing_under_autocast_does_not_change_a_bit() -> None:
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    found = []
    for recompute in (False, True):
        model = normed()
        pm = pipelined(model, recompute)
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = pm(x)
        square(output.float(), y).backward()
        found.append(gradients(model))
    assert output.dtype == torch.bfloat16
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_graph_that_is_kept_is_recompute_for_every_backward(schedule: str) -> None:
    model = mlp(8, 5)
    original = copy.deepcopy(model)
    for one in (original, pipelined(model, True, schedule)):
        loss = one(torch.ones(8, 8)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(gradients(model), gradients(original))


def test_hooks_of_parameters_see_one_gradient_a_step() -> None:
    model = mlp(8, 5)
    pm = pipelined(model, True)
    calls: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda _, name=name: calls.append(name))
    pm.train_step(torch.randn(8, 8), target=torch.randn(8, 8), loss_fn=square)
    assert sorted(calls) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.slow
def test_a_stage_that_recomputes_holds_the_activations_of_one_micro_batch() -> None:
    n_microbatches, depth, rows, width = 4, 12, 512, 16  # all parameters are less than one activation

    def peak(recompute: bool) -> int:
        """Bytes of the first stage."""
        layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2 * depth)]
        plan = Plan.from_split(
            {"0": 0, str(depth): 1},
            n_microbatches=n_microbatches,
            schedule="gpipe",
            recompute=[0] if recompute else [],
        )
        pm = autopar.parallelize(nn.Sequential(*layers), ["cpu", "cpu"], plan=plan)
        watch = MemoryWatch(CPUS)
        x = torch.randn(n_microbatches * rows, width)
        with pm.device_context(watch), watch.step([]):
            pm.train_step(x, target=x, loss_fn=square)
        return watch.peaks["cpu:0"]

    activation = rows * width * 4  # bytes of what a layer makes of a micro-batch
    # Of all micro-batches but one the outputs of the layers are missing, except the last one's, which is sent. There
    # are gradients of parameters already at the peak of the stage that recomputes.
    assert peak(False) - peak(True) >= ((n_microbatches - 1) * (depth - 1) - 1) * activation


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recompute"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_leaves_no_tensor_behind(schedule: str, recompute: bool) -> None:
    model = mlp(8, 5)
    pm = pipelined(model, recompute, schedule)
    x = torch.randn(8, 8)

    def live_after_steps(n_steps: int) -> int:
        for _ in range(n_steps):
            pm.train_step(x, target=x, loss_fn=square)
            square(pm(x), x).backward()
            model.zero_grad()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    live_after_steps(1)
    gc.collect()
    gc.disable()  # what only the collector could free would stay for long
    try:
        assert live_after_steps(1) == live_after_steps(3)
    finally:
        gc.enable()


def test_a_stage_that_no_gradient_reaches_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*mlp(8, 3), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    model[4].requires_grad_(False)
    pm = pipelined(model, True)
    again: list[int] = []
    real = Passes._recompute

    def noting(self: Passes, replica: StageReplica, *args: Any) -> tuple[Any, ...]:
        again.append(replica.stage.index)
        return real(self, replica, *args)

    monkeypatch.setattr(Passes, "_recompute", noting)
    x = torch.randn(6, 8)
    pm.train_step(x, target=x, loss_fn=square)
    assert again == [1, 1, 1]


class Writing(nn.Module):
    """Counts its calls in a buffer, written whole or through a view; its output may depend on it."""

    calls: torch.Tensor

    def __init__(self, whole: bool, read: bool) -> None:
        super().__init__()
        self.whole, self.read = whole, read
        self.layer = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.whole:
            self.calls += 1
        else:
            self.calls[0] += 1
        return self.layer(x) * self.calls.sum() if self.read else self.layer(x)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "through a view"])
def test_a_buffer_that_nothing_reads_is_written_once(whole: bool) -> None:
    counters = [Writing(whole, read=False) for _ in range(2)]
    x = torch.randn(6, 8)
    for counter, recompute in zip(counters, ([], [0]), strict=True):
        plan = Plan.from_split({"0": 0, "1": 1}, n_microbatches=2, recompute=recompute)
        model = nn.Sequential(counter, nn.Linear(8, 8))
        autopar.parallelize(model, ["cpu", "cpu"], plan=plan).train_step(x, target=x, loss_fn=square)
    assert torch.equal(counters[0].calls, counters[1].calls)
    assert counters[0].calls[0] > 0


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "through a view"])
def test_a_stage_that_reads_a_buffer_it_writes_cannot_be_recompute(whole: bool) -> None:
    model = nn.Sequential(Writing(whole, read=True), nn.Linear(8, 8))
    plan = Plan.from_split({"0": 0, "1": 1}, n_microbatches=2, recompute=[0])
    with pytest.raises(PlanError, match=r"stage 0 cannot be recomputed.*module '0'"):
        autopar.parallelize(model, ["cpu", "cpu"], plan=plan)(torch.randn(6, 8))
