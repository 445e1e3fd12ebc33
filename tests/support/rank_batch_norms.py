"""Batch norm on ranks, beside the same plan in one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from rank_behaviour import message_of
from rank_cases import MODELS, Job, plan_of
from torch.nn import functional

import autopar


def normed(job: Job, sizes: tuple[int, ...], eval_first: bool, batch_norm: str = "deferred") -> dict[str, Any]:
    """For each buffer that this rank keeps, whether it has the bits of the same plan in one process, and its distance
    from the plain model's; the losses here and there. `sizes`: samples of every batch. `eval_first`: the first call
    places what stages read in evaluation."""
    n = dist.get_world_size()
    torch.manual_seed(3)
    build, inputs = MODELS[job.model]
    model, x = build().double(), inputs().double()
    original = copy.deepcopy(model)
    plan = plan_of(job, copy.deepcopy(model), x, n)
    alone = copy.deepcopy(model)
    threads = autopar.parallelize(alone, ["cpu"] * n, plan=plan, batch_norm=batch_norm)
    pm = autopar.parallelize(model, plan=plan, batch_norm=batch_norm)
    losses = []
    for number, size in enumerate(sizes):
        batch = torch.randn(size, *x.shape[1:]).double() * (1 + number)
        found = []
        for one in (pm, threads):
            if eval_first and not number:
                one.eval()
                with torch.no_grad():
                    one(batch)
                one.train()
            if job.call == "train_step":
                target = torch.zeros(size, 5).double()
                loss = one.train_step(batch, target=target, loss_fn=functional.mse_loss)
            else:
                with torch.set_grad_enabled(job.call == "backward"):
                    loss = one(batch).square().mean()
                if job.call == "backward":
                    loss.backward()
            found.append(loss.item())
        losses.append(found)
        original(batch)
    pm.eval()
    threads.eval()
    with torch.no_grad():
        losses.append([pm(x).sum().item(), threads(x).sum().item()])
    mine, theirs, plain = (dict(one.named_buffers()) for one in (pm, alone, original))
    return {
        "same": {name: torch.equal(buffer, theirs[name]) for name, buffer in mine.items()},
        "from plain": {name: (b - plain[name]).abs().max().item() for name, b in mine.items()},
        "losses": losses,
    }


def written_elsewhere() -> str:
    """The message for a batch norm whose stage writes in training what another one reads in evaluation, which came
    first."""
    return message_of(lambda: normed(Job("norms", "chain"), (8,), True, "per-microbatch"))
