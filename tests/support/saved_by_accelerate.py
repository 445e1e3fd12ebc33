"""A script of tests: a loop of Accelerate on the ranks of torchrun, or in one process; three steps are done.

saved_by_accelerate.py FOLDER save        saves after two; writes the model to FOLDER/model, weights to FOLDER/found.pt
saved_by_accelerate.py FOLDER load        does the third from what was saved
saved_by_accelerate.py FOLDER scaled      with a gradient scaler and clipping; in the second step a rank finds an inf
saved_by_accelerate.py FOLDER two         saves with two optimizers
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

import autopar
from autopar import Plan
from autopar.integrations import for_ranks

SETTINGS: dict[str, Any] = {"init_scale": 64.0, "growth_interval": 2}


def main(folder: Path, what: str) -> None:
    n, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    accelerator = Accelerator(cpu=True, mixed_precision="fp16" if what == "scaled" else "no")
    if what == "scaled":  # as Accelerate makes it on GPUs; on CPUs it makes none
        accelerator.scaler = torch.amp.GradScaler("cpu", **SETTINGS)
    for_ranks(accelerator)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    if n > 1:
        model = autopar.parallelize(model, plan=Plan.from_split({"0": 0, "2": 1}, n_microbatches=1), data="per-rank")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    accelerator.native_amp = what == "scaled"  # now: gradients are unscaled, but the forward is not in float16
    torch.manual_seed(1)
    batches = torch.randn(3, 8, 4)
    if what == "two":
        accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1e-2))
    if what == "load":
        accelerator.load_state(str(folder / "state"))
    for step in range(2 if what == "load" else 0, 3):
        x = batches[step].view(n, 8 // n, 4)[rank]
        loss = model(x).square().mean()
        accelerator.backward(loss)
        if what == "scaled" and step == 1 and rank == n - 1:
            next(iter(optimizer.param_groups[0]["params"])).grad.fill_(float("inf"))
        if what == "scaled":
            accelerator.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if what in ("save", "two") and step == 1:
            accelerator.save_state(str(folder / "state"))
    accelerator.save_model(model, str(folder / "model"))
    whole = accelerator.get_state_dict(model)
    if rank == 0:
        scale = accelerator.scaler.get_scale() if what == "scaled" else None
        torch.save((dict(whole), schedule.get_last_lr(), scale), folder / "found.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
