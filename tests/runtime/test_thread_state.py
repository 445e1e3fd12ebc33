"""Stages and the loss run in worker threads, under the thread-local settings of the caller."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from losses import in_worker
from models import assert_same_gradients, assert_same_outputs, gradients, mlp
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import autopar
from autopar import PipelinedModule, Plan
from cost_models.hardware.devices import usable_cores

TWO_STAGES = Plan.from_split({"0": 0, "3": 1}, n_microbatches=3)
AB = Plan.from_split({"a": 0, "b": 1}, n_microbatches=2)

ways = pytest.mark.parametrize("way", ["a call", "train_step"])
workers = pytest.mark.parametrize("spread", [False, True], ids=["as measured", "every worker"])


def pipelined(model: nn.Module, plan: Plan = TWO_STAGES) -> PipelinedModule:
    return autopar.parallelize(model, ["cpu", "cpu"], plan=plan)


def on_every_worker(pm: PipelinedModule, spread: bool) -> contextlib.AbstractContextManager[None]:
    """Inside, every device uses its own worker. Stages this small might share one."""
    return pm.device_context(lambda _: contextlib.nullcontext()) if spread else contextlib.nullcontext()


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def step(called: nn.Module, x: torch.Tensor, way: str, loss_fn: Callable[..., torch.Tensor] = mean_square) -> Any:
    """The loss of a step whose target is zero; gradients are in `.grad`."""
    target = torch.zeros(len(x), 1, device=x.device)
    if way == "train_step" and isinstance(called, PipelinedModule):
        return called.train_step(x, target=target, loss_fn=loss_fn)
    loss = loss_fn(called(x), target)
    loss.backward()
    return loss.detach()


class Creating(nn.Module):
    """Makes tensors whose dtype is torch's default, in both stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.a(x) * torch.ones(8) + torch.tensor([0.5])
        z = self.b(y.to(x.dtype)) + torch.linspace(0, 1, 8)
        return z, (x[:, :1] > 0) / torch.arange(1, 9)


@pytest.fixture
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("default_dtype")
@pytest.mark.parametrize("first", [torch.float32, torch.float64])
def test_the_default_dtype_is_that_of_the_moment_of_the_call(first: torch.dtype) -> None:
    model, x = Creating(), torch.randn(5, 8)
    pm = pipelined(model, AB)
    other = torch.float64 if first is torch.float32 else torch.float32
    for dtype in (first, other, first):
        torch.set_default_dtype(dtype)
        assert_same_outputs(pm(x), model(x))


@pytest.mark.slow
@pytest.mark.usefixtures("default_dtype")
@workers
def test_a_loss_sees_the_default_dtype_and_default_device_of_its_caller(spread: bool) -> None:
    pm, x, seen = pipelined(mlp()), torch.randn(5, 16), []

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append((torch.empty(1).dtype, torch.empty(1).device.type))
        return output.square().mean()

    def seen_in_a_step() -> set[tuple[torch.dtype, str]]:
        seen.clear()
        with on_every_worker(pm, spread):
            pm.train_step(x, target=torch.zeros(5, device="cpu"), loss_fn=loss_fn)
        return set(seen)

    assert seen_in_a_step() == {(torch.float32, "cpu")}
    with torch.device("meta"):
        assert seen_in_a_step() == {(torch.float32, "meta")}
    torch.set_default_dtype(torch.float64)
    assert seen_in_a_step() == {(torch.float64, "cpu")}
    torch.set_default_dtype(torch.float32)
    torch.set_default_device("meta")
    try:
        assert seen_in_a_step() == {(torch.float32, "meta")}
    finally:
        torch.set_default_device(None)
    assert seen_in_a_step() == {(torch.float32, "cpu")}


@pytest.mark.parametrize("first", ["inside", "outside"])
@ways
@pytest.mark.filterwarnings("error::autopar.AutoparWarning")
def test_a_default_device_that_the_model_does_not_use_does_not_disturb_it(first: str, way: str) -> None:
    random = nn.Sequential(nn.Dropout(0.0), nn.RReLU(0.2, 0.2))  # they draw numbers that change nothing
    model, x = nn.Sequential(nn.Linear(16, 16), random, nn.Tanh(), nn.Linear(16, 16)), torch.randn(5, 16)
    pm = pipelined(model)
    expected = step(model, x, way)
    wanted = gradients(model)
    for where in (first, "inside", "outside"):
        with torch.device("meta") if where == "inside" else contextlib.nullcontext():
            found = step(pm, x, way)
        torch.testing.assert_close(found, expected)
        assert_same_gradients(gradients(pm), wanted)


@workers
def test_a_loss_sees_grad_mode_inference_mode_and_autocast_of_a_training_step(spread: bool) -> None:
    pm, x, seen = pipelined(mlp()), torch.randn(5, 16), []

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), (output @ output.t()).dtype))
        return output.float().square().mean()

    for context, dtype in (
        (contextlib.nullcontext(), torch.float32),
        (torch.no_grad(), torch.float32),  # a training step records gradients anyway
        (torch.autocast("cpu", torch.bfloat16), torch.bfloat16),
        (torch.autocast("cpu", torch.float16), torch.float16),
        (contextlib.nullcontext(), torch.float32),
    ):
        seen.clear()
        with context, on_every_worker(pm, spread):
            pm.train_step(x, target=torch.zeros(5), loss_fn=loss_fn)
        assert set(seen) == {(True, False, dtype)}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.a, self.b))
        return F.scaled_dot_product_attention(q, k, k)


def operators_of(output: torch.Tensor) -> set[str]:
    """Names of the autograd nodes behind a tensor."""
    nodes: set[Any] = set()
    stack = [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            stack += [child for child, _ in node.next_functions]
    return {node.name() for node in nodes}


@pytest.mark.parametrize("first", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_attention_uses_the_kernels_that_the_caller_allows(first: SDPBackend) -> None:
    model, x = Attention(), torch.randn(4, 3, 8)
    pm, seen = pipelined(model, AB), []

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if in_worker():
            seen.append(any("Flash" in name for name in operators_of(output)))
        return output.square().mean()

    for backend in (first, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        seen.clear()
        with sdpa_kernel(backend):
            loss_fn(model(x), x)
            pm.train_step(x, target=x, loss_fn=loss_fn)
        assert set(seen) == {backend is SDPBackend.FLASH_ATTENTION}


@ways
@workers
def test_hooks_on_saved_tensors_are_called_for_the_stages_activations(way: str, spread: bool) -> None:
    model, x = mlp(), torch.randn(5, 16)
    pm = pipelined(model)
    step(model, x, way)
    exact = gradients(model)
    coarse = torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float())
    with coarse:  # rounded activations change gradients
        step(model, x, way)
    wanted = gradients(model)
    assert not torch.allclose(wanted["0.weight"], exact["0.weight"], rtol=1e-6)
    with on_every_worker(pm, spread):
        with coarse:
            step(pm, x, way)
        assert_same_gradients(gradients(pm), wanted)
        step(pm, x, way)
        assert_same_gradients(gradients(pm), exact)


def test_saved_tensors_hooks_get_every_row_once_and_are_undone_by_a_backward_outside_of_them() -> None:
    x, packed, unpacked = torch.randn(5, 16), [], []

    def pack(tensor: torch.Tensor) -> Any:
        packed.append(tensor.shape)
        return tensor.detach().numpy().copy()  # as if written to a file: it must be a real tensor

    def unpack(saved: Any) -> torch.Tensor:
        unpacked.append(saved.shape)
        return torch.from_numpy(saved)

    model = mlp()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        output = model(x)
    output.square().mean().backward()
    wanted, rows = gradients(model), sum(shape[0] for shape in packed if shape != (16, 16))
    pm = pipelined(model)
    for _ in range(2):
        packed.clear()
        unpacked.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            output = pm(x)
        assert sum(shape[0] for shape in packed if shape != (16, 16)) == rows
        assert not unpacked
        output.square().mean().backward()
        assert sorted(unpacked) == sorted(packed)
        assert_same_gradients(gradients(pm), wanted)


@ways
def test_activations_saved_on_the_cpu_give_the_same_gradients(way: str) -> None:
    model, x = mlp(), torch.randn(5, 16)
    expected = step(model, x, way)
    wanted = gradients(model)
    pm = pipelined(model)
    with torch.autograd.graph.save_on_cpu():
        torch.testing.assert_close(step(pm, x, way), expected)
    assert_same_gradients(gradients(pm), wanted)


@workers
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("around", [lambda f: f, lambda f: lambda x: f(x.sin()).tanh()], ids=["alone", "with more"])
def test_a_checkpoint_around_a_pipelined_model_gives_the_same_gradients(
    around: Callable[[Any], Any], reentrant: bool, spread: bool
) -> None:
    model, x = mlp(), torch.randn(5, 16, requires_grad=True)
    pm = pipelined(model)
    (around(model)(x) ** 2).sum().backward()
    wanted, of_input, x.grad = gradients(model), x.grad, None
    expected: Any = (
        contextlib.nullcontext() if reentrant else pytest.warns(autopar.AutoparWarning, match="saves no memory")
    )
    with on_every_worker(pm, spread), expected:
        (checkpoint(around(pm), x, use_reentrant=reentrant) ** 2).sum().backward()
    assert_same_gradients(gradients(pm), wanted)
    torch.testing.assert_close(x.grad, of_input)


class NanBackward(nn.Module):
    """The square root of zero, times zero: its backward is infinity times zero."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b((0 * self.a(x)).sqrt())


@ways
@workers
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.filterwarnings("ignore:Error detected in")
def test_anomaly_mode_reports_a_nan_made_in_a_backward(way: str, spread: bool) -> None:
    pm, x = pipelined(NanBackward(), AB), torch.randn(4, 8)
    with on_every_worker(pm, spread):
        with (
            torch.autograd.detect_anomaly(),
            pytest.raises(RuntimeError, match="MulBackward0' returned nan values") as caught,
        ):
            step(pm, x, way)
        assert "backward of stage" in "".join(caught.value.__notes__)
        step(pm, x, way)  # no error without


@workers
def test_a_torch_profile_names_stage_and_phase_of_every_micro_batch(spread: bool) -> None:
    pm, x = pipelined(mlp()), torch.randn(6, 16)
    pm.train_step(x, target=torch.zeros(6, 1), loss_fn=mean_square)
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with on_every_worker(pm, spread), torch.profiler.profile(activities=activities, experimental_config=config) as run:
        pm.train_step(x, target=torch.zeros(6, 1), loss_fn=mean_square)
    names = [event.name for event in run.events() if event.name.startswith("autopar")]
    ranges = {f"autopar stage {stage} {phase}" for stage in (0, 1) for phase in ("forward", "backward")}
    assert set(names) == ranges
    assert all(names.count(name) == 3 for name in ranges)


class WarningModel(nn.Module):
    """Warns in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        warnings.warn("the model has something to say", FutureWarning, stacklevel=1)
        return self.b(self.a(x))


def test_what_a_models_code_warns_of_reaches_the_caller() -> None:
    x = torch.randn(4, 8)
    with pytest.warns(FutureWarning, match="something to say"):
        pipelined(WarningModel(), AB)(x)


def warning_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    warnings.warn("the loss has something to say", FutureWarning, stacklevel=1)
    return F.mse_loss(output, target)  # torch warns of sizes that differ


@workers
def test_what_a_loss_warns_of_reaches_the_caller_at_every_step(spread: bool) -> None:
    pm, x = pipelined(mlp()), torch.randn(6, 16)
    for _ in range(2):
        with on_every_worker(pm, spread), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pm.train_step(x, target=torch.zeros(6, 1), loss_fn=warning_loss)
        caught_here = [(w.category, w.filename == __file__) for w in caught]
        assert caught_here.count((FutureWarning, True)) == 3, "once a micro-batch"
        assert sum("target size" in str(w.message) for w in caught) == 3


def test_a_warning_that_is_to_be_an_error_is_raised_to_the_caller() -> None:
    pm, x = pipelined(mlp()), torch.randn(6, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        with pytest.raises(FutureWarning, match="something to say"):
            pm.train_step(x, target=torch.zeros(6, 1), loss_fn=warning_loss)
    assert all(p.grad is None for p in pm.parameters())


@pytest.fixture
def callers_threads() -> Iterator[int]:
    """A number of threads that the caller sets and that no worker has by itself."""
    before, mine = torch.get_num_threads(), usable_cores() + 3
    torch.set_num_threads(mine)
    yield mine
    torch.set_num_threads(before)


@pytest.mark.parametrize("n_workers", [1, 2])
def test_each_worker_computes_with_its_share_of_the_cores_and_the_callers_setting_stays(
    n_workers: int, callers_threads: int
) -> None:
    seen: list[int] = []

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if in_worker():
            seen.append(torch.get_num_threads())
        return output.square().mean()

    def failing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no loss")

    x, target = torch.randn(6, 16), torch.zeros(6)
    plan = Plan.from_split({"0": 0, "3": n_workers - 1}, n_microbatches=3)
    pm = autopar.parallelize(mlp(), ["cpu"] * n_workers, plan=plan)
    assert torch.get_num_threads() == callers_threads
    for spread in (False, True):
        with on_every_worker(pm, spread):
            pm(x).sum().backward()
            assert torch.get_num_threads() == callers_threads
            pm.train_step(x, target=target, loss_fn=loss_fn)
            assert torch.get_num_threads() == callers_threads
            with pytest.raises(ArithmeticError):
                pm.train_step(x, target=target, loss_fn=failing)
            assert torch.get_num_threads() == callers_threads
    assert seen == [max(1, usable_cores() // n_workers)] * 6
    pm.close()
    assert torch.get_num_threads() == callers_threads


class Island(nn.Module):
    """Computes in float32 where the call runs under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.router, self.b = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        with torch.autocast("cpu", enabled=False):
            h = self.router(h.float())
        y: torch.Tensor = self.b(h)
        return y


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("call", ["train_step", "outside", "inside"])
def test_a_backward_has_the_autocast_of_who_calls_it(call: str, schedule: str) -> None:
    """In float32 where the forward computed so, unless the script goes back under autocast itself."""
    torch.manual_seed(0)
    model, x = Island(), torch.randn(8, 16)
    alone = copy.deepcopy(model)
    plan = Plan.from_split({"a": 0, "router": 1, "b": 1}, n_microbatches=1, schedule=schedule)
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan)
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.mse_loss(alone(x).float(), x)
        if call == "train_step":
            pm.train_step(x, target=x, loss_fn=lambda output, target: F.mse_loss(output.float(), target))
        else:
            loss = F.mse_loss(pm(x).float(), x)
        if call == "inside":
            loss.backward()
            expected.backward()
    if call != "inside":
        expected.backward()
    if call == "outside":
        loss.backward()
    for own, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-6, atol=1e-7)
