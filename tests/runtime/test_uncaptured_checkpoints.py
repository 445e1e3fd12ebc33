"""Uncaptured checkpoints draw the same random numbers in their second run, whatever other stages draw meanwhile."""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import autopar
from autopar import Plan
from autopar.lower import random_operators
from autopar.lower.random_operators import from_global_generator, generators_held, seeded

WIDTH = 8
MASKS: dict[Any, list[torch.Tensor]] = defaultdict(list)  # by stage and micro-batch: one for each run


class Masked(nn.Module):
    """Drops values in a checkpoint that no tracer captures. Between putting the generator's state back and drawing from
    it, its second run leaves other threads time to draw."""

    def __init__(self, name: str, *, reentrant: bool) -> None:
        super().__init__()
        self.name, self.reentrant = name, reentrant
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.005)
        mask = self.drop(torch.ones_like(x))
        MASKS[self.name, float(x.detach().numpy().sum())].append(mask)
        found: torch.Tensor = self.linear(x) * mask
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self.body, x, use_reentrant=self.reentrant)
        return found


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_second_run_of_a_checkpoint_drops_what_the_first_one_dropped(reentrant: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), Masked("a", reentrant=reentrant), Masked("b", reentrant=reentrant)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH)).train()
    x = torch.randn(12, WIDTH)
    plan = Plan.from_split({"0": 0, "2": 1}, n_microbatches=6, schedule="1f1b")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of code that runs uncaptured
        pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan, cache=False)
        pm.prepare((x,), {}, loss_fn=mse_loss, target=x)
        MASKS.clear()
        pm.train_step(x, target=x, loss_fn=mse_loss)
    pm.close()
    assert len(MASKS) == 2 * 6
    for name, (first, *again) in MASKS.items():
        assert len(again) == 1, name
        assert torch.equal(again[0], first), name


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_nobody_else_draws_while_a_backward_holds_the_generators(device: str) -> None:
    place, drawn = torch.device(device), queue.SimpleQueue[str]()

    def draw() -> None:
        with seeded(1), random_operators.generator_lock(place) if device != "cpu" else seeded(2):
            from_global_generator(torch.rand, 2)
        drawn.put("other")

    thread = threading.Thread(target=draw)
    with seeded(3), generators_held(place):
        thread.start()
        from_global_generator(torch.rand, 2)  # of this thread: a stage within a checkpoint
        with generators_held(place):
            drawn.put("own")
        time.sleep(0.02)
        drawn.put("end")
    thread.join()
    assert [drawn.get() for _ in range(3)] == ["own", "end", "other"]
