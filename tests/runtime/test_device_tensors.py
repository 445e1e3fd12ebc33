"""Copies of the model's tensors on other devices are up to date whenever a call starts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import autopar
from autopar import AutoparError, PipelinedModule, Plan
from autopar.analysis.example import capture_example
from autopar.lower.sharded import Piece
from autopar.runtime.plain_model import plain_call
from autopar.runtime.stages.device_tensors import ParameterLeaf, ParameterLeaves, _state
from cost_models.hardware.devices import Device


class _Elsewhere(nn.Parameter):
    """A parameter that says it is on a GPU, so that a leaf on the CPU counts as a copy on another device."""

    device = torch.device("cuda:0")  # type: ignore[assignment]


def _leaf_of(parameter: nn.Parameter) -> ParameterLeaf:
    copied = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
    return ParameterLeaf(id(parameter), copied, Piece("weight", "weight", 0), _state(parameter))


def _fused_step(parameter: nn.Parameter) -> None:
    same_memory = nn.Parameter(parameter.data.as_subclass(torch.Tensor))  # the optimizer would look for a GPU
    same_memory.grad = torch.ones(3)
    torch.optim.Adam([same_memory], lr=0.1, fused=True).step()


def _new_data(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data + 1


_CHANGES: dict[str, Callable[[nn.Parameter], object]] = {
    "an in-place write": lambda p: p.detach().add_(1),
    "a write through .data": lambda p: p.data.clamp_(min=10),
    "new data": _new_data,
    "a fused optimizer": _fused_step,
}


@pytest.mark.parametrize("how", _CHANGES)
def test_a_copy_follows_whatever_changes_the_parameter(how: str) -> None:
    parameter = _Elsewhere(torch.arange(3.0))
    leaf = _leaf_of(parameter)
    before = leaf.tensor.detach().clone()
    _CHANGES[how](parameter)
    leaf.refresh(parameter)
    assert not torch.equal(leaf.tensor, before)
    assert torch.equal(leaf.tensor, parameter.detach().as_subclass(torch.Tensor))


def test_copies_of_frozen_parameters_are_made_anew_only_where_these_changed() -> None:
    parameter = _Elsewhere(torch.arange(3.0), requires_grad=False)
    leaf = _leaf_of(parameter)
    leaf.tensor.data.fill_(7.0)  # a mark that a copy would overwrite
    leaf.refresh(parameter)
    assert leaf.tensor.tolist() == [7.0] * 3
    parameter.add_(1)
    leaf.refresh(parameter)
    assert leaf.tensor.tolist() == [1.0, 2.0, 3.0]
    leaf.tensor.data.fill_(7.0)
    leaf.refresh(parameter)
    assert leaf.tensor.tolist() == [7.0] * 3
    parameter.data = torch.arange(3.0)  # of the same version
    leaf.refresh(parameter)
    assert leaf.tensor.tolist() == [0.0, 1.0, 2.0]


def test_all_copies_follow_their_parameters_at_every_call() -> None:
    """Only leaves that are views of their parameters need nothing where no parameter has moved."""
    parameters = [_Elsewhere(torch.arange(3.0)) for _ in range(2)]
    leaves = ParameterLeaves(map(_leaf_of, parameters), {id(p): p for p in parameters})
    for _ in range(3):
        for parameter in parameters:
            parameter.data.mul_(2).add_(1)
        leaves.refresh()
        for leaf, parameter in zip(leaves._leaves, parameters, strict=True):
            assert torch.equal(leaf, parameter.detach().as_subclass(torch.Tensor))


ELSEWHERE = Device("meta:0", torch.device("meta"), "nowhere", 1 << 30, 1)


def _plain_elsewhere(model: nn.Module) -> PipelinedModule:
    """The model by a plan of one stage on one device, which is not the CPU."""
    plan = Plan.from_split({"0": 0}, n_microbatches=1, devices=["meta:0"])
    pm = PipelinedModule(model, [ELSEWHERE], lambda _: plan, plan=plan)
    pm.adopt(capture_example(model, (), (torch.randn(4, 4),), {}))
    return pm


def test_a_plain_model_first_called_in_inference_mode_moves_parameters_that_train_afterwards() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    pm = _plain_elsewhere(model)
    with torch.inference_mode():
        pm.prepare((torch.randn(4, 4),), {})
    for tensor in [*model.parameters(), *model.buffers()]:
        assert tensor.is_meta
        assert not tensor.is_inference()
    model(torch.randn(4, 4, device="meta")).sum().backward()


def test_a_plain_model_that_was_moved_after_its_placement_says_where_to_move_it() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(4, 4)
    with pytest.raises(
        AutoparError, match=r"0\.weight has been moved to cpu; move the model back with pm\.to\('meta'\)"
    ):
        plain_call(model, ELSEWHERE, (x,), {})
    model.to("meta")
    assert plain_call(model, ELSEWHERE, (x,), {}).is_meta
    with pytest.raises(RuntimeError, match="dim"):  # an error of the model's own stays as it is
        plain_call(model, ELSEWHERE, (torch.randn(4, 3),), {})


@pytest.mark.parametrize("devices", [["cpu:0", "cpu:1"], ["cpu:0"]], ids=str)
def test_batch_norms_train_by_two_calls_and_one_backward(devices: list[str]) -> None:
    """The second call brings the replicas' running statistics up to date, which the first call's backward saved."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    plan = Plan.from_split({"0": 0}, n_microbatches=2, devices=[devices])
    pm = autopar.parallelize(model, ["cpu"] * len(devices), plan=plan)
    (pm(torch.randn(8, 4)) + pm(torch.randn(8, 4))).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]], ids=str)
def test_steps_follow_parameters_whose_memory_is_read_in_another_order(devices: list[str]) -> None:
    """`p.data = p.data.t()` leaves the first entry where it was."""
    layer, x, y = nn.Linear(4, 4), torch.randn(8, 4), torch.randn(8, 4)
    model, weight = nn.Sequential(layer), layer.weight
    plan = Plan.from_split({"0": 0}, n_microbatches=2, devices=[devices])
    pm = autopar.parallelize(model, ["cpu"] * len(devices), plan=plan)
    pm.train_step(x, target=y, loss_fn=mse_loss)
    weight.data = weight.data.t()
    pm.zero_grad()
    loss = pm.train_step(x, target=y, loss_fn=mse_loss)
    expected = mse_loss(model(x), y)
    (gradient,) = torch.autograd.grad(expected, weight)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(weight.grad, gradient)
