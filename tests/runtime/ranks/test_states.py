"""Optimizer states that plans cut over ranks (ZeRO 1, 2, 3): what ranks store, compute and refuse."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from random_states import fitting
from rank_cases import Job, trained
from rank_pool import RankPool
from rank_states import (
    changed_between,
    gradients_between,
    memory_left,
    on_two_meshes,
    parameters_held,
    planned,
    refused_states,
    seen_changes,
    stepped_by,
    stepped_in_small_buckets,
    tied_values,
    tied_with_other_scattering,
    tied_with_other_states,
    wide,
)
from test_ranks import assert_as_one_process

from autopar.analysis.example import capture_example
from autopar.costs.measured import measure_costs, with_shards
from autopar.lower.sharded import Piece
from autopar.planner.arrangement import Conditions
from autopar.planner.price_sharded import predict_any
from autopar.runtime.ranks.parameters.holders import StageGrid, holdings_of
from autopar.runtime.ranks.parameters.state_parts import Finer, axis_orders
from autopar.sharding.layouts import layouts
from autopar.sharding.stage_sharding import Stored
from cost_models import parse_devices


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3), (2, 2, 2)])
def test_an_order_of_axes_lets_every_rank_store_a_part_of_what_it_reads(mesh: tuple[int, ...]) -> None:
    """The order is found wherever trying all of them finds one, for one parameter and for two together."""
    shape = (math.prod(mesh) * 2, math.prod(mesh))
    every = [
        Stored(layout, state)
        for layout in layouts(shape, mesh, partial=False)
        for state in layouts(shape, mesh, partial=False)
        if all(b < 0 or a == b for a, b in zip(state, layout, strict=True))
    ]
    orders = list(itertools.permutations(range(len(mesh))))
    fits = {(one, order): fitting(one.layout, one.state, order, shape, mesh) for one in every for order in orders}
    grid = ((tuple(range(math.prod(mesh))),), mesh)
    for pair in itertools.combinations(every[:: 1 if len(mesh) == 2 else 5], 2):
        found = axis_orders([grid], [pair])[grid]
        best = max(sum(fits[one, order] for one in pair) for order in orders)
        if best == len(pair):
            assert all(fits[one, found] for one in pair)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "fused", "loop"])
def test_twenty_steps_give_the_parameters_of_one_process(ranks: RankPool, optimizer: str, zero: int) -> None:
    for one in ranks.run(stepped_by, 2, optimizer, zero, 20):
        assert one["message"] == ""
        assert one["error"] < 1e-5
        assert one["names"]
        assert one["state"]
        share = 0.5 if zero else 1.0
        cut = {"0.weight", "0.bias", "2.weight"}  # 7 biases and norms cannot be cut in two
        assert one["cut"] == {name: share if name in cut else 1.0 for name in one["cut"]}
        assert one["entries"] == {name: {part} for name, part in one["cut"].items()}


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("degrees", [{"data": 2}, {"data": 2, "pipeline": 2, "micro_batch": 2}], ids=str)
def test_parameters_larger_than_a_bucket_train(ranks: RankPool, degrees: dict[str, int], zero: int) -> None:
    n = 2 * degrees.get("pipeline", 1)
    for error in ranks.run(stepped_in_small_buckets, n, zero, degrees, 16 + 8 * zero + n):
        assert error < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("changed", ["mesh", "replicas"])
def test_a_plan_that_is_changed_to_cut_states_runs_so(ranks: RankPool, changed: str, zero: int) -> None:
    before, found = (ranks.run(partial(stepped_by, changed=how), 2, "adamw", zero, 6)[0] for how in ("", changed))
    assert found["message"] == ""
    assert found["error"] < 1e-5
    assert {name: found[name] for name in ("cut", "entries")} == {name: before[name] for name in ("cut", "entries")}
    assert set(found["cut"].values()) == {0.5, 1.0}


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "zero"), [("adafactor", 0), ("rprop", 0), ("lbfgs", 1)])
def test_optimizers_that_need_whole_parameters_step_them(ranks: RankPool, optimizer: str, zero: int) -> None:
    for one in ranks.run(stepped_by, 2, optimizer, zero, 5):
        assert one["message"] == ""
        assert one["error"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adafactor", "rprop"])
def test_optimizers_that_cannot_step_parts_are_refused(ranks: RankPool, optimizer: str) -> None:
    for one in ranks.run(stepped_by, 2, optimizer, 1, 1):
        assert re.match(
            r"InputError: torch.optim.\w+ cannot step parts of a parameter, and this rank stores '0.weight'",
            one["message"],
        )


@pytest.mark.slow
def test_lbfgs_over_two_stages_is_refused(ranks: RankPool) -> None:
    for message in ranks.run(on_two_meshes, 2, "lbfgs"):
        assert re.match("InputError: torch.optim.LBFGS measures one step along all parameters", message)


@pytest.mark.slow
def test_what_other_ranks_store_is_freed(ranks: RankPool) -> None:
    """In sizes of the model: what stages read, what the rank stores of it, and two states of Adam. The rest is small:
    steps, buckets' counts, constants."""
    wanted = {0: 1 + 2, 1: 1 + 0.5 + 1, 2: 1 + 0.5 + 1, 3: 0.5 + 1}
    for zero, sizes in wanted.items():
        for found in ranks.run(memory_left, 2, zero):
            assert sizes <= found < sizes + 0.1, zero


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_rank_holds_the_bytes_of_parameters_that_are_predicted(ranks: RankPool, zero: int) -> None:
    """As a search among ranks predicts them: what stages read, and the part that the rank stores beside it."""
    model, x, plan = planned(zero, 2, wide)
    devices = parse_devices(["cpu"] * 2)
    example = capture_example(model, devices, (x,), {})
    costs = with_shards(measure_costs(example, devices), 2)
    assert costs.shards is not None
    costs = replace(costs, shards=replace(costs.shards, separate=True))
    (stage,) = predict_any(plan, example, costs, Conditions("adam")).stages
    for found in ranks.run(parameters_held, 2, zero):
        assert stage.parameter_bytes == pytest.approx(found, rel=0.01)


@pytest.mark.slow
def test_scattered_gradients_are_not_kept_whole_between_micro_batches(ranks: RankPool) -> None:
    """Two micro-batches each. Without scattering, a rank has their sum until the last backward."""
    assert ranks.run(gradients_between, 2, 1) == [[1.0, 0.0] * 2] * 2
    assert ranks.run(gradients_between, 2, 2) == [[0.0, 0.0] * 2] * 2


@pytest.mark.slow
def test_changes_of_parts_are_gathered_whoever_made_them(ranks: RankPool) -> None:
    for found in ranks.run(seen_changes, 2):
        assert found.pop("gathers") == 0
        assert not {what: error for what, error in found.items() if not error < 1e-5}


@pytest.mark.slow
def test_a_backward_through_values_that_were_gathered_anew_is_refused_by_autograd(ranks: RankPool) -> None:
    for message in ranks.run(changed_between, 2):
        assert "modified by an inplace operation" in message


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_tied_weights_are_the_same_on_all_stages(ranks: RankPool, zero: int) -> None:
    values = [tensor for found in ranks.run(tied_values, 4, zero) for tensor in found]
    assert len(values) == 8 or zero == 3
    for value in values:
        assert torch.equal(value, values[0])


@pytest.mark.slow
def test_states_that_cannot_be_stored_are_refused_by_name(ranks: RankPool) -> None:
    first, second = ranks.run(refused_states, 2)
    assert first == second
    for what in ("uneven", "no dimension"):
        assert re.match(r"PlanError: .*state of '2\.\w+' of shape .* must divide", first[what]), first[what]
    for what in ("elsewhere", "partial", "coarser"):
        assert re.match("PlanError: .*'0.weight' .* no part of the parameter", first[what]), first[what]
    assert re.match("PlanError: .*trains 'table.weight' with sparse gradients", first["sparse"])


@pytest.mark.slow
def test_stages_that_cut_the_state_of_a_tied_weight_differently_are_refused(ranks: RankPool) -> None:
    for message in ranks.run(tied_with_other_states, 4):
        assert re.match("PlanError: stages 0 and 1 share '.*' and cut its optimizer's state differently", message)


@pytest.mark.parametrize(("mesh", "scattered"), [((2,), True), ((1,), False)])
def test_a_row_of_one_rank_scatters_nothing(mesh: tuple[int, ...], scattered: bool) -> None:
    tensor, n = torch.zeros(4, 4), mesh[0]
    grid = StageGrid((tuple(range(n)), tuple(range(n, 2 * n))), mesh, (0,))
    part = ((0, 4), (0, 4))
    pieces = [Piece("w", "w", i, (-1,), mesh, (i,)) for i in range(n)]
    by_rank = {rank: (0, pieces[rank % n], part) for rank in grid.all}
    finer = [{id(tensor): Finer((0,), frozenset({0}), scattered=True)}]
    found = holdings_of(tensor, by_rank, [grid], finer, frozenset({0}))
    assert {held.scattered for held in found.values()} == {scattered}
    assert {len(held.row) for held in found.values()} == {n}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_stages_may_scatter_gradients_of_a_tied_weight_or_not(ranks: RankPool, stage: int) -> None:
    for error in ranks.run(tied_with_other_scattering, 4, stage):
        assert error < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "job"),
    [
        (2, Job("attention", "states 2 seed 1")),
        *[(4, Job("attention", f"states 2x2 seed {seed}")) for seed in range(6)],
        *[(4, Job("attention", f"states 2*2 seed {seed}", call="backward")) for seed in range(2)],
        (4, Job("frozen cnn", "states 2*2 seed 3")),
        (4, Job("gpt2", "states 2 2 seed 4", "zb-h1")),
        (2, Job("skips", "hand data=2 zero=1", call="backward")),
        (2, Job("skips", "hand data=2 zero=2")),
    ],
    ids=lambda value: value if isinstance(value, int) else f"{value.model}-{value.plan}",
)
def test_ranks_with_any_states_train_as_one_process_does(ranks: RankPool, n: int, job: Job) -> None:
    assert_as_one_process(job, ranks.run(trained, n, job))
