"""Hooks on modules are called as the original calls them: the root's once a call, inner ones once a micro-batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import assert_same_gradients, assert_same_outputs, gradients
from torch import nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

import autopar
from autopar import PipelinedModule, Plan

BATCH, N_MICROBATCHES = 5, 3
PLAN = Plan.from_split({"a": 0, "b": 1}, n_microbatches=N_MICROBATCHES)
INNER = ("a", "a.0", "b", "b.scaled")

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
ways = pytest.mark.parametrize("way", ["a call", "train_step"])


class Scaled(nn.Module):
    """Takes one tensor by place and one by name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor, *, gate: torch.Tensor) -> torch.Tensor:
        return x * self.weight * gate.sigmoid()


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scaled = nn.Linear(8, 8), Scaled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return self.scaled(y, gate=x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), Second()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def pipelined(model: nn.Module, plan: Plan = PLAN, **options: Any) -> PipelinedModule:
    return autopar.parallelize(model, ["cpu", "cpu"], plan=plan, **options)


def twins() -> tuple[nn.Module, PipelinedModule]:
    """The original, and a pipelined copy of it."""
    model = Model()
    return model, pipelined(copy.deepcopy(model))


def step(called: nn.Module, x: torch.Tensor, way: str) -> None:
    target = torch.zeros(len(x), 8)
    if way == "train_step" and isinstance(called, PipelinedModule):
        called.train_step(x, target=target, loss_fn=F.mse_loss)
    else:
        F.mse_loss(called(x), target).backward()


class Log:
    """What the hooks on a model's modules were called with: for each, tuples of tensors in the order of the calls."""

    def __init__(self) -> None:
        self.calls: dict[str, list[tuple[torch.Tensor, ...]]] = {}
        self.handles: list[RemovableHandle] = []

    def note(self, key: str, *values: Any) -> None:
        self.calls.setdefault(key, []).append(tuple(v.detach().clone() for v in values if v is not None))

    def forwards(self, path: str, module: nn.Module) -> None:
        """Register forward hooks of all kinds."""
        self.handles += [
            module.register_forward_pre_hook(lambda _, args: self.note(f"{path} pre", *args)),
            module.register_forward_pre_hook(
                lambda _, args, kwargs: self.note(f"{path} pre with names", *args, *kwargs.values()), with_kwargs=True
            ),
            module.register_forward_hook(lambda _, args, output: self.note(f"{path} after", *args, output)),
            module.register_forward_hook(
                lambda _, args, kwargs, output: self.note(f"{path} after with names", *args, *kwargs.values(), output),
                with_kwargs=True,
            ),
        ]

    def backwards(self, path: str, module: nn.Module) -> None:
        """Register full backward hooks of both kinds."""
        self.handles += [
            module.register_full_backward_pre_hook(lambda _, grads: self.note(f"{path} backward pre", *grads)),
            module.register_full_backward_hook(
                lambda _, of_inputs, of_outputs: self.note(f"{path} backward", *of_inputs, *of_outputs)
            ),
        ]

    def everywhere(self, model: nn.Module, paths: tuple[str, ...] = INNER) -> Log:
        for path in paths:
            self.forwards(path, model.get_submodule(path))
            self.backwards(path, model.get_submodule(path))
        return self


def assert_same_calls(mine: Log, original: Log, calls: int) -> None:
    """`calls` times the original's, with parts of its tensors that together are its own."""
    assert sorted(mine.calls) == sorted(original.calls)
    for key, (expected,) in original.calls.items():
        found = mine.calls[key]
        assert len(found) == calls, key
        joined = tuple(torch.cat(parts) for parts in zip(*found, strict=True))
        torch.testing.assert_close(joined, expected, msg=lambda text, key=key: f"{key}: {text}")  # type: ignore[misc]


@ways
@pytest.mark.parametrize("when", ["before wrapping", "before the first call", "after the first call"])
def test_hooks_of_inner_modules_get_each_micro_batchs_rows_of_the_originals_tensors(way: str, when: str) -> None:
    original, model = Model(), Model()
    model.load_state_dict(original.state_dict())
    x, expected, found = torch.randn(BATCH, 8, requires_grad=True), Log(), Log()
    expected.everywhere(original)
    if when == "before wrapping":
        found.everywhere(model)
    pm = pipelined(model)
    if when == "after the first call":
        step(pm, x, way)
        pm.zero_grad()
    if when != "before wrapping":
        found.everywhere(pm)
    step(original, x, way)
    step(pm, x, way)
    assert {len(rows[0]) for rows in found.calls["a pre"]} == {1, 2}
    assert_same_calls(found, expected, N_MICROBATCHES)
    assert_same_gradients(gradients(pm), gradients(original))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forward_hooks_of_inner_modules_are_called_without_grad_too(mode: Any) -> None:
    original, pm = twins()
    logs = Log().everywhere(pm), Log().everywhere(original)
    x = torch.randn(BATCH, 8)
    with mode():
        assert_same_outputs(pm(x), original(x))
    assert_same_calls(*logs, N_MICROBATCHES)
    assert not [key for key in logs[0].calls if "backward" in key]


def tripled(gradients: Any) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if gradient is None else 3 * gradient for gradient in gradients)


CHANGES: dict[str, Callable[[nn.Module], RemovableHandle]] = {
    "input": lambda m: m.register_forward_pre_hook(lambda _, args: (2 * args[0], *args[1:])),
    "input, not in a tuple": lambda m: m.register_forward_pre_hook(lambda _, args: args[0] + 1),
    "input and names": lambda m: m.register_forward_pre_hook(
        lambda _, args, kwargs: ((args[0].cos(),), {k: v + 1 for k, v in kwargs.items()}), with_kwargs=True
    ),
    "output": lambda m: m.register_forward_hook(lambda _, args, output: output * args[0].detach()),
    "output, by names": lambda m: m.register_forward_hook(
        lambda _, args, kwargs, output: output + len(kwargs) + 1, with_kwargs=True
    ),
    "output in place": lambda m: m.register_forward_hook(lambda _, args, output: output.mul_(2)),
    "gradients of inputs": lambda m: m.register_full_backward_hook(lambda _, of_inputs, __: tripled(of_inputs)),
    "gradients of outputs": lambda m: m.register_full_backward_pre_hook(lambda _, of_outputs: tripled(of_outputs)),
    "a hook on the output": lambda m: m.register_forward_hook(
        lambda _, args, output: output.register_hook(lambda gradient: 2 * gradient) and None
    ),
}


@ways
@pytest.mark.parametrize("register", CHANGES.values(), ids=list(CHANGES))
@pytest.mark.parametrize("path", ["a", "b.linear", "b.scaled"])
def test_what_a_hook_changes_changes_outputs_and_gradients_as_in_the_original(
    register: Callable[[nn.Module], RemovableHandle], path: str, way: str
) -> None:
    original, pm = twins()
    x = torch.randn(BATCH, 8, requires_grad=True)

    def results(called: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
        output = called(x).detach()
        step(called, x, way)
        found = {**gradients(called), "x": x.grad}
        x.grad = None
        return output, found

    (plain, unchanged), before = results(original), results(pm)
    handles = [register(called.get_submodule(path)) for called in (original, pm)]
    (expected, wanted), after = results(original), results(pm)
    assert not torch.equal(expected, plain) or not torch.equal(wanted["x"], unchanged["x"])  # type: ignore[arg-type]
    for handle in handles:
        handle.remove()
    removed = results(pm)
    for (output, found), (right, grads) in (
        (before, (plain, unchanged)),
        (after, (expected, wanted)),
        (removed, (plain, unchanged)),
    ):
        assert_same_outputs(output, right)
        assert_same_gradients(found, grads)


def test_a_hook_that_is_removed_is_not_called_again_and_those_beside_it_are() -> None:
    pm, x, first, second = pipelined(Model()), torch.randn(BATCH, 8), Log(), Log()
    first.everywhere(pm)
    second.everywhere(pm)
    pm(x).sum().backward()
    for handle in first.handles:
        handle.remove()
    counts = {key: len(calls) for key, calls in first.calls.items()}
    pm(x).sum().backward()
    assert {key: len(calls) for key, calls in first.calls.items()} == counts
    assert {key: len(calls) for key, calls in second.calls.items()} == {key: 2 * n for key, n in counts.items()}


def test_hooks_of_a_module_are_called_in_the_originals_order() -> None:
    original, pm = twins()
    orders: list[list[str]] = []
    for called in (original, pm):
        order: list[str] = []
        orders.append(order)
        for name, prepend in (("first", False), ("second", False), ("third", True)):
            module = called.get_submodule("b")
            module.register_forward_pre_hook(lambda *_, o=order, n=name: o.append(f"pre {n}"), prepend=prepend)
            module.register_forward_hook(lambda *_, o=order, n=name: o.append(n), prepend=prepend)
        called(torch.randn(BATCH, 8))
    assert orders[1] == orders[0] * N_MICROBATCHES


class Refused(Exception):
    """Raised by a hook."""


def test_what_a_hook_raises_reaches_the_caller_and_the_next_call_works() -> None:
    model, x = Model(), torch.randn(BATCH, 8)
    pm = pipelined(model)

    def refuse(module: nn.Module, args: tuple[Any, ...]) -> None:
        raise Refused("not this input")

    handle = pm.get_submodule("b").register_forward_pre_hook(refuse)
    for _ in range(2):
        with pytest.raises(Refused, match="not this input"):
            pm(x)
    handle.remove()
    assert_same_outputs(pm(x), model(x))


@pytest.mark.slow
@pytest.mark.parametrize("on", ["the model, before wrapping", "the pipelined module", "the pipelined module, late"])
def test_the_roots_hooks_are_called_once_with_the_whole_batch(on: str) -> None:
    original, model = Model(), Model()
    model.load_state_dict(original.state_dict())
    x, expected, found = torch.randn(BATCH, 8, requires_grad=True), Log(), Log()
    expected.everywhere(original, ("",))
    if on == "the model, before wrapping":
        found.everywhere(model, ("",))
    pm = pipelined(model)
    if on == "the pipelined module, late":
        pm(x)
    if on != "the model, before wrapping":
        found.everywhere(pm, ("",))
    step(original, x, "a call")
    step(pm, x, "a call")
    assert_same_calls(found, expected, 1)
    assert_same_gradients(gradients(pm), gradients(original))
    for handle in found.handles:
        handle.remove()
    step(pm, x, "a call")
    assert_same_calls(found, expected, 1)


def test_what_the_roots_hooks_change_changes_the_call() -> None:
    original, pm = twins()
    for called in (original, pm):
        called.register_forward_pre_hook(lambda _, args: (2 * args[0],))
        called.register_forward_hook(lambda _, args, output: (output, args[0].sum(1)))
    x = torch.randn(BATCH, 8)
    assert_same_outputs(pm(x), original(x))


class Normed(Model):
    """With a running statistic and with random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.a.append(nn.BatchNorm1d(8)).append(nn.Dropout(0.5))


@ways
@pytest.mark.parametrize("batch_norm", ["exact", "deferred"])
@pytest.mark.parametrize("given", [True, False], ids=["given plan", "automatic plan"])
def test_wrapping_and_planning_call_no_hook_and_leave_the_model_as_it_was(
    way: str, batch_norm: str, given: bool
) -> None:
    model, x, log = Normed(), torch.randn(BATCH, 8), Log()
    called: list[str] = []
    log.everywhere(model, ("", *INNER, "a.3"))
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda _, n=name: called.append(n))
        parameter.register_post_accumulate_grad_hook(lambda _, n=name: called.append(n))
    model.get_parameter("b.linear.weight").grad = torch.ones(8, 8)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator, grads = torch.get_rng_state(), [(p, p.grad) for p in model.parameters()]
    options: dict[str, Any] = {"plan": PLAN} if given else {"cache": False}
    pm = autopar.parallelize(model, ["cpu", "cpu"], batch_norm=batch_norm, **options)
    if way == "train_step":
        pm.prepare((x,), {}, loss_fn=F.mse_loss, target=torch.zeros(BATCH, 8))
    else:
        pm.prepare((x,), {})
    assert log.calls == {}
    assert called == []
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
    assert all(p.grad is gradient for p, gradient in grads)
    assert torch.equal(model.get_parameter("b.linear.weight").grad, torch.ones(8, 8))  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(module.training for module in model.modules())
    step(pm, x, way)
    assert len(set(called)) == len(grads)
    assert {key.split(" ")[0] for key in log.calls} >= {*INNER, "a.3"}
