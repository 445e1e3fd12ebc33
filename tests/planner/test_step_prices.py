"""Launches, the optimizer's step and precision in the prices of plans for clusters: the same in objective and
simulator, from search, file and hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from models import CASES
from test_prices import BATCH, SAME, line_of, one_stage, two_stages
from torch import nn

import autopar
from autopar import Cluster, InputError, Plan
from autopar.analysis.example import example_ahead
from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import HostTimes
from autopar.costs.estimated import estimate_costs
from autopar.costs.operator_cost import Weight
from autopar.costs.python_overhead import ACTION_OVERHEAD
from autopar.costs.recipe import USUAL, Recipe
from autopar.planner.arrangement import Conditions
from autopar.planner.inter_op.atom_times import atom_times
from autopar.planner.inter_op.candidates import Searching
from autopar.planner.inter_op.mesh_configuration import MeshConfiguration
from autopar.planner.inter_op.meshes import Meshes, mesh_program_of
from autopar.planner.inter_op.stage_costs import Costs
from autopar.planner.inter_op.stage_tables import Mode
from autopar.planner.intra_op.sharding_task import ShardingTask
from autopar.planner.intra_op.strategy_search import ShardingProblem
from autopar.planner.predict import as_plan
from autopar.planner.predicted_step import step_of_plan
from autopar.planner.priced_step import predicted_step
from autopar.planner.search_options import SearchOptions
from autopar.sharding.layouts import PARTIAL, REPLICATE, parts
from autopar.sharding.mesh import make_mesh
from cost_models import PRECISIONS, efficiency_of, host_costs, optimizer_step_seconds, rates_of
from cost_models.kernels.kernel import Kernel
from cost_models.kernels.launches import FREE_HOST, MODES
from cost_models.kernels.roofline import kernel_seconds

ADAM = Conditions(optimizer="adam", loss_inside=True)
OPTIONS = SearchOptions(loss_inside=True, optimizer="adam")
SECONDS = st.floats(1e-4, 1e-1)
META = torch.device("meta")


def launched(costs: CostGraph, forward: list[float], start: float = 0.0, recipe: Recipe = USUAL) -> CostGraph:
    """With the given seconds of the host for each operator, and twice that in the backward."""
    launches = np.array(forward)
    host = HostTimes(launches, 2 * launches, (0.0, 0.0), start)
    return replace(costs, tables=tuple(replace(table, host=host) for table in costs.tables), recipe=recipe)


@given(
    operators=st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=5),
    start=st.sampled_from([0.0, 1e-2]),
    mbytes=st.floats(1e-3, 1e3),
    replicas=st.integers(1, 8),
    m=st.sampled_from([1, 2, 4, 8, 16]),
    schedule=st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    recompute=st.booleans(),
    how=st.sampled_from([None, "fused", "for-loop"]),
)
@example(operators=[(1e-3, 1e-1)], start=0.0, mbytes=1e3, replicas=1, m=4, schedule="zb-h1", recompute=True, how=None)
@example(operators=[(0.01, 0.01)], start=0.0, mbytes=1.0, replicas=1, m=1, schedule="gpipe", recompute=True, how=None)
def test_the_objective_of_a_stage_is_the_simulated_step_with_launches_and_the_optimizer(
    operators: list[tuple[float, float]],
    start: float,
    mbytes: float,
    replicas: int,
    m: int,
    schedule: str,
    recompute: bool,
    how: Any,
) -> None:
    replicas = min(replicas, m)
    kernels, launches = map(list, zip(*operators, strict=True))
    costs = line_of(kernels, [int(mbytes * 2**20)] * len(kernels), Cluster.preset("4xH100", 2))
    costs = launched(costs, launches, start, Recipe(optimizer_step=how))
    searching = Searching(costs, OPTIONS)
    problem = searching.problem(m, schedule, (replicas,))
    arrangement = replace(one_stage(searching, replicas, m, schedule), recompute=(recompute,))
    step = predicted_step(costs, searching.atoms, arrangement, ADAM)
    assert step.stages[0].optimizer > 0
    terms, mode = Costs(problem, problem.counts), Mode(0, recompute)
    found = float((terms.terms_of(mode, replicas).fill + terms.max_term(mode, replicas))[terms.pair(0, -1)])
    assert found == pytest.approx(step.timeline().step_time, rel=SAME)
    plan = as_plan(costs, searching.atoms, arrangement, step, step.timeline(), "adam")
    loaded = step_of_plan(Plan.from_json(plan.to_json()))
    assert loaded is not None
    assert loaded.timeline().step_time == pytest.approx(step.timeline().step_time)


@given(
    operators=st.lists(st.tuples(SECONDS, SECONDS), min_size=2, max_size=5),
    m=st.sampled_from([1, 2, 4, 8]),
    data=st.data(),
)
def test_stages_take_the_longer_of_their_own_kernels_and_launches(
    operators: list[tuple[float, float]], m: int, data: st.DataObject
) -> None:
    """Of two stages under gpipe, by hand: launches of one stage hide nothing of the other."""
    kernels, launches = map(list, zip(*operators, strict=True))
    cut = data.draw(st.integers(1, len(kernels) - 1))
    costs = launched(line_of(kernels, [4] * len(kernels), Cluster.preset("8xH100")), launches)
    searching = Searching(costs, OPTIONS)
    assume(len(searching.atoms.nodes) == len(kernels))
    arrangement = replace(two_stages(searching, cut, m), schedule="gpipe")
    step = predicted_step(costs, searching.atoms, arrangement, Conditions("none", loss_inside=True))
    parts = slice(None, cut), slice(cut, None)
    # The table is of the whole batch: kernels take a part of that for each micro-batch, launches as long as ever.
    forward = [max(sum(kernels[part]) / m, sum(launches[part])) + ACTION_OVERHEAD for part in parts]
    backward = [2 * f - ACTION_OVERHEAD for f in forward]
    by_hand = sum(forward) + (m - 1) * max(forward) + sum(backward) + (m - 1) * max(backward)
    assert step.timeline().step_time == pytest.approx(by_hand)
    problem = searching.problem(m, "gpipe", searching.full)
    found, mode = Costs(problem, problem.counts), Mode(0, recompute=False)
    middle = next(i for i, row in enumerate(problem.space.cuts) if row.sum() == cut)
    price = sum(found.terms[mode].fill[found.pair(*at)] for at in ((0, middle), (middle, -1)))
    price += max(found.max_term(mode, 1)[found.pair(*at)] for at in ((0, middle), (middle, -1)))
    rates = problem.kinds[0].optimizer
    assert rates is not None
    assert price - by_hand <= rates.seconds(problem.tables(0).stepped)[found.pair(0, -1)] * (1 + SAME)
    assert price >= by_hand * (1 - SAME)


# -- models on clusters ------------------------------------------------------------------------------------------------


def deep(width: int = 64, layers: int = 40) -> nn.Module:
    """Many small operators."""
    with META:
        return nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())]).train()


def call(width: int = 64, batch: int = BATCH, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    x = torch.empty(batch, width, device=META, dtype=dtype)
    return {"example_args": (x,), "target": x, "loss_fn": nn.functional.mse_loss}


ALONE: dict[str, Any] = {"n_microbatches": 1, "max_shards": 1, "max_replicas": 1}
ONE = Cluster.preset("H100")


def step_time(plan: Plan) -> float:
    assert plan.predicted_step_time is not None
    return plan.predicted_step_time


@pytest.mark.slow
def test_many_small_operators_take_as_long_as_their_launches() -> None:
    plans = {mode: autopar.plan(deep(), ONE, **call(), **ALONE, optimizer="none", launch=mode) for mode in MODES}
    eager, compiled, graphs = (step_time(plans[mode]) for mode in ("eager", "compiled", "cuda-graphs"))
    host = host_costs("eager")
    (stage,) = plans["eager"].stages
    # An operator and one kernel each, and those of the loss.
    assert 80 * (host.operator + host.kernel) <= (stage.forward_time or 0) <= 84 * (host.operator + host.kernel)
    assert graphs < compiled < eager
    for larger in (2 * BATCH, 16 * BATCH):  # the host does not care
        assert step_time(autopar.plan(deep(), ONE, **call(batch=larger), **ALONE, optimizer="none")) == eager


@pytest.mark.parametrize("frozen", [0, 1, 3])
def test_a_backward_adds_the_gradient_of_every_trained_parameter(frozen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep(64, 4)
    for parameter in list(model.parameters())[:frozen]:
        parameter.requires_grad_(False)
    trained = sum(parameter.requires_grad for parameter in model.parameters())
    monkeypatch.setattr(Recipe, "host", lambda *_: replace(FREE_HOST, accumulation=1.0))
    wanted = call()
    example = example_ahead(model, wanted["example_args"], {}, target=wanted["target"], loss_fn=wanted["loss_fn"])
    (table,) = estimate_costs(example, ONE).tables
    assert table.host is not None
    assert (table.host.forward.sum(), table.host.backward.sum()) == (0, trained)
    assert trained > 0


def test_large_operators_hide_their_launches() -> None:
    width, found = 8192, []
    for mode in ("eager", "cuda-graphs"):
        found.append(autopar.plan(deep(width, 2), ONE, **call(width, 4096), **ALONE, optimizer="none", launch=mode))
    assert step_time(found[0]) == step_time(found[1])


@pytest.mark.slow
def test_compile_says_how_kernels_are_launched() -> None:
    default, compiled = (autopar.plan(deep(), ONE, **call(), **ALONE, compile=how) for how in (False, True))
    assert step_time(compiled) == step_time(autopar.plan(deep(), ONE, **call(), **ALONE, launch="compiled"))
    assert step_time(default) == step_time(autopar.plan(deep(), ONE, **call(), **ALONE, launch="eager"))
    assert step_time(compiled) != step_time(default)
    eager = autopar.plan(deep(), ONE, **call(), **ALONE, compile="aot_eager")
    assert step_time(eager) == step_time(default)
    assert "launch='compiled'" in str(eager.explain())


@pytest.mark.slow
def test_where_launching_bounds_a_plan_has_fewer_and_larger_micro_batches() -> None:
    """Each micro-batch launches all kernels again, unless they are recorded."""
    cluster, width = Cluster.preset("4xA100-80"), 1024
    alone = {"max_replicas": 1, "max_shards": 1, "optimizer": "none"}
    plans = [
        autopar.plan(deep(width, 48), cluster, **call(width, 192), **alone, compile=how)
        for how in (False, True, "graphs")
    ]
    passes = [plan.n_microbatches * len(plan.stages) for plan in plans]
    assert passes == sorted(passes)
    assert passes[0] < passes[-1]
    assert [plan.assumed and plan.assumed.launch for plan in plans] == ["eager", "compiled", "cuda-graphs"]
    assert step_time(plans[0]) > step_time(plans[-1])


@pytest.mark.slow
def test_a_cpu_launches_its_kernels_itself() -> None:
    cpu = Cluster.preset("cpu")
    assert step_time(autopar.plan(deep(), cpu, **call(), **ALONE)) == step_time(
        autopar.plan(deep(), cpu, **call(), **ALONE, launch="cuda-graphs")
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fused", "foreach", "for-loop"])
def test_a_step_ends_with_the_optimizer(how: Any) -> None:
    model = deep(1024, 10)
    without = autopar.plan(model, ONE, **call(1024), **ALONE, optimizer="none")
    plan = autopar.plan(model, ONE, **call(1024), **ALONE, optimizer="adamw", optimizer_step=how)
    (stage,) = plan.stages
    spec = ONE.specs["H100"]
    bandwidth = spec.bandwidth * spec.bandwidth_efficiency
    exact = optimizer_step_seconds("adamw", [p.shape for p in model.parameters()], bandwidth, implementation=how)
    assert stage.optimizer_time == pytest.approx(exact, rel=0.01)
    assert step_time(plan) == pytest.approx(step_time(without) + (stage.optimizer_time or 0))
    loaded = Plan.from_json(plan.to_json())
    assert loaded.stages == plan.stages
    assert step_time(autopar.plan(model, ONE, plan=loaded, **call(1024), optimizer="adamw", optimizer_step=how)) == (
        pytest.approx(step_time(plan))
    )


@pytest.mark.slow
def test_an_optimizer_says_itself_how_it_steps() -> None:
    with META:
        model = nn.Linear(8, 8).train()
    named = autopar.plan(model, ONE, **call(8), **ALONE, optimizer="adamw", optimizer_step="for-loop")
    given = autopar.plan(model, ONE, **call(8), **ALONE, optimizer=torch.optim.AdamW(model.parameters(), foreach=False))
    assert step_time(given) == step_time(named) > step_time(autopar.plan(model, ONE, **call(8), **ALONE))
    with pytest.raises(InputError, match=r"torch fuses only .*, not radam"):
        autopar.plan(model, ONE, **call(8), optimizer="radam", optimizer_step="fused")


@pytest.mark.slow
def test_plans_by_hand_are_launched_and_stepped_as_asked() -> None:
    cluster, dtype = Cluster.preset("2xH100"), torch.bfloat16
    model = deep(256, 8).to(dtype)
    ways: list[dict[str, Any]] = [
        {},
        {"launch": "cuda-graphs"},
        {"optimizer_step": "fused"},
        {"precision": "bf16-mixed"},
    ]
    plans = [Plan.by_hand(model, cluster, pipeline=2, micro_batch=4, **call(256, dtype=dtype), **way) for way in ways]
    usual, graphs, fused, mixed = plans
    assert step_time(graphs) < step_time(usual)
    assert (fused.stages[0].optimizer_time or 0) < (usual.stages[0].optimizer_time or 0)
    assert (mixed.stages[0].peak_memory or 0) > (usual.stages[0].peak_memory or 0)
    for way, plan in zip(ways, plans, strict=True):
        priced = autopar.plan(model, cluster, plan=plan, **call(256, dtype=dtype), **way)
        assert step_time(priced) == pytest.approx(step_time(plan))


class Hinted(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = autopar.shard(nn.Linear(width, 4 * width), in_strategy=((2, 2),))
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_a_plan_from_shard_hints_has_the_price_that_it_has_from_a_file(stages: int) -> None:
    with META:
        model = nn.Sequential(*(Hinted(64) for _ in range(stages))).train()
    if stages > 1:
        for stage, part in enumerate(model):
            autopar.pipeline_stage(part, stage)
    cluster = Cluster.preset(f"{4 * stages}xH100")
    plan = autopar.plan(model, cluster, **call(64))
    loaded = autopar.plan(model, cluster, plan=Plan.from_json(plan.to_json()), **call(64))
    assert step_time(loaded) == pytest.approx(step_time(plan))
    for stage in plan.stages:
        host = host_costs("eager")
        assert (stage.forward_time or 0) >= 3 * (host.operator + host.kernel)
        assert (stage.optimizer_time or 0) > 0


def test_inference_and_devices_at_hand_step_no_optimizer() -> None:
    model = deep(64, 2).eval()
    plan = autopar.plan(model, ONE, example_args=call()["example_args"], **ALONE)
    assert [stage.optimizer_time for stage in plan.stages] == [None]
    x = torch.randn(4, 8)
    here = autopar.plan(nn.Linear(8, 8), ["cpu"], example_args=(x,), target=x, loss_fn=nn.functional.mse_loss, tune=0)
    assert [stage.optimizer_time for stage in here.stages] == [None]


def test_a_sharded_state_is_stepped_in_parts() -> None:
    elements = 1 << 24
    whole, cut = (Weight(4 * elements, True, (4096, 4096), state_parts=n).step("adam", "fused") for n in (1, 8))
    assert whole.nbytes == 8 * cut.nbytes
    assert whole.nbytes == 28 * elements


@pytest.mark.slow
@pytest.mark.parametrize(("name", "each"), [("fp32", 16), ("bf16", 8), ("bf16-mixed", 18), ("fp16-mixed", 16)])
def test_a_parameter_takes_the_bytes_of_its_precision(name: str, each: int) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name.partition("-")[0]]
    model, precision = deep(1024, 4).to(dtype), PRECISIONS[name]
    # A fused step has no temporaries, which would come on top.
    adamw: dict[str, Any] = {**ALONE, "optimizer": "adamw", "optimizer_step": "fused"}
    plan = autopar.plan(model, ONE, **call(1024, dtype=dtype), **adamw, precision=name)
    alone = autopar.plan(model, ONE, **call(1024, dtype=dtype), **ALONE, optimizer="none", precision=name)
    elements = sum(p.numel() for p in model.parameters())
    assert plan.stages[0].parameter_bytes == precision.parameter * elements
    peaks = [one.stages[0].peak_memory or 0 for one in (plan, alone)]
    assert peaks[0] - peaks[1] == (each - precision.parameter - precision.gradient - precision.master) * elements
    usual = autopar.plan(model, ONE, **call(1024, dtype=dtype), **adamw)
    own = 4 * dtype.itemsize
    assert peaks[0] - (usual.stages[0].peak_memory or 0) == (each - own) * elements


def test_norms_in_float32_stay_as_they_are_beside_bfloat16() -> None:
    recipe = Recipe(precision="bf16-mixed")
    assert recipe.precision_of(torch.float32) is None
    assert recipe.precision_of(torch.bfloat16) == PRECISIONS["bf16-mixed"]


@pytest.mark.slow
def test_a_precision_of_another_dtype_is_refused() -> None:
    with pytest.raises(InputError, match=r"is for parameters in torch.bfloat16, but the model's are in torch.float32"):
        autopar.plan(deep(), ONE, **call(), precision="bf16-mixed")


@pytest.mark.slow
def test_gradients_in_float32_take_as_long_to_reduce_as_those_of_a_model_in_float32() -> None:
    """Of as many parameters: with bfloat16 gradients, half as long."""
    cluster, width, sync = Cluster.preset("4xT4"), 4096, {}
    options: dict[str, Any] = {"n_microbatches": 4, "max_shards": 1, "optimizer": "none"}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("bf16-mixed", torch.bfloat16)):
        made = autopar.plan(deep(width, 2).to(dtype), cluster, **call(width, 4096, dtype), **options, precision=name)
        (stage,) = made.stages
        assert len(stage.devices) == 4
        sync[name] = stage.sync_time or 0.0
    assert sync["bf16-mixed"] == pytest.approx(sync["fp32"], rel=1e-3)
    assert sync["bf16"] == pytest.approx(sync["fp32"] / 2, rel=0.1)


def test_inside_a_mesh_gradients_move_in_their_own_bytes_and_state_is_that_of_the_precision() -> None:
    cluster, width = Cluster.preset("4xH100"), 1024
    mesh = make_mesh((4,), [device.name for device in cluster.devices], ("data",))
    found = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("bf16-mixed", torch.bfloat16)):
        x = torch.empty(64, width, device=META, dtype=dtype)
        example = example_ahead(deep(width, 1).to(dtype), (x,), {}, batch_dim=None)
        subject = mesh_program_of(example, "adam")
        recipe = Recipe(precision=name)
        task = ShardingTask(subject.module, subject.inputs(64), 64, cluster, optimizer="adam", recipe=recipe)
        problem = ShardingProblem(task, mesh)
        stored = next(one for parameter, one in problem.stored.items() if parameter.endswith("weight"))
        nbytes = problem.variables[stored.variable].nbytes
        found[name] = stored.tables, [nbytes[place] for place in (0, -1)], stored.options
    (single, held, options), (half, _, _), (mixed, mixed_held, _) = (found[n] for n in ("fp32", "bf16", "bf16-mixed"))
    added, whole = (PARTIAL,), (REPLICATE,)
    for which in ("once_gradient", "gradient"):
        assert getattr(mixed, which).between(added, whole) == getattr(single, which).between(added, whole)
        assert getattr(half, which).between(added, whole) < getattr(mixed, which).between(added, whole)
    assert mixed.once.between((0,), whole) == half.once.between((0,), whole) < single.once.between((0,), whole)
    for one, nbytes, ours in zip((options[0], options[-1]), held, mixed_held, strict=True):
        cut, state = parts(one.layout, (4,)), parts(one.state, (4,))
        assert nbytes == width**2 * (8 / cut + 8 / state)
        assert ours == width**2 * (6 / cut + 12 / state)


# -- fused kernels -----------------------------------------------------------------------------------------------------


def chain(width: int) -> nn.Module:
    with META:
        return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Sigmoid(), nn.Tanh(), nn.LayerNorm(width)).train()


def tables_of(mode: str, cluster: Cluster = ONE, width: int = 1024, batch: int = 1 << 16) -> CostGraph:
    x = torch.empty(batch, width, device=META)
    example = example_ahead(chain(width), (x,), {}, batch_dim=None)
    return estimate_costs(example, cluster, Recipe(mode))


@pytest.mark.slow
def test_a_chain_of_a_compiled_stage_takes_one_kernel_that_its_operators_share() -> None:
    width, batch = 1024, 1 << 16
    costs = tables_of("compiled", width=width, batch=batch)
    eager, compiled = tables_of("eager", width=width, batch=batch).tables[0], costs.tables[0]
    assert compiled.nodes[0] == "linear"
    assert (compiled.forward[:, 0] == eager.forward[:, 0]).all()
    spec = ONE.specs["H100"]
    moved = 2 * 4 * width * batch + 2 * 4 * width
    kernel = Kernel("fused", "normalization", torch.float32, 0, moved, 0)
    alone = kernel_seconds(kernel, rates_of(spec, host_costs("compiled")), efficiency_of(spec))
    assert compiled.forward[-1, 1:].sum() == pytest.approx(alone)
    assert (compiled.forward <= eager.forward).all()
    assert (compiled.backward <= eager.backward).all()
    assert compiled.host is not None
    assert compiled.host.forward[1:].sum() == pytest.approx(host_costs("compiled").kernel)
    # A cut within the chain: both sides have a part of it.
    atoms = Searching(costs, OPTIONS).atoms
    times = atom_times(costs, atoms, "H100", 1, batch).kernels.forward
    assert len(times) > 2
    assert times.sum() == pytest.approx(compiled.forward[-1].sum())


@pytest.mark.slow
def test_shards_gain_by_fusion_as_whole_operators_do() -> None:
    cluster, width, batch, found = Cluster.preset("2xH100"), 1024, 1 << 16, {}
    for mode in ("eager", "compiled"):
        x = torch.empty(batch, width, device=META)
        example = example_ahead(chain(width), (x,), {}, batch_dim=None)
        costs = estimate_costs(example, cluster, Recipe(mode))
        meshes = Meshes(costs, mesh_program_of(example, "none")).of(2, [1])
        assert meshes is not None
        configuration = meshes.configurations[0]
        assert isinstance(configuration, MeshConfiguration)
        found[mode] = configuration.solution, configuration.table, costs.tables[0]
    assert found["eager"][0].strategies == found["compiled"][0].strategies
    for which in ("forward", "backward"):
        whole, parts_of = ([getattr(found[mode][i], which)[-1] for mode in found] for i in (2, 1))
        # But for the last one, whose result is gathered for the caller.
        assert parts_of[1][1:-1] / parts_of[0][1:-1] == pytest.approx(whole[1][1:-1] / whole[0][1:-1])


@pytest.mark.slow
def test_one_device_compares_with_the_same_step() -> None:
    plan = autopar.plan(deep(1024, 10), ONE, **call(1024), **ALONE)
    assert plan.single_device_time == pytest.approx(step_time(plan))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_compiled_models_of_every_family_are_priced_below_eager_ones(case: Any) -> None:
    example = example_ahead(case.model().eval(), (), case.inputs(4), batch_dim=None)

    def kernels(launch: str) -> float:
        (table,) = estimate_costs(example, Cluster.preset("2xH100"), Recipe(launch=launch)).tables
        return float(table.forward.sum() + table.backward.sum())

    assert 0 < kernels("compiled") <= kernels("eager")
