"""Layers whose modules lie inside one another: plans by hand keep together what no stage cuts, and train exactly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import assert_same_gradients, gradients
from torch import nn

import autopar
from autopar import Plan

parametrizations = nn.utils.parametrizations
functional = nn.functional
X, Y = torch.randn(8, 16), torch.randn(8, 4)
STAGES: list[dict[str, Any]] = [
    {"pipeline": 2},
    {"pipeline": 4},
    {"pipeline": 2, "chunks": 2, "schedule": "interleaved-1f1b"},
]


def linear(**options: Any) -> nn.Module:
    return nn.Linear(16, 16, **options)


def weight_normed(**options: Any) -> nn.Module:
    return parametrizations.weight_norm(linear(**options))


class Layers(nn.Module):
    """Four layers, each a Sequential, and a head."""

    def __init__(self, layer: Callable[[], nn.Module] = weight_normed) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(layer(), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class WeightsAhead(Layers):
    """Computes the weights before it uses the first, the last one first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = [layer[0].weight for layer in reversed(self.layers)]
        for layer, weight in zip(self.layers, reversed(weights), strict=True):
            x = torch.tanh(functional.linear(x, weight, layer[0].bias))
        return self.head(x)


class Shared(Layers):
    """All layers use one computed weight."""

    def __init__(self) -> None:
        super().__init__(linear)
        self.shared = weight_normed(bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.shared.weight
        for layer in self.layers:
            x = layer(functional.linear(x, weight))
        return self.head(x)


class Generated(nn.Module):
    """A weight that another module computes from its parameter alone, and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(16, 1)
        self.own = nn.Linear(16, 16)
        self.generator = Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.linear(self.own(x), self.generator())
        return x + self.positions(torch.arange(16)).squeeze(-1)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seed = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self) -> torch.Tensor:
        return torch.tanh(self.seed)


class Block(nn.Module):
    """Scales what a layer inside it returns, by a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(16))
        self.inner = weight_normed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.inner(x)


class Surrounded(Layers):
    """Parameters of the model itself are used before and after the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.offset, self.scale = nn.Parameter(torch.rand(16)), nn.Parameter(torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.offset) * self.scale


MODELS: dict[str, Callable[[], nn.Module]] = {
    "weight norm": Layers,
    "weight norm without biases": lambda: Layers(lambda: weight_normed(bias=False)),
    "orthogonal": lambda: Layers(lambda: parametrizations.orthogonal(linear())),
    "weights ahead": WeightsAhead,
    "a shared weight": Shared,
    "generated weights": lambda: Layers(Generated),
    "blocks that scale": lambda: Layers(Block),
    "parameters around the layers": Surrounded,
}


def by_hand(model: nn.Module, **stages: Any) -> Plan:
    call: dict[str, Any] = {"example_args": (X,), "target": Y, "loss_fn": functional.mse_loss}
    return Plan.by_hand(model, ["cpu"] * stages["pipeline"], data=1, micro_batch=2, **stages, **call)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stages"),
    [
        *(("weight norm", stages) for stages in STAGES),
        *((name, STAGES[number % len(STAGES)]) for number, name in enumerate(list(MODELS)[1:])),
    ],
)
def test_layers_inside_one_another_train_as_in_the_plain_model(name: str, stages: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    plain = copy.deepcopy(model)
    plan = by_hand(model, **stages)
    assert len(plan.stages) == stages["pipeline"] * stages.get("chunks", 1)
    pm = autopar.parallelize(model, ["cpu"] * stages["pipeline"], plan=plan, tune=0)
    expected = functional.mse_loss(plain(X), Y)
    expected.backward()
    torch.testing.assert_close(pm.train_step(X, target=Y, loss_fn=functional.mse_loss), expected.detach())
    assert_same_gradients(gradients(model), gradients(plain))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["weight norm", "weight norm without biases", "orthogonal", "weights ahead"])
def test_a_weight_is_computed_on_the_stage_that_uses_it(name: str) -> None:
    plan = by_hand(MODELS[name](), pipeline=4)
    used = [number for number, stage in enumerate(plan.stages) for one in stage.operators if "/linear" in f"/{one}"]
    for i in range(4):
        of_layer = f"layers.{i}.0.parametrizations"
        computed = {
            n for n, stage in enumerate(plan.stages) if any(one.startswith(of_layer) for one in stage.operators)
        }
        assert computed == {used[i]}


@pytest.mark.slow
def test_parametrizations_are_no_layers_of_their_own() -> None:
    counts = {
        build.__name__: sum("linear" in operator for operator in by_hand(Layers(build), pipeline=2).stages[0].operators)
        for build in (linear, weight_normed)
    }
    assert counts["linear"] == counts["weight_normed"]
