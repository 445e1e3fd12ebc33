"""The runtime's own work for a call and for an action: Python functions called, and threads woken."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from models import assert_same_gradients, gradients
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import autopar
from autopar import PipelinedModule, Plan
from autopar.analysis.loss_count import Count
from autopar.runtime.signatures import bound_signature
from autopar.runtime.step.execution import Execution
from autopar.runtime.step.workers import Worker

PACKAGE = str(Path(autopar.__file__).parent)
WIDTH, BATCH = 8, 32
PER_ACTION = 15  # Python functions of autopar, the mean over forwards and backwards, the loss included
PER_CALL = 185  # beside those of actions, for a model of four parameters
PER_PARAMETER = 5


def layers(n: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(n)])


def pipelined(model: nn.Sequential, n_microbatches: int, schedule: str = "1f1b") -> PipelinedModule:
    cut = {"0": 0, str(len(model) // 2): 1}
    plan = Plan.from_split(cut, n_microbatches=n_microbatches, schedule=schedule)
    return autopar.parallelize(model, ["cpu", "cpu"], plan=plan, cache=False)


def batch(n: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(n, WIDTH), torch.randn(n, WIDTH)


def step(pm: PipelinedModule) -> torch.Tensor:
    x, y = batch()
    return pm.train_step(x, target=y, loss_fn=mse_loss)


class Calls:
    """Counts calls of Python functions of autopar, in all threads that start inside."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.on = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if self.on and event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.counts[frame.f_code.co_qualname] += 1

    def of(self, pm: PipelinedModule) -> int:
        """In one step, after others have warmed up: the fewest of three, as a thread that waits may call one more."""
        for _ in range(3):
            step(pm)
        return min(self._of_a_step(pm) for _ in range(3))

    def _of_a_step(self, pm: PipelinedModule) -> int:
        self.counts.clear()
        self.on = True
        sys.setprofile(self)
        step(pm)
        sys.setprofile(None)
        self.on = False
        return self.counts.total()


@pytest.fixture
def calls() -> Iterator[Calls]:
    counter = Calls()
    threading.setprofile(counter)
    yield counter
    threading.setprofile(None)


@pytest.mark.parametrize("one_worker", [True, False])
def test_an_action_and_a_call_take_few_functions(
    calls: Calls, one_worker: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopar.costs.python_overhead.TINY", 1e6 if one_worker else 0.0)
    few, many = 4, 16
    by_count = {m: calls.of(pipelined(layers(2), m)) for m in (few, many)}
    per_microbatch = (by_count[many] - by_count[few]) / (many - few)
    per_call = by_count[few] - few * per_microbatch
    assert per_microbatch / 4 <= PER_ACTION, calls.counts.most_common(20)
    assert per_call <= PER_CALL, calls.counts.most_common(20)


@pytest.mark.parametrize("one_worker", [True, False])
def test_a_parameter_takes_few_functions(calls: Calls, one_worker: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.costs.python_overhead.TINY", 1e6 if one_worker else 0.0)  # not by this machine's speed
    few, many = layers(2), layers(10)
    more = calls.of(pipelined(many, 4)) - calls.of(pipelined(few, 4))
    assert more / (len(list(many.parameters())) - len(list(few.parameters()))) <= PER_PARAMETER


def test_the_code_of_stages_reads_its_tensors_without_python_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    pm = pipelined(layers(4), 4)
    step(pm)
    found = Counter[str]()
    original = nn.Module.__getattr__

    def counting(module: nn.Module, name: str) -> Any:
        if "Stage" in type(module).__name__ or name in ("weight", "bias"):
            found[name] += 1
        return original(module, name)

    monkeypatch.setattr(nn.Module, "__getattr__", counting)
    step(pm)
    assert not found


def test_targets_are_counted_without_calling_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many targets a cross-entropy does not ignore decides what the loss of a micro-batch weighs."""
    pm, x = pipelined(layers(2), 4), torch.randn(BATCH, WIDTH)
    target = torch.randint(WIDTH, (BATCH,))
    target[:3] = -100
    pm.train_step(x, target=target, loss_fn=cross_entropy)
    counted, called = Counter[str](), Count.of
    original = torch.fx.graph_module._WrappedCall.__call__

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        counted["calls"] += 1
        return original(self, *args, **kwargs)

    def of(self: Count, *args: Any) -> torch.Tensor:
        counted["micro-batches"] += 1
        return called(self, *args)

    monkeypatch.setattr(torch.fx.graph_module._WrappedCall, "__call__", counting)
    monkeypatch.setattr(Count, "of", of)
    loss = pm.train_step(x, target=target, loss_fn=cross_entropy)
    assert counted == {"micro-batches": 4}
    assert torch.allclose(loss, cross_entropy(pm.unwrap()(x), target))


def test_buffers_are_looked_up_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Identity())
    pm = pipelined(model, 4)
    with pytest.warns(autopar.AutoparWarning, match="batch norm"):
        step(pm)
    found = Counter[str]()
    original = bound_signature.Lookup.__call__

    def counting(self: Any, name: str) -> torch.Tensor:
        found[name] += 1
        return original(self, name)

    monkeypatch.setattr(bound_signature.Lookup, "__call__", counting)
    before = model[1].running_mean.clone()
    step(pm)
    assert found == {f"1.{name}": 1 for name, _ in model[1].named_buffers()}
    assert not torch.equal(model[1].running_mean, before)


@pytest.mark.parametrize("change", ["data", "in place", "a new tensor in .data", "frozen"])
def test_stages_follow_changed_parameters(change: str) -> None:
    """They find their own tensors, which must follow the model's."""
    model, plain = layers(4), layers(4)
    pm = pipelined(model, 4)
    step(pm)
    for own in (model, plain):
        weight = own[1].weight
        with torch.no_grad():
            if change == "in place":
                weight.mul_(2)
            elif change == "data":
                weight.data.add_(1)
            elif change == "a new tensor in .data":
                weight.data = weight.data * 3
            else:
                weight.requires_grad_(False)
        own.zero_grad()
    x, y = batch()
    step(pm)
    mse_loss(plain(x), y).backward()
    assert_same_gradients(gradients(model), gradients(plain))


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices whose workers get work."""
    found: list[str] = []
    original = Worker.submit

    def submit(self: Worker, work: Any) -> None:
        found.append(self.device.name)
        original(self, work)

    monkeypatch.setattr(Worker, "submit", submit)
    monkeypatch.setattr("autopar.costs.python_overhead.TINY", 1e6)
    return found


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_tiny_stages_wake_no_thread_and_train_as_the_plain_model(schedule: str, submitted: list[str]) -> None:
    model, plain = layers(4), layers(4)
    pm = pipelined(model, 4, schedule)
    step(pm)
    submitted.clear()
    model.zero_grad()
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    loss = step(pm)
    assert not submitted
    assert (torch.get_num_threads(), torch.is_grad_enabled()) == (threads, grad)
    x, y = batch()
    wanted = mse_loss(plain(x), y)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach())
    assert_same_gradients(gradients(model), gradients(plain))


def test_a_backward_of_the_caller_runs_no_actions_in_its_thread(submitted: list[str]) -> None:
    """Autograd would take their graphs for parts of the caller's."""
    model, plain = layers(4), layers(4)
    pm = pipelined(model, 4)
    step(pm)
    model.zero_grad()
    x, y = batch()
    loss = mse_loss(pm(x), y)
    submitted.clear()
    loss.backward()
    assert submitted == ["cpu:0"]
    mse_loss(plain(x), y).backward()
    assert_same_gradients(gradients(model), gradients(plain))


def test_no_cast_of_a_parameter_stays_in_the_callers_autocast() -> None:
    """The caller may step the optimizer inside; the next step must see the new weights."""
    model, plain = layers(4), layers(4)
    pm = pipelined(model, 1)
    x, y = batch()
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            for own in (model, plain):
                with torch.no_grad():
                    own[1].weight.add_(1.0)
                own.zero_grad()
            got = [pm.train_step(x, target=y, loss_fn=mse_loss)]
            with torch.no_grad():
                model[1].weight.add_(1.0)
            got.append(pm.train_step(x, target=y, loss_fn=mse_loss))
        with torch.autocast("cpu", torch.bfloat16):
            wanted = [mse_loss(plain(x), y).detach()]
        with torch.no_grad():
            plain[1].weight.add_(1.0)
        with torch.autocast("cpu", torch.bfloat16):
            wanted.append(mse_loss(plain(x), y).detach())
        torch.testing.assert_close(got, wanted)


def test_a_failure_in_the_callers_thread_leaves_the_model_as_it_was(
    submitted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = layers(4), layers(4)
    pm = pipelined(model, 4)
    step(pm)
    submitted.clear()
    model.zero_grad()
    original = Execution._act

    def failing(self: Execution, actions: Any) -> None:
        original(self, actions[:5])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Execution, "_act", failing)
        with pytest.raises(KeyboardInterrupt):
            step(pm)
    assert all(gradient is None for gradient in gradients(model).values())
    step(pm)
    assert not submitted
    x, y = batch()
    mse_loss(plain(x), y).backward()
    assert_same_gradients(gradients(model), gradients(plain))
