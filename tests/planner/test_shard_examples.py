"""The introductory examples of MindSpore's operator-level parallelism (`shard`, `Layout`), planned and carried out."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import assert_same_gradients, assert_same_outputs, gpt2, gradients
from torch import nn
from torch.nn import functional

import autopar
from autopar import Layout, PipelinedModule
from autopar.sharding.stage_sharding import StageSharding

COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "take_part")


def transfers(pm: PipelinedModule) -> list[tuple[str, dict[str, Any]]]:
    """The forward's, in order; not those of the last operator, whose result the caller gets whole."""
    (stage,) = pm.stages
    calls = [n for n in stage.graph.nodes if n.op == "call_function"]
    returned = next(n for n in reversed(calls) if n.name.endswith("__joined")).name.removesuffix("__joined")
    names = [(getattr(n.target, "__name__", ""), dict(n.kwargs)) for n in calls if n.meta.get("tensor") != returned]
    return [one for one in names if one[0] in COLLECTIVES]


def sharded(
    model: nn.Module, n_devices: int, *args: torch.Tensor, **options: Any
) -> tuple[PipelinedModule, StageSharding]:
    """The model on CPU workers, whose outputs and gradients are those of the model alone."""
    mine = [x.clone().requires_grad_() for x in args]
    expected = model(*mine)
    expected.square().sum().backward()
    wanted = {**gradients(model), **{f"input {i}": x.grad for i, x in enumerate(mine)}}
    pm = autopar.parallelize(model, ["cpu"] * n_devices, example_args=args, **options)
    again = [x.clone().requires_grad_() for x in args]
    output = pm(*again)
    output.square().sum().backward()
    assert_same_outputs(output, expected, 1e-5)
    assert_same_gradients({**gradients(model), **{f"input {i}": x.grad for i, x in enumerate(again)}}, wanted, 1e-5)
    assert pm.plan is not None
    (stage,) = pm.plan.stages
    assert stage.sharding is not None
    assert len(stage.devices) == n_devices
    return pm, stage.sharding


class Products(nn.Module):
    """Z = (X W) V"""

    def __init__(self, first: Callable[..., Any], second: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.w, self.v = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, self.w), self.v)


def test_two_products_split_by_rows_and_then_by_columns_need_one_all_gather_between() -> None:
    row = Layout((4,), ("devices",))
    first = autopar.shard(torch.matmul, in_strategy=(row("devices", "None"), row("None", "None")))
    second = autopar.shard(torch.matmul, in_strategy=((1, 1), (1, 4)))
    pm, found = sharded(Products(first, second), 4, torch.randn(8, 8))
    assert found.strategy_of["/matmul#0"] == (((0,), (-1,)), ((0,),))
    assert found.strategy_of["/matmul#1"] == (((-1,), (1,)), ((1,),))
    gathers = [(name, kwargs["dim"]) for name, kwargs in transfers(pm) if name != "take_part"]
    assert gathers == [("all_gather", 0)]


def test_without_a_layout_the_same_is_gathered_axis_by_axis() -> None:
    """Four devices are a mesh of 2 x 2: one redistribution in two steps."""
    first = autopar.shard(torch.matmul, in_strategy=((4, 1), (1, 1)))
    second = autopar.shard(torch.matmul, in_strategy=((1, 1), (1, 4)))
    pm, found = sharded(Products(first, second), 4, torch.randn(8, 8))
    assert found.mesh == (2, 2)
    gathers = [(name, kwargs["dim"]) for name, kwargs in transfers(pm) if name != "take_part"]
    assert gathers == [("all_gather", 0)] * 2


class ProductThenRelu(nn.Module):
    def __init__(self, in_matmul: Any, in_relu: Any) -> None:
        super().__init__()
        self.matmul = autopar.shard(torch.matmul, in_strategy=in_matmul)
        self.relu = autopar.shard(torch.relu, in_strategy=in_relu)
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.matmul(x, self.w))


def test_a_split_contraction_is_reduced_before_what_reads_it() -> None:
    pm, found = sharded(ProductThenRelu(((1, 2), (2, 1)), ((2, 1),)), 2, torch.randn(8, 8))
    assert found.strategy_of["/matmul#0"] == (((1,), (0,)), ((-2,),))
    names = [name for name, _ in transfers(pm)]
    assert names in (["reduce_scatter"], ["all_reduce", "take_part"])


class Relu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8))
        self.relu = autopar.shard(torch.relu, in_strategy=((2, 1),))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(x * self.w)


def test_devices_that_a_strategy_leaves_over_repeat_the_work() -> None:
    pm, found = sharded(Relu(), 4, torch.randn(8, 8))
    (layouts, _) = found.strategy_of["/relu#0"]
    assert sorted(layouts[0]) == [-1, 0]
    assert found.repeated_time
    assert any("2 of 4 devices do different parts" in note for note in pm.plan.notes)


MESH = Layout((2, 2, 2), ("dp", "sp", "mp"))


class Product(nn.Module):
    def __init__(self, matmul: Callable[..., Any]) -> None:
        super().__init__()
        self.matmul, self.w = matmul, nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.matmul(x, self.w)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "slices"),
    [
        ((MESH("dp", "mp"), MESH("mp", "sp")), ((2, 2), (2, 2))),
        ((MESH(("dp", "sp"), "mp"), MESH("mp", "None")), ((4, 2), (2, 1))),
        ((MESH(("dp", "mp", "sp"), "None"), MESH("None", "None")), ((8, 1), (1, 1))),
        ((MESH("None", ("sp", "dp")), MESH(("sp", "dp"), "mp")), ((1, 4), (4, 2))),
    ],
)
def test_layouts_by_names_are_carried_out_as_slices_are(named: tuple[Any, Any], slices: Any) -> None:
    for asked in (named, slices):
        matmul = autopar.shard(torch.matmul, in_strategy=asked)
        _, found = sharded(Product(matmul), 8, torch.randn(8, 8))
        layouts, _ = found.strategy_of["/matmul#0"]
        for layout, parts in zip(layouts, slices, strict=True):
            assert [2 ** sum(code == d for code in layout) for d in range(2)] == list(parts)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("n_microbatches", [1, 2])
def test_a_model_with_a_few_hints_trains_as_without(n_microbatches: int) -> None:
    """Data and model parallel by names; the parameters of one layer are stored in parts."""
    torch.manual_seed(0)
    mesh = Layout((2, 2), ("dp", "mp"))
    model = nn.Sequential(Block(), Block(), nn.Linear(8, 4))
    for block in model[:2]:
        autopar.shard(block, in_strategy=(mesh("dp", "None"),), out_strategy=(mesh("dp", "None"),))
        autopar.shard(block.up, in_strategy=((2, 1),), parameter_plan={"weight": mesh("mp", "None")})
    alone = without_hints(model)
    pm, found = sharded(model, 4, torch.randn(16, 8), n_microbatches=n_microbatches)
    assert found.mesh == (2, 2)
    assert found.axes == ("dp", "mp")
    assert dict(found.texts[1])["0.up.weight"].startswith("RS0")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, pm)]
    for _ in range(3):
        x = torch.randn(16, 8)
        for module, optimizer in zip((alone, pm), optimizers, strict=True):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
    for (name, a), b in zip(alone.named_parameters(), pm.parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


def without_hints(model: nn.Module) -> nn.Module:
    alone = copy.deepcopy(model)
    autopar.clear_hints(alone)
    return alone


@pytest.mark.slow
def test_every_hint_is_planned_for_machines_that_are_not_here() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(autopar.shard(Block(), in_strategy=((4, 1),)) for _ in range(3)))
        x = torch.empty(16, 8)
    plan = autopar.plan(model, autopar.Cluster.preset("4xH100"), example_args=(x,))
    (stage,) = plan.stages
    assert stage.sharding is not None
    assert Counter(key.split("/")[1] for key, _ in stage.sharding.strategies)["alias#0"] == 3
    assert autopar.Plan.from_json(plan.to_json()) == plan


@pytest.mark.slow
def test_a_transformer_with_hints_on_its_blocks_computes_the_same() -> None:
    mesh = Layout((2, 2), ("dp", "mp"))
    model = gpt2().eval()
    for block in model.transformer.h:
        autopar.shard(block, in_strategy=(mesh("dp", None, None), None, None), out_strategy=((2, 1, 1),))
        autopar.shard(block.mlp.act, in_strategy=(mesh("dp", None, "mp"),))
    ids = torch.randint(0, 50, (8, 12))
    wanted = model(input_ids=ids, use_cache=False).logits
    pm = autopar.parallelize(model, ["cpu"] * 4, example_kwargs={"input_ids": ids, "use_cache": False})
    torch.testing.assert_close(pm(input_ids=ids, use_cache=False).logits, wanted, rtol=1e-4, atol=1e-5)
    assert pm.plan is not None
    assert pm.plan.stages[0].sharding is not None
    cut = dict(pm.plan.stages[0].sharding.texts[0])
    borders = [text for key, text in cut.items() if "/alias#" in key]
    assert Counter(borders)["S0R -> S0R"] == 2 * len(model.transformer.h)


@pytest.mark.slow
def test_plans_that_are_compared_follow_the_hints() -> None:
    model = nn.Sequential(nn.Linear(8, 8), autopar.shard(nn.Linear(8, 8), ((2, 1),)))
    found = autopar.compare(model, ["cpu"] * 2, example_args=(torch.randn(8, 8),), repeats=1, cache=False)
    (stage,) = found["auto"].plan.stages
    assert stage.sharding is not None
    assert dict(stage.sharding.texts[0])["1/linear#0"].startswith("S0 ")


def test_a_module_with_hooks_of_the_users_is_sharded_as_asked() -> None:
    seen = []
    layer = autopar.shard(nn.Linear(8, 8), in_strategy=((2, 1),))
    layer.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    _, found = sharded(nn.Sequential(nn.Linear(8, 8), layer), 2, torch.randn(8, 8))
    assert dict(found.texts[0])["1/linear#0"].startswith("S0 ")
    assert seen == [(8, 8)] * 2
