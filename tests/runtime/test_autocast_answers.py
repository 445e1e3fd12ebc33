"""Code that asks whether torch.autocast is on computes in a pipeline what it computes in the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from models import assert_same_gradients, gradients
from torch import nn
from torch.nn.functional import mse_loss

import autopar
from autopar import Plan
from autopar.analysis.example import examine
from autopar.capture.autocast_answers import Asking, answered_as_now


class Angles(nn.Module):
    """Leaves autocast only where it is on, as `maybe_autocast` of transformers does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        on = torch.is_autocast_enabled(x.device.type)
        with torch.autocast(x.device.type, enabled=False) if on else nullcontext():
            at = torch.arange(x.shape[1], device=x.device).float()
            angles = at[:, None] @ torch.ones(1, x.shape[2], device=x.device)  # in bfloat16, rounded from 256 on
        return x + angles / 100


class Casting(nn.Module):
    """Casts by itself, to the dtype of autocast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.get_autocast_dtype("cpu")).float() if torch.is_autocast_enabled("cpu") else x


class CastingOnGpu(nn.Module):
    """Asks about another device than it runs on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.get_autocast_gpu_dtype()).float() if torch.is_autocast_enabled() else x


def chain(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), kind(), nn.Linear(8, 8), kind(), nn.Linear(8, 8))


def off() -> AbstractContextManager[object]:
    return nullcontext()


def bfloat16() -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16)


def float16() -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.float16)


@contextmanager
def of_gpus() -> Iterator[None]:
    """As torch.autocast("cuda") does where there is a GPU."""
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    yield
    torch.set_autocast_enabled("cuda", before)


def by_hand(model: nn.Module, x: torch.Tensor) -> autopar.PipelinedModule:
    plan = Plan.from_split({"0": 0, "2": 1}, n_microbatches=2)
    return autopar.parallelize(model, ["cpu", "cpu"], plan=plan, example_args=(x,), cache=False)


def searched(model: nn.Module, x: torch.Tensor) -> autopar.PipelinedModule:
    return autopar.parallelize(model, ["cpu", "cpu"], n_microbatches=2, example_args=(x,), tune=0, cache=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Angles, Casting, CastingOnGpu])
@pytest.mark.parametrize("build", [by_hand, searched])
def test_every_call_computes_as_the_plain_model_under_its_own_autocast(
    kind: type[nn.Module], build: Callable[[nn.Module, torch.Tensor], autopar.PipelinedModule]
) -> None:
    model = chain(kind)
    original = copy.deepcopy(model)
    pm = build(model, torch.randn(4, 600, 8))  # planned outside of autocast
    for autocast in (off, bfloat16, float16, of_gpus, bfloat16, off):
        x, y = torch.randn(4, 600, 8), torch.randn(4, 600, 8)
        for one in (model, original):
            one.zero_grad()
        with autocast():
            wanted = mse_loss(original(x).float(), y)
            wanted.backward()
            with torch.no_grad():
                torch.testing.assert_close(pm(x), original(x), rtol=0, atol=0)
            loss = pm.train_step(x, target=y, loss_fn=lambda output, target: mse_loss(output.float(), target))
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-6, atol=1e-6)
        assert_same_gradients(gradients(model), gradients(original), 1e-2 if autocast in (bfloat16, float16) else 1e-5)
    pm.close()


@pytest.mark.slow
def test_a_model_that_asks_is_captured_once_for_each_answer_and_any_other_once() -> None:
    for kind, captures in ((Angles, 2), (nn.ReLU, 1)):
        pm = by_hand(chain(kind), torch.randn(4, 600, 8))
        for autocast in (off, bfloat16, off, bfloat16, float16):  # that it is on is all that `Angles` asks
            with autocast():
                pm(torch.randn(4, 600, 8))
        assert len(pm._signatures._captures.known) == captures
        pm.close()


@pytest.mark.slow
def test_a_model_on_the_cpu_learns_of_the_autocast_of_the_gpus_that_it_will_run_on() -> None:
    x = torch.randn(4, 6, 8)
    for types, autocast, asked in (
        ({"cuda"}, of_gpus, True),
        ({"cuda"}, bfloat16, False),
        ({"cpu"}, bfloat16, True),
        ({"cpu", "cuda"}, of_gpus, True),
    ):
        with autocast():
            program, _ = examine(chain(Angles), (x,), {}, types, batch_dim=None, verify=False)
        assert program.autocast == (("is_autocast_enabled", "cpu", asked),)


def test_answers_are_for_the_code_of_one_thread_and_end_with_the_capture() -> None:
    real = torch.is_autocast_enabled, torch.get_autocast_dtype, torch.get_autocast_gpu_dtype
    asking = Asking.of(torch.device("cpu"), {"cpu"})
    with bfloat16(), answered_as_now(asking) as asked, torch.autocast("cpu", enabled=False):
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32  # operators do not ask
        assert list(asked) == [("is_autocast_enabled", "cpu", True), ("get_autocast_dtype", "cpu", torch.bfloat16)]
        assert asking.holds([])
        assert not asking.holds(asked)
    assert real == (torch.is_autocast_enabled, torch.get_autocast_dtype, torch.get_autocast_gpu_dtype)
    with bfloat16():
        assert asking.holds(asked)
    with pytest.raises(KeyError), answered_as_now(asking):
        raise KeyError
    assert real == (torch.is_autocast_enabled, torch.get_autocast_dtype, torch.get_autocast_gpu_dtype)


def test_a_model_without_values_is_planned_ahead() -> None:
    """The meta device has no autocast, and torch refuses the question."""
    with torch.device("meta"):
        model, x = chain(Casting), torch.randn(4, 6, 8)
    plan = autopar.plan(model, autopar.Cluster.preset("2xH100"), example_args=(x,), n_microbatches=2)
    assert plan.n_microbatches == 2
