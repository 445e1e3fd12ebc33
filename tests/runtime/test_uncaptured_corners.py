"""Opaque operators whose code does what few modules do: the plain model is the oracle."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from uncaptured_models import WIDTH, NumpyGate, rows

import autopar
from autopar import Plan


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Outside(nn.Module):
    """Asks numpy, so that no tracer follows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        np.abs(x.detach().numpy())
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Checkpointed(Outside):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.linear, self.reentrant = nn.Linear(WIDTH, WIDTH), reentrant

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: torch.relu(self.linear(y)), x, use_reentrant=self.reentrant)


class Strided(Outside):
    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, 2)[:, ::2]


class Normed(Outside):
    """Hooks or parametrizations of torch compute its weight."""

    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.linear = norm(nn.Linear(WIDTH, WIDTH))

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Bound(Outside):
    """Keeps a method bound to itself, a list of its modules, and a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.order = [self.second, self.first]
        self.method = self.run
        self.forward = self.changed  # type: ignore[method-assign]

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        return self.method(x + float(np.float32(1.0)) * int(x.detach().numpy().shape[1] > 0))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.order:
            x = module(torch.tanh(x))
        return x


class Differentiates(nn.Module):
    """Uses autograd in its forward, as force fields do."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        energy = torch.tanh(self.energy(x)).square().sum(-1)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return force


class InPlaceAround(nn.Module):
    """The opaque module returns its input itself, which is overwritten and read afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.same = Outside()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return self.same(y).relu_() + y


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = NumpyGate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(torch.relu(self.gate(x)))


class Several(torch.autograd.Function):
    """Takes None and any number of weights; returns a mask and a number besides the result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, option: None, *weights: torch.Tensor) -> Any:
        ctx.save_for_backward(x, *weights)
        return x * sum(w.sum() for w in weights), x > 0, x.shape[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, *weights = ctx.saved_tensors
        gradient = gradients[0]
        total = sum(w.sum() for w in weights)
        return gradient * total, None, *[torch.full_like(w, float((gradient * x).sum())) for w in weights]


class SeveralTimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.rand(3)) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x, mask, n = Several.apply(x, None, *self.weights)
        return x * mask / n


MODULES: dict[str, Callable[[], nn.Module]] = {
    "checkpoint": lambda: Checkpointed(reentrant=False),
    "reentrant checkpoint": lambda: Checkpointed(reentrant=True),
    "strided result": Strided,
    "weight_norm as a hook": lambda: Normed(nn.utils.weight_norm),
    "weight_norm": lambda: Normed(nn.utils.parametrizations.weight_norm),
    "bound": Bound,
    "autograd in forward": Differentiates,
    "in place": InPlaceAround,
    "twice": Twice,
    "several": SeveralTimes,
}


def wrapped(name: str) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), MODULES[name](), nn.ReLU(inplace=True), nn.Linear(WIDTH, 4))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("name", MODULES)
def test_it_computes_and_trains_like_the_model(name: str, schedule: str) -> None:
    model = wrapped(name)
    plan = Plan.from_split({"0": 0, "1": 1, "3": 1}, n_microbatches=3, schedule=schedule)
    pm = autopar.parallelize(wrapped(name), ["cpu", "cpu"], plan=plan, cache=False)
    for n in (6, 7):
        results = []
        for module in (pm, model):
            results.append(module(*rows(n)))
            results[-1].square().mean().backward()
        torch.testing.assert_close(*results)
    for (key, parameter), (_, expected) in zip(pm.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, msg=key)
    assert pm.plan.n_microbatches == 3  # type: ignore[union-attr]
    assert "as one operator" in str(pm.plan)
    pm.close()


def test_others_see_the_models_own_parameters_while_it_runs() -> None:
    """A call changes nothing that the user's other threads may look at."""
    model = nn.Sequential(NumpyGate(), nn.Linear(WIDTH, 4))
    gate: Any = model[0]
    own, seen = dict(gate.linear._parameters), []
    entered, looked = threading.Event(), threading.Event()

    def pausing(*_: Any) -> None:
        entered.set()
        assert looked.wait(10)

    plan = Plan.from_split({"0": 0, "1": 1}, n_microbatches=2)
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan, cache=False)
    pm(*rows(4))
    gate.linear.register_forward_hook(pausing)
    thread = threading.Thread(target=lambda: pm(*rows(4)))
    thread.start()
    assert entered.wait(60)
    seen.append(all(gate.linear._parameters[name] is value for name, value in own.items()))
    looked.set()
    thread.join()
    assert seen == [True]
    pm.close()


@pytest.mark.slow
def test_a_second_plan_takes_its_costs_from_the_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.costs import operator_passes

    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    counted = []
    real = operator_passes.measure
    monkeypatch.setattr(operator_passes, "measure", lambda *a, **k: counted.append(1) or real(*a, **k))
    model = wrapped("twice")
    plans = []
    for _ in range(2):
        plans.append(autopar.plan(copy.deepcopy(model), ["cpu", "cpu"], example_args=rows(8)))
        counted.append(0)
    assert counted[0] == 1
    assert counted[-2:] == [0, 0]
    assert plans[0].predicted_step_time == pytest.approx(plans[1].predicted_step_time)


def test_beside_sharded_modules_one_device_runs_it_for_all() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), NumpyGate(), nn.Linear(WIDTH, WIDTH))
    hinted = copy.deepcopy(model)
    autopar.shard(hinted[0], in_strategy=((1, 1),), out_strategy=((1, 2),))
    pm = autopar.parallelize(hinted, ["cpu", "cpu"], cache=False)
    outputs = [module(*rows(6)) for module in (pm, model)]
    torch.testing.assert_close(*outputs)
    for output in outputs:
        output.square().sum().backward()
    for parameter, expected in zip(pm.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)
    assert pm.plan.stages[0].shards == 2  # type: ignore[union-attr]
    pm.close()


class Masked(Outside):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        np.abs(x.detach().numpy())
        found: torch.Tensor = self.linear(x)
        return found if mask is None else found * mask


class DropsMasks(nn.Module):
    """Passes a mask on where it masks something, as transformers does outside of a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(WIDTH, WIDTH), Masked(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        dropped = not torch.compiler.is_exporting() and bool(mask.all())
        found: torch.Tensor = self.last(self.inner(self.first(x), None if dropped else mask))
        return found


@pytest.mark.parametrize("masked", [1, 0], ids=["first with a mask", "first without"])
def test_a_part_that_gets_a_tensor_for_some_samples_only_runs_within_a_larger_operator(masked: int) -> None:
    model = DropsMasks()
    plain, pm = copy.deepcopy(model), autopar.parallelize(model, ["cpu", "cpu"], n_microbatches=2, tune=0)
    for number in (masked, 1 - masked):
        x, mask = torch.randn(4, WIDTH), torch.ones(4, 1)
        mask[:number] = 0
        torch.testing.assert_close(pm(x, mask), plain(x, mask))
        for one in (pm, plain):
            one(x, mask).square().sum().backward()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)
    pm.close()
