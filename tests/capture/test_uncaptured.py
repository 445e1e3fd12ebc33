"""Which part of a model becomes an opaque operator, and that finding it leaves the model as it was."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from uncaptured_models import (
    CASES,
    WIDTH,
    BranchInside,
    Case,
    DoubledSwish,
    NumpyGate,
    PackedEncoder,
    rows,
    sequences,
)

import autopar
from autopar import CaptureError
from autopar.capture.program import Program, capture
from autopar.capture.uncaptured import ChangedResultError, uncaptured_in
from autopar.capture.uncaptured_trace import Opaque, RefusedError


def paths(program: Program) -> list[str]:
    return [part.path for part in uncaptured_in(program.graph_module)]


def results(program: Program, *inputs: Any) -> Any:
    return program.graph_module(*inputs)[: program.n_outputs]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_graph_computes_what_the_model_computes_at_any_batch_size(case: Case) -> None:
    model = case.model()
    program = capture(model, case.inputs(4), {})
    for n in (2, 4, 7):
        expected = model(*case.inputs(n))
        torch.testing.assert_close(
            results(program, *case.inputs(n)), expected if isinstance(expected, tuple) else (expected,)
        )
    assert program.any_batch


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_strict_refuses_what_would_run_uncaptured(case: Case) -> None:
    with pytest.raises(CaptureError):
        capture(case.model(), case.inputs(4), {}, strict=True)


class Configured(nn.Module):
    def __init__(self, *, outside: bool) -> None:
        super().__init__()
        self.linear, self.outside = nn.Linear(WIDTH, WIDTH), outside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y + torch.from_numpy(np.sin(y.detach().numpy())) if self.outside else y


def test_the_smallest_module_runs_uncaptured_and_others_of_its_class_only_if_they_are_alike() -> None:
    layers = [nn.Sequential(Configured(outside=outside), nn.ReLU()) for outside in (True, False, True)]
    program = capture(nn.Sequential(*layers), rows(4), {})
    assert paths(program) == ["0.0", "2.0"]
    assert len(program.uncaptured) == 2


def test_a_module_with_two_names_runs_uncaptured_under_the_first() -> None:
    shared = nn.Sequential(Returns("tensor"), nn.ReLU())
    model = nn.Sequential(shared, nn.Linear(WIDTH, WIDTH), shared)
    program = capture(model, rows(5), {})
    assert paths(program) == ["0.0", "0.0"]
    torch.testing.assert_close(results(program, *rows(5)), (model(*rows(5)),))


def test_what_is_refused_under_another_name_of_an_opaque_module_makes_the_module_around_it_opaque() -> None:
    model = nn.Sequential(Configured(outside=True))
    model.append(model[0])
    opaque = Opaque({"0": "reason"}).after(RefusedError("refused", "1"), model)
    assert opaque is not None
    assert list(opaque.reasons) == [""]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, large: bool) -> torch.Tensor:
        return self.linear(x) * 2 if large else self.linear(x)


class LoopOverList(nn.Module):
    """Layers that take a Python bool computed from values, held by a list or a dict that is never called."""

    def __init__(self, layers: nn.ModuleList | nn.ModuleDict) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = (x > 3).any().item()
        for layer in self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers:
            x = layer(x, large)
        return x


@pytest.mark.parametrize(
    "container",
    [nn.ModuleList, lambda layers: nn.ModuleDict({"a": layers[0], "b": layers[1]})],
    ids=["ModuleList", "ModuleDict"],
)
def test_the_module_that_loops_over_a_container_runs_uncaptured_where_its_layers_cannot(
    container: Callable[[list[nn.Module]], Any],
) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), LoopOverList(container([Branches(), Branches()])), nn.ReLU())
    program = capture(model, rows(5), {})
    assert paths(program) == ["1"]
    for scale in (1, 100):
        inputs = [x * scale for x in rows(5)]
        torch.testing.assert_close(results(program, *inputs), (model(*inputs),))


class CallsInnerOnly(nn.Module):
    """Is called by a method of its own, not by `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = Branches()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def encode(self, x: torch.Tensor, large: bool) -> torch.Tensor:
        return self.branches(x, large)


class Encodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = CallsInnerOnly()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner.encode(x, (x > 3).any().item())


@pytest.mark.slow
def test_the_module_around_runs_uncaptured_where_an_inner_one_is_not_called_by_its_forward() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Encodes(), nn.ReLU())
    program = capture(model, rows(5), {})
    assert paths(program) == ["1"]
    torch.testing.assert_close(results(program, *rows(5)), (model(*rows(5)),))


class Calls(nn.Module):
    """Calls its inner module in a way that no graph can hold; so the module around it runs uncaptured."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.gate, self.linear, self.kind = Returns(kind), nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        result = self.gate(y, self) if self.kind == "object" else self.gate(y)
        if self.kind == "number":
            return y * result
        if self.kind == "rows":
            return y + result.sum()
        return y + result


class Returns(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor, other: Any = None) -> Any:
        values = x.detach().numpy()
        if self.kind == "number":
            return float(np.abs(values).max())
        if self.kind == "rows":
            return x[torch.from_numpy(values.sum(1) > values.sum(1).mean())]
        if self.kind == "writes":
            x.mul_(2)
        return torch.from_numpy(np.sin(values))


@pytest.mark.parametrize("kind", ["number", "rows", "writes", "object"])
def test_the_module_around_runs_uncaptured_if_the_call_fits_no_graph(kind: str) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Calls(kind), nn.ReLU())
    program = capture(model, rows(5), {})
    assert paths(program) == ["1"]
    torch.testing.assert_close(results(program, *rows(5)), (model(*rows(5)),))


class Odd:
    pass


class ReturnsOdd(nn.Module):
    def forward(self, x: torch.Tensor) -> Odd:
        return Odd()


def test_a_model_that_cannot_run_as_one_operator_is_refused_with_both_reasons() -> None:
    with pytest.raises(CaptureError, match=r"cannot run uncaptured either.*returns"):
        capture(ReturnsOdd(), rows(3), {})


class Stateful(nn.Module):
    """Everything that a call may change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count, self.log = nn.Linear(WIDTH, WIDTH), 0, []  # type: ignore[var-annotated]
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.register_buffer("sum", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.log.append(float(np.sum(x.detach().numpy())))
        self.seen = self.seen * 0.5 + x.detach().mean(0)
        self.sum.add_(x.detach().sum(0))
        noise = float(np.random.rand()) + random.random()
        return nn.functional.dropout(self.linear(x), 0.5) + noise


def test_capturing_leaves_buffers_attributes_and_random_generators_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Stateful(), nn.ReLU())
    inner = model[1]
    inner.log.append(7.0)
    buffers = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    states = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    program = capture(model, rows(4), {})
    assert paths(program) == ["1"]
    assert (inner.count, inner.log) == (0, [7.0])
    assert "forward" not in vars(inner)
    assert random.getstate() == states[1]
    assert repr(np.random.get_state()) == states[2]
    torch.set_rng_state(states[0])
    capture(model, rows(4), {})
    assert torch.equal(torch.get_rng_state(), states[0])
    for name, (buffer, content) in buffers.items():
        assert model.get_buffer(name) is buffer
        assert torch.equal(buffer, content)
    results(program, *rows(4))  # not a stage that runs for the user: only buffers, which are operands, change
    assert (inner.count, inner.log) == (0, [7.0])
    assert random.getstate() == states[1]
    (operator,) = uncaptured_in(program.graph_module)
    assert operator.effects.random
    assert operator.effects.stateful
    assert len(operator.effects.written) == 2


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_inputs_that_the_model_does_not_run_on_are_told_from_code_that_cannot_be_captured() -> None:
    message = rf"the model itself raised RuntimeError on this call at \S*{Path(__file__).name}:\d+: .*shapes cannot be"
    with pytest.raises(CaptureError, match=message):
        capture(OneLayer(), (torch.ones(4, WIDTH + 1),), {})


def test_a_failed_capture_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(NumpyGate(), nn.Linear(WIDTH + 1, 4))
    before = {name: vars(module).copy() for name, module in model.named_modules()}
    with pytest.raises(CaptureError, match="shapes cannot be multiplied"):
        capture(model, rows(4), {})
    assert {name: vars(module) for name, module in model.named_modules()} == before


class UnderNoGrad(nn.Module):
    """A frozen part: its block becomes a nested graph."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.last = NumpyGate(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = torch.relu(self.frozen(x)) + 1
        return self.last(y) + DoubledSwish.apply(y, 2.0)


def test_an_opaque_call_under_no_grad_has_no_gradient() -> None:
    model = UnderNoGrad()
    program = capture(model, rows(4), {})
    assert paths(program) == ["frozen", ""]
    (output,) = results(program, *rows(6))
    torch.testing.assert_close(output, model(*rows(6)))
    output.sum().backward()
    assert model.frozen.linear.weight.grad is None
    assert model.last.weight.grad is not None


@pytest.mark.slow
def test_a_result_of_another_shape_than_the_example_showed_is_refused_by_name() -> None:
    class Unpadded(PackedEncoder):
        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            longest = int(lengths.max())
            return super().forward(x, lengths)[:, :longest]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.encoder = nn.Embedding(16, WIDTH), Unpadded()

        def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return self.encoder(self.embed(ids), lengths).mean(1)

    ids, _ = sequences(4)
    model = Model()
    program = capture(model, (ids, torch.full((4,), 5)), {})  # all equally long: nothing shows that sizes vary
    assert paths(program) == ["encoder"]
    with pytest.raises(ChangedResultError, match=r"'encoder' \(Unpadded\).*shape depends on values"):
        results(program, ids, torch.full((4,), 3))
    varied = capture(model, (ids, torch.tensor([5, 5, 3, 2])), {})
    assert paths(varied) == [""]
    torch.testing.assert_close(results(varied, ids, torch.full((4,), 3)), (model(ids, torch.full((4,), 3)),))


class SaysMoreOfLargeValues(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = {"twice": 2 * x}
        if bool(x.max() > 100):
            found["large"] = x
        return found


def test_a_result_that_the_example_did_not_have_is_named() -> None:
    program, (x,) = capture(SaysMoreOfLargeValues(), rows(4), {}), rows(4)
    results(program, x)
    with pytest.raises(CaptureError, match=r"another structure than in the example call: output\['large'\] is new"):
        results(program, 1000 + x)


def test_one_sample_and_keyword_arguments_are_captured_too() -> None:
    model = BranchInside()
    program = capture(model, (), {"x": rows(1)[0]})
    torch.testing.assert_close(results(program, *rows(1)), model(*rows(1)))


class Frozen(nn.Module):
    """Two linear layers. `call` runs the first."""

    def __init__(self, call: Callable[[torch.Tensor, nn.Linear], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.call = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.call(x, self.a))


def module_toggled(x: torch.Tensor, a: nn.Linear) -> torch.Tensor:
    y = a.requires_grad_(False)(x)
    a.requires_grad_(True)
    return y


def parameters_assigned(x: torch.Tensor, a: nn.Linear) -> torch.Tensor:
    for parameter in a.parameters():
        parameter.requires_grad = False
    y = a(x)
    for parameter in a.parameters():
        parameter.requires_grad = True
    return y


def weight_toggled(x: torch.Tensor, a: nn.Linear) -> torch.Tensor:
    a.weight.requires_grad_(False)
    y = a(x)
    a.weight.requires_grad_(requires_grad=True)
    return y


def frozen_for_ever(x: torch.Tensor, a: nn.Linear) -> torch.Tensor:
    return a.requires_grad_(False)(x)


def activation_cut(x: torch.Tensor, a: nn.Linear) -> torch.Tensor:
    return a(x).detach().requires_grad_()


def gradient_penalty(x: torch.Tensor, a: nn.Linear) -> torch.Tensor:
    x.requires_grad_(True)
    y = a(x)
    return y + torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize(
    "call",
    [module_toggled, parameters_assigned, weight_toggled, frozen_for_ever, activation_cut, gradient_penalty],
)
def test_a_module_that_changes_what_requires_grad_runs_uncaptured_with_the_models_gradients(
    call: Callable[[torch.Tensor, nn.Linear], torch.Tensor],
) -> None:
    model = Frozen(call)
    original = copy.deepcopy(model)
    x = torch.randn(4, WIDTH)
    program = capture(model, (x,), {})
    assert paths(program) == [""]
    assert re.search(
        r"sets requires_grad to (True|False) on a tensor \(.*test_uncaptured\.py:\d+\)", str(program.uncaptured)
    )
    assert all(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(CaptureError, match=r"module '\(root\)' sets requires_grad to .*; do that outside of the model"):
        capture(model, (x,), {}, strict=True)
    expected, found = original(x.clone()), program.graph_module(x.clone())[0]
    torch.testing.assert_close(found, expected)
    expected.sum().backward()
    found.sum().backward()
    for (name, own), other in zip(model.named_parameters(), original.parameters(), strict=True):
        assert own.requires_grad == other.requires_grad
        torch.testing.assert_close(own.grad, other.grad, msg=lambda m, n=name: f"{n}: {m}")


def requires_grad_as_before(x: torch.Tensor, a: nn.Linear) -> torch.Tensor:
    return a.requires_grad_(True)(x.requires_grad_(x.requires_grad)).requires_grad_()


def test_a_module_that_sets_requires_grad_to_what_it_is_stays_captured() -> None:
    assert not capture(Frozen(requires_grad_as_before), (torch.randn(4, WIDTH),), {}).uncaptured


class TakesAndReturnsScalars(nn.Module):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x.square().mean() * scale if scale > 0 else x.sum()


class WithScalarPart(nn.Module):
    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        self.a, self.part, self.b = nn.Linear(WIDTH, WIDTH), TakesAndReturnsScalars(), nn.Linear(WIDTH, WIDTH)
        self.whole = whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.a(x)
        part = self.part(hidden, hidden.abs().mean())
        if self.whole and part < 0:
            return part
        return part + self.b(hidden).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
def test_parts_that_take_and_return_scalars_run_uncaptured(whole: bool) -> None:
    model, x = WithScalarPart(whole=whole), torch.randn(8, WIDTH)
    program = capture(model, (x,), {})
    assert paths(program) == ["" if whole else "part"]
    torch.testing.assert_close(results(program, x)[0], model(x))
    pm = autopar.parallelize(model, ["cpu", "cpu"], example_args=(x,), tune=0)
    torch.testing.assert_close(pm(x), model(x))
    expected = torch.autograd.grad(model(x), list(model.parameters()), allow_unused=True)
    pm(x).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
