"""Interleaved and zero-bubble schedules whose stages are meshes or replicas: searched, priced once, and run exactly."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import assert_same_gradients, gradients
from torch import nn

import autopar
from autopar import Cluster, Plan
from autopar.analysis.example import example_ahead
from autopar.costs.estimated import estimate_costs
from autopar.lower.split_backward import WeightPart
from autopar.planner.inter_op.ahead import SearchingAhead
from autopar.planner.inter_op.candidates import Searching
from autopar.planner.inter_op.config import Config, Used
from autopar.planner.inter_op.partition import solve
from autopar.planner.inter_op.search_space import SearchSpace
from autopar.planner.search_options import SearchOptions

pytestmark = pytest.mark.usefixtures("shared_exports")
INTERLEAVED, ZERO_BUBBLE = "interleaved-1f1b", "zb-h1"


def mlp(width: int = 16, layers: int = 12) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())))


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def only(monkeypatch: pytest.MonkeyPatch, schedule: str, width: int, replicas: int, chunks: int) -> None:
    """Let every search look at this alone: stages with this number of replicas, each a mesh of `width` devices."""

    def configs(self: SearchSpace, m: int, counts: Used) -> Iterator[Config]:
        yield Config(schedule, m, counts, chunks, most_width=width, least_width=width, copies=replicas)

    monkeypatch.setattr(SearchSpace, "configs", configs)
    monkeypatch.setattr(SearchSpace, "limited", lambda *_: iter(()))
    monkeypatch.setattr(SearchingAhead, "_search_each", lambda *_: None)
    whole = Searching._solve

    def on_all_devices(self: Searching, config: Config, problem: Any, cutoff: float, tolerance: float) -> Any:
        if chunks > 1:
            return whole(self, config, problem, cutoff, tolerance)
        found = solve(replace(problem, max_replicas=1), self.counts_of(config), tolerance=tolerance, exactly=True)
        assert found is not None
        self.bounds[config] = found.bound
        return found.copied(config.copies)

    monkeypatch.setattr(Searching, "_solve", on_all_devices)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "width", "replicas", "chunks"),
    [
        (INTERLEAVED, 1, 2, 2),
        (INTERLEAVED, 2, 1, 2),
        (INTERLEAVED, 2, 1, 3),
        (INTERLEAVED, 2, 2, 2),
        (ZERO_BUBBLE, 1, 2, 1),
        (ZERO_BUBBLE, 2, 1, 1),
        (ZERO_BUBBLE, 2, 2, 1),
    ],
)
def test_a_searched_plan_has_one_price_and_runs_with_the_gradients_of_the_model(
    monkeypatch: pytest.MonkeyPatch, schedule: str, width: int, replicas: int, chunks: int
) -> None:
    model, x, y = mlp(), torch.randn(8, 16), torch.randn(8, 16)
    plain, n = copy.deepcopy(model), 2 * width * replicas
    call: dict[str, Any] = {"example_args": (x,), "target": y, "loss_fn": squares}
    cluster = Cluster.preset(f"{n}xH100")
    only(monkeypatch, schedule, width, replicas, chunks)
    plan = autopar.plan(model, cluster, n_microbatches=4, schedule=schedule, **call)
    assert plan.schedule == schedule
    assert len(plan.stages) == 2 * chunks
    assert {(stage.shards, stage.replicas) for stage in plan.stages} == {(width, replicas)}

    again = autopar.plan(model, cluster, plan=Plan.from_json(plan.to_json()), **call)
    assert again.predicted_step_time == pytest.approx(plan.predicted_step_time, rel=1e-9)

    names = {name: f"cpu:{i}" for i, name in enumerate(plan.devices)}
    stages = tuple(replace(s, devices=tuple(names[d] for d in s.devices)) for s in plan.stages)
    here = replace(plan, stages=stages, devices=tuple(names.values()), device_kinds=())
    pm = autopar.parallelize(model, ["cpu"] * n, plan=here)
    loss = pm.train_step(x, target=y, loss_fn=squares)
    expected = squares(plain(x), y)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(gradients(model), gradients(plain))
    pm.close()


def test_interleaved_plans_may_have_meshes_or_replicas_on_all_devices() -> None:
    costs = estimate_costs(example_ahead(mlp(), (torch.randn(8, 16),), {}, batch_dim=None), Cluster.preset("8xH100"))
    searching = Searching(costs, SearchOptions(loss_inside=True, schedule=INTERLEAVED))
    found = [c for m in (2, 3, 4) for c in searching.configs(m, (8,))]
    assert {c.copies for c in found if c.n_microbatches == 4} == {1, 2, 4}, "divisors of 4 that leave two ranks"
    assert {c.copies for c in found if c.n_microbatches == 3} == {1}, "micro-batches are shared evenly"
    limited = Searching(costs, SearchOptions(loss_inside=True, schedule=INTERLEAVED, max_replicas=2))
    assert {c.copies for c in limited.configs(4, (8,))} == {1, 2}


@pytest.mark.slow
def test_replicas_of_interleaved_stages_pay_for_their_gradients() -> None:
    """Two copies of a pipeline take what one takes with half the micro-batches, and their reduction."""
    model = mlp(1024, 8)
    example = example_ahead(model, (torch.randn(16, 64, 1024),), {}, batch_dim=None)
    for node in ("4xH100", "4xcpu"):
        searching = Searching(estimate_costs(example, Cluster.preset(node)), SearchOptions(loss_inside=True))
        problem = searching.problem_of(Config(INTERLEAVED, 8, (4,), 2, most_width=1, copies=2))
        free = replace(problem, kinds=tuple(replace(kind, copies=1) for kind in problem.kinds), overlapping=None)
        both = [solve(one, (4,), exactly=True) for one in (problem, free)]
        paid, unpaid = (one.objective for one in both if one is not None)
        assert paid > unpaid * 1.001


@pytest.mark.slow
def test_hand_plans_under_these_schedules_have_the_gradients_of_the_model() -> None:
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    every = [{"schedule": ZERO_BUBBLE}, {"schedule": INTERLEAVED, "chunks": 2}, {"schedule": INTERLEAVED, "chunks": 3}]
    for how, mesh in itertools.product(every, [{"tensor": 2}, {"data": 2}, {"data": 2, "zero": 2}]):
        model = mlp()
        plain = copy.deepcopy(model)
        call: dict[str, Any] = {"example_args": (x,), "target": y, "loss_fn": squares}
        plan = Plan.by_hand(model, ["cpu"] * 4, pipeline=2, micro_batch=2, **how, **mesh, **call)
        pm = autopar.parallelize(model, ["cpu"] * 4, plan=plan)
        pm.train_step(x, target=y, loss_fn=squares)
        squares(plain(x), y).backward()
        assert_same_gradients(gradients(model), gradients(plain))
        pm.close()


@pytest.mark.slow
@pytest.mark.parametrize(("degrees", "waits"), [({"tensor": 2}, False), ({"data": 2, "zero": 2}, True)])
def test_a_split_backward_delays_collectives_of_gradients_of_parameters_alone(
    degrees: dict[str, Any], waits: bool
) -> None:
    """On a slow network the gradients of activations that a mesh adds up make the first part longer, not the second."""
    fast = Cluster.preset("4xA100-80")
    slow = replace(fast, intra_node=replace(fast.intra_node, line_rate=fast.intra_node.line_rate / 20))
    model, x, y = mlp(1024, 4), torch.randn(8, 256, 1024), torch.randn(8, 256, 1024)
    call: dict[str, Any] = {"example_args": (x,), "target": y, "loss_fn": squares, "overlap": "none"}
    stages = [
        Plan.by_hand(model, cluster, pipeline=2, micro_batch=2, schedule=ZERO_BUBBLE, **degrees, **call).stages[1]
        for cluster in (fast, slow)
    ]
    (weight, backward), (slow_weight, slow_backward) = ((s.weight_time or 0.0, s.backward_time or 0.0) for s in stages)
    assert slow_backward > 1.2 * backward
    later, earlier = slow_weight - weight, (slow_backward - slow_weight) - (backward - weight)
    assert later == pytest.approx(slow_backward - backward if waits else 0.0, abs=1e-9)
    assert earlier == pytest.approx(0.0 if waits else slow_backward - backward, abs=1e-9)


@pytest.mark.parametrize(("degrees", "divided"), [({}, True), ({"sequence_parallel": True}, False)], ids=str)
def test_stages_on_meshes_divide_their_backwards_unless_they_gather_again(
    monkeypatch: pytest.MonkeyPatch, degrees: dict[str, Any], divided: bool
) -> None:
    """As they are priced: nothing is delayed where stages gather activations again."""
    torch.manual_seed(0)
    model, x, y = nn.Sequential(Feedforward(), Feedforward()), torch.randn(4, 8, 16), torch.randn(4, 8, 16)
    plain = copy.deepcopy(model)
    call: dict[str, Any] = {"example_args": (x,), "target": y, "loss_fn": squares}
    how: dict[str, Any] = {"pipeline": 2, "tensor": 2, "micro_batch": 1, "schedule": ZERO_BUBBLE, **degrees}
    plan = Plan.by_hand(model, Cluster.preset("4xH100"), **how, **call)
    assert plan.stages[1].weight_time is not None
    assert (plan.stages[1].weight_time > 0.0) == divided

    junctions = []
    run = WeightPart.run

    def counted(self: WeightPart, retain_graph: bool) -> None:
        junctions.append(len(self.junctions))
        run(self, retain_graph)

    monkeypatch.setattr(WeightPart, "run", counted)
    pm = autopar.parallelize(model, ["cpu"] * 4, plan=Plan.by_hand(model, ["cpu"] * 4, **how, **call))
    pm.train_step(x, target=y, loss_fn=squares)
    squares(plain(x), y).backward()
    assert_same_gradients(gradients(model), gradients(plain))
    assert any(junctions) == divided
    pm.close()
