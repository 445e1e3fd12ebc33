"""Which results a layer keeps that runs the rest of its operators again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.analysis.blocks import Blocks
from autopar.analysis.example import example_ahead
from autopar.analysis.operators import operator_name

HIDDEN = 16


class Layer(nn.Module):
    def __init__(self, after: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        names = ("query", "key", "value", "out", "up", "down")
        self.products = nn.ModuleDict({name: nn.Linear(HIDDEN, HIDDEN, bias=name == "up") for name in names})
        self.norm, self.after = nn.LayerNorm(HIDDEN), after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        query, key, value = (self.products[name](y).unflatten(-1, (2, -1)) for name in ("query", "key", "value"))
        heads = (t.transpose(1, 2) for t in (query, key, value))
        x = x + self.products["out"](F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2))
        return x + self.products["down"](self.after(self.products["up"](x)))


@pytest.mark.slow
@pytest.mark.parametrize(("after", "up"), [(torch.relu, True), (torch.relu_, False)], ids=["kept", "overwritten"])
def test_every_second_product_is_kept_and_attention_unless_it_is_overwritten(
    after: Callable[[torch.Tensor], torch.Tensor], up: bool
) -> None:
    model = nn.Sequential(Layer(after), Layer(after))
    example = example_ahead(model, (torch.zeros(2, 4, HIDDEN),), {})
    blocks = Blocks(example.program, example.batching.storages)
    for layer in blocks.all:
        kept = blocks.kept_of(layer)
        weights = sorted(str(w.target) for n in kept for w in n.all_input_nodes if w.op == "get_attr")
        names = ["query", "value", *(["up"] if up else [])]
        assert sorted({weight.split(".")[-2] for weight in weights}) == sorted(names)
        assert sum("scaled_dot_product" in operator_name(n) for n in kept) == 1
        assert len(kept) == len(names) + 1
    assert blocks.kept == {node for layer in blocks.all for node in blocks.kept_of(layer)}
    assert len(blocks.all) == 2
