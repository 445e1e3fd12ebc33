"""A module gives each of its warnings once, whatever is called how often."""

from __future__ import annotations

import copy
import warnings
from collections import Counter

import pytest
import torch
from torch import nn

import autopar
from autopar import Plan


class Warned(nn.Module):
    """Gives cause for several warnings: statistics of micro-batches, code that no tracer captures."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.branch = Branch()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.branch(self.norm(self.first(x))))


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) if float(x.detach().sum()) > 1e9 else torch.tanh(x)


def spread(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean().sqrt()


@pytest.mark.slow
@pytest.mark.parametrize("planned", ["by hand", "by the search"])
def test_every_warning_is_given_once_over_all_calls_lengths_modes_and_copies(planned: str) -> None:
    plan = Plan.from_split({"first": 0, "last": 1}, n_microbatches=2) if planned == "by hand" else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pm = autopar.parallelize(Warned(), ["cpu", "cpu"], plan=plan, cache=False)
        for copied in (False, True):
            module = copy.deepcopy(pm) if copied else pm
            for n in (8, 6, 8):
                module(torch.randn(n, 4)).sum().backward()
                module.train_step(torch.randn(n, 4), target=torch.randn(n, 4), loss_fn=spread)
            module.eval()(torch.randn(8, 4))
            module.train()
    said = Counter(str(w.message) for w in caught if issubclass(w.category, autopar.AutoparWarning))
    assert not {text: count for text, count in said.items() if count > 1}
    if planned == "by hand":
        assert any("statistics of each micro-batch" in text for text in said)
        assert any("whole batch" in text for text in said)
