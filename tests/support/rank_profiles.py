"""Profiled steps on ranks, each beside the same plan in threads."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_cases import MODELS, Job, loss_of, plan_of
from torch import nn

import autopar
from autopar.report.document import Report
from autopar.runtime.ranks.step_records import Ahead, clock_ahead
from autopar.runtime.ranks.world import joined
from autopar.runtime.step_profile import StepProfile

AHEAD = 1000.0  # s that the clock of a machine shows more


def _ready(job: Job) -> tuple[nn.Module, autopar.PipelinedModule, torch.Tensor]:
    """The same plan in threads and on ranks, and the batch."""
    n = dist.get_world_size()
    torch.manual_seed(3)
    build, inputs = MODELS[job.model]
    model, x = build(), inputs()
    plan = plan_of(job, copy.deepcopy(model), x, n)
    threads = autopar.parallelize(copy.deepcopy(model), ["cpu"] * n, plan=plan)
    return threads, autopar.parallelize(model, plan=plan, **job.options), x


def _profiled(job: Job, pm: Any, x: torch.Tensor) -> tuple[float, StepProfile]:
    torch.manual_seed(0)
    loss = pm.train_step(x, target=x, loss_fn=lambda output, y: loss_of(job.model, output, y), profile=True)
    assert pm.last_profile is not None
    return loss.item(), pm.last_profile


def profiled(job: Job, folder: str) -> dict[str, Any]:
    """A profiled step on ranks, what it is in threads, and the trace that this rank writes of it."""
    threads, pm, x = _ready(job)
    wanted_loss, wanted = _profiled(job, threads, x)
    threads.close()
    loss, found = _profiled(job, pm, x)
    path = Path(folder) / f"step{dist.get_rank()}.json"
    found.trace(path)
    report: Report = pm.report()
    again = pm.train_step(x, target=x, loss_fn=lambda output, y: loss_of(job.model, output, y))  # goes on without it
    return {
        "loss": loss,
        "wanted loss": wanted_loss,
        "found": found,
        "wanted": wanted,
        "trace": json.loads(path.read_text()),
        "report": str(report),
        "again": again.item(),
    }


@contextlib.contextmanager
def _another_machine(rank: int) -> Any:
    """Rank `rank` is on a machine whose clock shows `AHEAD` more."""
    world = joined()
    assert world is not None
    places = world.places
    world.places = (*places[:rank], dataclasses.replace(places[rank], machine="another"), *places[rank + 1 :])
    clock = time.perf_counter

    def ahead() -> float:
        return clock() + AHEAD

    try:
        with mock.patch("time.perf_counter", ahead) if world.rank == rank else contextlib.nullcontext():
            yield world
    finally:
        world.places = places


def clocks(rank: int) -> Ahead:
    """How the clock of each rank compares with rank 0's, where rank `rank` is on another machine."""
    with _another_machine(rank) as world:
        return clock_ahead(world)


def profiled_on_machines(job: Job) -> StepProfile:
    """A step where the last rank is on another machine."""
    _, pm, x = _ready(job)
    with _another_machine(dist.get_world_size() - 1):
        return _profiled(job, pm, x)[1]
