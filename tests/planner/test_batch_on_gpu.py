"""A batch that lies on a GPU counts there as a whole, and is not copied; other GPUs get copies of micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import mse_loss

from autopar import Plan
from autopar.analysis.example import capture_example
from autopar.costs.step_rehearsal import StepRehearsal
from autopar.planner.arrangement import Conditions
from autopar.planner.predict import arranged, completed
from autopar.planner.rehearsed_memory import StagePeak, rehearsed
from benchmarks.plan_memory import costs_of_bytes
from cost_models import Device, parse_devices

ROWS, WIDTH, M = 64, 256, 8
BATCH = 4 * ROWS * WIDTH
CUT = {"layers.0": 0, "layers.1": 1}


class Reads(nn.Module):
    """Both layers read the input, so that each stage of two does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers[1](torch.relu(self.layers[0](x))) * x
        return found


def peaks(plan: Plan, lies_on: str) -> list[StagePeak]:
    """Of the plan's stages on GPUs, which need not be there, for a batch on `lies_on`."""
    devices = [
        Device(name, torch.device(name.partition("#")[0]), "GPU", 80 << 30, threads=1)
        for name in dict.fromkeys(name for stage in plan.stages for name in stage.devices)
    ]
    x = torch.randn(ROWS, WIDTH)
    example = capture_example(Reads(), parse_devices(["cpu"]), (x,), {}, loss_fn=mse_loss, target=x)
    costs = costs_of_bytes(example, devices)
    with FakeTensorMode():
        leaves = [torch.empty(ROWS, WIDTH, device=lies_on)]
    costs = replace(costs, rehearsal=StepRehearsal.at_hand(replace(example, leaves=leaves), devices))
    plan = completed(plan, example, costs)
    stage_of = {node.name: stage for node, stage in plan.assign(example.program, example.batching.storages).items()}
    found = rehearsed(costs, *arranged(costs, plan, stage_of), Conditions("none", loss_inside=True))
    return [peak for peak in found.stages if peak is not None]


def plan_on(*stages: Any) -> Plan:
    split = CUT if len(stages) > 1 else {"layers.0": 0}
    return Plan.from_split(split, n_microbatches=M, schedule="1f1b", devices=list(stages))


@pytest.mark.slow
@pytest.mark.usefixtures("shared_exports")
def test_a_batch_on_the_gpu_counts_as_a_whole_and_is_not_copied() -> None:
    plan = plan_on("cuda:0")
    (here,), (copied,), (elsewhere,) = (peaks(plan, place) for place in ("cuda:0", "cpu", "cuda:1"))
    under_way = 2 * BATCH // M  # copies of the last two micro-batches: of their targets, and of inputs if copied
    assert here.peak - here.certain == under_way
    assert here.certain == copied.certain + BATCH - BATCH // M, "the peak has one micro-batch, with its input"
    assert copied.peak - copied.certain == 2 * under_way
    assert here.activation == copied.activation - BATCH // M
    assert elsewhere == copied


@pytest.mark.usefixtures("shared_exports")
def test_only_the_gpu_that_has_the_batch_counts_it() -> None:
    plan = plan_on("cuda:0", "cuda:1")
    copied = peaks(plan, "cpu")
    for has_it, other in ((0, 1), (1, 0)):
        found = peaks(plan, f"cuda:{has_it}")
        assert found[other] == copied[other]
        assert found[has_it].certain > copied[has_it].certain
        assert found[has_it].activation == copied[has_it].activation - BATCH // M


@pytest.mark.usefixtures("shared_exports")
def test_replicas_of_a_stage_differ_by_where_the_batch_lies() -> None:
    """A stage states what its fullest device holds: here the one that has the batch."""
    (alone,) = peaks(plan_on(["cuda:0", "cuda:1"]), "cpu")
    (one_has_it,) = peaks(plan_on(["cuda:0", "cuda:1"]), "cuda:0")
    assert one_has_it.certain == alone.certain + BATCH - BATCH // M


@pytest.mark.usefixtures("shared_exports")
def test_workers_that_share_a_gpu_both_read_the_batch_there() -> None:
    here, elsewhere = (peaks(plan_on("cuda:0", "cuda:0#1"), place) for place in ("cuda:0", "cpu"))
    assert all(one.activation < other.activation for one, other in zip(here, elsewhere, strict=True))
