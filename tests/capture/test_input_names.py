"""Inputs have the names of the parameters that they are passed for; those in `*args` their place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture.call_inputs import leaf_names

X = torch.zeros(2, 2)


class Variable(nn.Module):
    def forward(self, first: torch.Tensor, *rest: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return first


class Named(nn.Module):
    def forward(self, a: torch.Tensor, b: dict[str, torch.Tensor], c: torch.Tensor | None = None) -> torch.Tensor:
        return a


@pytest.mark.parametrize(
    ("model", "args", "kwargs", "names"),
    [
        (Variable(), (X, X, X), {"mask": X}, ["first", "args[1]", "args[2]", "mask"]),
        (Variable(), (X,), {}, ["first"]),
        (Named(), (X, {"x": X, "y": X}), {"c": X}, ["a", "b", "b", "c"]),
    ],
)
def test_names(model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], names: list[str]) -> None:
    assert leaf_names(model, args, kwargs) == names
