"""At the peak of a step, a device holds the activations that its schedule keeps in flight. Of a stage that recomputes,
it holds those of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import nn

import autopar
from autopar import Plan
from autopar.runtime.memory_watch import MemoryWatch
from cost_models import parse_devices

DEPTH, ROWS, WIDTH = 60, 512, 32  # DEPTH activations of ROWS x WIDTH per stage and micro-batch: parameters are small
CPUS = parse_devices(["cpu", "cpu"])
TOLERANCE = 0.1  # for gradients between stages and the transients of an operator: a few activations


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.mean()


def model() -> nn.Sequential:
    """Two stages one after the other."""
    return nn.Sequential(*(layer for _ in range(2) for layer in stage_layers()))


def stage_layers() -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH), *(nn.Tanh() for _ in range(DEPTH))]


@cache
def peaks(schedule: str, n_microbatches: int, recompute: bool) -> list[int]:
    """Bytes of both stages' devices in a training step."""
    split, stages = {"0": 0, str(DEPTH + 1): 1}, (0, 1) if recompute else ()
    plan = Plan.from_split(split, n_microbatches=n_microbatches, schedule=schedule, recompute=stages)
    pm = autopar.parallelize(model(), ["cpu", "cpu"], plan=plan)
    x, target = torch.randn(n_microbatches * ROWS, WIDTH), torch.zeros(n_microbatches * ROWS)
    pm.train_step(x, target=target, loss_fn=loss_fn)
    pm.zero_grad()
    watch = MemoryWatch(CPUS)
    with pm.device_context(watch), watch.step([]):
        pm.train_step(x, target=target, loss_fn=loss_fn)
    return [watch.peaks[device.name] for device in CPUS]


@dataclass(frozen=True)
class Stage:
    """Bytes of one stage of the plain model."""

    fixed: int  # parameters and their gradients, and the caller's batch if it reads that
    saved: int  # what autograd saves of a micro-batch, with what enters and leaves the stage
    ends: int  # of these, what enters and leaves: kept where the rest is recomputed


@cache
def measured(index: int, n_microbatches: int) -> Stage:
    layers = nn.Sequential(*stage_layers())
    storages: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(ROWS, WIDTH)
    with torch.autograd.graph.saved_tensors_hooks(note, note):
        output = layers(x)
        loss = loss_fn(output, torch.empty(0)) if index == 1 else output
    for tensor in (x, *layers.parameters()):
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    assert loss.requires_grad, "alive, so that no two storages had one address"
    storages[output.untyped_storage().data_ptr()] = output.nbytes
    parameters = sum(p.nbytes for p in layers.parameters())
    received = x.nbytes if index > 0 else 0
    return Stage(
        fixed=2 * parameters + (n_microbatches * x.nbytes if index == 0 else 0),
        saved=received + sum(storages.values()),
        ends=received + output.nbytes,
    )


def in_flight(schedule: str, n_microbatches: int, stage: int) -> int:
    """GPipe runs all forwards first; 1F1B (PipeDream-Flush) holds one micro-batch per stage from here to the last."""
    return n_microbatches if schedule == "gpipe" else min(n_microbatches, 2 - stage)


@pytest.mark.slow
@pytest.mark.parametrize("n_microbatches", [4, 8])
def test_1f1b_holds_fewer_activations_than_gpipe_by_what_it_keeps_in_flight(n_microbatches: int) -> None:
    gpipe, alternating = peaks("gpipe", n_microbatches, False), peaks("1f1b", n_microbatches, False)
    for index in (0, 1):
        fewer = in_flight("gpipe", n_microbatches, index) - in_flight("1f1b", n_microbatches, index)
        predicted = fewer * measured(index, n_microbatches).saved
        assert gpipe[index] - alternating[index] == pytest.approx(predicted, rel=TOLERANCE), f"stage {index}"


@pytest.mark.slow
@pytest.mark.parametrize("n_microbatches", [4, 8])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recompute"])
def test_the_peak_is_what_is_in_flight_and_what_is_recomputed(
    recompute: bool, schedule: str, n_microbatches: int
) -> None:
    found = peaks(schedule, n_microbatches, recompute)
    for index in (0, 1):
        stage, held = measured(index, n_microbatches), in_flight(schedule, n_microbatches, index)
        if recompute:
            predicted = stage.fixed + held * stage.ends + (stage.saved - stage.ends)
        else:
            predicted = stage.fixed + held * stage.saved
        assert found[index] == pytest.approx(predicted, rel=TOLERANCE), f"stage {index}"
