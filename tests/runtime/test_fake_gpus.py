"""On GPUs, no operator of a step mixes devices, and what a step gives is where it is promised.

The runtime trains on fake tensors (support/fake_gpus.py): forwards, losses and backwards of all stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from fake_gpus import fake_copy, fake_gpus, on, pipelined
from models import CASES, Case, bert, mlp, ragged_mask, tokens
from shardings import Convolutions, InPlace, Pieces, staged
from tied_models import Tied
from torch import nn

from autopar import Plan
from autopar.analysis.example import Example, capture_example, examine
from autopar.analysis.node_values import observe
from autopar.capture.torch_private import tree_leaves
from autopar.runtime.signatures import captures
from autopar.runtime.signatures.bound_signature import RunSettings
from autopar.runtime.signatures.captures import CallArguments, Captures
from autopar.runtime.stages.device_tensors import move
from autopar.runtime.user_warnings import OneTimeWarnings

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer")

BATCH = 8
FOR_EVERY_MODEL = ("one GPU", "two GPUs", "CPU, GPU", "replicas on GPUs")
SMALL = ("sequential", "two towers", "tied", "dropping", "normed", "in place")
GPUS = ("cuda:0", "cuda:1")


class Dropping(nn.Module):
    """Every way of drawing numbers; constants made in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(4, 8, 1), nn.Conv1d(8, 4, 1)
        self.drop, self.channels, self.leaky = nn.Dropout(0.2), nn.Dropout1d(0.3), nn.RReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.leaky(self.channels(self.drop(self.a(x))))
        y = y + 0.1 * torch.randn_like(y) * torch.rand(y.shape)
        return self.b(y) * torch.arange(x.shape[-1]).to(x.dtype)


class Masked(nn.Module):
    """Attention with positions, a causal mask and a table of constants."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(64, 16), nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2))
        self.register_buffer("scale", torch.linspace(1, 2, 16))
        self.table = torch.arange(16.0)  # no buffer
        self.head = nn.Linear(16, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        x = self.embed(ids) + self.positions(torch.arange(length)) * self.scale
        mask = torch.full((length, length), float("-inf")).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(x * self.table)


class Normed(nn.Module):
    """Batch norms that train."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.b = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(128, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


@dataclass(frozen=True)
class Model:
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    split: dict[str, int]


def rows(*shape: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"x": torch.randn(BATCH, *shape)}


def ids(**more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"ids": tokens(BATCH), **more}


def _of_family(case: Case) -> Model:
    return Model(case.model, lambda: case.inputs(BATCH), dict(case.two))


MODELS = {
    **{case.name: _of_family(case) for case in CASES},
    "bert with dropout": Model(
        lambda: bert(0.1),
        lambda: {"input_ids": tokens(BATCH), "attention_mask": ragged_mask(BATCH)},
        {"bert.embeddings": 0, "bert.encoder.layer.1": 1},
    ),
    "tied": Model(lambda: Tied(24, 12), lambda: {"ids": torch.randint(24, (BATCH, 6))}, {"embed": 0, "head": 1}),
    "dropping": Model(Dropping, rows(4, 6), {"a": 0, "b": 1}),
    "masked": Model(Masked, ids(), {"layers.0": 0, "layers.1": 1}),
    "normed": Model(Normed, rows(3, 8, 8), {"a": 0, "b": 1}),
    "convolutions": Model(Convolutions, rows(3, 8, 8), {"conv1": 0, "conv2": 1}),
    "in place": Model(InPlace, rows(6, 12), {"a": 0, "c": 1}),
    "pieces": Model(Pieces, rows(4, 12), {"a": 0, "b": 1}),
}

# For two stages, the devices of each.
PLACES: dict[str, list[list[str]]] = {
    "one GPU": [["cuda:0"], ["cuda:0#1"]],
    "two GPUs": [["cuda:0"], ["cuda:1"]],
    "CPU, GPU": [["cpu:0"], ["cuda:0"]],
    "GPU, CPU": [["cuda:0"], ["cpu:0"]],
    "replicas on GPUs": [["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"]],
    "GPU, replicas on both": [["cuda:0"], ["cuda:1", "cpu:0"]],
    "replicas on both, GPU": [["cpu:0", "cuda:1"], ["cuda:0"]],
}


@cache
def example(name: str) -> Example:
    torch.manual_seed(1)
    model = MODELS[name].build()
    return capture_example(model, (), (), MODELS[name].inputs())


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    """A mean over samples that every floating-point output moves."""
    rows, total = torch.zeros_like(target), torch.zeros((), device=target.device)
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            if leaf.dim() == 0:
                total = total + leaf.to(target.device)
            else:
                rows = rows + leaf.flatten(1).float().square().mean(1) if leaf.dim() > 1 else rows + leaf
    return total + (rows - target).square().mean()


def check_steps(name: str, plan: Plan, data: str, steps: int = 2, **settings: Any) -> None:
    """A call and its backward, training steps and a call without gradients; caller's tensors on the device `data`."""
    known = example(name)
    last = torch.device(plan.stages[-1].devices[0].partition("#")[0].replace("cpu:0", "cpu"))
    with fake_gpus() as mode:
        model = fake_copy(known.model, mode)
        pm = pipelined(known, model, plan, **settings)
        inputs, target = on(known.kwargs, data), torch.empty(BATCH, device=data)
        leaves = [x.requires_grad_() for x in inputs.values() if isinstance(x, torch.Tensor) and x.is_floating_point()]
        output = pm(**inputs)
        found = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
        assert {x.device for x in found if x.dim()} <= {last}
        scalars = {x.device for x in found if not x.dim()}
        assert scalars <= ({last} if data == "cpu" else {torch.device(data)})
        torch.autograd.backward([x.float().sum().to(data) for x in found if x.requires_grad])
        check_gradients(model, leaves)
        for _ in range(steps):
            loss, outputs = pm.train_step(**inputs, target=target, loss_fn=loss_of, return_outputs=True)
            assert loss.device == last
            assert {x.device for x in tree_leaves(outputs) if isinstance(x, torch.Tensor)} <= {last}
            check_gradients(model, leaves)
        with torch.no_grad():
            assert {x.device for x in tree_leaves(pm(**inputs)) if isinstance(x, torch.Tensor) and x.dim()} <= {last}


def check_gradients(model: nn.Module, leaves: list[torch.Tensor]) -> None:
    """Every gradient is on the device of its tensor. They are taken off."""
    named = [*model.named_parameters(), *((f"input {i}", x) for i, x in enumerate(leaves))]
    assert any(x.grad is not None for _, x in named)
    for name, x in named:
        assert x.grad is None or x.grad.device == x.device, f"{name} on {x.device}, its gradient on {x.grad.device}"
        x.grad = None


def _plan(name: str, places: list[list[str]], **more: Any) -> Plan:
    return Plan.from_split(MODELS[name].split, n_microbatches=2, devices=places, **more)


def _slow(value: str) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


def _cases() -> list[Any]:
    """Every model on one GPU, on two, on a CPU and a GPU, and with replicas, and on a quarter of all other places; with
    data on the CPU or on a GPU in turn, as all pairs take half an hour. One case of each small model is not slow."""
    cases = []
    for row, name in enumerate(MODELS):
        for column, (places, data) in enumerate(itertools.product(PLACES, ["cpu", "cuda:0"])):
            quick = name in SMALL and (5 * row + 1) % (2 * len(PLACES)) == column
            usual = pytest.mark.slow if places in FOR_EVERY_MODEL else pytest.mark.exhaustive
            marks = [] if quick else [usual]
            if not quick and (row + column) % (2 if places in FOR_EVERY_MODEL else 4):
                continue
            cases.append(pytest.param(name, places, data, marks=marks, id=f"{name}, {places}, {data}"))
    return cases


@pytest.mark.slow
@pytest.mark.parametrize(("name", "places", "data"), _cases())
def test_stages_and_replicas_on_gpus(name: str, places: str, data: str) -> None:
    check_steps(name, _plan(name, PLACES[places]), data)


# Schedules, recomputation and options, for stages on two GPUs.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpipe": ({"schedule": "gpipe"}, {}),
    "recomputed stages": ({"recompute": [0, 1]}, {}),
    "recomputed layers": ({"recompute": {0: "full", 1: "full"}}, {}),
    "recomputed attention": ({"selective": [0, 1]}, {}),
    "deferred batch norm": ({}, {"batch_norm": "deferred"}),
    "watched for NaN": ({}, {"watch_nan": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["normed", *(_slow(name) for name in ("masked", "dropping", "bert with dropout"))])
def test_schedules_and_recomputation_on_gpus(name: str, way: str) -> None:
    of_plan, settings = WAYS[way]
    check_steps(name, _plan(name, [["cuda:0"], ["cuda:1", "cuda:2"]], **of_plan), "cuda:2", **settings)


# For two stages: the meshes, the replicas of each, and the devices of the plan in order.
MESHES: dict[str, tuple[list[tuple[int, ...] | None], list[int], list[str]]] = {
    "two GPUs, then one": ([(2,), None], [1, 1], ["cuda:0", "cuda:1", "cuda:2"]),
    "one GPU, then two": ([None, (2,)], [1, 1], ["cuda:2", "cuda:0", "cuda:1"]),
    "CPU, then two GPUs": ([None, (2,)], [1, 1], ["cpu:0", "cuda:0", "cuda:1"]),
    "CPU and GPU, then four GPUs": ([(2,), (2, 2)], [1, 1], ["cpu:0", "cuda:0", *(f"cuda:{i}" for i in range(1, 5))]),
    "two replicas of two GPUs": ([(2,), None], [2, 1], [f"cuda:{i}" for i in range(5)]),
}
ON_ALL_MESHES = ("sequential", "tied", "convolutions", "in place", "pieces", "masked")


def _sharded() -> list[Any]:
    """Small models on all meshes. All others take seconds for every sharded stage: they have one, in turn the first and
    the last."""
    names = list(MODELS)
    return [
        pytest.param(
            name,
            mesh,
            marks=pytest.mark.slow if name in ON_ALL_MESHES else pytest.mark.exhaustive,
            id=f"{name}, {mesh}",
        )
        for (row, name), (column, mesh) in itertools.product(enumerate(names), enumerate(MESHES))
        if name in ON_ALL_MESHES or row % 2 == column
    ]


@pytest.mark.parametrize(("name", "mesh"), _sharded())
def test_shards_on_gpus(name: str, mesh: str) -> None:
    data = ("cpu", "cuda:0")[(list(MODELS).index(name) + list(MESHES).index(mesh)) % 2]
    meshes, replicas, devices = MESHES[mesh]
    plan = staged(example(name).program, MODELS[name].split, meshes, replicas)
    names = dict(zip(plan.used_devices, devices, strict=True))
    stages = tuple(replace(stage, devices=tuple(names[d] for d in stage.devices)) for stage in plan.stages)
    check_steps(name, replace(plan, stages=stages), data, steps=2 if name in ON_ALL_MESHES else 1)


@pytest.mark.slow
def test_stages_first_called_in_inference_mode_train_afterwards() -> None:
    known = example("normed")
    with fake_gpus() as mode:
        model = fake_copy(known.model, mode)
        pm = pipelined(known, model, _plan("normed", [["cpu:0", "cuda:0"], ["cuda:1"]]))
        inputs = on(known.kwargs, "cpu")
        with torch.inference_mode():
            pm(**inputs)
        assert not any(tensor.is_inference() for tensor in [*model.parameters(), *model.buffers()])
        pm.train_step(**inputs, target=torch.empty(BATCH), loss_fn=loss_of)
        check_gradients(model, [])


@pytest.mark.slow
@pytest.mark.parametrize("first", [["cuda:0"], ["cuda:0", "cuda:1"]], ids="+".join)
@pytest.mark.parametrize("target", ["cpu", "cuda:0", "cuda:1", "cuda:7"])
def test_a_model_that_was_moved_after_its_placement_trains_where_it_is(target: str, first: list[str]) -> None:
    """`pm.to(...)` sets `data` and `grad` of every parameter, and replaces buffers. `first`: devices of stage 0."""
    known, place = example("normed"), torch.device(target)
    with fake_gpus() as mode:
        model = fake_copy(known.model, mode)
        pm = pipelined(known, model, _plan("normed", [first, ["cuda:2"]]))
        inputs, y = on(known.kwargs, "cpu"), torch.empty(BATCH)
        for moved in (False, True):
            if moved:
                for parameter in model.parameters():
                    gradient, parameter.grad = parameter.grad, None
                    parameter.data = parameter.data.to(place)
                    parameter.grad = gradient.to(place)
                for module in model.modules():
                    module._buffers.update({n: None if b is None else b.to(place) for n, b in module._buffers.items()})
            pm.train_step(**inputs, target=y, loss_fn=loss_of)
            loss_of(pm(**inputs), y.to("cuda:2")).backward()
            for name, p in model.named_parameters():
                assert p.grad is not None
                assert p.grad.device == p.device, name
                assert p.device == place or not moved
        assert {b.device for b in model.buffers()} == {place}


@pytest.mark.slow
def test_gradients_from_before_the_placement_move_with_their_parameters() -> None:
    known = example("sequential")
    with fake_gpus() as mode:
        alone = nn.Parameter(torch.empty(3))
        alone.grad = torch.empty(3)
        move(alone, torch.device("cuda:1"))
        assert alone.grad is not None
        assert alone.grad.device == alone.device == torch.device("cuda:1")
        model = fake_copy(known.model, mode)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        pm = pipelined(known, model, _plan("sequential", [["cuda:0"], ["cuda:1"]]))
        pm.train_step(**on(known.kwargs, "cpu"), target=torch.empty(BATCH), loss_fn=loss_of)
        assert {p.grad.device for p in model.parameters() if p.grad is not None} == {torch.device(g) for g in GPUS}
        check_gradients(model, [])


@pytest.mark.slow
def test_values_of_a_model_that_is_spread_over_gpus_are_studied_on_one_device() -> None:
    program = example("masked").program
    with fake_gpus() as mode:
        module = fake_copy(program.graph_module, mode)
        for i, p in enumerate(module.parameters()):
            p.data = p.data.to(GPUS[i % 2])
        for where in ("cpu", "cuda:0"):
            values = observe(module, on(list(example("masked").leaves), where), program.device)
            tensors = [x for x in tree_leaves(list(values.values())) if isinstance(x, torch.Tensor)]
            assert {x.device for x in tensors} == {torch.device("cpu")}


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_every_capture_takes_the_model_to_be_where_it_was_before_its_placement(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = mlp(4, 2), torch.randn(2, 4)
    found = examine(model, (x,), {}, set(), batch_dim=None, verify=True)
    asked = []

    def recorded(*_: Any, device: torch.device | None, **__: Any) -> Any:
        asked.append(device)
        return found

    monkeypatch.setattr(captures, "examine", recorded)
    known = Captures(model, (), RunSettings(), OneTimeWarnings())
    known.find(CallArguments((x,), {}))
    model[0].to("meta")  # as if placed on several devices
    model.train(mode == "train")
    known.find(CallArguments((x,), {}))
    model.to("meta")  # or on one other
    known.find(CallArguments((x,), {}))
    assert asked == [None, torch.device("cpu"), torch.device("cpu")]
