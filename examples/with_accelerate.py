"""A training loop of Accelerate with gradient accumulation: python examples/with_accelerate.py"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autopar


def main(epochs: int = 3) -> list[float]:
    """The mean loss of every epoch."""
    torch.manual_seed(0)
    net = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())], nn.Linear(32, 1))
    x = torch.randn(256, 32)
    data = TensorDataset(x, x[:, :2].prod(1, keepdim=True))

    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)  # on GPUs without cpu=True
    model = autopar.parallelize(net, ["cpu", "cpu"])
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
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        means.append(sum(losses) / len(losses))
    return means


if __name__ == "__main__":
    for epoch, loss in enumerate(main(*map(int, sys.argv[1:]))):
        print(f"epoch {epoch}: loss {loss:.4f}")
