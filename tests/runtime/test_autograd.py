"""A pipelined model in the caller's autograd graph does what the original does there."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
from models import TwoTowers, assert_same_gradients, assert_same_outputs, gradients, mlp
from torch import nn

import autopar
from autopar import CaptureError, PipelinedModule, Plan

TWO_STAGES = Plan.from_split({"0": 0, "3": 1}, n_microbatches=3)
REPLICAS = Plan.from_split({"0": 0}, n_microbatches=3, devices=[("cpu:0", "cpu:1")])
TOWERS = Plan.from_split({"left": 0, "right": 1}, n_microbatches=2)

plans = pytest.mark.parametrize("plan", [TWO_STAGES, REPLICAS], ids=["stages", "replicas"])


def pipelined(model: nn.Module, plan: Plan = TWO_STAGES, **options: Any) -> PipelinedModule:
    return autopar.parallelize(model, ["cpu", "cpu"], plan=plan, **options)


@plans
def test_autograd_grad_gives_gradients_of_parameters_and_inputs_without_touching_grad(plan: Plan) -> None:
    model, x = mlp(), torch.randn(5, 16, requires_grad=True)
    wanted = [*model.parameters(), x]
    expected = torch.autograd.grad(model(x).square().sum(), wanted)
    found = torch.autograd.grad(pipelined(model, plan)(x).square().sum(), wanted)
    torch.testing.assert_close(found, expected)
    assert all(tensor.grad is None for tensor in wanted)


@plans
def test_inputs_that_require_grad_get_it_and_pass_it_to_what_made_them(plan: Plan) -> None:
    model, before, x = mlp(), nn.Linear(16, 16), torch.randn(5, 16)
    model(before(x)).square().sum().backward()
    expected = gradients(before)
    gradients(model)
    pipelined(model, plan)(before(x)).square().sum().backward()
    assert_same_gradients(gradients(before), expected)


def test_train_step_gives_gradients_to_inputs_too() -> None:
    model, x = mlp(), torch.randn(5, 16, requires_grad=True)
    expected = torch.autograd.grad(model(x).square().mean(), x)[0]
    pipelined(model).train_step(x, target=torch.zeros(5), loss_fn=lambda output, _: output.square().mean())
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("when", ["before wrapping", "after the first call"])
@pytest.mark.parametrize("frozen", ["0", "6", "all but 4"])
def test_frozen_parameters_get_no_gradient_and_the_others_theirs(when: str, frozen: str) -> None:
    model, x = mlp(), torch.randn(5, 16)
    pm = pipelined(model)
    if when == "after the first call":
        pm(x).sum().backward()
        gradients(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_((name[0] == "4") if frozen == "all but 4" else (name[0] != frozen))
    model(x).square().sum().backward()
    expected = gradients(model)
    pm(x).square().sum().backward()
    assert_same_gradients(gradients(model), expected)
    for parameter in model.parameters():
        parameter.requires_grad_()
    model(x).square().sum().backward()
    expected = gradients(model)
    pm(x).square().sum().backward()
    assert_same_gradients(gradients(model), expected)


def test_a_model_frozen_whole_returns_outputs_without_grad() -> None:
    model = mlp().requires_grad_(False)
    assert not pipelined(model)(torch.randn(5, 16)).requires_grad


@plans
def test_two_forwards_then_two_backwards_in_any_order(plan: Plan) -> None:
    model, (x, y) = mlp(), torch.randn(2, 5, 16)
    (model(x).square().sum() + 3 * model(y).sum()).backward()
    expected = gradients(model)
    pm = pipelined(model, plan)
    for order in ((0, 1), (1, 0)):
        losses = (pm(x).square().sum(), 3 * pm(y).sum())
        for index in order:
            losses[index].backward()
        assert_same_gradients(gradients(pm), expected)


def test_a_model_may_be_called_twice_in_one_graph() -> None:
    model, x = mlp(), torch.randn(5, 16)
    model(model(x)).square().sum().backward()
    expected = gradients(model)
    pm = pipelined(model)
    pm(pm(x)).square().sum().backward()
    assert_same_gradients(gradients(pm), expected)


@plans
def test_gradients_accumulate_over_calls(plan: Plan) -> None:
    model, x = mlp(), torch.randn(5, 16)
    model(x).square().mean().backward()
    twice = {name: 2 * p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients(model)
    pm = pipelined(model, plan)
    for _ in range(2):
        pm(x).square().mean().backward()
    assert_same_gradients(gradients(pm), twice)
    for _ in range(2):
        pm.train_step(x, target=torch.zeros(5), loss_fn=lambda output, _: output.square().mean())
    assert_same_gradients(gradients(pm), twice)


@plans
def test_backward_twice_needs_retain_graph(plan: Plan) -> None:
    model, x = mlp(), torch.randn(5, 16, requires_grad=True)
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert x.grad is not None
    (expected, input_gradient), x.grad = (gradients(model), x.grad), None
    pm = pipelined(model, plan)
    loss = pm(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert_same_gradients(gradients(pm), expected)
    torch.testing.assert_close(x.grad, input_gradient)
    with pytest.raises(RuntimeError, match=r"second time.*retain_graph=True"):
        loss.backward()
    pm(x).sum().backward()  # and a new call is not disturbed


def test_a_second_backward_from_another_output_gives_only_its_own_gradients() -> None:
    model = TwoTowers()
    a, b = torch.randn(4, 6, requires_grad=True), torch.randn(4, 10, requires_grad=True)

    def two_backwards(called: nn.Module) -> list[torch.Tensor | None]:
        a.grad = b.grad = None
        output = called(a, b)
        output["left"].square().sum().backward(retain_graph=True)
        output["right"].square().sum().backward()
        return [a.grad, b.grad]

    expected_inputs, expected = two_backwards(model), gradients(model)
    pm = pipelined(model, TOWERS)
    torch.testing.assert_close(two_backwards(pm), expected_inputs)
    assert_same_gradients(gradients(pm), expected)


@pytest.mark.slow
def test_an_output_that_the_loss_does_not_use_leaves_its_parameters_without_gradient() -> None:
    model, inputs = TwoTowers(), {"a": torch.randn(4, 6), "b": torch.randn(4, 10)}
    model(**inputs)["left"].sum().backward()
    expected = gradients(model)
    assert expected["right.0.weight"] is None
    pm = pipelined(model, TOWERS)
    pm(**inputs)["left"].sum().backward()
    assert_same_gradients(gradients(pm), expected)


class WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.unused, self.b = nn.Linear(8, 8), nn.Linear(3, 3), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def test_parameters_that_no_output_uses_keep_grad_none() -> None:
    pm = pipelined(WithUnused(), Plan.from_split({"a": 0, "b": 1}, n_microbatches=2))
    pm(torch.randn(5, 8)).sum().backward()
    assert [name for name, gradient in gradients(pm).items() if gradient is None] == ["unused.weight", "unused.bias"]


class Tied(nn.Module):
    """One parameter used in the first and in the last layer, by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


@pytest.mark.parametrize("second", ["cpu:1", ("cpu:1", "cpu:2")], ids=["plain", "replicated"])
def test_tied_parameters_in_two_stages_stay_one_and_sum_their_gradients(second: Any) -> None:
    model, x = Tied(), torch.randn(5, 8)
    model(x).square().sum().backward()
    expected = gradients(model)
    plan = Plan.from_split({"first": 0, "last": 1}, n_microbatches=3, devices=["cpu:0", second])
    pm = autopar.parallelize(model, ["cpu"] * 3, plan=plan)
    pm(x).square().sum().backward()
    assert pm.last.weight is pm.first.weight is model.first.weight
    assert_same_gradients(gradients(pm), expected)


def test_no_grad_outputs_have_no_grad_and_inference_mode_outputs_are_inference_tensors() -> None:
    model, x = mlp(), torch.randn(5, 16)
    pm = pipelined(model)
    with torch.no_grad():
        assert not pm(x).requires_grad
    with torch.inference_mode():
        output = pm(x)
    assert output.is_inference()
    torch.testing.assert_close(output, model(x).detach())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [False, True])
def test_a_model_first_called_without_grad_trains_later(mode: Any, training: bool) -> None:
    model, x = mlp().train(training), torch.randn(5, 16)
    pm = pipelined(model)
    with mode():
        pm(x)
    model(x).square().sum().backward()
    expected = gradients(model)
    pm(x).square().sum().backward()
    assert_same_gradients(gradients(pm), expected)


@pytest.mark.parametrize("first", ["plain", "autocast"])
def test_autocast_is_the_callers_of_the_moment(first: str) -> None:
    model, x = mlp(), torch.randn(5, 16)
    pm = pipelined(model)
    kinds = {"plain": False, "autocast": True}
    for kind in (first, *(k for k in kinds if k != first)):
        with torch.autocast("cpu", torch.bfloat16, enabled=kinds[kind]):
            original, output = model(x), pm(x)
        assert output.dtype == original.dtype == (torch.bfloat16 if kinds[kind] else torch.float32)
        assert_same_outputs(output, original, tolerance=2e-2 if kinds[kind] else 1e-5)
        original.float().square().sum().backward()
        expected = gradients(model)
        output.float().square().sum().backward()
        assert_same_gradients(gradients(pm), expected, tolerance=2e-2 if kinds[kind] else 1e-5)


class Blocks(nn.Module):
    """A detached branch, a no_grad block and an autocast block, as users write them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        with torch.no_grad():
            scale = self.b(x).sigmoid()
        with torch.autocast("cpu", torch.bfloat16):
            y = self.c(x)
        return y.float() * scale + x.detach().cos()


def test_blocks_without_grad_or_with_autocast_inside_the_model_keep_their_meaning() -> None:
    model, x = Blocks(), torch.randn(5, 8)
    original = model(x)
    original.square().sum().backward()
    expected = gradients(model)
    assert expected["b.weight"] is None
    pm = pipelined(model, Plan.from_split({"a": 0, "c": 1}, n_microbatches=2))
    output = pm(x)
    assert_same_outputs(output, original, tolerance=1e-2)
    output.square().sum().backward()
    assert_same_gradients(gradients(pm), expected, tolerance=1e-2)


class StraightThrough(torch.autograd.Function):
    """Rounds forward; passes the gradient as if it had not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(StraightThrough.apply(4 * self.a(x)))


def test_a_backward_that_the_user_wrote_is_refused_by_name_if_strict() -> None:
    plan = Plan.from_split({"a": 0, "b": 1}, n_microbatches=2)
    pm = autopar.parallelize(Quantised(), ["cpu", "cpu"], plan=plan, strict=True)
    with pytest.raises(CaptureError, match=r"autograd.Function 'StraightThrough'.*own backward"):
        pm(torch.randn(5, 8))


@pytest.mark.slow
def test_forwards_without_backward_do_not_pile_up() -> None:
    pm, x = pipelined(mlp()), torch.randn(5, 16)

    def live() -> int:
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    counts = []
    for _ in range(3):
        for _ in range(10):
            pm(x)
        counts.append(live())
    assert not any(later > earlier for earlier, later in itertools.pairwise(counts)), counts


@pytest.mark.slow
def test_an_output_that_is_dropped_frees_its_activations_without_the_garbage_collector() -> None:
    pm, x = pipelined(mlp(width=64)), torch.randn(5, 64)

    def live() -> int:
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    pm(x)
    gc.collect()
    gc.disable()
    try:
        before = live()
        for _ in range(10):
            pm(x)
        assert live() - before < 10, "less than one tensor a call"
    finally:
        gc.enable()
