"""Losses have one digest in every process, and losses that compute something else have another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from autopar.analysis.example import capture_example
from autopar.analysis.loss import study_loss

SCRIPT = """
import torch
from torch import nn
from autopar.analysis.loss_digest import digest_of_code, digest_of_graph
from autopar.capture.program import capture

def loss(x, y):
    return (x - y).abs().mean() if str(x.device) in {"cpu", "cuda", "mps", "xpu"} else x.sum()

class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weights", torch.arange(4.0))
    def forward(self, x, y):
        return ((x - y).square() * self.weights * 0.1).mean()

graph = capture(Module(), (torch.ones(3, 4), torch.ones(3, 4)), {}).graph_module
print(digest_of_code(loss), digest_of_code(Module()), digest_of_graph(graph))
"""


@pytest.mark.slow
def test_digests_are_the_same_in_every_process() -> None:
    found = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")  # which put the texts in the set in different orders
    }
    assert len(found) == 1
    assert len(set(found.pop().split())) == 3


def digest_of(loss_fn: Callable[[Any, Any], Any]) -> str:
    x = torch.ones(8, 4)
    example = capture_example(nn.Linear(4, 4), (), (x,), {})
    return study_loss(loss_fn, example.program, example.batching, torch.zeros(8, 4)).digest


@pytest.mark.slow
@pytest.mark.parametrize("scale", [2.0, 1.0])
def test_a_digest_is_of_what_a_loss_computes_with_its_numbers_and_tensors(scale: float) -> None:
    def scaled(by: float) -> Callable[[Any, Any], Any]:
        return lambda output, target: by * functional.mse_loss(output, target)

    def weighted(by: float) -> Callable[[Any, Any], Any]:
        weights = torch.full((4,), by)
        return lambda output, target: ((output - target) * weights).square().sum()

    def read(by: float) -> Callable[[Any, Any], Any]:
        return (lambda y, t: y.mean() * float(t.sum())) if by == 2.0 else lambda y, t: y.sum() * float(t.mean())

    for make in (scaled, weighted, read):
        assert (digest_of(make(scale)) == digest_of(make(2.0))) is (scale == 2.0)
