"""What a model writes where a graph does not show it at first sight: in blocks under no_grad or autocast, and through
`.data` in code that runs uncaptured."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar import Plan, PlanError

WIDTH, SAMPLES = 8, 8


class Counting(nn.Module):
    """Counts its calls under no_grad, and reads the number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.steps += 1
        return self.b((self.a(x) * self.steps).tanh())


class Normed(nn.Module):
    """Its batch norm runs under an autocast of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        with torch.autocast("cpu", enabled=False):
            h = self.n(h)
        return self.b(h.tanh())


def spectral() -> nn.Module:
    """torch's spectral norm moves its estimate under no_grad."""
    first = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(first, nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    x, y = torch.randn(2, SAMPLES, WIDTH, dtype=torch.float64)
    return x, y


@pytest.mark.parametrize(
    ("make", "split"), [(Counting, {"a": 0, "b": 1}), (spectral, {"0": 0, "2": 1})], ids=["count", "spectral_norm"]
)
def test_a_stage_that_writes_a_buffer_in_a_block_cannot_run_again(
    make: Callable[[], nn.Module], split: dict[str, int]
) -> None:
    model, (x, y) = make().double(), data()
    plan = Plan.from_split(split, n_microbatches=1, schedule="1f1b", recompute="stage")
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan)
    with pytest.raises(PlanError, match="cannot be recomputed"):
        pm.train_step(x, target=y, loss_fn=functional.mse_loss)


@pytest.mark.parametrize("whole", [False, True], ids=["apart", "whole"])
@pytest.mark.parametrize("recompute", ["none", "stage"])
@pytest.mark.parametrize("batch_norm", ["per-microbatch", "deferred", "exact"])
def test_batch_norm_under_an_autocast_of_the_model_keeps_its_word(batch_norm: str, recompute: str, whole: bool) -> None:
    """`whole`: the call's autocast, which changes nothing in double precision, keeps the block together."""
    torch.manual_seed(0)
    model, (x, y) = Normed().double(), data()
    alone, counted = copy.deepcopy(model), copy.deepcopy(model)
    # The statistics of a whole block cannot be put off: then the batch is not split.
    parts = 1 if batch_norm == "exact" or (whole and batch_norm == "deferred") else 2
    for some, wanted in zip(x.chunk(parts), y.chunk(parts), strict=True):
        (functional.mse_loss(alone(some), wanted) / parts).backward()
    counted(x)
    plan = Plan.from_split({"a": 0, "b": 1}, n_microbatches=2, schedule="1f1b", recompute=recompute)
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan, batch_norm=batch_norm)
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16, enabled=whole):
        warnings.simplefilter("ignore")
        pm.train_step(x, target=y, loss_fn=functional.mse_loss)
    for own, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-9, atol=1e-9)
    expected = alone if batch_norm == "per-microbatch" else counted
    for own, other in zip(model.buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)


class Through(nn.Module):
    """Writes through `.data`, which torch.export refuses."""

    def __init__(self, write: Callable[[Through, torch.Tensor], None]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("m", torch.zeros(WIDTH))
        self._write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.a(x)
        self._write(self, h)
        y: torch.Tensor = self.b(h * (1 + self.m))
        return y


def count(model: Through, _: torch.Tensor) -> None:
    model.m.data.add_(1)


def average(model: Through, h: torch.Tensor) -> None:
    model.m.data.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)


def scale(_: Through, h: torch.Tensor) -> None:
    h.data.mul_(2)


@pytest.mark.parametrize("write", [count, average, scale], ids=lambda f: f.__name__)
def test_writes_through_data_are_neither_lost_nor_repeated(write: Callable[[Through, torch.Tensor], None]) -> None:
    torch.manual_seed(0)
    model, (x, _) = Through(write).double(), data()
    alone = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it runs uncaptured
        pm = autopar.parallelize(model, ["cpu", "cpu"], n_microbatches=2, tune=0)
        for _ in range(3):
            torch.testing.assert_close(pm(x), alone(x), rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(model.m, alone.m)


class Whole(nn.Module):
    """All of its layers run under an autocast of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y: torch.Tensor = self.layers(x)
        return y.float()


def test_a_plan_says_that_a_block_cannot_be_divided() -> None:
    model, x = Whole(), torch.randn(SAMPLES, WIDTH)
    with torch.autocast("cpu", torch.float16):
        pm = autopar.parallelize(model, ["cpu", "cpu"], example_args=(x,), tune=0)
    assert pm.plan is not None
    (note,) = [note for note in pm.plan.notes if "one operator" in note]
    assert "the call runs under another autocast" in note
    for divided in (model, model.layers):
        alone = autopar.parallelize(divided, ["cpu", "cpu"], example_args=(x,), tune=0)
        assert alone.plan is not None
        assert not any("one operator" in note for note in alone.plan.notes)
