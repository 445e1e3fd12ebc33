"""Several slots of a plan on one GPU: their kernels share one stream, so that one worker queues them in order."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import assert_same_gradients, gradients, mlp
from pretend_gpus import PretendGpus, pipelined
from torch.nn.functional import mse_loss

from autopar import Plan

pytestmark = pytest.mark.usefixtures("shared_exports")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendGpus]:
    pretended = PretendGpus(monkeypatch)
    yield pretended
    pretended.close()


def threads_of_a_step(gpus: PretendGpus, way: str, **plan: Any) -> set[str]:
    """The workers that computed a step, which must be that of the plain model. The caller's thread does not count."""
    model = mlp(8, 4)
    original = copy.deepcopy(model)
    split = {"0": 0, "4": 1} if len(plan["devices"]) == 2 else {"0": 0, "2": 1, "4": 2, "6": 3}
    pm = pipelined(model, Plan.from_split(split, n_microbatches=4, **plan))
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    with gpus.recording():
        pm.prepare((x,), {}, loss_fn=mse_loss, target=y)
        mse_loss(original(x), y).backward()
        there = gpus.on(x, "cuda:0"), gpus.on(y, "cuda:0")
        gpus.threads.clear()
        if way == "train_step":
            pm.train_step(there[0], target=there[1], loss_fn=mse_loss)
        else:
            output = pm(there[0])
            mse_loss(output, there[1].to(output.device)).backward()
        found = {name: g.cpu() for name, g in gradients(model).items() if g is not None}
        assert_same_gradients(found, gradients(original))
    gpus.check()
    return set().union(*gpus.threads.values()) - {"MainThread"}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["train_step", "call and backward"])
@pytest.mark.parametrize(
    ("schedule", "devices"),
    [
        ("gpipe", ["cuda:0", "cuda:0#1"]),
        ("1f1b", ["cuda:0", "cuda:0#1"]),
        ("zb-h1", ["cuda:0", "cuda:0#1"]),
        ("1f1b", [["cuda:0", "cuda:0#1"], "cuda:0#2"]),
        ("interleaved-1f1b", ["cuda:0", "cuda:0#1"] * 2),
    ],
)
def test_one_worker_does_the_actions_of_all_slots_on_one_gpu(
    gpus: PretendGpus, schedule: str, devices: list[Any], way: str
) -> None:
    assert threads_of_a_step(gpus, way, schedule=schedule, devices=devices) <= {"autopar-cuda:0"}


def test_every_gpu_has_a_worker(gpus: PretendGpus) -> None:
    workers = threads_of_a_step(gpus, "train_step", schedule="1f1b", devices=["cuda:0", "cuda:1"])
    assert workers == {"autopar-cuda:0", "autopar-cuda:1"}
