"""Training that goes on after a failure. A rank is killed in step 7, and the losses are those of an undisturbed run:

torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/with_restarts.py runs/restarts --kill-in-step 7
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
from torch import nn

import autopar


def main(folder: str | Path, steps: int = 12, kill_in_step: int | None = None) -> dict[int, float]:
    """Train from the newest checkpoint of `folder` on. The losses by step."""
    torch.manual_seed(0)
    net = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())], nn.Linear(32, 1))
    model = autopar.parallelize(net, n_microbatches=2, max_replicas=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = autopar.load(folder, model, optimizer, required=False)

    losses = {}
    for step in range(found.step if found else 0, steps):
        data = torch.Generator().manual_seed(step)  # the same batch for this step in every attempt, on every rank
        x = torch.randn(32, 32, generator=data)
        if step == kill_in_step and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = model.train_step(x, target=x[:, :2].prod(1, keepdim=True), loss_fn=nn.functional.mse_loss)
        optimizer.step()
        losses[step] = loss.item()
        if os.environ.get("RANK", "0") == "0":
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
        if (step + 1) % 3 == 0:
            autopar.save(folder, model, optimizer, step=step + 1)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="of the checkpoints")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kill-in-step", type=int)
    given = parser.parse_args()
    main(given.folder, given.steps, given.kill_in_step)
