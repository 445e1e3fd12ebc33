"""Whole models with sharded stages: chosen strategies, any strategies, pipelines with some sharded stages."""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import CASES, Case, assert_same_gradients, assert_same_outputs, gradients, loss_of
from shardings import at_random, one_stage, pipelined, staged
from torch import nn

from autopar import PipelinedModule, Plan
from autopar.analysis.operators import on_device, operator_keys
from autopar.capture.program import Program, capture
from autopar.planner.intra_op.sharding_task import ShardingTask
from autopar.planner.intra_op.solution import whole_graph_sharding
from autopar.planner.intra_op.strategy_search import Sharding, ShardingProblem
from autopar.sharding.mesh import make_mesh
from cost_models import Cluster

pytestmark = pytest.mark.usefixtures("shared_exports")

META = torch.device("meta")
BY_NAME = {case.name: case for case in CASES}


@functools.cache
def case_of(name: str) -> tuple[Case, nn.Module, dict[str, Any], Program]:
    """A family, its model, 24 samples and what is captured of it, which all tests share."""
    case = BY_NAME[name]
    model, inputs = case.model(), case.inputs(24)
    return case, model, inputs, capture(model, (), inputs)


def by_devices(now: dict[str, list[tuple[int, ...]]], later: dict[str, list[tuple[int, ...]]]) -> list[Any]:
    """(name, mesh) of quick tests and of slow ones."""
    found: list[Any] = [(name, mesh) for name, meshes in now.items() for mesh in meshes]
    slow = [(name, mesh) for name, meshes in later.items() for mesh in meshes]
    return found + [pytest.param(name, mesh, marks=pytest.mark.slow) for name, mesh in slow]


ONLY_BYTES = 1e3  # s per byte on a device


def chosen(
    program: Program, inputs: dict[str, Any], rows: int, mesh: tuple[int, ...]
) -> tuple[ShardingProblem, Sharding]:
    """The fastest strategies for micro-batches of `rows` samples."""
    module = on_device(copy.deepcopy(program.graph_module), program.device, META).to(META)
    leaves = [x[:rows].to(META) if isinstance(x, torch.Tensor) else x for x in program.bind((), inputs)[0]]
    cluster = Cluster.preset(f"{math.prod(mesh)}xH100")
    task, grid = ShardingTask(module, leaves, rows, cluster), make_mesh(mesh, [d.name for d in cluster.devices])
    problem = ShardingProblem(task, grid)
    return problem, problem.solve(math.inf, {})


def assert_same_step(model: nn.Module, pm: PipelinedModule, inputs: dict[str, Any]) -> None:
    target = torch.randn(24)

    def step(module: nn.Module) -> tuple[Any, dict[str, Any]]:
        output = module(**inputs)
        loss_of(output, target).backward()
        return output, gradients(model)

    (expected, wanted), (output, found) = step(model), step(pm)
    assert_same_outputs(output, expected)
    assert_same_gradients(found, wanted)


# In both together, every model is on every number of devices.
CHOSEN = by_devices(
    {"gpt2": [(2,)], "bert": [(3,)], "resnet": [(2, 2)], "t5": [(2,)], "mixtral": [(2, 2)]},
    {
        "gpt2": [(3,), (2, 2), (4,)],
        "bert": [(2,), (2, 2)],
        "resnet": [(2,), (3,)],
        "t5": [(3,), (2, 2)],
        "mixtral": [(2,), (3,), (4,)],
    },
)
ANY = by_devices(
    {
        "gpt2": [(3,), (2, 2)],
        "bert": [(2,), (4,)],
        "resnet": [(2,), (3,)],
        "t5": [(3,), (2, 2)],
        "mixtral": [(2,), (3,)],
        "gpt2 with labels": [(2,)],
        "llama": [(2,)],
        "u-net": [(2, 2)],
        "lstm": [(2,)],
        "vit": [(3,)],
    },
    {"gpt2": [(2,), (4,)], "bert": [(2, 2)], "resnet": [(2, 2)], "t5": [(2,)], "mixtral": [(2, 2), (4,)]},
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), CHOSEN, ids=str)
def test_chosen_strategies_give_the_originals_outputs_and_gradients(name: str, mesh: tuple[int, ...]) -> None:
    _, model, inputs, program = case_of(name)
    problem, _ = chosen(program, inputs, 12, mesh)
    found = problem.priced(ONLY_BYTES)  # so small models are fastest whole
    sharding = whole_graph_sharding(problem, found, {node.name: key for node, key in operator_keys(program).items()})
    assert sharding.strategies
    plan = Plan.from_json(one_stage(program, sharding).to_json())
    assert_same_step(model, pipelined(model, plan), inputs)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), ANY, ids=str)
def test_any_strategies_give_the_originals_outputs_and_gradients(name: str, mesh: tuple[int, ...]) -> None:
    _, model, inputs, program = case_of(name)
    plan = one_stage(program, at_random(program, mesh, 5))
    assert_same_step(model, pipelined(model, plan), inputs)


@pytest.mark.parametrize("name", ["resnet", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "t5"))])
@pytest.mark.parametrize(
    ("meshes", "replicas", "schedule", "recompute"),
    [
        ([(2,), None], [1, 1], "1f1b", False),
        ([None, (2,)], [2, 1], "1f1b", True),
        ([(2,), (3,)], [1, 1], "zb-h1", False),
        ([(2,), (2, 2)], [2, 1], "gpipe", True),
    ],
    ids=str,
)
def test_stages_of_a_pipeline_may_be_sharded_or_not(
    name: str, meshes: list[Any], replicas: list[int], schedule: str, recompute: bool
) -> None:
    case, model, inputs, program = case_of(name)
    plan = staged(program, dict(case.two), meshes, replicas, schedule=schedule)
    plan = replace(plan, stages=tuple(replace(stage, recompute=recompute) for stage in plan.stages))
    assert_same_step(model, pipelined(model, plan), inputs)


def test_interleaved_stages_may_be_sharded() -> None:
    _, model, inputs, program = case_of("sequential")
    split = {"0": 0, "2": 1, "4": 2, "6": 3}
    plan = staged(program, split, [(2,)] * 4, [1] * 4)
    stages = [replace(stage, devices=plan.stages[s % 2].devices) for s, stage in enumerate(plan.stages)]
    plan = replace(plan, stages=tuple(stages), schedule="interleaved-1f1b")
    assert_same_step(model, pipelined(model, plan), inputs)


@pytest.mark.slow
def test_a_trained_step_with_the_loss_inside_is_the_originals() -> None:
    case, shared, inputs, program = case_of("gpt2")
    model, original = copy.deepcopy(shared), copy.deepcopy(shared)
    plan = staged(program, dict(case.two), [(2,), (2,)], [1, 1])
    target = torch.randn(24)
    pm = pipelined(model, plan)
    losses: list[list[float]] = [[], []]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, original)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses[0].append(float(pm.train_step(**inputs, target=target, loss_fn=loss_of)))
        loss = loss_of(original(**inputs), target)
        loss.backward()
        losses[1].append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]
