"""What a graph's nodes are without values: equal calls of operators are worked out once, and tell the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.analysis.node_values import observe, storages_of
from autopar.capture.program import capture
from cost_models.graphs import tensors_in
from cost_models.memory.meta_results import MetaResults


class Block(nn.Module):
    """With views, results that share memory, and tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)).softmax(-1).type_as(x)
        values, _ = (scores @ v).max(-1, keepdim=True)
        return x + self.out(scores @ v).contiguous().reshape(x.shape) * values.expand_as(x)


@pytest.mark.slow
def test_repeated_calls_tell_the_same_as_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(*(Block() for _ in range(3))), torch.empty(4, 5, 8)
    program = capture(model, (x,), {})

    def seen() -> list[tuple[str, Any, Any]]:
        found = observe(program.graph_module, [x])
        numbers: dict[int, int] = {}
        return [
            (
                node.name,
                [(t.shape, t.stride(), t.dtype) for t in tensors_in(value)] or value,
                sorted(numbers.setdefault(key, len(numbers)) for key in storages_of(value)),
            )
            for node, value in found.items()
        ]

    torchs: list[str] = []

    def direct(self: MetaResults, func: Any, args: Any, kwargs: Any) -> Any:
        torchs.append(str(func))
        return func(*args, **kwargs)

    repeated = seen()
    monkeypatch.setattr(MetaResults, "of", direct)
    assert seen() == repeated
    assert len(torchs) > 30
