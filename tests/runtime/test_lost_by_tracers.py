"""Code whose effect on gradients a tracer would lose: the plain model is the oracle."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from models import assert_same_gradients
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar import Plan

DEVICES = ["cpu", "cpu"]


class Reentrant(nn.Module):
    """Its input has a gradient, or, at the start of a model, none."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.inner, x, use_reentrant=True)
        return result


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        if result.requires_grad:
            result.register_hook(lambda gradient: gradient * 0.5)
        return result


class Derived(nn.Module):
    """The gradient of an energy, as in force fields."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.requires_grad_()
        with torch.enable_grad():
            return -torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


class Mapped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda sample: sample * sample.sum())(x)


PARTS = {"reentrant checkpoint": Reentrant, "tensor hook": Hooked, "derivative inside": Derived, "vmap": Mapped}


def same_step(model: nn.Module, pm: nn.Module, original: nn.Module, x: Tensor) -> None:
    for module in (pm, original):
        module(x.clone()).square().sum().backward()
    torch.testing.assert_close(pm(x.clone()), original(x.clone()))
    assert_same_gradients(
        {n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in original.named_parameters()}
    )


@pytest.mark.parametrize("searched", [False, True])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_between_others_trains_as_the_plain_model(part: str, searched: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), PARTS[part](), nn.Linear(8, 3)), torch.randn(7, 8)
    original = copy.deepcopy(model)
    plan = (
        {"tune": 0, "n_microbatches": 3} if searched else {"plan": Plan.from_split({"0": 0, "2": 1}, n_microbatches=3)}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autopar.AutoparWarning)
        pm = autopar.parallelize(model, DEVICES, cache=False, **plan)
        same_step(model, pm, original, x)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_of_inputs_without_gradients_trains_nothing_as_in_torch() -> None:
    model, x = nn.Sequential(Reentrant(), nn.Linear(8, 3)), torch.randn(6, 8)
    original = copy.deepcopy(model)
    pm = autopar.parallelize(model, DEVICES, plan=Plan.from_split({"0": 0, "1": 1}, n_microbatches=3), cache=False)
    same_step(model, pm, original, x)
    assert original[0].inner[0].weight.grad is None


@pytest.mark.parametrize("part", ["tensor hook", "vmap"])
def test_strict_refuses_what_a_graph_would_lose(part: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), PARTS[part](), nn.Linear(8, 3))
    message = "register_hook.* on a tensor" if part == "tensor hook" else "do not run apart"
    with pytest.raises(autopar.errors.CaptureError, match=f"module '1'.*{message}|{message}.*"):
        autopar.parallelize(model, DEVICES, tune=0, cache=False, strict=True)(torch.randn(6, 8))


class OwnGenerator(nn.Module):
    """Draws the same numbers as any copy of it, one call after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(8, generator=self.generator)


class LayerDrop(nn.Module):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.draw() < 0.5 else x


@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
def test_a_generator_of_the_models_own_goes_on() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), OwnGenerator(), nn.Linear(8, 3)), torch.randn(6, 8)
    original = copy.deepcopy(model)
    original[1].generator = torch.Generator()
    plan = Plan.from_split({"0": 0, "2": 1}, n_microbatches=1)
    pm = autopar.parallelize(model, DEVICES, plan=plan, cache=False)
    pm(x)  # captured
    for module in (model, original):
        module[1].generator.manual_seed(3)
    for _ in range(3):
        torch.testing.assert_close(pm(x), original(x))


class NoiseWithin(nn.Module):
    """Its generators are in containers. Evaluation would not draw."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.noise = nn.Linear(8, 3), {"by": [torch.Generator().manual_seed(5)]}

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.randn((len(x), 3), generator=self.noise["by"][0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
@pytest.mark.parametrize("tune", [0, 2])
def test_planning_leaves_the_models_own_generators_as_they_were(tune: float) -> None:
    model, x, y = NoiseWithin(), torch.randn(6, 8), torch.randn(6, 3)
    generator = model.noise["by"][0]
    before = generator.get_state()
    pm = autopar.parallelize(
        model, DEVICES, tune=tune, cache=False, example_args=(x,), loss_fn=nn.functional.mse_loss, target=y
    )
    assert torch.equal(generator.get_state(), before)
    expected = [model(x) for _ in range(3)]
    generator.set_state(before)
    for one in expected:
        torch.testing.assert_close(pm(x), one)


@pytest.mark.slow
def test_a_module_that_draws_from_its_own_generator_gets_the_whole_batch() -> None:
    with pytest.warns(autopar.AutoparWarning, match=r"not split .* changes NoiseWithin\.noise, once for every batch"):
        autopar.parallelize(NoiseWithin(), DEVICES, tune=0, cache=False, example_args=(torch.randn(6, 8),))


class NoisyLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target + torch.randn(output.shape, generator=self.generator)).square().mean()


def noisy_closure(generator: torch.Generator) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: (output - target).mul(torch.rand(3, generator=generator)).square().mean()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
@pytest.mark.parametrize("held_by", ["module", "closure"])
def test_planning_leaves_a_generator_of_the_loss_as_it_was(held_by: str) -> None:
    torch.manual_seed(0)
    plain, x, y = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)), torch.randn(6, 8), torch.randn(6, 3)
    module = NoisyLoss()
    loss = module if held_by == "module" else noisy_closure(module.generator)
    before = module.generator.get_state()
    expected = [float(loss(plain(x), y)) for _ in range(2)]
    module.generator.set_state(before)
    pm = autopar.parallelize(plain, DEVICES, tune=1, cache=False, example_args=(x,), loss_fn=loss, target=y)
    assert torch.equal(module.generator.get_state(), before)
    assert [float(pm.train_step(x, loss_fn=loss, target=y)) for _ in range(2)] == pytest.approx(expected)


@pytest.mark.parametrize(("draw", "name"), [(random.random, "Python's"), (np.random.rand, "numpy's")])
def test_random_numbers_that_a_graph_repeats_are_named_and_not_used_up(draw: Callable[[], float], name: str) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), LayerDrop(draw), nn.Linear(8, 3)), torch.randn(6, 8)
    random.seed(0)
    np.random.seed(0)
    before = draw()
    random.seed(0)
    np.random.seed(0)
    pm = autopar.parallelize(model, DEVICES, plan=Plan.from_split({"0": 0, "2": 1}, n_microbatches=3), cache=False)
    with pytest.warns(autopar.AutoparWarning, match=f"draws random numbers from {name} random generator"):
        pm(x)
    assert draw() == before
