"""A LightningModule whose network runs as a pipeline: python examples/with_lightning.py"""

from __future__ import annotations

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autopar.integrations import AutoparStrategy


class Regression(lightning.LightningModule):
    """An ordinary LightningModule: it knows nothing of pipelines."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[x for _ in range(4) for x in (nn.Linear(32, 32), nn.Tanh())], nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(epochs: int = 3) -> float:
    """The loss of the last step."""
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(256, 32)
    loader = DataLoader(TensorDataset(x, x[:, :2].prod(1, keepdim=True)), batch_size=32)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        strategy=AutoparStrategy(["cpu", "cpu"]),
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), loader)
    return float(trainer.callback_metrics["loss"])


if __name__ == "__main__":
    print(f"loss {main(*map(int, sys.argv[1:])):.4f}")
