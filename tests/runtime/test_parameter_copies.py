"""Plans that are measured in turn hold the parameters once, and one step's gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.analysis.example import Example, capture_example
from autopar.options import PlanOptions
from autopar.plan.plan import Plan
from autopar.plan.stage import Stage
from autopar.runtime.comparing.contestants import (
    ComparedCall,
    Rounds,
    contestants,
    memory_in_turn,
    places_of,
    steps_in_turn,
)
from autopar.runtime.comparing.parameter_copies import ParameterCopies, keeps_parameters
from autopar.runtime.signatures.bound_signature import RunSettings
from cost_models import Device, parse_devices
from cost_models.graphs import storage_key

CPUS = parse_devices(["cpu", "cpu"])
X, Y = torch.randn(8, 8), torch.randn(8, 8)
PLANS = {
    "pipeline": Plan.from_split({"0": 0, "2": 1}, n_microbatches=2),
    "replicas": Plan.from_split({"": 0}, n_microbatches=2, devices=[("cpu:0", "cpu:1")]),
    "plain": Plan.from_split({"": 0}, n_microbatches=1, devices=[("cpu:1",)]),
}


def layers() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[4].weight = model[2].weight
    return model


class Rounded(nn.Module):
    """Runs uncaptured."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * self.scale * float(x.detach().numpy().round().sum() > 1e9)


def example_of(model: nn.Module) -> Example:
    return capture_example(model, CPUS, (X,), {}, loss_fn=F.mse_loss, target=Y)


def _silent(what: str, done: float) -> None:
    """A progress that nobody sees."""


def storages(model: nn.Module) -> set[int]:
    return {storage_key(p) for p in model.parameters()}


@pytest.mark.slow
def test_contestants_hold_the_models_parameters_and_no_gradients_between_steps() -> None:
    model = layers()
    before = copy.deepcopy(model.state_dict())
    call = ComparedCall(example_of(model), RunSettings.of(PlanOptions(batch_norm="per-microbatch")))
    plain = Plan((Stage(("cpu:0",)),), n_microbatches=1)
    with contestants(call, PLANS, CPUS, _silent, plain=plain) as ready:
        for contestant in ready:
            assert storages(contestant.model) == storages(model)
            contestant.step()
            mine = {name: p.grad for name, p in contestant.model.named_parameters()}
            assert all(gradient is not None for gradient in mine.values())
            others = [p.grad for c in ready if c is not contestant for p in c.model.parameters()]
            assert others == [None] * len(others)
            steps_in_turn([contestant], CPUS, Rounds(1), _silent)
        assert all(p.grad is None for c in ready for p in c.model.parameters())
        buffers = [{storage_key(b) for b in m.buffers()} for m in (model, *(c.model for c in ready))]
        assert len(set().union(*buffers)) == sum(map(len, buffers))
    assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
def test_a_model_that_runs_uncaptured_is_copied_with_its_parameters() -> None:
    model = Rounded()
    example = example_of(model)
    assert not keeps_parameters(example)
    plans = {"plain": PLANS["plain"]}
    with contestants(ComparedCall(example, RunSettings.of(PlanOptions())), plans, CPUS, _silent) as ready:
        assert not storages(ready[0].model) & storages(model)
        ready[0].step()


def move_to_meta(model: nn.Module) -> None:
    """As the runtime moves parameters to a GPU: each stays one, tied or not."""
    moved = {id(p): nn.Parameter(torch.empty_like(p, device="meta")) for p in model.parameters()}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = moved[id(parameter)]


def test_copies_on_another_device_share_its_memory() -> None:
    """The meta device is used as a GPU."""
    model = layers()
    copies = ParameterCopies(example_of(model))
    first, second, here = copies.make(), copies.make(), copies.make()
    for placed in (first, second):
        move_to_meta(placed)
        copies.share(placed)
    assert storages(first[2]) == storages(second[2])
    assert not storages(first) & storages(model)
    copies.share(here)
    assert storages(here) == storages(model)
    assert second[2].weight is second[4].weight


def test_tied_weights_and_frozen_ones_stay_so_in_copies() -> None:
    model = layers()
    model[0].weight.requires_grad_(False)
    made = ParameterCopies(example_of(model)).make()
    assert made[2].weight is made[4].weight
    assert [p.requires_grad for p in made.parameters()] == [p.requires_grad for p in model.parameters()]


def stage(*devices: str, parameters: int, peak: int) -> Stage:
    return Stage(devices, parameter_bytes=parameters, peak_memory=peak)


def test_plans_in_turn_need_what_one_needs_and_the_parameters_of_the_others() -> None:
    gpu = torch.device("cuda:0")
    devices: Any = (
        Device("cuda:0", gpu, "GPU", 100, 1),
        Device("cuda:0#1", gpu, "GPU", 100, 1),
        *(Device(name, torch.device("cpu"), "CPU", 100, 1) for name in ("cpu:0", "cpu:1")),
    )
    plans = [
        Plan((stage("cuda:0", parameters=10, peak=50), stage("cuda:0#1", parameters=20, peak=30)), 2, "gpipe"),
        Plan((stage("cuda:0", parameters=30, peak=70),), 1, "gpipe"),
        Plan((stage("cpu:0", parameters=30, peak=60),), 1, "gpipe"),
        Plan((stage("cpu:0", parameters=10, peak=20), stage("cpu:1", parameters=20, peak=40)), 2, "gpipe"),
    ]
    shared, apart = (memory_in_turn(plans, places_of(devices), on) for on in (("cpu:0", "cpu:1"), ()))
    assert shared == {"cuda:0": 50 + 30 + 30, "cpu:0": 60, "cpu:1": 40}
    assert apart == {"cuda:0": 50 + 30 + 30, "cpu:0": 60 + 10, "cpu:1": 40}
