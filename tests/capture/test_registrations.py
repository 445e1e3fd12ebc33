"""Models whose forward registers modules, parameters or buffers are refused until they are complete, and left alone."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import autopar
from autopar.capture.program import capture
from autopar.errors import CaptureError

X = torch.linspace(-1, 1, 48).reshape(8, 6)
PLAN = autopar.Plan.from_split({"a": 0, "b": 1}, n_microbatches=2)


class Registering(nn.Module):
    """Between two layers, `use` computes; it may register what it needs in `part`, a module of this one."""

    def __init__(self, part: nn.Module, use: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.part, self.b = nn.Linear(6, 6), part, nn.Linear(6, 6)
        self._use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self._use(self.part, self.a(x)))


def child(part: Any, x: torch.Tensor) -> torch.Tensor:
    if part.extra is None:
        part.extra = nn.Linear(6, 6)
    return part.extra(x)


def added_child(part: Any, x: torch.Tensor) -> torch.Tensor:
    if "extra" not in part._modules:
        part.add_module("extra", nn.Linear(6, 6))
    return part.extra(x)


def item_of_a_list(part: Any, x: torch.Tensor) -> torch.Tensor:
    if not len(part):
        part.append(nn.Linear(6, 6))
    return part[0](x)


def item_of_a_dict(part: Any, x: torch.Tensor) -> torch.Tensor:
    if "extra" not in part:
        part["extra"] = nn.Linear(6, 6)
    return part["extra"](x)


def parameter(part: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(part, "scale"):
        part.scale = nn.Parameter(torch.full((6,), 2.0))
    return x * part.scale


def item_of_a_parameter_list(part: Any, x: torch.Tensor) -> torch.Tensor:
    if not len(part):
        part.append(nn.Parameter(torch.full((6,), 2.0)))
    return x * part[0]


def buffer(part: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(part, "positions"):
        part.register_buffer("positions", torch.arange(6.0), persistent=False)
    return x + part.positions


def buffer_that_was_none(part: Any, x: torch.Tensor) -> torch.Tensor:
    if part.positions is None:
        part.positions = torch.arange(6.0)
    return x + part.positions


def parametrized(part: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(part, "parametrizations"):
        parametrizations.weight_norm(part)
    return part(x)


def branching(part: Any, x: torch.Tensor) -> torch.Tensor:
    """No tracer captures the model: the model itself runs."""
    return child(part, x) if x.sum() > -1e9 else x


def module(**attributes: Any) -> nn.Module:
    made = nn.Module()
    for name, value in attributes.items():
        made.register_buffer(name, value) if name == "positions" else setattr(made, name, value)
    return made


CASES: list[tuple[Callable[..., torch.Tensor], Callable[[], nn.Module], str]] = [
    (child, lambda: module(extra=None), r"module 'part\.extra' \(Linear\)"),
    (added_child, module, r"module 'part\.extra' \(Linear\)"),
    (item_of_a_list, nn.ModuleList, r"module 'part\.0' \(Linear\)"),
    (item_of_a_dict, nn.ModuleDict, r"module 'part\.extra' \(Linear\)"),
    (parameter, module, r"parameter 'part\.scale'"),
    (item_of_a_parameter_list, nn.ParameterList, r"parameter 'part\.0'"),
    (buffer, module, r"buffer 'part\.positions'"),
    (buffer_that_was_none, lambda: module(positions=None), r"buffer 'part\.positions'"),
    (parametrized, lambda: nn.Linear(6, 6), r"module 'part\.parametrizations' \(ModuleDict\)"),
    (branching, lambda: module(extra=None), r"module 'part\.extra' \(Linear\)"),
]


def held(model: nn.Module) -> list[Any]:
    """All that the modules hold, down to the objects."""
    return [
        (type(m), {k: list(v.items()) if isinstance(v, dict) else str(v) for k, v in vars(m).items()})
        for m in model.modules()
    ]


@pytest.mark.parametrize(("use", "part", "named"), CASES, ids=[case[0].__name__ for case in CASES])
def test_what_forward_registers_is_refused_by_name_and_fine_after_a_plain_call(
    use: Callable[..., torch.Tensor], part: Callable[[], nn.Module], named: str
) -> None:
    torch.manual_seed(0)
    model = Registering(part(), use)
    before, ids = held(model), [id(m) for m in model.modules()]
    plan = None if use is branching else PLAN
    with pytest.raises(CaptureError, match=f"forward registers {named}, .* call the model once before"):
        autopar.parallelize(model, ["cpu", "cpu"], example_args=(X,), plan=plan, tune=0)
    assert [id(m) for m in model.modules()] == ids
    assert all(str(a) == str(b) for a, b in zip(held(model), before, strict=True))
    with torch.no_grad():
        expected = model(X)
    pm = autopar.parallelize(model, ["cpu", "cpu"], example_args=(X,), plan=plan, tune=0)
    torch.testing.assert_close(pm(X), expected)
    assert [name for name, _ in pm.named_parameters()] == [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    pm(X).square().sum().backward()
    optimizer.step()
    torch.testing.assert_close(model(X), pm(X))
    assert not torch.equal(model(X), expected)


def bias_removed(part: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = part[0](x)
    part[0].bias = None
    return found


def buffer_removed(part: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = part[1](x)
    part[1].running_mean = None
    return found


def swapped(part: Any, x: torch.Tensor) -> torch.Tensor:
    part[0], part[2] = part[2], part[0]
    found: torch.Tensor = part[0](x)
    return found


@pytest.mark.parametrize(
    ("use", "named"),
    [
        (bias_removed, r"removes parameter 'part\.0\.bias', .* call the model once before"),
        (buffer_removed, r"removes buffer 'part\.1\.running_mean', .* call the model once before"),
        (swapped, r"replaces module 'part\.0' \(Linear\) by another \(Linear\).* choose by an argument or an index"),
    ],
    ids=["parameter", "buffer", "module"],
)
def test_what_forward_removes_or_swaps_is_refused_by_name_and_left_alone(
    use: Callable[..., torch.Tensor], named: str
) -> None:
    part = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    model = Registering(part, use).eval()
    before, tensors = held(model), model.state_dict(keep_vars=True)
    with pytest.raises(CaptureError, match=f"forward {named}"):
        autopar.parallelize(model, ["cpu", "cpu"], example_args=(X,), plan=PLAN, tune=0)
    assert all(str(a) == str(b) for a, b in zip(held(model), before, strict=True))
    assert all(tensor is tensors[name] for name, tensor in model.state_dict(keep_vars=True).items())


class Late(nn.Module):
    """Runs uncaptured; uses `extra` only for large values, and registers it then."""

    def __init__(self, use: Callable[[Any, torch.Tensor], torch.Tensor], part: nn.Module) -> None:
        super().__init__()
        self.part, self._use = part, use
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return self._use(self.part, x) if x.sum() > 100 else x


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
@pytest.mark.parametrize(
    ("use", "part", "named"),
    [
        (child, lambda: module(extra=None), r"registers module '1\.part\.extra' \(Linear\)"),
        (parameter, module, r"registers parameter '1\.part\.scale'"),
        (buffer, module, r"registers buffer '1\.part\.positions'"),
        (bias_removed, lambda: nn.Sequential(nn.Linear(6, 6)), r"removes parameter '1\.part\.0\.bias'"),
    ],
    ids=["module", "parameter", "buffer", "removed"],
)
def test_what_uncaptured_code_registers_at_a_later_call_is_refused_then_and_fine_after_a_plain_call(
    use: Callable[..., torch.Tensor], part: Callable[[], nn.Module], named: str
) -> None:
    model = nn.Sequential(nn.Softplus(), Late(use, part()), nn.Linear(6, 4))
    plan = autopar.Plan.from_split({"0": 0, "2": 1}, n_microbatches=1)
    pm = autopar.parallelize(model, ["cpu", "cpu"], example_args=(X,), plan=plan, tune=0)
    expected, before = pm(X), {name: t.clone() for name, t in model.state_dict().items()}
    for _ in range(2):
        with pytest.raises(CaptureError, match=f"forward {named} in this call.* call the model itself once"):
            pm(X + 10)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    torch.testing.assert_close(pm(X), expected)
    pm.close()
    model(X + 10)
    pm = autopar.parallelize(model, ["cpu", "cpu"], example_args=(X,), plan=plan, tune=0)
    torch.testing.assert_close(pm(X + 10), model(X + 10))


@pytest.mark.slow
def test_a_lazy_module_of_torch_is_refused_by_name_before_its_first_call() -> None:
    model = nn.Sequential(nn.LazyLinear(6), nn.Linear(6, 6))
    for call in (autopar.plan, autopar.parallelize):
        with pytest.raises(CaptureError, match=r"'0\.weight' of LazyLinear has no sizes .* call the model once before"):
            call(model, ["cpu", "cpu"], example_args=(X,))
    with pytest.raises(CaptureError, match="call the model once before"):
        capture(model, (X,), {})
    expected = model(X)
    torch.testing.assert_close(autopar.parallelize(model, ["cpu"], example_args=(X,), tune=0)(X), expected)


class SharedSettings(nn.Module):
    """Writes into what it shares with its maker, as models of transformers do."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.layer = config, nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.config.kind is None:
            self.config.kind = "regression"
        self.config.seen["calls"].append(tuple(x.shape))
        self.config.inner.size = x.shape[-1]
        return self.layer(x)


@pytest.mark.slow
@pytest.mark.parametrize("watched", [False, True])
def test_settings_that_modules_share_are_left_as_they_were(watched: bool) -> None:
    config = types.SimpleNamespace(kind=None, seen={"calls": []}, inner=types.SimpleNamespace(), first=1)
    model = SharedSettings(config)
    if watched:
        model.register_forward_pre_hook(lambda *_: None)
    text = str(config)
    capture(model, (X,), {})
    assert str(config) == text
    autopar.plan(model, ["cpu", "cpu"], example_args=(X,))
    assert str(config) == text


class Named(nn.Module):
    def __init__(self, kind: str, name: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.kind, self.name = kind, name
        if kind == "buffer":
            self.register_buffer(name, torch.ones(6))
        else:
            setattr(self, name, nn.Linear(6, 6) if kind == "module" else nn.Parameter(torch.ones(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        named = getattr(self, self.name)
        return self.b(named(self.a(x)) if self.kind == "module" else self.a(x) * named)


@pytest.mark.parametrize("name", ["code", "graph", "meta", "_code", "recompile", "print_readable", "shape_env"])
@pytest.mark.parametrize("kind", ["module", "parameter", "buffer"])
def test_names_of_a_captured_graphs_own_are_refused_at_the_root_and_fine_inside(kind: str, name: str) -> None:
    model = Named(kind, name)
    with pytest.raises(CaptureError, match=rf"{kind} '{name}' of Named cannot be captured.* Rename it"):
        capture(model, (X,), {})
    inside = nn.Sequential(model)
    program = capture(inside, (X,), {})
    assert not program.uncaptured
    torch.testing.assert_close(program.graph_module(X)[0], inside(X))
