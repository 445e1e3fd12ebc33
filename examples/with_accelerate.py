"""A training loop of Accelerate with gradient accumulation, in one process or in many:

python examples/with_accelerate.py
torchrun --nproc-per-node 2 examples/with_accelerate.py
"""

from __future__ import annotations

import os
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autopar
from autopar.integrations import for_ranks


def main(epochs: int = 3) -> list[float]:
    """The mean loss of every epoch."""
    torch.manual_seed(0)
    net = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())], nn.Linear(32, 1))
    x = torch.randn(256, 32)
    data = TensorDataset(x, x[:, :2].prod(1, keepdim=True))

    # Many processes: one device each, and Accelerate gives each its own samples.
    ranked = "RANK" in os.environ
    model = autopar.parallelize(net, data="per-rank") if ranked else autopar.parallelize(net, ["cpu", "cpu"])
    accelerator = for_ranks(Accelerator(gradient_accumulation_steps=2, cpu=True))  # on GPUs without cpu=True
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=32, shuffle=True))

    means = []
    for _ in range(epochs):
        losses = []
        for batch, target in loader:
            with accelerator.accumulate(model):
                output = model(batch)
                loss = nn.functional.mse_loss(output, target.to(output.device))  # where the last stage is
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
        means.append(sum(losses) / len(losses))
        if accelerator.is_main_process:
            print(f"epoch {len(means) - 1}: loss {means[-1]:.4f}", flush=True)
    return means


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
