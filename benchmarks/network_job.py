"""What `benchmarks.network` runs under torchrun: a plan for the network there is, or plans in turn.

torchrun ... network_job.py plan OUT.json                       OUT: the plan that autopar makes
torchrun ... network_job.py compare OUT.json ROUNDS A.json ..   OUT: seconds of a training step by each plan, and of
                                                                the ceiling
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import autopar
from autopar import Plan
from autopar.runtime.other_systems.independent import CEILING
from benchmarks.timing import interleave

WIDTH, WAIST, BATCH = 256, 8, 16384
BEFORE, AFTER = 2, 4  # layers before and after the waist


def model() -> nn.Module:
    """Layers with a narrow waist after a third of the work.

    Replicas balance perfectly, but add up 1.6 MB of gradients each step. A pipeline can only be cut cheaply at the
    waist, where it sends 8 numbers a sample, and then has two thirds of the work in one stage; elsewhere it sends
    17 MB each way.
    """
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for index in range(BEFORE + AFTER):
        if index == BEFORE:
            layers += [nn.Linear(WIDTH, WAIST), nn.Linear(WAIST, WIDTH)]
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


def plan() -> Plan:
    """What autopar plans here; the same on all ranks."""
    x = torch.randn(BATCH, WIDTH)
    return autopar.plan(model(), example_args=(x,), target=x, loss_fn=functional.mse_loss)


def compare(plans: Sequence[Plan], rounds: int) -> dict[str, Any]:
    """Seconds of a training step by each plan (by number) and of the ceiling, in turn, and the loss of the
    first one of each.

    A step ends when its last rank is done. The ceiling: every rank has the plain model and its part of the batch, in
    micro-batches as the first plan's, and ranks send each other nothing.
    """
    original, x = model(), torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    losses: dict[str, float] = {}
    steps: dict[str, Callable[[], object]] = {}

    def step(name: str, module: autopar.PipelinedModule) -> None:
        module.zero_grad()
        loss = module.train_step(x, target=x, loss_fn=functional.mse_loss)
        losses.setdefault(name, loss.item())

    def alone(module: nn.Module, part: torch.Tensor) -> None:
        module.zero_grad()
        total = 0.0
        for micro_batch in part.split(-(-BATCH // plans[0].n_microbatches)):
            loss = functional.mse_loss(module(micro_batch), micro_batch) * (len(micro_batch) / len(part))
            loss.backward()
            total += loss.item()
        losses.setdefault(CEILING, total)

    for index, one in enumerate(plans):
        steps[str(index)] = partial(step, str(index), autopar.parallelize(copy.deepcopy(original), plan=one))
    steps[CEILING] = partial(alone, copy.deepcopy(original), x.chunk(dist.get_world_size())[dist.get_rank()])
    seconds = interleave(steps, rounds, before=dist.barrier)
    return {"seconds": _of_the_last_rank(seconds), "losses": losses}


def _of_the_last_rank(seconds: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """The longest of all ranks, in every round."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, dict(seconds))
    return {name: [max(taken) for taken in zip(*(rank[name] for rank in gathered), strict=True)] for name in seconds}


def main(what: str, out: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    if what == "plan":
        text = plan().to_json()
    else:
        rounds, *files = arguments
        dist.init_process_group("gloo")
        text = json.dumps(compare([Plan.from_json(Path(file).read_text()) for file in files], int(rounds)))
    if dist.get_rank() == 0:
        Path(out).write_text(text)
    # Threads of a group that outlives the interpreter may end the process with SIGABRT.
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
