"""Where values decide which samples meet, the batch is split only if the samples of the call, too, say that it may be.

Made-up samples can lie alike under a mask or a count, so that a comparison of a few of them shows no difference.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Plan


class Counted(nn.Module):
    """Scaled by the number of positive samples of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.b(self.a(x))
        return h * (h.sum(1) > 0).nonzero().shape[0]


class Routed(Counted):
    """Samples go to experts, each scaled by the share of the samples that go there."""

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.b(self.a(x))
        chosen, out = h[:, :4].argmax(1), torch.zeros_like(h)
        for expert in range(4):
            mask = chosen == expert
            out = out.index_put((mask,), h[mask] * mask.to(h.dtype).mean())
        return out


class RarelyCounted(Counted):
    """As before, but most batches have no sample that counts."""

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.b(self.a(x))
        return h * (1 + (h.sum(1) > 3).nonzero().shape[0])


class SharedOut(Counted):
    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.b(self.a(x))
        mask = h.sum(1) > 2
        chosen = h[mask]
        return h.index_put((mask,), chosen / (1 + chosen.shape[0]))


class LeastLoaded(Counted):
    """Samples of the expert that has the fewest are raised."""

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.b(self.a(x))
        chosen = h[:, :4].argmax(1)
        fewest = torch.bincount(chosen, minlength=4).argmin()
        return h + (chosen == fewest).to(h.dtype)[:, None]


@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
@pytest.mark.parametrize("kind", [Counted, Routed, RarelyCounted, SharedOut, LeastLoaded])
def test_a_count_or_share_that_values_decide_is_of_the_whole_batch(kind: type[Counted]) -> None:
    for seed in range(6):
        torch.manual_seed(seed)
        model = kind()
        pm = autopar.parallelize(
            copy.deepcopy(model), ["cpu", "cpu"], plan=Plan.from_split({"a": 0, "b": 1}, n_microbatches=4), cache=False
        )
        for _ in range(2):
            x = torch.randn(8, 16) * torch.arange(1.0, 9.0)[:, None]
            torch.testing.assert_close(pm(x), model(x))
