"""A language model whose embedding and head share their weight."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Tied(nn.Module):
    def __init__(self, vocabulary: int = 8192, width: int = 1024) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(vocabulary, width), nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self.mix(self.embed(ids)))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())
