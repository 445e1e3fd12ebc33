"""A training that is killed again and again, to be run by torchrun: FOLDER WHAT STEPS KILLS.

WHAT: "never", "never without dropout", "anywhere" (in the first KILLS attempts, at a random point of a random rank),
or "waiting" (from step 4 on every step takes a second while there are four ranks, so that a test can kill what it wants
to; without dropout).
Appends "attempt world-size step loss" to FOLDER/losses.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import autopar

POINTS = ("forward", "backward", "between", "save", "after saving began")


class Net(nn.Module):
    """With dropout and a running state, so that a step depends on all that a checkpoint must hold."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(12, 12), nn.Tanh())))
        self.norm, self.head, self.drop = nn.BatchNorm1d(12), nn.Linear(12, 1), drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(functional.dropout(self.norm(self.layers(x)), self.drop, self.training))


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def undisturbed(folder: Path, what: str, steps: int) -> None:
    """On ranks of a pool."""
    ranks = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    os.environ.update(ranks | {"TORCHELASTIC_RESTART_COUNT": "0"})
    try:
        main(folder, what, steps)
    finally:
        for name in (*ranks, "TORCHELASTIC_RESTART_COUNT"):
            del os.environ[name]


def main(folder: Path, what: str, steps: int, n_kills: int = 0) -> None:
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    net = Net(0.2 if what in ("never", "anywhere") else 0.0)
    split = {f"layers.{i}": i * size // 8 for i in range(8)} | {"norm": size - 1, "head": size - 1}
    searches = what == "waiting" and size < 4  # what is left after a machine is lost gets a plan of its own
    plan = None if searches else autopar.Plan.from_split(split, n_microbatches=2)
    options = {"n_microbatches": 2, "max_replicas": 1} if searches else {}
    model = autopar.parallelize(net, plan=plan, cache=False, **options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    found = autopar.load(folder / "checkpoints", model, optimizer, extra={"scheduler": scheduler}, required=False)
    begin = found.step if found else 0
    chance = random.Random(1000 + attempt)
    dies = what == "anywhere" and attempt < n_kills
    victim, point, at = chance.randrange(size), POINTS[attempt % len(POINTS)], begin + chance.randrange(1, 3)
    now, saving = [-1], None

    def reached(here: str) -> bool:
        return dies and rank == victim and here == point and now[0] == at

    def forward_hook(module: Any, args: Any, output: torch.Tensor) -> None:
        if reached("forward"):
            kill()
        if output.requires_grad and reached("backward"):
            output.register_hook(lambda _: kill())

    net.layers[2 * (4 * victim // size)].register_forward_hook(forward_hook)  # of the victim's own stage
    for now[0] in range(begin, steps):
        if reached("between"):
            kill()
        x = torch.randn(16, 12, generator=torch.Generator().manual_seed(now[0]))
        optimizer.zero_grad()
        loss = model.train_step(x, target=x[:, :1], loss_fn=functional.mse_loss)
        optimizer.step()
        scheduler.step()
        if rank == 0:
            with (folder / "losses").open("a") as file:
                file.write(f"{attempt} {size} {now[0]} {loss.item().hex()}\n")
        if what == "waiting" and size == 4 and now[0] >= 4:
            time.sleep(1.0)
        if reached("save"):
            threading.Timer(chance.random() * 0.02, kill).start()
        saving = autopar.save(
            folder / "checkpoints",
            model,
            optimizer,
            step=now[0] + 1,
            extra={"scheduler": scheduler},
            asynchronous=now[0] % 2 == 1,
        )
        if reached("after saving began"):
            kill()
    if saving is not None:
        saving.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
