"""Tensors that a model trains without holding them as parameters are refused: a graph would lose their gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar import CaptureError

WIDTH = 6
OUTSIDE = torch.ones(WIDTH, requires_grad=True)


class Scaled(nn.Module):
    """Scales what its layer gives by something."""

    def __init__(self, scale: Callable[[Scaled, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.hidden = [nn.Linear(WIDTH, WIDTH)]  # so that parameters() does not list it
        self.tensors = [torch.ones(WIDTH, requires_grad=True)]
        self.register_buffer("k", torch.ones(WIDTH))
        self._scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._scale(self, self.layer(x))


def by_hidden_module(model: Scaled, h: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = model.hidden[0](h)
    return y


def by_teacher(model: Scaled, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = model.hidden[0](h)
    return h - target


def by_list(model: Scaled, h: torch.Tensor) -> torch.Tensor:
    return h * model.tensors[0]


def by_buffer(model: Scaled, h: torch.Tensor) -> torch.Tensor:
    return h * model.k


def by_global(_: Scaled, h: torch.Tensor) -> torch.Tensor:
    return h * OUTSIDE


@pytest.mark.parametrize("scale", [by_hidden_module, by_list, by_buffer, by_global], ids=lambda f: f.__name__)
def test_a_tensor_that_would_lose_its_gradient_is_refused(scale: Callable[..., torch.Tensor]) -> None:
    model = Scaled(scale)
    model.k.requires_grad_()
    pm = autopar.parallelize(model, ["cpu", "cpu"], tune=0)
    with pytest.raises(CaptureError, match=r"requires a gradient and is no parameter .* Register it"):
        pm(torch.randn(4, WIDTH))


@pytest.mark.parametrize("scale", [by_teacher, by_hidden_module], ids=["under no_grad", "frozen"])
def test_a_hidden_module_without_gradients_is_taken(scale: Callable[..., torch.Tensor]) -> None:
    model, x = Scaled(scale), torch.randn(4, WIDTH)
    if scale is by_hidden_module:
        model.hidden[0].requires_grad_(False)
    pm = autopar.parallelize(model, ["cpu", "cpu"], tune=0)
    torch.testing.assert_close(pm(x), model(x))


def test_a_loss_may_train_tensors_of_its_own() -> None:
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH)
    temperature = nn.Parameter(torch.ones(()))
    pm = autopar.parallelize(model, ["cpu", "cpu"], tune=0)
    pm.train_step(x, target=x, loss_fn=lambda y, t: functional.mse_loss(y * temperature.exp(), t))
    found = temperature.grad
    temperature.grad = None
    functional.mse_loss(model(x) * temperature.exp(), x).backward()
    torch.testing.assert_close(found, temperature.grad)
