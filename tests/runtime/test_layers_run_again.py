"""Layers that run again one after the other: gradients of the plain model, buffers written once, and what is kept."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CASES, Case, assert_same_gradients, gradients, loss_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar import Plan
from autopar.lower.rerun_groups import _Rerun
from autopar.plan.recompute import RECOMPUTE
from autopar.schedule.builders import INTERLEAVED, SCHEDULES

pytestmark = [
    pytest.mark.filterwarnings("ignore:batch norm uses"),
    pytest.mark.filterwarnings("ignore:the batch is not split"),
]
FAMILIES = {case.name: case for case in CASES}
WIDTH = 8


class Layer(nn.Module):
    """`kind`: what is in it beside linear layers and a residual sum."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0
        self.norm: nn.Module = nn.BatchNorm1d(WIDTH) if kind == "batch norm" else nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "writes its input":
            x = x.tanh_()
        y = self.up(self.norm(x))
        y = y.relu_() if self.kind == "in place" else torch.relu(y)
        y = self.down(y)
        if self.kind == "dropout":
            y = self.drop(y)
        return y.add_(x) if self.kind == "sums in place" else x + y


class Net(nn.Module):
    """`kinds`: of its layers. Its ends share a weight, and the last one reads what entered the first layer, too."""

    def __init__(self, kinds: list[str], after: str = "") -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(map(Layer, kinds))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.after = after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * 2
        kept = x * 1
        for layer in self.layers:
            x = layer(x)
            if self.after == "write":
                x.mul_(0.5)
        return self.last(x + kept)


KINDS = ("plain", "in place", "sums in place", "writes its input", "batch norm")


def squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def reruns(pm: autopar.PipelinedModule) -> list[_Rerun]:
    replicas = pm._signatures.newest().executable.replicas
    return [part for one in replicas for part in one.module.modules() if isinstance(part, _Rerun)]


@settings(max_examples=examples(20), deadline=None)
@given(data=st.data())
@pytest.mark.slow
def test_gradients_are_those_of_the_plain_model_whatever_recomputes(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(KINDS[:-1]), min_size=2, max_size=4))
    torch.manual_seed(0)
    model = Net(kinds, data.draw(st.sampled_from(["", "write"])))
    places = ["first", *(f"layers.{i}{part}" for i in range(len(kinds)) for part in (".norm", ".down")), "last"]
    n_stages = data.draw(st.sampled_from([1, 2, 4]))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(places) - 1), min_size=n_stages - 1, max_size=n_stages - 1)))
    split = {places[at]: stage for stage, at in enumerate([0, *cuts])}
    schedule = data.draw(st.sampled_from([s for s in SCHEDULES if n_stages == 4 or s not in INTERLEAVED]))
    modes = {s: data.draw(st.sampled_from([*RECOMPUTE, "full", "full"])) for s in range(n_stages)}
    plan = Plan.from_split(split, n_microbatches=data.draw(st.integers(1, 4)), schedule=schedule, recompute=modes)
    original = copy.deepcopy(model)
    pm = autopar.parallelize(model, ["cpu"] * (2 if schedule in INTERLEAVED else n_stages), plan=plan)
    x = torch.randn(4, WIDTH, requires_grad=True)
    mine, its = x.detach().requires_grad_(), x
    for _ in range(2):
        loss = squared(pm(mine), torch.ones(4, WIDTH))
        loss.backward()
        expected = squared(original(its), torch.ones(4, WIDTH))
        expected.backward()
        torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(mine.grad, its.grad)
    assert_same_gradients(gradients(model), gradients(original))
    pm.close()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("name", ["resnet", "gpt2 with labels", "bert", "t5", "llama", "lstm", "sequential", "mixtral"])
def test_models_of_many_families_train_as_the_plain_ones(name: str, schedule: str) -> None:
    case: Case = FAMILIES[name]
    model = case.model()
    original = copy.deepcopy(model)
    split: Mapping[str, int] = case.two
    plan = Plan.from_split(split, n_microbatches=2, schedule=schedule, recompute={0: "full", 1: "full"})
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan)
    call, target = case.inputs(4), torch.arange(4.0)
    for one in (pm, original):
        loss_of(one(**call), target).backward()
    assert bool(reruns(pm)) == (name not in ("lstm", "sequential"))
    assert_same_gradients(gradients(model), gradients(original))
    pm.close()


@pytest.mark.slow
@pytest.mark.parametrize("batch_norm", ["micro-batch", "deferred"])
@pytest.mark.parametrize("again", ["full", "selective-op"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_running_statistics_are_written_once(schedule: str, again: str, batch_norm: str) -> None:
    torch.manual_seed(0)
    model, x = Net(["batch norm"] * 4), torch.randn(8, WIDTH)
    seen = []
    for mode in ("none", again):
        mine = copy.deepcopy(model)
        split = {"first": 0, "layers.0": 0, "layers.2": 1}
        plan = Plan.from_split(split, n_microbatches=2, schedule=schedule, recompute={0: mode, 1: mode})
        options: dict[str, Any] = {"batch_norm": "deferred"} if batch_norm == "deferred" else {}
        pm = autopar.parallelize(mine, ["cpu", "cpu"], plan=plan, **options)
        for _ in range(2):
            pm.train_step(x, target=x, loss_fn=squared)
        assert len(reruns(pm)) == (0 if mode == "none" else 4)
        seen.append(({name: p.grad for name, p in mine.named_parameters()}, dict(mine.named_buffers())))
        pm.close()
    (kept, statistics), (rerun, others) = seen
    assert_same_gradients(rerun, kept)
    assert int(statistics["layers.0.norm.num_batches_tracked"]) > 0
    for name, value in statistics.items():
        torch.testing.assert_close(others[name], value, msg=name)


@pytest.mark.parametrize("mode", ["full", "selective-op"])
def test_a_layer_that_runs_again_draws_the_same_numbers(mode: str) -> None:
    """Gradients are those of the loss that was returned: a small step changes it as they say."""
    torch.manual_seed(0)
    model = Net(["dropout"] * 4).double()
    plan = Plan.from_split({"first": 0, "layers.2": 1}, n_microbatches=2, recompute={0: mode, 1: mode})
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan)
    x = torch.randn(8, WIDTH, dtype=torch.double)

    def loss() -> torch.Tensor:
        torch.manual_seed(7)
        return squared(pm(x), x)

    loss().backward()
    slopes = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    norm = float(torch.stack([g.square().sum() for g in slopes.values()]).sum().sqrt())
    values = []
    for shift in (1e-6, -1e-6):
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.add_(slopes[name], alpha=shift / norm)
            values.append(float(loss()))
            for name, p in model.named_parameters():
                p.sub_(slopes[name], alpha=shift / norm)
    assert (values[0] - values[1]) / 2e-6 == pytest.approx(norm, rel=1e-4)
    pm.close()


class Counting(TorchDispatchMode):
    """Counts matrix products with a bias, which only forwards have."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_a_layer_runs_twice_and_what_lies_outside_once(schedule: str) -> None:
    model = Net(["plain"] * 4)
    plan = Plan.from_split(
        {"first": 0, "layers.2": 1}, n_microbatches=2, schedule=schedule, recompute={0: "full", 1: "full"}
    )
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan)
    x = torch.randn(4, WIDTH)
    pm.train_step(x, target=x, loss_fn=squared)
    counted = Counting()
    with pm.device_context(lambda device: counted):
        pm.train_step(x, target=x, loss_fn=squared)
    # The last product of a layer is not needed for its backward: torch stops before it.
    assert counted.products == 2 * (2 + 4 * 2 + 4)
    pm.close()


class Four(nn.Module):
    """A layer of four products."""

    def __init__(self) -> None:
        super().__init__()
        self.products = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for product in self.products:
            x = torch.sin(product(x))
        return x


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "again"), [("none", 0), ("selective-op", 2), ("full", 4)])
def test_layers_that_keep_products_run_every_second_one_again(mode: str, again: int) -> None:
    model = nn.Sequential(*(Four() for _ in range(3)))
    plan = Plan.from_split({"0": 0}, n_microbatches=2, recompute={0: mode})
    pm = autopar.parallelize(model, ["cpu"], plan=plan)
    x = torch.randn(4, WIDTH)
    pm.train_step(x, target=x, loss_fn=squared)
    counted = Counting()
    with pm.device_context(lambda device: counted):
        pm.train_step(x, target=x, loss_fn=squared)
    assert counted.products == 2 * 3 * (4 + again)
    pm.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "after"),
    [(["writes its input"] * 3, ""), (["plain"] * 3, "write")],
    ids=["by the layer", "by the model, before it"],
)
def test_a_layer_that_overwrites_its_input_keeps_what_it_makes(kinds: list[str], after: str) -> None:
    model = Net(kinds, after)
    original = copy.deepcopy(model)
    plan = Plan.from_split({"first": 0}, n_microbatches=2, recompute={0: "full"})
    pm = autopar.parallelize(model, ["cpu"], plan=plan)
    x = torch.randn(4, WIDTH)
    for one in (pm, original):
        squared(one(x), x).backward()
    assert_same_gradients(gradients(model), gradients(original))
    expected = 3 if after else 0  # the model overwrites what left a layer before another one reads it
    assert len(reruns(pm)) == expected
    pm.close()


def test_a_layer_with_hooks_keeps_what_it_makes() -> None:
    model, calls = Net(["plain"] * 3), []
    model.layers[1].register_forward_hook(lambda *args: calls.append(1))
    plan = Plan.from_split({"first": 0}, n_microbatches=2, recompute={0: "full"})
    pm = autopar.parallelize(model, ["cpu"], plan=plan)
    x = torch.randn(4, WIDTH)
    squared(pm(x), x).backward()
    assert len(reruns(pm)) == 2
    assert len(calls) in (2, 3)  # of each micro-batch, and perhaps of the capture
    pm.close()


DEGREES: list[dict[str, Any]] = [
    {"tensor": 2},
    {"tensor": 2, "sequence_parallel": True},
    {"data": 2, "tensor": 2, "zero": 3},
    {"data": 2, "zero": 3, "micro_batch": 2},
    {"pipeline": 2, "tensor": 2, "micro_batch": 2},
    {"pipeline": 2, "data": 2, "micro_batch": 2, "schedule": "zb-h1"},
]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "selective-op"])
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
@pytest.mark.parametrize("name", ["gpt2 with labels", "bert"])
def test_layers_run_again_on_meshes(name: str, degrees: dict[str, Any], mode: str) -> None:
    case = FAMILIES[name]
    model = case.model()
    original = copy.deepcopy(model)
    call = case.inputs(8)
    n = degrees.get("pipeline", 1) * degrees.get("tensor", 1) * degrees.get("data", 1)
    plan = Plan.by_hand(model, ["cpu"] * n, example_kwargs=call, recompute=mode, **degrees)
    assert all(stage.layerwise for stage in plan.stages)
    pm = autopar.parallelize(model, ["cpu"] * n, plan=plan)
    for one in (pm, original):
        loss_of(one(**call), torch.arange(8.0)).backward()
    assert reruns(pm)
    assert_same_gradients(gradients(model), gradients(original), tolerance=1e-4)
    pm.close()


def held_bytes(mode: str, **degrees: Any) -> int:
    """Of the tensors, apart from parameters, that a stage holds between its forward and its backward."""
    model, x = Net(["plain"] * 6), torch.randn(64, WIDTH)
    n = degrees.get("data", 1) * degrees.get("tensor", 1)
    options: dict[str, Any] = {"example_args": (x,), "target": x, "loss_fn": squared}
    plan = Plan.by_hand(
        model, ["cpu"] * n, recompute=mode, micro_batch=64 // degrees.get("data", 1), **options, **degrees
    )
    pm = autopar.parallelize(model, ["cpu"] * n, plan=plan)
    squared(pm(x), x).backward()
    (replica,) = pm._signatures.newest().executable.replicas if plan.stages[0].mode or n > 1 else (None,)
    parameters = {t.untyped_storage().data_ptr() for t in [*pm.parameters(), *replica.module.parameters()]}
    held: dict[int, int] = {}

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for t in torch.utils._pytree.tree_leaves(result):
                if isinstance(t, torch.Tensor):
                    living.append(
                        (
                            torch.multiprocessing.reductions.StorageWeakRef(t.untyped_storage()),
                            t.untyped_storage().nbytes(),
                        )
                    )
            return result

    living: list[Any] = []
    with Watching():
        outputs = replica.compute(x)
    held = {ref.cdata: n for ref, n in living if not ref.expired()}
    assert outputs
    pm.close()
    return sum(n for key, n in held.items() if key not in parameters)


@pytest.mark.slow
def test_layers_that_keep_products_hold_the_results_of_every_second_one_beside() -> None:
    ups = 6 * 64 * 2 * WIDTH * 4  # the first of the two products of each layer
    assert held_bytes("selective-op") - held_bytes("full") == ups


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{}, {"tensor": 2}, {"data": 2, "zero": 3}], ids=str)
def test_only_what_flows_between_layers_is_kept(degrees: dict[str, Any]) -> None:
    row = 64 * WIDTH * 4  # bytes of a value between layers, on all devices that cut the batch together
    copies, more = degrees.get("tensor", 1), 2 if degrees else 0  # a mesh has parts of the batch, and joins outputs
    full = held_bytes("full", **degrees)
    # Outside: what the first layer multiplies, and `kept`; then 6 inputs of layers, what enters `last`, and outputs.
    assert full <= (11 + more) * row * copies + 4 * WIDTH * WIDTH * 4 * 2
    if degrees:
        assert full < held_bytes("none", **degrees)
