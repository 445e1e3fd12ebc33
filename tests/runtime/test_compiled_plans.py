"""With `compile`, devices at hand are planned with the prices of compiled stages, and the plan says so."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_tuning import CALL, costly, layers
from torch import fx, nn

import autopar
from autopar import Plan
from autopar.runtime.planning import compiled_prices

pytestmark = pytest.mark.slow

__all__ = ["costly"]  # a fixture

NAP = 0.2  # s
NAPPING = "napping_for_tests"


@pytest.fixture
def napping() -> Iterator[str]:
    """A compiler whose code takes at least `NAP` seconds for every forward."""

    def backend(graph: fx.GraphModule, examples: Any) -> Any:
        def run(*inputs: Any) -> Any:
            time.sleep(NAP)
            return graph.forward(*inputs)

        return run

    torch.compiler.reset()
    torch._dynamo.backends.registry.register_backend(backend, name=NAPPING)
    yield NAPPING
    torch._dynamo.backends.registry._COMPILER_FNS.pop(NAPPING, None)
    torch._dynamo.backends.registry._BACKENDS.pop(NAPPING, None)


@pytest.mark.slow
@pytest.mark.usefixtures("costly")
def test_predicted_seconds_are_those_of_compiled_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []

    def half(device: Any, costs: Any, call: Any, search: Any, counts: list[int], progress: Any) -> Any:
        assert call.settings.compile is True
        asked.append(counts)
        return [(m, 0.5) for m in counts]

    monkeypatch.setattr(compiled_prices, "_measured", half)
    plans = [autopar.plan(layers(), ["cpu", "cpu"], compile=c, tune=0, cache=False, **CALL) for c in (False, True)]
    assert asked == [[1, 4]], "one kind of device; batch norm needs two samples"
    captured, compiled = plans
    assert compiled.single_device_time == pytest.approx(0.5 * (captured.single_device_time or 0.0), rel=1e-3)
    assert compiled.predicted_step_time == pytest.approx(0.5 * (captured.predicted_step_time or 0.0), rel=0.01)
    assert any("compiled are priced by whole steps" in note and "0.5 at 8 samples" in note for note in compiled.notes)
    assert not any("compiled" in note for note in captured.notes)


@pytest.mark.slow
@pytest.mark.usefixtures("costly")
def test_plans_of_users_are_priced_as_compiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_prices, "_measured", lambda *args: [(m, 0.5) for m in args[4]])
    hand = Plan.from_split({"0": 0, "1": 1}, n_microbatches=2)
    one, other = (
        autopar.plan(layers(), ["cpu", "cpu"], plan=hand, compile=c, tune=0, cache=False, **CALL) for c in (False, True)
    )
    for usual, now in zip(one.stages, other.stages, strict=True):
        assert now.forward_time == pytest.approx(0.5 * (usual.forward_time or 0.0), rel=1e-3)


@pytest.mark.slow
def test_the_measured_price_is_that_of_the_code_that_runs(napping: str) -> None:
    """Of two plans that are measured one after the other, the machine's load may change between them."""
    plan = autopar.plan(layers(), ["cpu"], compile=napping, n_microbatches=2, tune=0, cache=False, **CALL)
    (note,) = [note for note in plan.notes if "priced by whole steps" in note]
    ratios = [float(ratio) for ratio in re.findall(r"([0-9.e+]+) at [0-9.]+ samples", note)]
    assert ratios
    assert min(ratios) > 3


def test_measured_ratios_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def some(*args: Any) -> Any:
        calls.append(1)
        return [(1, 0.7), (4, 0.8)]

    monkeypatch.setattr(compiled_prices, "_measured", some)
    first, second = (autopar.plan(layers(), ["cpu"], compile=True, tune=0, **CALL) for _ in range(2))
    assert len(calls) == 1
    assert first.notes == second.notes


class Uncaptured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)
        self.up.register_forward_hook(lambda module, args, output: output * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def test_what_is_not_compiled_is_not_priced_as_compiled() -> None:
    plan = autopar.plan(Uncaptured(), ["cpu"], compile=True, tune=0, cache=False, **CALL)
    assert any("predicted for stages that are not compiled: as one stage, it runs hooks" in n for n in plan.notes)


def test_a_model_that_no_device_holds_whole_is_not_measured_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_prices, "available_memory", lambda device: 0)
    plan = autopar.plan(layers(), ["cpu"], compile=True, tune=0, cache=False, **CALL)
    assert any("not compiled: cpu:0 does not hold the whole model" in note for note in plan.notes)
