"""Studying a call and its loss leaves the random numbers of GPUs as they were.

A stand-in takes the place of the default generators of two GPUs: its state is the number of draws so far.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from autopar.analysis.example import capture_example, untouched
from autopar.analysis.node_values import in_lockstep, look, observe
from autopar.capture.torch_private import is_fake
from autopar.runtime.initial_values.sources import FunctionSource


class Generators:
    """Of two GPUs."""

    def __init__(self) -> None:
        self.draws = torch.tensor([3, 5])

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return list(self.draws.clone())

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        self.draws = torch.stack(list(states))

    def drawn(self, x: torch.Tensor) -> torch.Tensor:
        """`x` plus a number that a GPU has drawn."""
        self.draws = self.draws + torch.tensor([1, 0])
        return x + self.draws[0]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Generators:
    found = Generators()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", found.get_rng_state_all)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", found.set_rng_state_all)
    # A loss that referred to the stand-in itself would have it put back as one of its objects.
    monkeypatch.setattr(torch.cuda, "a_draw", found.drawn, raising=False)
    return found


@pytest.fixture
def noisy(gpus: Generators) -> fx.GraphModule:
    """Two draws of a GPU and one of the CPU."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(gpus.drawn, (x,))
    second = graph.call_function(gpus.drawn, (graph.call_function(torch.rand_like, (first,)),))
    graph.output((first, second))
    return fx.GraphModule(nn.Module(), graph)


@pytest.mark.parametrize("error", [None, ValueError])
def test_what_runs_on_a_model_that_stays_as_it_is_draws_nothing_for_good(
    gpus: Generators, error: type[Exception] | None
) -> None:
    model, before, on_cpu = nn.Linear(2, 2), gpus.draws, torch.get_rng_state()
    try:
        with untouched(model):
            gpus.drawn(torch.rand(3))
            if error is not None:
                raise error
    except ValueError:
        pass
    assert torch.equal(gpus.draws, before)
    assert torch.equal(torch.get_rng_state(), on_cpu)


class Noisy:
    """A loss that draws. An object: it is called with values before it is captured."""

    def __init__(self, called: list[bool]) -> None:
        self._note = called.append

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self._note(not is_fake(output))
        if not is_fake(output):
            torch.cuda.a_draw(torch.rand(3))  # type: ignore[attr-defined]
        return (output - target).square().mean()


def test_studying_a_loss_draws_nothing_for_good(gpus: Generators) -> None:
    model, x, called = nn.Linear(4, 4), torch.linspace(0, 1, 16).reshape(4, 4), list[bool]()
    loss, before, on_cpu = Noisy(called), gpus.draws, torch.get_rng_state()
    capture_example(model, (), (x,), {}, loss_fn=loss, target=x)
    assert called[0], "with values"
    assert torch.equal(gpus.draws, before)
    assert torch.equal(torch.get_rng_state(), on_cpu)


@pytest.mark.parametrize("run", [observe, look], ids=lambda f: f.__name__)
def test_running_a_graph_draws_nothing_for_good(
    gpus: Generators, noisy: fx.GraphModule, run: Callable[..., object]
) -> None:
    before, on_cpu = gpus.draws, torch.get_rng_state()
    run(noisy, [torch.ones(3)])
    assert torch.equal(gpus.draws, before)
    assert torch.equal(torch.get_rng_state(), on_cpu)


def test_runs_in_lockstep_draw_the_same_numbers(gpus: Generators, noisy: fx.GraphModule) -> None:
    before, steps = gpus.draws, 0
    for _, (one, other) in in_lockstep(noisy, [[torch.ones(3)], [torch.ones(3)]]):
        assert torch.equal(one, other)
        steps += 1
    assert steps == len(noisy.graph.nodes) - 1
    assert torch.equal(gpus.draws, before)


def test_initial_values_by_a_function_draw_nothing_for_good(gpus: Generators) -> None:
    before, target = gpus.draws, torch.zeros(3)
    FunctionSource(lambda name, tensor: tensor.copy_(gpus.drawn(torch.ones(3))), 0).fill({"weight": target})
    assert not torch.equal(target, torch.zeros(3))
    assert torch.equal(gpus.draws, before)
