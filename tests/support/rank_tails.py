"""Models whose end needs the whole batch, on ranks, beside the plain model in one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from rank_cases import Job, relative
from rank_training import gradient_error, ready

STEPS = 3


def of_tails(job: Job, data: str, call: str) -> list[float]:
    """Errors of loss, output and gradients of steps by `call`: "train_step", or "backward" of the model's own loss.
    `data`: "whole", or "per-rank": every rank passes samples of its own."""
    original, pm, x = ready(job, data=data)
    per_rank = data == "per-rank"
    errors = []
    for step in range(STEPS):
        batch = (x + step).cos()
        own = batch.chunk(dist.get_world_size())[dist.get_rank()] if per_rank else batch
        plain = original(batch)
        plain["loss"].backward()
        if call == "train_step":
            loss, outputs = pm.train_step(own, return_outputs=True)
        else:
            outputs = pm(own)
            loss = outputs["loss"]
            loss.backward()
        wanted = plain["left"].chunk(dist.get_world_size())[dist.get_rank()] if per_rank else plain["left"]
        errors += [relative(loss.detach(), plain["loss"].detach(), 1.0), gradient_error(pm, original)]
        errors.append(relative(outputs["left"].detach(), wanted.detach(), 1.0))
    assert pm.plan.n_microbatches == job.n_microbatches or job.plan.startswith("hand")
    return errors


def in_evaluation(job: Job, rows: int) -> float:
    """The error of the outputs for a batch of `rows` samples, without gradients."""
    original, pm, _ = ready(job)
    original.eval()
    pm.eval()
    x = torch.randn(rows, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, found = original(x), pm(x)
    return max(relative(found[name], wanted[name], 1.0) for name in wanted)
