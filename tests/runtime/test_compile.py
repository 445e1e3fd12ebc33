"""Compiled stages compute the same numbers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import assert_same_gradients, gradients
from torch import fx, nn
from torch.nn.functional import mse_loss
from uncaptured_models import WIDTH, NumpyGate

import autopar
from autopar import PipelinedModule, Plan


def model_with_dropout() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.GELU(),
        nn.LayerNorm(16),
        nn.Dropout(0.3),
        nn.Linear(16, 16),
        nn.Dropout(0.5),
        nn.Linear(16, 4),
    )


def pipelined(model: nn.Module, schedule: str, compile: bool | str, recompute: bool = False) -> PipelinedModule:
    stages = [0] if recompute else []
    plan = Plan.from_split({"0": 0, "4": 1}, n_microbatches=3, schedule=schedule, recompute=stages)
    return autopar.parallelize(model, ["cpu", "cpu"], plan=plan, compile=compile)


def assert_compiled_is_the_same(schedule: str, backend: bool | str, recompute: bool = False) -> None:
    model = model_with_dropout()
    x, y = torch.randn(9, 8), torch.randn(9, 4)
    found = {}
    for compiled in (False, backend):
        own = copy.deepcopy(model)
        pm = pipelined(own, schedule, compiled, recompute)
        torch.manual_seed(3)
        loss = pm.train_step(x, target=y, loss_fn=mse_loss)
        mse_loss(pm(x), y).backward()
        own.eval()
        with torch.no_grad():
            found[compiled] = loss, gradients(own), pm(x)
    plain, compiled_ = found.values()
    torch.testing.assert_close(compiled_[0], plain[0])
    assert_same_gradients(compiled_[1], plain[1])
    torch.testing.assert_close(compiled_[2], plain[2])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_stages_give_the_same_numbers_dropout_included(schedule: str, recompute: bool) -> None:
    assert_compiled_is_the_same(schedule, "aot_eager", recompute)


@pytest.mark.slow
def test_the_default_backend_does_too() -> None:
    assert_compiled_is_the_same("1f1b", True)


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.float() - target).square().mean()


@pytest.fixture
def compiled_graphs() -> Iterator[list[fx.GraphModule]]:
    """All graphs that the compiler gets, in order."""
    found: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, examples: Any) -> Any:
        found.append(graph)
        return graph.forward

    torch.compiler.reset()
    torch._dynamo.backends.registry.register_backend(backend, name="noting_for_tests")
    yield found
    torch._dynamo.backends.registry._COMPILER_FNS.pop("noting_for_tests", None)
    torch._dynamo.backends.registry._BACKENDS.pop("noting_for_tests", None)


def layers(n: int = 4, width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(n)])


@pytest.mark.slow
def test_every_stage_is_compiled_in_the_first_step_under_the_callers_autocast_and_the_micro_batch(
    compiled_graphs: list[fx.GraphModule],
) -> None:
    model = layers()
    plan = Plan.from_split({"0": 0, "2": 1}, n_microbatches=3)
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan, compile="noting_for_tests", cache=False)
    x, y = torch.randn(9, 8), torch.randn(9, 8)
    with torch.autocast("cpu", torch.bfloat16):
        pm.train_step(x, target=y, loss_fn=mean_square)
        assert len(compiled_graphs) == 2, "one graph a stage, no breaks"
        pm.train_step(x, target=y, loss_fn=mean_square)
    assert len(compiled_graphs) == 2
    for graph in compiled_graphs:
        products = [node for node in graph.graph.nodes if node.op == "call_function" and "linear" in str(node.target)]
        assert len(products) == 2
        for node in products:
            assert node.meta["example_value"].dtype == torch.bfloat16
            assert node.meta["example_value"].shape == (3, 8)


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_stages_compute_in_the_callers_precision_whatever_came_before(autocast: bool) -> None:
    model = layers()
    pm = autopar.parallelize(
        copy.deepcopy(model),
        ["cpu", "cpu"],
        plan=Plan.from_split({"0": 0, "2": 1}, n_microbatches=2),
        compile="aot_eager",
        cache=False,
    )
    x = torch.randn(6, 8)
    with torch.no_grad():
        for enabled in (autocast, not autocast, autocast):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                got, wanted = pm(x), model(x)
            assert got.dtype == wanted.dtype
            torch.testing.assert_close(got, wanted)


@pytest.mark.slow
def test_the_report_says_how_long_compiling_took_backwards_included() -> None:
    pm = pipelined(model_with_dropout(), "1f1b", "aot_eager")
    assert "compile=" not in str(pm.report())
    torch.compiler.reset()
    x, y = torch.randn(9, 8), torch.randn(9, 4)
    pm(x)
    forward = pm._signatures.newest().executable.compile_seconds  # type: ignore[union-attr]
    pm.train_step(x, target=y, loss_fn=mse_loss)
    both = pm._signatures.newest().executable.compile_seconds  # type: ignore[union-attr]
    assert 0 < forward < both
    assert f"compile='aot_eager': stages are compiled ({both:.1f} s so far)" in str(pm.report())
    for _ in range(2):
        pm.train_step(x, target=y, loss_fn=mse_loss)
    assert pm._signatures.newest().executable.compile_seconds == both  # type: ignore[union-attr]


class Hooked:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1


def test_a_stage_with_hooks_runs_them_uncompiled_and_a_warning_says_so(
    compiled_graphs: list[fx.GraphModule],
) -> None:
    model, hook = layers(), Hooked()
    plain = copy.deepcopy(model)
    model[3].register_forward_hook(hook)
    pm = autopar.parallelize(
        model,
        ["cpu", "cpu"],
        plan=Plan.from_split({"0": 0, "2": 1}, n_microbatches=2),
        compile="noting_for_tests",
        cache=False,
    )
    x = torch.randn(6, 8)
    with pytest.warns(autopar.AutoparWarning, match=r"compile='noting_for_tests' leaves stage 1 as it is: it runs"):
        got = pm(x)
    torch.testing.assert_close(got, plain(x))
    assert hook.calls == 2
    assert len(compiled_graphs) == 1
    assert "except:\n  stage 1: it runs hooks" in str(pm.report())


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.relu(self.up(x))))


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.slow
def test_layers_that_run_again_stay_as_they_are_and_say_so() -> None:
    torch.manual_seed(0)
    model, found, said = Layered(), [], []
    for compile in (False, "aot_eager"):
        own = copy.deepcopy(model)
        plan = Plan.from_split({"layers.0": 0, "layers.2": 1}, n_microbatches=2, recompute={0: "full"})
        pm = autopar.parallelize(own, ["cpu", "cpu"], plan=plan, compile=compile, cache=False)
        torch.manual_seed(1)
        x = torch.randn(6, 8)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found.append((pm.train_step(x, target=x, loss_fn=mse_loss), gradients(own)))
        said.append([str(w.message) for w in caught if "leaves stage" in str(w.message)])
    assert said[0] == []
    assert len(said[1]) == 1
    assert "leaves stage 0 as it is: layers that run again" in said[1][0]
    torch.testing.assert_close(*[loss for loss, _ in found])
    assert_same_gradients(*[gradient for _, gradient in found])


def test_sharded_stages_stay_as_they_are_and_say_so() -> None:
    model = layers(2)
    hinted = copy.deepcopy(model)
    autopar.shard(hinted[0], in_strategy=((1, 1),), out_strategy=((1, 2),))
    pm = autopar.parallelize(hinted, ["cpu", "cpu"], cache=False, compile="aot_eager")
    x = torch.randn(6, 8)
    with pytest.warns(autopar.AutoparWarning, match=r"stage 0 as it is: its operators run on 2 devices"):
        got = pm(x)
    torch.testing.assert_close(got, model(x))


@pytest.mark.slow
def test_stages_with_uncaptured_code_stay_as_they_are_and_say_so(compiled_graphs: list[fx.GraphModule]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), NumpyGate(), nn.Linear(WIDTH, 4))
    pm = autopar.parallelize(
        copy.deepcopy(model),
        ["cpu", "cpu"],
        plan=Plan.from_split({"0": 0, "2": 1}, n_microbatches=2),
        compile="noting_for_tests",
        cache=False,
    )
    x = torch.randn(6, WIDTH)
    with pytest.warns(autopar.AutoparWarning, match=r"stage 1 as it is: it runs modules that are not captured"):
        got = pm(x)
    torch.testing.assert_close(got, model(x))
    assert len(compiled_graphs) == 1, "of stage 0"


@pytest.mark.slow
def test_compiled_replicas_compute_what_one_would() -> None:
    model = layers(3)
    plan = Plan.from_split({"0": 0}, n_microbatches=4, devices=[["cpu:0", "cpu:1"]])
    own = copy.deepcopy(model)
    pm = autopar.parallelize(own, ["cpu", "cpu"], plan=plan, compile="aot_eager", cache=False)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    for _ in range(2):
        loss = pm.train_step(x, target=y, loss_fn=mse_loss)
        wanted = mse_loss(model(x), y)
        wanted.backward()
        torch.testing.assert_close(loss, wanted.detach())
    assert_same_gradients(gradients(own), gradients(model))
