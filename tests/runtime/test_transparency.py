"""Around a pipelined model, optimizers, hooks, scalers, copies and files work as around the original."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import assert_same_gradients, assert_same_outputs, gradients, mlp
from torch import nn
from torch.nn import functional as F

import autopar
from autopar import PipelinedModule, Plan

TWO_STAGES = Plan.from_split({"0": 0, "3": 1}, n_microbatches=3)
AB = Plan.from_split({"a": 0, "b": 1}, n_microbatches=3)
BATCH = 5  # micro-batches of 2, 2 and 1

ways = pytest.mark.parametrize("way", ["a call", "train_step"])


def pipelined(model: nn.Module, plan: Plan = TWO_STAGES, **options: Any) -> PipelinedModule:
    return autopar.parallelize(model, ["cpu", "cpu"], plan=plan, **options)


def twins(model: nn.Module, plan: Plan = TWO_STAGES, **options: Any) -> tuple[nn.Module, PipelinedModule]:
    """The original, and a pipelined copy of it."""
    return model, pipelined(copy.deepcopy(model), plan, **options)


def step(
    called: nn.Module, x: torch.Tensor, y: torch.Tensor, way: str, loss_fn: Callable[..., torch.Tensor] = F.mse_loss
) -> torch.Tensor:
    """The loss of a step; gradients are added to `.grad`."""
    if way == "train_step" and isinstance(called, PipelinedModule):
        return called.train_step(x, target=y, loss_fn=loss_fn)
    loss = loss_fn(called(x), y)
    loss.backward()
    return loss.detach()


def batch(width: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, width), torch.randn(BATCH, width)


def assert_same_state(mine: nn.Module, original: nn.Module, tolerance: float = 1e-5) -> None:
    assert list(mine.state_dict()) == list(original.state_dict())
    torch.testing.assert_close(
        dict(mine.state_dict()), dict(original.state_dict()), rtol=tolerance, atol=tolerance, check_device=False
    )


class Buffered(nn.Module):
    """Buffers of every kind, and a module of no stage between two that are."""

    def __init__(self) -> None:
        super().__init__()
        self.shift: torch.Tensor
        self.scratch: torch.Tensor
        self.register_buffer("shift", torch.randn(8))
        self.b, self.a = nn.Linear(8, 8), nn.Linear(8, 8)
        self.spare = nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.randn(8), persistent=False)
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x + self.shift)) * self.scale + self.scratch


def test_buffers_parameters_and_keys_come_in_the_originals_order_and_are_its_own_tensors() -> None:
    model = Buffered()
    pm = pipelined(model, AB)
    for _ in range(2):
        for kind in ("named_parameters", "named_buffers", "named_children"):
            found, expected = list(getattr(pm, kind)()), list(getattr(model, kind)())
            assert [name for name, _ in found] == [name for name, _ in expected]
            assert all(a is b for (_, a), (_, b) in zip(found, expected, strict=True))
        assert list(pm.state_dict()) == list(Buffered().state_dict())
        assert_same_outputs(pm(x := torch.randn(BATCH, 8)), model(x))


class Tied(nn.Module):
    """One parameter in both stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh())


@ways
@pytest.mark.parametrize("when", ["before wrapping", "after wrapping", "after the first call"])
@pytest.mark.parametrize("tied", [False, True])
def test_hooks_of_parameters_are_called_once_with_the_originals_gradients(way: str, when: str, tied: bool) -> None:
    plan, width = (AB, 8) if tied else (TWO_STAGES, 16)
    original, model = (Tied(), Tied()) if tied else (mlp(), mlp())
    model.load_state_dict(original.state_dict())

    def watch(watched: nn.Module) -> dict[str, list[Any]]:
        """Names, gradients and whether `.grad` is there, of every call; a hook also changes what it gets."""
        seen: dict[str, list[Any]] = {}

        def before(gradient: torch.Tensor, name: str) -> torch.Tensor:
            seen.setdefault(f"{name} before", []).append(gradient.clone())
            return gradient.clamp(-0.01, 0.01)

        def after(parameter: torch.Tensor, name: str) -> None:
            assert parameter.grad is not None
            seen.setdefault(f"{name} after", []).append(parameter.grad.clone())

        for name, parameter in watched.named_parameters():
            parameter.register_hook(functools.partial(before, name=name))
            parameter.register_post_accumulate_grad_hook(functools.partial(after, name=name))
        return seen

    expected = watch(original)
    found = watch(model) if when == "before wrapping" else {}
    pm = pipelined(model, plan)
    if when == "after the first call":
        pm(torch.randn(BATCH, width))
    if when != "before wrapping":
        found = watch(pm)
    for _ in range(2):
        x, y = batch(width)
        for called in (original, pm):
            step(called, x, y, way)
    assert not [name for name, calls in expected.items() if len(calls) != 2]
    torch.testing.assert_close(dict(sorted(found.items())), dict(sorted(expected.items())))
    assert_same_gradients(gradients(pm), gradients(original))


@ways
def test_an_optimizer_may_step_inside_the_hooks_of_its_parameters(way: str) -> None:
    original, pm = twins(mlp())
    for called in (original, pm):
        for parameter in called.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def update(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(update)
    for _ in range(3):
        x, y = batch()
        torch.testing.assert_close(step(pm, x, y, way), step(original, x, y, way))
    assert all(p.grad is None for p in pm.parameters())
    assert_same_state(pm, original)


@ways
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_and_accumulation_over_batches_of_any_size(way: str, to_none: bool) -> None:
    original, pm = twins(mlp())
    kept = None
    for size in (5, 3, 1):
        for rows in (size, 6):
            x, y = torch.randn(2, rows, 16)
            for called in (original, pm):
                step(called, x, y, way)
        found, expected = ({n: p.grad for n, p in m.named_parameters()} for m in (pm, original))
        assert_same_gradients(found, expected)
        gradient = pm.get_parameter("0.weight").grad
        assert kept is None or gradient is kept, "accumulated where it was"
        for called in (original, pm):
            called.zero_grad(set_to_none=to_none)
        assert all((p.grad is None) if to_none else not p.grad.any() for p in pm.parameters())  # type: ignore[union-attr]
        kept = None if to_none else gradient


def test_calls_train_steps_and_evaluations_may_alternate_in_one_gradient() -> None:
    original, pm = twins(mlp())
    xs, ys = torch.randn(2, 4, BATCH, 16)
    for x, y in zip(xs, ys, strict=True):
        step(original, x, y, "a call")
    output = pm(xs[0])
    with torch.no_grad():
        assert_same_outputs(pm(xs[1]), original(xs[1]).detach())
    step(pm, xs[1], ys[1], "train_step")
    step(pm, xs[2], ys[2], "a call")
    with torch.inference_mode():
        pm(xs[3])
    step(pm, xs[3], ys[3], "train_step")
    F.mse_loss(output, ys[0]).backward()
    assert_same_gradients(gradients(pm), gradients(original))


@ways
def test_requires_grad_may_change_between_steps_and_optimizers_follow(way: str) -> None:
    original, pm = twins(mlp())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (original, pm)]
    for frozen in ([], ["0"], ["0", "2", "4"], ["6"], []):
        for called, optimizer in zip((original, pm), optimizers, strict=True):
            for name, child in called.named_children():
                child.requires_grad_(name not in frozen)
            optimizer.zero_grad()
        x, y = batch()
        for called, optimizer in zip((original, pm), optimizers, strict=True):
            step(called, x, y, way)
            assert not any(p.grad is not None for name in frozen for p in called.get_submodule(name).parameters())
            optimizer.step()
    assert_same_state(pm, original)


@ways
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_of_another_dtype_after_the_first_call_trains_in_it(way: str, dtype: torch.dtype) -> None:
    original, pm = twins(mlp())
    x, y = batch()
    step(pm, x, y, way)
    pm.zero_grad()
    assert pm.to(dtype) is pm
    original.to(dtype)
    x, y = x.to(dtype), y.to(dtype)
    losses = [step(called, x, y, way) for called in (pm, original)]
    assert losses[0].dtype == losses[1].dtype == dtype
    tolerance = 1e-12 if dtype is torch.float64 else 3e-2
    torch.testing.assert_close(losses[0], losses[1], rtol=tolerance, atol=tolerance)
    assert {p.grad.dtype for p in pm.parameters() if p.grad is not None} == {dtype}
    assert_same_gradients(gradients(pm), gradients(original), tolerance)


@pytest.mark.parametrize("called_before", [False, True])
def test_a_deep_copy_is_independent_and_follows_the_same_plan(called_before: bool) -> None:
    pm, (x, y) = pipelined(mlp()), batch()
    if called_before:
        step(pm, x, y, "a call")
    twin = copy.deepcopy(pm)
    assert isinstance(twin, PipelinedModule)
    assert_same_outputs(twin(x), pm(x))
    assert twin.plan == pm.plan
    assert not {p.data_ptr() for p in pm.parameters()} & {p.data_ptr() for p in twin.parameters()}
    before = copy.deepcopy(pm.state_dict())
    step(twin, x, y, "train_step")
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    torch.testing.assert_close(dict(pm.state_dict()), dict(before), rtol=0, atol=0)
    assert not torch.equal(twin(x), pm(x))
    twin.close()
    assert_same_outputs(pm(x), pm.unwrap()(x))


@pytest.mark.parametrize("into", ["a pipelined model", "the original"])
def test_a_state_dict_saved_to_a_file_is_the_originals_and_loads_into_either(into: str) -> None:
    original, pm = twins(Buffered(), AB)
    step(pm, *batch(8), "a call")
    torch.optim.SGD(pm.parameters(), lr=0.1).step()
    file = io.BytesIO()
    torch.save(pm.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert list(loaded) == list(original.state_dict())
    other: nn.Module = Buffered()
    other.get_buffer("scratch").copy_(original.get_buffer("scratch"))  # which is not saved
    other = pipelined(other, AB) if into == "a pipelined model" else other
    assert other.load_state_dict(loaded).missing_keys == []
    assert_same_outputs(other(x := torch.randn(BATCH, 8)), pm(x))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adam, fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
}


@ways
@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
def test_optimizers_schedulers_and_clipping_train_like_the_original(way: str, made: str, make: Any) -> None:
    original, pm = twins(mlp())
    if made == "after":
        pm(torch.randn(BATCH, 16))
    optimizers = [make(m.parameters()) for m in (original, pm)]
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=6) for o in optimizers]
    for _ in range(5):
        x, y = batch()
        norms = []
        for called, optimizer, scheduler in zip((original, pm), optimizers, schedulers, strict=True):
            optimizer.zero_grad()
            step(called, x, y, way)
            norms.append(nn.utils.clip_grad_norm_(called.parameters(), 0.1))
            optimizer.step()
            scheduler.step()
        torch.testing.assert_close(norms[1], norms[0], rtol=1e-3, atol=1e-6)
    assert_same_state(pm, original, tolerance=2e-4)


@ways
def test_a_gradient_scaler_scales_skips_and_grows_as_with_the_original(way: str) -> None:
    original, pm = twins(mlp())
    scales: list[list[float]] = []
    torch.manual_seed(1)
    batches = [batch() for _ in range(5)]
    batches[2][0][-1] = 1e30  # its gradients overflow, in the last micro-batch alone
    for called in (original, pm):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        optimizer = torch.optim.SGD(called.parameters(), lr=0.1)
        scales.append([])

        def loss_fn(output: torch.Tensor, y: torch.Tensor, scaler: torch.amp.GradScaler = scaler) -> torch.Tensor:
            return scaler.scale(F.mse_loss(output, y))

        for x, y in batches:
            optimizer.zero_grad()
            step(called, x, y, way, loss_fn)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(called.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales[-1].append(scaler.get_scale())
    assert scales[0] == scales[1] == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0]
    assert_same_state(pm, original)


class Switching(nn.Module):
    """Batch norm before dropout: what dropout draws moves no statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.drop(self.norm(self.a(x))))


@pytest.mark.parametrize("first", ["train", "eval"])
def test_training_and_evaluation_may_alternate_with_dropout_and_batch_norm(first: str) -> None:
    original, pm = twins(Switching(), AB, batch_norm="exact")
    for training in (first == "train", True, False, True, False):
        x = torch.randn(BATCH, 8)
        expected, found = original.train(training)(x), pm.train(training)(x)
        if not training:
            assert_same_outputs(found, expected)
        else:
            assert not torch.equal(pm(x), found), "dropout draws anew"
            original(x)
        assert_same_state(pm, original)
        assert [m.training for m in pm.modules()] == [m.training for m in original.modules()]


NORMED: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "weight norm": nn.utils.parametrizations.weight_norm,
    "spectral norm": nn.utils.parametrizations.spectral_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
    "old weight norm": nn.utils.weight_norm,
    "old spectral norm": nn.utils.spectral_norm,
}


@ways
@pytest.mark.parametrize("norm", NORMED.values(), ids=list(NORMED))
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_parametrized_weights_train_like_the_original(norm: Callable[[nn.Linear], nn.Module], way: str) -> None:
    def build() -> nn.Module:
        torch.manual_seed(3)  # what the old functions make cannot be copied
        model = nn.Sequential(norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 8), norm(nn.Linear(8, 8)))
        return model.eval()  # in training, spectral norm moves its vectors at every call: by micro-batches, more often

    original = build()
    pm = pipelined(build(), Plan.from_split({"0": 0, "2": 1}, n_microbatches=3))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (original, pm)]
    for _ in range(3):
        x, y = batch(8)
        for called, optimizer in zip((original, pm), optimizers, strict=True):
            optimizer.zero_grad()
            step(called, x, y, way)
        assert_same_gradients({n: p.grad for n, p in pm.named_parameters()},
                              {n: p.grad for n, p in original.named_parameters()})  # fmt: skip
        for optimizer in optimizers:
            optimizer.step()
    assert_same_outputs(pm(x), original(x))


@pytest.mark.parametrize("new", [nn.Tanh, lambda: nn.Linear(16, 16)], ids=["without parameters", "with parameters"])
def test_a_module_that_is_replaced_is_captured_anew(new: Callable[[], nn.Module]) -> None:
    model, x = mlp(), torch.randn(6, 16)
    pm = autopar.parallelize(
        model, ["cpu", "cpu"], plan=Plan.from_split({"0": 0, "3": 1}, n_microbatches=2), cache=False
    )
    assert_same_outputs(pm(x), model(x))
    model[3] = new()
    original = copy.deepcopy(model)
    assert_same_outputs(pm(x), original(x))
    pm.zero_grad()
    pm.train_step(x, target=x, loss_fn=F.mse_loss)
    F.mse_loss(original(x), x).backward()
    assert_same_gradients(gradients(model), gradients(original))
