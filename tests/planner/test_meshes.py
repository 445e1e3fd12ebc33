"""Plans whose stages are meshes: chosen together with stages, replicas and micro-batches, no slower than without one of
these."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import CASES, GroupedLlama, assert_same_gradients, assert_same_outputs, gradients, sum_of_squares
from torch import nn

import autopar
from autopar import Cluster, InfeasibleError, InputError, Plan
from autopar.analysis.example import example_ahead
from autopar.costs.estimated import estimate_costs
from autopar.planner.arrangement import Arrangement, Conditions
from autopar.planner.inter_op.candidates import Searching
from autopar.planner.inter_op.meshes import Meshes, mesh_program_of
from autopar.planner.predict import as_plan
from autopar.planner.priced_step import predicted_step
from autopar.planner.search import make_plan
from autopar.planner.search_options import SearchOptions

pytestmark = pytest.mark.usefixtures("shared_exports")

META = torch.device("meta")


def planned(cluster: Cluster, *, model: nn.Module | None = None, samples: int = 8, **options: Any) -> Plan:
    with META:
        model = model or GroupedLlama(2, 4096, 16384).bfloat16().train()
        tokens = torch.empty(samples, 1024, dtype=torch.long)
    return autopar.plan(model, cluster, example_args=(tokens,), target=tokens, loss_fn=lambda loss, _: loss, **options)


def step_time(plan: Plan) -> float:
    assert plan.predicted_step_time is not None
    return plan.predicted_step_time


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    with META:
        return GroupedLlama(2, 4096, 16384).bfloat16().train()


@pytest.mark.exhaustive
def test_a_plan_beats_pure_data_tensor_and_pipeline_parallelism(llama: nn.Module) -> None:
    cluster = Cluster.preset("4xH100")
    free = planned(cluster, model=llama)
    for options in (
        {"max_shards": 1},  # replicas and stages
        {"max_shards": 1, "max_replicas": 1},  # stages alone
        {"max_replicas": 1},  # meshes and stages
        {"max_shards": 2},
        {"n_microbatches": 1},  # samples or tensors alone: one stage at a time works
    ):
        assert step_time(free) <= step_time(planned(cluster, model=llama, **options)) * (1 + 1e-9), options


@pytest.mark.slow
def test_what_fits_no_device_is_split_over_meshes() -> None:
    """The weights of one operator are more than a device holds with their gradients and state."""
    cluster = Cluster.preset("8xH100")
    call = {"example_args": (torch.empty(16, 1 << 17, device=META, dtype=torch.bfloat16),), "target": torch.zeros(16)}
    with META:
        model = nn.Linear(1 << 17, 1 << 17, bias=False).bfloat16()
    with pytest.raises(InfeasibleError, match="no plan fits the memory"):
        autopar.plan(model, cluster, **call, loss_fn=lambda y, _: y.square().mean(), max_shards=1)
    found = autopar.plan(model, cluster, **call, loss_fn=lambda y, _: y.square().mean())
    assert [stage.shards > 1 for stage in found.stages] == [True]
    assert (found.stages[0].peak_memory or 0) <= 80e9


@pytest.mark.parametrize(
    ("node", "nodes", "samples", "widths"),
    [
        ("4xT4", 4, 12, [2, 3, 4, 8, 12, 16]),
        ("4xT4", 4, 8, [2, 4, 8, 16]),  # neither samples nor features come in three parts
        ("6xT4", 1, 12, [2, 3, 4, 6]),
        ("6xT4", 2, 12, [2, 3, 4, 6, 12]),
    ],
)
def test_meshes_have_any_number_of_nodes_or_devices_that_the_model_can_be_cut_into(
    node: str, nodes: int, samples: int, widths: list[int]
) -> None:
    with META:
        example = example_ahead(nn.Linear(1024, 1024), (torch.empty(samples, 1024),), {}, batch_dim=None)
    costs = estimate_costs(example, Cluster.preset(node, nodes))
    meshes = Meshes(costs, mesh_program_of(example, "adamw"))
    assert meshes.widths() == widths
    assert all(meshes.configurations(width, 1) for width in widths)


@pytest.mark.slow
def test_meshes_are_reported_with_their_devices_collectives_and_work(llama: nn.Module) -> None:
    cluster = Cluster.preset("8xH100")
    plan = planned(cluster, model=llama, max_replicas=1, n_microbatches=2, memory_limit=20e9)
    assert set(plan.used_devices) <= {device.name for device in cluster.devices}
    assert len(plan.devices) == 8
    sharded = [stage for stage in plan.stages if stage.sharding is not None]
    assert sharded
    for stage in sharded:
        sharding = stage.sharding
        assert stage.replicas * stage.shards == len(stage.devices)
        assert {key for key, _ in sharding.strategies} <= set(stage.operators)
        assert {exchange.operator for exchange in sharding.exchanges} <= set(stage.operators)
        seconds = {once: sum(e.seconds for e in sharding.exchanges if e.once is once) for once in (False, True)}
        assert sharding.collective_time == pytest.approx(seconds[False])
        assert stage.sync_time == pytest.approx(seconds[True])
        assert sharding.repeated_time is not None
        assert sharding.repeated_time <= (stage.forward_time or 0) + (stage.backward_time or 0)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.slow
def test_the_same_inputs_give_the_same_plan(llama: nn.Module) -> None:
    cluster = Cluster.preset("2xH100")
    assert planned(cluster, model=llama) == planned(cluster, model=llama)


@pytest.mark.slow
def test_workers_of_cpus_are_no_meshes(llama: nn.Module) -> None:
    """They do their shards one after another."""
    plan = planned(Cluster.preset("4xcpu"), model=llama)
    assert all(stage.sharding is None for stage in plan.stages)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shards"), [("gpt2", 2), ("gpt2", 4), ("bert", 2), ("t5", 2)])
def test_a_plan_of_meshes_runs_and_has_the_original_gradients(name: str, shards: int) -> None:
    """Made ahead for GPUs, with nothing but meshes to choose from and little memory, and followed by CPU workers."""
    case = next(case for case in CASES if case.name == name)
    model, call = case.model().eval(), case.inputs(4)
    cluster = Cluster.preset("4xH100")
    example = example_ahead(model, (), call, batch_dim=None)
    costs = estimate_costs(example, cluster)

    def of_meshes(memory_limit: float | None) -> Plan:
        meshes = Meshes(costs, mesh_program_of(example, "adamw"), memory_limit).of(shards, [2])
        assert meshes is not None
        return make_plan(meshes, SearchOptions(n_microbatches=2, memory_limit=memory_limit))

    ahead = of_meshes(0.7 * max(stage.peak_memory or 0 for stage in of_meshes(None).stages))
    assert all(stage.shards == shards for stage in ahead.stages)
    assert_runs_like_the_model(ahead, model, call)


@pytest.mark.slow
@pytest.mark.parametrize("widths", [(2, 1), (1, 2), (1, 2, 1)])
def test_stages_of_different_widths_run_and_have_the_original_gradients(widths: tuple[int, ...]) -> None:
    case = next(case for case in CASES if case.name == "gpt2")
    model, call = case.model().eval(), case.inputs(4)
    example = example_ahead(model, (), call, batch_dim=None)
    alone = estimate_costs(example, Cluster.preset("4xH100"))
    configuration = Meshes(alone, mesh_program_of(example, "adamw"), memory_limit=1e5).configurations(2, 2)[-1]
    costs = replace(alone, configurations=(configuration,))
    atoms = Searching(costs, SearchOptions(n_microbatches=2)).atoms
    ends = [len(atoms.nodes) * i // len(widths) for i in range(len(widths) + 1)]
    first = [sum(widths[:i]) for i in range(len(widths) + 1)]
    names = [device.name for device in costs.devices]
    arrangement = Arrangement(
        tuple(tuple(range(a, b)) for a, b in itertools.pairwise(ends)),
        tuple((costs.group(tuple(names[a:b])),) for a, b in itertools.pairwise(first)),
        2,
        "1f1b",
        (False,) * len(widths),
        tuple(configuration.name if width == 2 else configuration.kind for width in widths),
    )
    step = predicted_step(costs, atoms, arrangement, Conditions())
    plan = as_plan(costs, atoms, arrangement, step, step.timeline())
    assert tuple(stage.shards for stage in plan.stages) == widths
    assert_runs_like_the_model(plan, model, call)


def assert_runs_like_the_model(ahead: Plan, model: nn.Module, call: dict[str, Any]) -> None:
    """On four CPU workers."""
    names = dict(zip(ahead.devices, [f"cpu:{i}" for i in range(4)], strict=True))
    stages = tuple(replace(s, devices=tuple(names[d] for d in s.devices)) for s in ahead.stages)
    plan = replace(ahead, stages=stages, devices=tuple(names.values()), device_kinds=())
    shardings = [stage.sharding for stage in plan.stages if stage.sharding is not None]
    assert any(one.strategies or one.parameters for one in shardings)
    whole = copy.deepcopy(model)
    pm = autopar.parallelize(model, ["cpu"] * 4, plan=Plan.from_json(plan.to_json()))
    mine, original = pm(**call), whole(**call)
    assert_same_outputs(mine, original)
    sum_of_squares(mine).backward()
    sum_of_squares(original).backward()
    assert_same_gradients(gradients(model), gradients(whole))
    pm.close()


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "2"])
def test_a_wrong_number_of_shards_is_refused(wrong: Any) -> None:
    with pytest.raises(InputError, match="max_shards must be a whole number of at least 1"):
        planned(Cluster.preset("2xH100"), model=nn.Linear(2, 2), max_shards=wrong)
