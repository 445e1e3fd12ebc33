"""Plans with sharded stages, and small models of all that sharding has to get right."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from models import assert_same_gradients, assert_same_outputs, gradients, sum_of_squares
from torch import fx, nn
from torch.nn import functional

import autopar
from autopar import PipelinedModule, Plan
from autopar.analysis.operators import compute_nodes, operator_keys
from autopar.analysis.rules.table import bind
from autopar.capture.program import Program
from autopar.plan.stage import Stage
from autopar.sharding.layouts import PARTIAL, layouts
from autopar.sharding.stage_sharding import StageSharding, Stored
from autopar.sharding.strategies import Strategy, strategies
from cost_models.graphs import get_attribute

NAMES = ("first", "second")


def is_sum(layout: Sequence[int], value: Any) -> bool:
    return PARTIAL in layout and not (isinstance(value, torch.Tensor) and value.is_floating_point())


def possible(node: fx.Node, mesh: Sequence[int]) -> list[Strategy]:
    """All strategies of an operator; the batch size counts as divisible."""
    if any(n.meta.get("val") is None for n in (node, *node.all_input_nodes) if n.op != "get_attr"):
        return []
    rule = bind(node)
    results = node.meta["val"] if isinstance(node.meta.get("val"), (list, tuple)) else [node.meta.get("val")]
    if rule is None or len(rule.outputs) != len(results):
        return []
    even = {i: s if isinstance(s, int) else math.prod(mesh) for i, s in rule.sizes.items()}
    operands = [o.meta.get("val") if isinstance(o, fx.Node) else None for o in rule.operands]
    return [
        one
        for one in strategies(replace(rule, sizes=even), mesh)
        if not any(map(is_sum, one.inputs, operands)) and not any(map(is_sum, one.outputs, results))
    ]


def at_random(
    program: Program, mesh: tuple[int, ...], seed: int, nodes: Sequence[fx.Node] | None = None
) -> StageSharding:
    """Any strategy for every operator, any layout for every parameter."""
    chance, keys = random.Random(seed), operator_keys(program)
    chosen = []
    for node in compute_nodes(program.graph) if nodes is None else nodes:
        if found := possible(node, mesh):
            chosen.append((keys[node], chance.choice(found).placements))
    stored = []
    for name in dict.fromkeys(str(n.target) for n in program.graph.nodes if n.op == "get_attr"):
        tensor = get_attribute(program.graph_module, name)
        if isinstance(tensor, torch.Tensor):
            layout = chance.choice(layouts(tensor.shape, mesh, partial=False))
            stored.append((name, Stored(layout, layout)))
    return StageSharding(mesh, NAMES[: len(mesh)], tuple(chosen), tuple(stored))


def one_stage(
    program: Program, sharding: StageSharding, n_microbatches: int = 2, replicas: int = 1, **more: Any
) -> Plan:
    """A plan with everything in one stage."""
    names = tuple(f"cpu:{i}" for i in range(sharding.size * replicas))
    stage = Stage(names, tuple(operator_keys(program).values()), sharding=sharding, **more)
    return Plan((stage,), n_microbatches)


def staged(
    program: Program,
    split: dict[str, int],
    meshes: Sequence[tuple[int, ...] | None],
    replicas: Sequence[int],
    **more: Any,
) -> Plan:
    """A pipeline whose stage s is sharded over meshes[s], if there is one, as often as replicas[s] says."""
    keys, stage_of = operator_keys(program), Plan.from_split(split, n_microbatches=2).assign(program)
    stages, used = [], 0
    for s, (mesh, times) in enumerate(zip(meshes, replicas, strict=True)):
        nodes = [node for node, stage in stage_of.items() if stage == s]
        sharding: StageSharding | None = at_random(program, mesh, s, nodes) if mesh is not None else None
        size = times * math.prod(mesh or (1,))
        names = tuple(f"cpu:{i}" for i in range(used, used + size))
        used += size
        stages.append(Stage(names, tuple(keys[node] for node in nodes), sharding=sharding))
    return replace(Plan(tuple(stages), 2), **more)


def pipelined(model: nn.Module, plan: Plan, **options: Any) -> PipelinedModule:
    return autopar.parallelize(model, ["cpu"] * len(plan.used_devices), plan=plan, **options)


def assert_same_step(model: nn.Module, pm: PipelinedModule, *args: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Outputs, gradients of parameters and gradients of inputs."""

    def step(module: nn.Module) -> tuple[Any, dict[str, Any]]:
        mine = [x.clone().requires_grad_() if x.is_floating_point() else x for x in args]
        output = module(*mine)
        sum_of_squares(output).backward()
        found = gradients(model)
        return output, {**found, **{f"input {i}": x.grad for i, x in enumerate(mine)}}

    expected, wanted = step(model)
    output, found = step(pm)
    assert_same_outputs(output, expected, tolerance)
    assert_same_gradients(found, wanted, tolerance)


class Mlp(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(24, 72), nn.Linear(24, 24), nn.LayerNorm(24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (y.view(batch, length, 12, -1).transpose(1, 2) for y in self.qkv(self.norm(x)).split(width, 2))
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        scores = (q @ k.transpose(-2, -1)).masked_fill(~mask, -1e9)
        y = torch.softmax(scores, -1) @ v
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 12, 3)
        self.norm1, self.norm2 = nn.BatchNorm2d(12), nn.BatchNorm2d(12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norm1(self.conv1(x)), inplace=True)
        y = functional.max_pool2d(self.norm2(self.conv2(y)).relu_(), 2)
        return self.head(y.mean((2, 3)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(24, 12), nn.LayerNorm(12), nn.Linear(12, 24, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x) + self.embed(x.flip(1))))


class Pieces(nn.Module):
    """Several results, lists of operands, sizes among the arguments, an average."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> Any:
        u, v = self.a(x).chunk(2, -1)
        first, *rest = torch.cat([v, u.sigmoid()], -1).unbind(1)
        y = self.b(torch.stack([first, *rest], 1)) + torch.zeros(x.shape[0], 1, 12) + x.new_ones(12)
        many = y.unsqueeze(1).expand(-1, 4, -1, -1).reshape(x.shape[0], -1, 12)
        return {"y": y.square().mean(-1), "many": many * torch.arange(12), "largest": y.max(-1), "view": y.view_as(x)}


class InPlace(nn.Module):
    """Writes that others see, and writes that nobody sees."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x).mul_(2).relu_()
        z = self.b(y)
        z[:, 0] = 1.0  # seen in z
        w = self.c(z)
        head = w[:, :3]
        w.add_(1)  # seen in head
        return (w.tanh() + y).sum(1, keepdim=True) * head.mean((1, 2), keepdim=True)
