"""Models that use one weight in several layers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Tied(nn.Module):
    """A language model whose embedding and head share their weight."""

    def __init__(self, vocabulary: int = 8192, width: int = 1024) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(vocabulary, width), nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self.mix(self.embed(ids)))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


class CountingLinear(nn.Linear):
    """Counts its calls in a plain attribute."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fall(functional.gelu(self.rise(x)))


class SharedModules(nn.Module):
    """Modules with two names: one of the first and the last layer, a whole layer, and the entry, which is the exit."""

    def __init__(self, entry: type[nn.Linear] = nn.Linear, width: int = 12) -> None:
        super().__init__()
        self.entry = entry(width, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(4))
        self.layers[3].rise = self.layers[0].rise
        self.layers.append(self.layers[1])
        self.exit = self.entry

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for layer in self.layers:
            x = layer(x)
        return self.exit(x)
