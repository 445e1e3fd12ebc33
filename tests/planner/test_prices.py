"""One plan has one price: by hand, by the objective of the search, and by the simulator."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tied_models import Tied
from torch import nn
from torch.nn import functional

from autopar import Cluster
from autopar.analysis.example import example_ahead
from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import CostTable
from autopar.costs.device_group import DeviceGroup
from autopar.costs.estimated import estimate_costs
from autopar.costs.gradient_reduction import BUCKET, bucketed, reduction_seconds
from autopar.costs.operator_cost import OperatorCost, Weight
from autopar.costs.python_overhead import ACTION_OVERHEAD
from autopar.costs.recipe import Recipe
from autopar.planner.arrangement import Arrangement, Conditions
from autopar.planner.inter_op.candidates import Searching
from autopar.planner.inter_op.device_pools import neighbours
from autopar.planner.inter_op.mesh_configuration import MeshConfiguration
from autopar.planner.inter_op.meshes import Meshes, mesh_program_of
from autopar.planner.inter_op.problem import Problem
from autopar.planner.inter_op.stage_costs import Costs
from autopar.planner.inter_op.stage_tables import Mode
from autopar.planner.predict import as_plan
from autopar.planner.predicted_step import step_of_plan
from autopar.planner.priced_step import predicted_step
from autopar.planner.search_options import SearchOptions

BATCH = 16
INSIDE = Conditions(optimizer="none", loss_inside=True)
OPTIONS = SearchOptions(loss_inside=True, optimizer="none")
SAME = 1e-3  # the law: one price, within 0.1 %


class Mlp(nn.Module):
    def __init__(self, hidden: int = 1024) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x))).square().mean()


@cache
def mlp_on_meshes(samples: int, m: int) -> CostGraph:
    """An MLP over meshes of two H100s, in `m` micro-batches."""
    with torch.device("meta"):
        model, x = Mlp().train(), torch.empty(samples, 2048, 1024)
    example = example_ahead(model, (x,), {}, batch_dim=None)
    costs = estimate_costs(example, Cluster.preset("8xH100"))
    found = Meshes(costs, mesh_program_of(example, "none")).of(2, [m])
    assert found is not None
    return found


def objective(problem: Problem, kind: int, replicas: int) -> float:
    """Of the plan of one stage."""
    costs, mode = Costs(problem, problem.counts), Mode(kind, recompute=False)
    fill = costs.terms_of(mode, replicas).fill
    return float((fill + costs.max_term(mode, replicas))[costs.pair(0, -1)])


def one_stage(searching: Searching, replicas: int, m: int, schedule: str, name: str = "") -> Arrangement:
    everything = tuple(range(len(searching.atoms.nodes)))
    names = (name,) if name else ()
    return Arrangement((everything,), (meshes_of(searching.costs)[:replicas],), m, schedule, (False,), names)


def meshes_of(costs: CostGraph) -> tuple[DeviceGroup, ...]:
    """The meshes of a cost graph whose meshes have one width, or its devices."""
    width = max((one.width for one in costs.configurations), default=1)
    return tuple(neighbours(costs, costs.groups, width))


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_mesh_does_its_collectives_of_a_step_once_however_few_micro_batches_it_runs(replicas: int) -> None:
    samples, m = 64, 8
    costs = mlp_on_meshes(samples, m)
    searching = Searching(costs, OPTIONS)
    problem = searching.problem(m, "1f1b", searching.full)
    (configuration,) = (c for c in costs.configurations if isinstance(c, MeshConfiguration))
    once = sum(c.seconds for c in configuration.solution.collectives if c.once)
    assert once > 0
    work = sum(w.forward + w.backward for w in configuration.solution.work.values())
    moving = sum(c.seconds for c in configuration.solution.collectives if not c.once)
    rounds = m // replicas
    held = sum(w.nbytes / configuration.operators[n].parameters[key].parts
               for n, o in costs.operators.items() for key, w in o.parameters.items())  # fmt: skip
    reduced = reduction_seconds(costs, held, meshes_of(costs)[:replicas])
    assert (reduced > 0) is (replicas > 1)
    by_hand = rounds * (work + moving + 2 * ACTION_OVERHEAD) + once + reduced
    arrangement = one_stage(searching, replicas, m, "1f1b", configuration.name)
    step = predicted_step(costs, searching.atoms, arrangement, INSIDE)
    assert step.timeline().step_time == pytest.approx(by_hand)
    kind = [k.name for k in problem.kinds].index(configuration.name)
    assert objective(problem, kind, replicas) == pytest.approx(by_hand, rel=SAME)
    plan = as_plan(costs, searching.atoms, arrangement, step, step.timeline())
    (stage,) = plan.stages
    assert stage.sync_time == pytest.approx(once + reduced)
    assert stage.sharding is not None
    assert sum(e.seconds for e in stage.sharding.exchanges if e.once) == pytest.approx(once)
    loaded = step_of_plan(type(plan).from_json(plan.to_json()))
    assert loaded is not None
    assert loaded.timeline().step_time == pytest.approx(plan.predicted_step_time)


# -- made-up cost graphs on a cluster ----------------------------------------------------------------------------------


def line_of(
    seconds: list[float],
    nbytes: list[int],
    cluster: Cluster,
    tied: tuple[int, ...] = (),
    sent: float = 0.0,
    accumulated: float = 0.0,
) -> CostGraph:
    """Operators in a line with a parameter each. `tied`: operators that read the parameter of the first one, too.
    `accumulated`: part of a backward of the whole batch that adds gradients to those before."""
    graph: nx.DiGraph = nx.DiGraph()
    for i, size in enumerate(nbytes):
        parameters = {f"p{i}": Weight(size, True, (size // 4,))}
        if i in tied:
            parameters["p0"] = Weight(nbytes[0], True, (nbytes[0] // 4,))
        cost = OperatorCost(f"m{i}/op#0", "op", f"m{i}", "", i, False, True, 0.5, sent, sent, sent, {}, parameters)
        graph.add_node(f"n{i}", cost=cost)
    for i in range(len(seconds) - 1):
        graph.add_edge(f"n{i}", f"n{i + 1}", nbytes=sent)
    graph.graph.update(fused=[], outputs=[f"n{len(seconds) - 1}"])
    whole = np.array([seconds])
    times = (BATCH,), whole, 2 * whole, np.zeros((1, 2))
    added = 2 * accumulated * whole[0] if accumulated else None
    table = CostTable(cluster.devices[0].kind, 1, tuple(graph), *times, accumulation=added)
    return CostGraph(graph, BATCH, True, (table,), cluster.devices, cluster.links, 0.0, cluster)


SECONDS = st.lists(st.floats(1e-3, 1e-1), min_size=1, max_size=5)


@given(
    seconds=SECONDS,
    mbytes=st.floats(1e-3, 1e3),
    replicas=st.integers(1, 8),
    m=st.sampled_from([1, 2, 4, 8, 16]),
    schedule=st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    cluster=st.sampled_from([("4xH100", 2), ("8xA100-80", 1), ("2xT4", 4)]),
    accumulated=st.floats(0, 0.2),
)
# A few bytes, uneven.
@example(seconds=[1e-3], mbytes=1e-3, replicas=3, m=4, schedule="gpipe", cluster=("2xT4", 4), accumulated=0.0)
@example(seconds=[0.1], mbytes=1.0, replicas=2, m=2, schedule="1f1b", cluster=("4xH100", 2), accumulated=0.1)
@example(seconds=[0.1], mbytes=1.0, replicas=1, m=1, schedule="zb-h1", cluster=("4xH100", 2), accumulated=0.1)
def test_the_objective_of_a_stage_and_its_replicas_is_the_simulated_step(
    seconds: list[float],
    mbytes: float,
    replicas: int,
    m: int,
    schedule: str,
    cluster: tuple[str, int],
    accumulated: float,
) -> None:
    replicas = min(replicas, m)
    nbytes = [int(mbytes * 2**20)] * len(seconds)
    costs = line_of(seconds, nbytes, Cluster.preset(*cluster), accumulated=accumulated)
    searching = Searching(costs, OPTIONS)
    problem = searching.problem(m, schedule, (replicas,))
    step = predicted_step(costs, searching.atoms, one_stage(searching, replicas, m, schedule), INSIDE)
    assert objective(problem, 0, replicas) == pytest.approx(step.timeline().step_time, rel=SAME)


@given(mbytes=st.lists(st.floats(1e-3, 200), min_size=1, max_size=6))
def test_gradients_pay_the_latency_of_a_bucket_and_not_of_every_parameter(mbytes: list[float]) -> None:
    cluster = Cluster.preset("8xH100", nodes=2)
    costs = line_of([0.1] * len(mbytes), [int(x * 2**20) for x in mbytes], cluster)
    groups = costs.groups
    names = [group.first for group in groups]
    total = sum(int(x * 2**20) for x in mbytes)
    whole, rest = divmod(total, BUCKET)
    alone = cluster.seconds("all_reduce", BUCKET, names)
    exact = whole * alone + (cluster.seconds("all_reduce", rest, names) if rest else 0.0)
    found = reduction_seconds(costs, total, groups)
    # The last bucket is not full: it counts in proportion.
    assert whole * alone <= found * (1 + 1e-9)
    assert found <= exact * (1 + 1e-9)
    assert found <= (whole + 1) * alone * (1 + 1e-9)
    if total <= BUCKET:
        assert found == pytest.approx(exact, rel=1e-3)  # between two known sizes


def test_buckets_are_never_cheaper_for_more_bytes() -> None:
    cluster = Cluster.preset("4xT4", nodes=4)
    names = [device.name for device in cluster.devices]
    sizes = [BUCKET * x / 16 for x in range(100)]
    seconds = [bucketed(lambda n: cluster.seconds("all_reduce", n, names), size) for size in sizes]
    assert seconds == sorted(seconds)
    assert seconds[0] == 0.0


# -- tied weights ------------------------------------------------------------------------------------------------------


def two_stages(searching: Searching, cut: int, m: int) -> Arrangement:
    atoms = range(len(searching.atoms.nodes))
    groups = searching.costs.groups
    stages = (tuple(a for a in atoms if a < cut), tuple(a for a in atoms if a >= cut))
    return Arrangement(stages, ((groups[0],), (groups[1],)), m, "1f1b", (False, False))


@pytest.mark.parametrize("m", [1, 4])
def test_a_tied_weight_lies_in_both_stages_and_its_gradient_is_added_up_once_a_step(m: int) -> None:
    cluster, nbytes = Cluster.preset("2xH100"), [64 << 20, 1 << 20, 1 << 20, 4 << 20]
    free, tied = (line_of([0.1] * 4, nbytes, cluster, tied=readers) for readers in ((), (3,)))
    steps = []
    for costs in (free, tied):
        searching = Searching(costs, OPTIONS)
        assert len(searching.atoms.nodes) == 4
        steps.append(predicted_step(costs, searching.atoms, two_stages(searching, 2, m), INSIDE))
    apart, together = (step.timeline() for step in steps)
    names = [device.name for device in cluster.devices]
    exchange = bucketed(lambda n: cluster.seconds("all_reduce", n, names), 64 << 20)
    assert together.step_time == pytest.approx(apart.step_time + exchange)
    assert apart.peak_memory is not None
    assert together.peak_memory is not None
    assert together.peak_memory[0] == apart.peak_memory[0]
    assert together.peak_memory[1] == apart.peak_memory[1] + 2 * (64 << 20)  # the copy and its gradient
    # The objective knows it, too, and that the later stage exchanges it while the first one still runs backwards.
    prices = []
    for costs in (free, tied):
        searching = Searching(costs, OPTIONS)
        found = Costs(searching.problem(m, "1f1b", searching.full), (2,))
        cuts = found.problem.space.cuts
        middle = next(i for i, row in enumerate(cuts) if row.tolist() == [True, True, False, False])
        term, stages = found.max_term(Mode(0, False), 1), ((0, middle), (middle, -1), (0, -1))
        prices.append([term[found.pair(*stage)] for stage in stages])
    differences = np.subtract(prices[1], prices[0])
    assert differences[0] == pytest.approx(exchange, rel=1e-2)
    assert differences[1] == 0.0
    assert differences[2] == 0.0  # both readers in one stage


def test_stages_that_share_a_weight_within_one_process_pay_for_the_way_of_its_gradient() -> None:
    """Without a cluster a stage adds the gradient to that of the stage before it."""
    from test_predict import line_of as on_cpus

    costs = on_cpus(0.1, 0.1)
    before = predicted_step(costs, Searching(costs, OPTIONS).atoms, two_stages(Searching(costs, OPTIONS), 1, 2), INSIDE)
    for node in costs.graph:
        costs.graph.nodes[node]["cost"].parameters["shared"] = Weight(1 << 20, True, (1 << 18,))
    searching = Searching(costs, OPTIONS)
    after = predicted_step(costs, searching.atoms, two_stages(searching, 1, 2), INSIDE)
    added = math.fsum([after.timeline().step_time, -before.timeline().step_time])
    assert added == pytest.approx((1 << 20) * costs.accumulate)


@pytest.mark.slow
def test_a_tied_weight_on_meshes_is_reduced_once_in_every_stage_that_has_it() -> None:
    m = 4
    with torch.device("meta"):
        model, ids = Tied().train(), torch.zeros(64, 2048, dtype=torch.long)
    example = example_ahead(model, (ids,), {}, batch_dim=None)
    costs = Meshes(
        estimate_costs(example, Cluster.preset("8xH100")), mesh_program_of(example, "none")
    ).of(2, [m])  # fmt: skip
    assert costs is not None
    searching = Searching(costs, OPTIONS)
    (configuration,) = (c for c in costs.configurations if isinstance(c, MeshConfiguration))
    shared = [c for c in configuration.solution.collectives if c.shared]
    alone = [c for c in configuration.solution.collectives if c.once and not c.shared]
    assert len(shared) == 1
    assert alone
    seconds = shared[0].seconds + sum(c.seconds for c in alone)
    n = len(searching.atoms.nodes)
    cut = next(a for a, nodes in enumerate(searching.atoms.nodes) if "linear_1" in nodes)  # the head
    whole = tuple(range(n))
    groups, twice = meshes_of(costs), (configuration.name,) * 2
    one = Arrangement((whole,), (groups[:1],), m, "1f1b", (False,), twice[:1])
    two = Arrangement((whole[:cut], whole[cut:]), (groups[:1], groups[1:2]), m, "1f1b", (False, False), twice)
    steps = [predicted_step(costs, searching.atoms, a, INSIDE) for a in (one, two)]
    assert steps[0].stages[0].once == pytest.approx(seconds)
    exchange = reduction_seconds(costs, 8192 * 1024 * 4, groups[:2])
    assert sum(stage.once for stage in steps[1].stages) == pytest.approx(seconds + shared[0].seconds + 2 * exchange)
    assert costs.configurations[0] is configuration
    problem = searching.problem(m, "1f1b", searching.full)
    assert objective(problem, 0, 1) == pytest.approx(steps[0].timeline().step_time, rel=SAME)


@given(
    seconds=st.lists(st.floats(1e-4, 1e-2), min_size=2, max_size=5),
    mbytes=st.lists(st.floats(1e-3, 3e3), min_size=5, max_size=5),
    schedule=st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    data=st.data(),
)
def test_with_one_micro_batch_the_objective_is_the_simulated_step_with_the_optimizers_step(
    seconds: list[float], mbytes: list[float], schedule: str, data: st.DataObject
) -> None:
    """Whichever stage steps for longest: later stages step while earlier ones still run backwards."""
    n = len(seconds)
    cut = data.draw(st.integers(1, n - 1))
    costs = line_of(seconds, [4 * int(each * (1 << 18)) for each in mbytes[:n]], Cluster.preset("8xH100"), sent=4.0)
    costs = replace(costs, recipe=Recipe())
    searching = Searching(costs, replace(OPTIONS, optimizer="adamw"))
    assume(len(searching.atoms.nodes) == n)
    price = price_of_two_stages(searching, cut, 1, schedule)
    arrangement = replace(two_stages(searching, cut, 1), schedule=schedule)
    conditions = replace(INSIDE, optimizer="adamw")
    step = predicted_step(costs, searching.atoms, arrangement, conditions).timeline().step_time
    latency = searching.problem(1, schedule, searching.full).kinds[0].lane(1).latency
    assert price == pytest.approx(step, rel=SAME, abs=3 * latency)  # a gradient is on its way meanwhile, too


@given(
    seconds=st.lists(st.floats(1e-3, 1e-1), min_size=2, max_size=5),
    m=st.sampled_from([1, 2, 4, 8]),
    data=st.data(),
)
def test_where_the_caller_computes_the_loss_split_backwards_count_as_delaying_one_weight_part(
    seconds: list[float], m: int, data: st.DataObject
) -> None:
    """The objective is the simulated step where the first stage is the slowest, and above it elsewhere: a slow later
    stage could delay more."""
    n = len(seconds)
    cut = data.draw(st.integers(1, n - 1))
    costs = line_of(seconds, [4] * n, Cluster.preset("8xH100"), sent=4.0)
    searching = Searching(costs, replace(OPTIONS, loss_inside=False))
    assume(len(searching.atoms.nodes) == n)
    whole, split = (price_of_two_stages(searching, cut, m, schedule) for schedule in ("gpipe", "zb-h1"))
    arrangement = replace(two_stages(searching, cut, m), schedule="zb-h1")
    conditions = replace(INSIDE, loss_inside=False)
    step = predicted_step(costs, searching.atoms, arrangement, conditions).timeline().step_time
    latency = searching.problem(m, "zb-h1", searching.full).kinds[0].lane(1).latency
    assert step <= split * (1 + SAME) + 2 * m * latency
    assert split <= whole * (1 + SAME)
    if sum(seconds[:cut]) >= sum(seconds[cut:]):
        assert split == pytest.approx(step, rel=SAME, abs=2 * m * latency)


def price_of_two_stages(searching: Searching, cut: int, m: int, schedule: str) -> float:
    """The objective of two stages on single devices, the first with `cut` atoms of a line."""
    problem = searching.problem(m, schedule, searching.full)
    found, mode = Costs(problem, problem.counts), Mode(0, recompute=False)
    cuts = problem.space.cuts
    middle = next(i for i, row in enumerate(cuts) if row.tolist() == [a < cut for a in range(problem.n_atoms)])
    stages = [(0, middle), (middle, len(cuts) - 1)]
    fills = sum(found.terms_of(mode, 1).fill[found.pair(*at)] for at in stages)
    return float(fills + max(found.max_term(mode, 1)[found.pair(*at)] for at in stages))


@given(
    seconds=st.lists(st.floats(1e-3, 1e-1), min_size=2, max_size=5),
    m=st.sampled_from([1, 2, 4, 8]),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    accumulated=st.floats(0, 0.2),
    data=st.data(),
)
def test_the_objective_of_a_pipeline_is_the_simulated_step_of_gpipe_and_never_below_that_of_1f1b(
    seconds: list[float], m: int, schedule: str, accumulated: float, data: st.DataObject
) -> None:
    """Without transfers. Under 1F1B, forwards of the warm-up fill what the objective counts as waiting. It counts the
    last backward of all stages but the slowest one, which adds up gradients; of later stages the first one counts."""
    n = len(seconds)
    cut = data.draw(st.integers(1, n - 1))
    costs = line_of(seconds, [4] * n, Cluster.preset("8xH100"), accumulated=accumulated)
    searching = Searching(costs, OPTIONS)
    assume(len(searching.atoms.nodes) == n)
    price = price_of_two_stages(searching, cut, m, schedule)
    arrangement = replace(two_stages(searching, cut, m), schedule=schedule)
    step = predicted_step(costs, searching.atoms, arrangement, INSIDE).timeline().step_time
    if schedule == "gpipe":
        later = sum(2 * accumulated * s for s in seconds[cut:])
        assert step * (1 - SAME) <= price <= (step + later) * (1 + SAME)
        assert accumulated > 0 or price == pytest.approx(step, rel=SAME)
    assert step <= price * (1 + SAME)
