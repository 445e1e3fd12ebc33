"""Models built without values, on ranks: where their values come from, and what a rank holds meanwhile."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_cases import MODELS, Job, loss_of, plan_of
from rank_checkpoints import batch, message_of
from torch import nn

import autopar


def named_values(name: str, tensor: torch.Tensor) -> None:
    """An init_fn: weights at random, norms to one, everything else to zero."""
    if tensor.dim() > 1:
        nn.init.normal_(tensor, std=0.05)
    else:
        tensor.fill_(1 if "ln" in name and name.endswith("weight") else 0)


def first_losses(job: Job, where: str, weights: Path | None, *, named: bool = False, steps: int = 3) -> list[float]:
    """Of a model that is built `where`: "meta", "rank 0" (on the others without values) or "here"."""
    torch.manual_seed(5)
    example = batch(job.model)
    n = dist.get_world_size() if dist.is_initialized() else 2
    plan = plan_of(job, MODELS[job.model][0]().double(), example, n)
    torch.manual_seed(3)
    meta = where == "meta" or (where == "rank 0" and dist.get_rank() > 0)
    with torch.device("meta" if meta else "cpu"):
        model = MODELS[job.model][0]().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # of tensors without values
    devices = None if dist.is_initialized() else ["cpu"] * n
    source: dict[str, Any] = {"weights": weights} if weights is not None else {}
    source |= {"init_fn": named_values} if named else {}
    pm = autopar.parallelize(model, devices, plan=plan, **source)
    found = []
    torch.manual_seed(7)
    for _ in range(steps):
        x = batch(job.model)
        optimizer.zero_grad()
        loss = pm.train_step(x, target=x, loss_fn=lambda output, target: loss_of(job.model, output, target))
        optimizer.step()
        found.append(loss.item())
    return found
