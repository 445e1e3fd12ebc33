"""Small models with hints on their modules, and what becomes of these hints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import nn

import autopar
from autopar import PlanError
from autopar.analysis.operators import compute_nodes, replicable_nodes
from autopar.capture.node_names import module_path
from autopar.capture.program import Program, capture
from autopar.hints.module_hints import read_hints
from autopar.planner.hint_constraints.stage_hints import ResolvedHints, resolve


class Residual(nn.Module):
    """left and right read what stem computes; out reads the sum of both.

    stem --+--> left ---+
           |            + --> out
           +--> right --+
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right, self.out = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.out(self.left(x) + self.right(x))


class Tied(nn.Module):
    """Two modules with one parameter, and a block that is called under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.again = self.block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.again(self.block(self.first(x))))


class Remembering(nn.Module):
    """A moving average that the output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.average: torch.Tensor
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average.mul_(0.9).add_(0.1 * x.mean(0).detach())
        return x - self.average


class WithIdle(nn.Module):
    """A chain and a module that never runs."""

    def __init__(self, *chain: nn.Module) -> None:
        super().__init__()
        self.chain, self.idle = nn.Sequential(*chain), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.chain(x)
        return y


def nested() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))


def hinted(
    model: nn.Module,
    pins: Mapping[str, int] | None = None,
    recompute: Sequence[str] = (),
    together: Sequence[Sequence[str]] = (),
) -> nn.Module:
    """`model` with hints on its modules, by path."""
    for path, stage in (pins or {}).items():
        autopar.pipeline_stage(model.get_submodule(path), stage)
    for path in recompute:
        autopar.recompute(model.get_submodule(path))
    for paths in together:
        autopar.keep_together(*map(model.get_submodule, paths))
    return model


def captured(model: nn.Module) -> Program:
    return capture(model, (torch.randn(6, 4),), {})


def resolved(model: nn.Module, n_devices: int = 4) -> ResolvedHints:
    return resolve(read_hints(model), captured(model), n_devices)


def problems_of(model: nn.Module, n_devices: int = 4) -> list[str]:
    """What resolving the model's hints is refused for."""
    with pytest.raises(PlanError) as refused:
        resolved(model, n_devices)
    return [line.strip() for line in str(refused.value).splitlines()[1:]]


def running(program: Program) -> dict[str, str]:
    """Operators that are in one stage each, with their modules."""
    free = replicable_nodes(program)
    return {node.name: module_path(node) for node in compute_nodes(program.graph) if node not in free}
