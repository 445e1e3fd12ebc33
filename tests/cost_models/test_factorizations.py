"""Estimates say where they count the bytes of factorizations alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar import Cluster
from cost_models.kernels.factorizations import factorizations


def test_factorizations_are_found_and_products_are_not() -> None:
    class Both(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            square = torch.linalg.multi_dot([x, x.mT, x]) @ x.mT + torch.linalg.vector_norm(x)
            root = torch.linalg.cholesky(square + torch.eye(4))
            return torch.cholesky_solve(torch.linalg.svdvals(x)[:, None], root) + torch.linalg.solve(square, x)

    graph = torch.export.export(Both(), (torch.randn(4, 4),)).module().graph
    assert set(factorizations(graph)) == {"linalg_cholesky", "linalg_svdvals", "cholesky_solve", "linalg_solve"}


def test_a_plan_ahead_says_that_they_take_longer() -> None:
    class Whitened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.svdvals(self.linear(x))

    with pytest.warns(autopar.AutoparWarning, match="predictions count bytes alone for linalg_svdvals, which take"):
        plan = autopar.plan(Whitened(), Cluster.preset("2xH100"), example_args=(torch.randn(4, 16, 16),))
    assert any("linalg_svdvals" in note for note in plan.notes)
