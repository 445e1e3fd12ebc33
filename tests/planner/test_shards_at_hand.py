"""Shards searched for devices at hand: `max_shards` lets stages be meshes, priced from measurements, and run as any
sharded stage. The plain model is the oracle."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CASES, Case, assert_same_gradients, assert_same_outputs, gradients, sum_of_squares
from torch import nn

import autopar
from autopar import Cluster, InfeasibleError, InputError, Plan, PlanError
from autopar.analysis.example import capture_example
from autopar.capture.repeated_layers.fold import fold
from autopar.costs import shard_costs
from autopar.costs.measured import measure_costs, with_shards
from autopar.costs.shard_costs import SIZES, ShardCosts
from autopar.options import PlanOptions
from autopar.plan.stage import Stage
from autopar.planner.inter_op.at_hand import SearchingAtHand
from autopar.planner.inter_op.meshes import as_measured, mesh_program_of
from autopar.planner.intra_op.strategy_search import ShardingProblem
from autopar.planner.search import make_plan
from autopar.planner.search_at_hand import check_max_shards, shards_at_hand
from autopar.planner.search_options import search_options
from autopar.runtime.comparing.comparison import Comparison
from autopar.runtime.comparing.contestants import Contestant
from autopar.runtime.planning import tuning
from autopar.sharding.layouts import REPLICATE
from autopar.sharding.mesh import make_mesh
from cost_models import MeasuredCollectives, parse_devices

ROWS, WIDE = 8, 512
BIG = 4 * WIDE * WIDE  # bytes of one linear layer's weight
DEVICES = ["cpu"] * 4


def big_layer() -> nn.Module:
    """One layer that has nearly all bytes of the model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, 16))


CALL: dict[str, Any] = {
    "example_args": (torch.randn(ROWS, 16),),
    "target": torch.randn(ROWS, 16),
    "loss_fn": nn.functional.mse_loss,
}
SHORT: dict[str, Any] = {"memory_limit": 3 * BIG, "optimizer": "adamw"}  # weight, gradient and state are 4 * BIG


LONG = ("gru", "gpt2 with labels", "t5", "llama", "mixtral", "resnet", "vit")


@pytest.fixture
def fast_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prices by which meshes gain much time, so that the search chooses them."""
    monkeypatch.setattr(ShardCosts, "turns", lambda self, names: 0.01)
    monkeypatch.setattr(MeasuredCollectives, "seconds", lambda self, collective, nbytes: 1e-9 + nbytes / 1e15)


def shards(plan: Plan | None) -> list[int]:
    assert plan is not None
    return [stage.shards for stage in plan.stages]


def chosen(stage: Stage) -> Any:
    """What is chosen for the operators and parameters of a stage."""
    return stage.sharding and (stage.sharding.mesh, stage.sharding.strategies, stage.sharding.parameters)


# -- a plan with meshes is chosen, run, saved and explained -----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("widest", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_layer_that_no_device_holds_is_cut_over_a_mesh_and_trains_as_the_plain_model(widest: int) -> None:
    model, x = big_layer(), CALL["example_args"][0]
    whole = copy.deepcopy(model)
    with pytest.raises(InfeasibleError, match="no plan fits the memory"):
        autopar.parallelize(model, DEVICES, **CALL, **SHORT)
    with pytest.raises(InfeasibleError, match="no plan fits the memory"):
        autopar.parallelize(model, DEVICES, **CALL, **SHORT, max_shards=1)
    pm = autopar.parallelize(model, DEVICES, **CALL, **SHORT, max_shards=widest)
    assert pm.plan is not None
    assert 1 < max(shards(pm.plan)) <= widest
    assert all((stage.peak_memory or 0) <= SHORT["memory_limit"] for stage in pm.plan.stages)
    assert any("one after another" in note for note in pm.plan.notes)
    loss = pm.train_step(x, target=CALL["target"], loss_fn=nn.functional.mse_loss)
    expected = nn.functional.mse_loss(whole(x), CALL["target"])
    expected.backward()
    torch.testing.assert_close(torch.as_tensor(loss), expected.detach())
    assert_same_gradients(gradients(model), gradients(whole))
    assert_same_outputs(pm(x), whole(x))
    pm.close()


@pytest.mark.usefixtures("fast_meshes")
@pytest.mark.parametrize("n_microbatches", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_no_other_boundary_between_meshes_makes_the_step_shorter(
    n_microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with few micro-batches, for which the search's objective is far above the step of some cuts."""
    monkeypatch.setattr(ShardCosts, "turns", lambda self, names: 0.5)  # operators count, not their launches alone
    sizes = [256, 384, 128, 512, 512, 256, 384, 256, 640, 128]
    model = nn.Sequential(*itertools.starmap(nn.Linear, itertools.pairwise(sizes)))
    call = {**CALL, "example_args": (torch.randn(512, 256),), "target": torch.randn(512, 128)}
    options = {"max_shards": 2, "max_replicas": 1, "n_microbatches": n_microbatches, "optimizer": "none", "tune": 0}
    plan = autopar.plan(model, DEVICES, **call, **options, schedule="zb-h1")  # a stage for each mesh
    assert shards(plan) == [2, 2]
    first = len(plan.stages[0].operators)  # one for each layer
    assert plan.predicted_step_time is not None
    for stage, boundaries in ((0, range(first + 1, len(model))), (1, range(first - 1, 0, -1))):
        other = plan
        for boundary in boundaries:
            other = other.move(str(boundary if stage else boundary - 1), stage=stage)
            assert len(other.stages[0].operators) == boundary
            assert other.predicted_step_time is not None
            # They move one operator at a time, and may stop before one that a busy machine makes dear.
            assert plan.predicted_step_time <= other.predicted_step_time * 1.05


@pytest.mark.usefixtures("fast_meshes")
@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (case.name in LONG)) for case in CASES]
)
def test_every_model_on_a_searched_mesh_has_its_outputs_and_gradients_and_one_price(case: Case, n: int) -> None:
    model, call = case.model(), case.inputs(8)
    whole = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of models whose batch is not split
        pm = autopar.parallelize(model, ["cpu"] * n, example_kwargs=call, max_shards=n, tune=0, n_microbatches=1)
        mine, original = pm(**call), whole(**call)
    assert_same_outputs(mine, original)
    sum_of_squares(mine).backward()
    sum_of_squares(original).backward()
    assert_same_gradients(gradients(model), gradients(whole))
    assert pm.plan is not None
    assert max(shards(pm.plan)) > 1
    again = autopar.plan(whole, ["cpu"] * n, example_kwargs=call, plan=Plan.from_json(pm.plan.to_json()))
    assert again.predicted_step_time == pytest.approx(pm.plan.predicted_step_time, rel=1e-3)
    # The prices of these meshes are nearly equal, so that a tensor may be passed on in several ways at the same price.
    assert [chosen(stage) for stage in again.stages] == [chosen(stage) for stage in pm.plan.stages]
    pm.close()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"n_microbatches": 4}, {"max_replicas": 1}, {"schedule": "1f1b"}], ids=str)
def test_meshes_keep_the_other_limits(options: dict[str, Any]) -> None:
    plan = autopar.plan(big_layer(), DEVICES, **CALL, **SHORT, **options, max_shards=2, tune=0)
    assert max(shards(plan)) == 2
    assert plan.n_microbatches == options.get("n_microbatches", plan.n_microbatches)
    assert plan.schedule == options.get("schedule", plan.schedule)
    assert all(stage.replicas <= options.get("max_replicas", 4) for stage in plan.stages)


@pytest.mark.slow
def test_a_saved_plan_with_meshes_is_the_same_after_loading_and_runs(tmp_path: Any) -> None:
    model, x = big_layer(), CALL["example_args"][0]
    plan = autopar.plan(model, DEVICES, **CALL, **SHORT, max_shards=2, tune=0)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    whole = copy.deepcopy(model)
    pm = autopar.parallelize(model, DEVICES, plan=loaded)
    assert_same_outputs(pm(x), whole(x))
    pm.close()


@pytest.mark.slow
def test_a_plan_with_meshes_prints_and_explains_its_strategies() -> None:
    plan = autopar.plan(big_layer(), DEVICES, **CALL, **SHORT, max_shards=2, tune=0)
    stage = next(number for number, one in enumerate(plan.stages) if one.shards == 2)
    assert "mesh" in str(plan)
    assert f"in stage {stage}" in str(plan.explain("2"))
    assert "bottleneck" in str(plan.explain())


@pytest.mark.slow
def test_costs_that_know_meshes_from_a_search_can_be_searched_again() -> None:
    devices = parse_devices(DEVICES)
    example = capture_example(
        big_layer(), devices, CALL["example_args"], {}, loss_fn=CALL["loss_fn"], target=CALL["target"]
    )
    example, search = search_options(example, PlanOptions(**SHORT), len(devices))
    at_hand = shards_at_hand(example, measure_costs(example, devices), search, 2, cache=True)
    first = SearchingAtHand(at_hand.costs, search, at_hand.meshes)
    best = min(candidate.timeline.step_time for candidate in first.run())
    assert first.costs.configurations
    again = SearchingAtHand(first.costs, search, at_hand.meshes)
    assert min(candidate.timeline.step_time for candidate in again.run()) == best
    for device_counts in again.device_counts():  # without meshes, every problem has a device
        again._with_meshes = False
        assert all(config.least_width == 1 for config in again.configs(2, device_counts))


@pytest.mark.slow
def test_an_edited_plan_with_meshes_is_priced_as_what_it_has_become() -> None:
    plan = autopar.plan(big_layer(), DEVICES, **CALL, **SHORT, max_shards=2, tune=0, n_microbatches=1)
    other = autopar.plan(big_layer(), DEVICES, **CALL, plan=plan.with_decision("for the test", n_microbatches=2))
    assert other.predicted_step_time is not None
    assert other.predicted_step_time != pytest.approx(plan.predicted_step_time, rel=1e-3)
    back = autopar.plan(big_layer(), DEVICES, **CALL, plan=other.with_decision("back", n_microbatches=1))
    assert back.predicted_step_time == pytest.approx(plan.predicted_step_time, rel=1e-9)


# -- laws -------------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(3), deadline=None)
@given(
    st.lists(st.sampled_from([16, 64, 256]), min_size=2, max_size=4),
    st.sampled_from([4, 6, 8]),
    st.sampled_from([2, 3, 4]),
    st.sampled_from([None, 0.3, 0.6]),
    st.booleans(),
)
@pytest.mark.slow
def test_more_shards_never_make_a_plan_slower(
    sizes: list[int], batch: int, n: int, share: float | None, fast: bool
) -> None:
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.GELU())))
    nbytes = 16 * sum(p.numel() for p in model.parameters()) + 8 * batch * sum(sizes)
    call: dict[str, Any] = {"example_args": (torch.randn(batch, sizes[0]),), "tune": 0}
    call["memory_limit"] = None if share is None else share * nbytes
    steps = []
    with pytest.MonkeyPatch.context() as patched:
        if fast:
            patched.setattr(ShardCosts, "turns", lambda self, names: 1)
        for widest in range(1, n + 1):
            try:
                plan = autopar.plan(model, ["cpu"] * n, **call, max_shards=widest)
            except InfeasibleError:
                steps.append(float("inf"))
            else:
                assert max(shards(plan)) <= widest
                assert plan.predicted_step_time is not None
                steps.append(plan.predicted_step_time)
    for fewer, more in itertools.pairwise(steps):
        assert more <= fewer * 1.011  # plans within 1 % count as equally fast, and the simpler one is taken


@pytest.mark.slow
def test_workers_of_one_cpu_gain_no_time_by_sharding_and_are_not_sharded_unasked() -> None:
    free = autopar.plan(big_layer(), DEVICES, **CALL, tune=0)
    assert set(shards(free)) == {1}
    asked = autopar.plan(big_layer(), ["cpu", "cpu"], **CALL, tune=0, max_shards=2, n_microbatches=1)
    assert set(shards(asked)) == {1}


@pytest.mark.slow
@settings(max_examples=examples(4), deadline=None)
@given(st.sampled_from([32, 128, 512]), st.sampled_from([2, 4]), st.booleans())
def test_a_shard_takes_its_part_of_the_measured_operator_and_whole_ones_all_of_it(
    width: int, n: int, gelu: bool
) -> None:
    model = nn.Sequential(nn.Linear(width, width), nn.GELU() if gelu else nn.ReLU())
    devices = parse_devices(["cpu"] * n)
    example = capture_example(model, devices, (torch.randn(8, width),), {}, loss_fn=None, target=None, batch_dim=None)
    costs = with_shards(measure_costs(example, devices), n)
    subject = mesh_program_of(example, "adamw")
    folded = fold(subject.module)
    task = as_measured(subject.task(costs, folded, 1), costs, folded, devices[0].kind, n)
    problem = ShardingProblem(task, make_mesh((n,), [device.name for device in devices]))
    for name, (_, options) in problem.options.items():
        measured = sum(task.measured[name])
        whole: list[float] = []
        parts: list[float] = []
        for strategy, seconds in zip(options.strategies, options.seconds.tolist(), strict=True):
            is_whole = all(code == REPLICATE for side in strategy.placements for layout in side for code in layout)
            (whole if is_whole else parts).append(seconds)
        assert whole == pytest.approx([n * measured] * len(whole))  # every device does all, one after another
        assert min(parts) < n * measured
        assert all(0 < seconds <= n * measured * (1 + 1e-9) for seconds in parts)


@pytest.mark.slow
def test_collectives_are_measured_as_the_runtime_does_them() -> None:
    devices = parse_devices(DEVICES)
    example = capture_example(
        nn.Linear(4, 4), devices, (torch.randn(4, 4),), {}, loss_fn=None, target=None, batch_dim=None
    )
    costs = with_shards(measure_costs(example, devices), 4)
    assert costs.shards is not None
    cluster = costs.shards.cluster
    assert [one.per_node for one in cluster.measured_collectives] == [2, 3, 4]
    names = [device.name for device in devices]
    for collective in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        few, many = (cluster.seconds(collective, nbytes, names) for nbytes in (SIZES[0], SIZES[-1]))
        assert 0 < few <= many
        # Two lines of a mesh of 2 x 2 take turns in one thread.
        pair = cluster.seconds(collective, SIZES[-1], names[:2])
        assert cluster.seconds(collective, SIZES[-1], names[:2], concurrent=2) == pytest.approx(2 * pair)
    assert costs.shards.turns(names) == 4
    assert costs.shards.launch_seconds(devices[0].kind) == 0


@pytest.mark.slow
def test_what_prices_shards_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = autopar.plan(big_layer(), DEVICES, **CALL, **SHORT, max_shards=2, tune=0)

    def again(*args: Any, **keywords: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr(shard_costs, "measure_spec", again)
    monkeypatch.setattr(shard_costs, "_measured", again)
    same = autopar.plan(big_layer(), DEVICES, **CALL, **SHORT, max_shards=2, tune=0)
    assert same.predicted_step_time == plan.predicted_step_time
    with pytest.raises(AssertionError, match="measured again"):
        autopar.plan(big_layer(), DEVICES, **CALL, **SHORT, max_shards=2, tune=0, cache=False)


@pytest.mark.slow
@pytest.mark.usefixtures("fast_meshes")
def test_one_thread_launches_the_kernels_of_all_devices_of_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {**CALL, "max_shards": 4, "tune": 0, "n_microbatches": 1}
    quick = autopar.plan(big_layer(), DEVICES, **options)
    monkeypatch.setattr(ShardCosts, "launch_seconds", lambda self, kind: 1e-3)
    slow = autopar.plan(big_layer(), DEVICES, **options, plan=quick)
    assert quick.predicted_step_time is not None
    assert slow.predicted_step_time is not None
    kernels = 5  # in the forward, at least
    assert slow.predicted_step_time > kernels * max(shards(quick)) * 1e-3 > quick.predicted_step_time
    monkeypatch.setattr(ShardCosts, "launch_seconds", lambda self, kind: 1.0)
    assert set(shards(autopar.plan(big_layer(), DEVICES, **options))) == {1}


@pytest.mark.slow
def test_where_the_first_device_holds_whole_parameters_a_mesh_saves_activations_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ShardCosts, "holds_whole_parameters", lambda self, kind: True)
    with pytest.raises(InfeasibleError, match="no plan fits the memory"):
        autopar.plan(big_layer(), DEVICES, **CALL, **SHORT, max_shards=4, tune=0)


# -- proof runs -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fast_meshes")
@pytest.mark.slow
def test_a_plan_with_shards_that_is_slower_in_truth_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Plan] = []

    def step(contestant: Any, devices: Any) -> float:
        ran.append(contestant.plan)
        return 1.0 if max(shards(contestant.plan)) > 1 else 0.5

    monkeypatch.setattr(Contestant, "timed", step)
    plan = autopar.plan(big_layer(), DEVICES, **CALL, max_shards=4, cache=False)
    assert {max(shards(one)) > 1 for one in ran} == {True, False}
    assert set(shards(plan)) == {1}


@pytest.mark.slow
@pytest.mark.usefixtures("fast_meshes")
def test_the_best_plan_without_shards_runs_beside_the_one_with_shards() -> None:
    devices = parse_devices(["cpu", "cpu"])
    example = capture_example(big_layer(), devices, CALL["example_args"], {}, loss_fn=None, target=None, batch_dim=None)
    example, search = search_options(example, PlanOptions(), len(devices))
    costs = measure_costs(example, devices)
    # Seconds in proportion to the samples: replicas gain most of all plans without shards.
    each = [(np.ones_like(t.forward) * np.array(t.rows)[:, None], 0 * t.loss) for t in costs.tables]
    pairs = zip(costs.tables, each, strict=True)
    tables = tuple(dataclasses.replace(t, forward=long, backward=long, loss=none) for t, (long, none) in pairs)
    at_hand = shards_at_hand(example, dataclasses.replace(costs, tables=tables), search, 2, cache=True)
    tried = dict(tuning._automatic(at_hand.costs, search, at_hand.meshes))
    assert max(shards(tried["automatic"])) > 1
    without = make_plan(at_hand.costs, search)
    assert [stage.replicas for stage in without.stages] == [2]
    assert any((one.places, shards(one)) == (without.places, [1]) for one in tried.values())


# -- hints, wrong values ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_hints_keep_working_and_contradict_fewer_shards_than_they_ask_for() -> None:
    model = big_layer()
    autopar.shard(model[2], in_strategy=((1, 1),), parameter_plan={"weight": (2, 1)})
    for widest in (None, 2):
        pm = autopar.parallelize(model, ["cpu", "cpu"], example_args=CALL["example_args"], max_shards=widest)
        assert shards(pm.plan) == [2]
        pm.close()
    fewer: dict[str, Any] = {"example_args": CALL["example_args"], "max_shards": 1}
    for call in (autopar.parallelize, autopar.plan, autopar.compare):
        with pytest.raises(PlanError, match=r"max_shards=1, but with hints of shard\(\) 2 devices form a mesh"):
            call(model, ["cpu", "cpu"], **fewer)  # type: ignore[operator]
    with pytest.raises(PlanError, match="max_shards=1"):
        autopar.plan(model, Cluster.preset("2xH100"), **fewer)


def test_pinned_stages_with_hints_have_meshes_of_their_own_width() -> None:
    model = big_layer()
    autopar.shard(model[2], in_strategy=((1, 1),), parameter_plan={"weight": (2, 1)})
    autopar.pipeline_stage(model[0], 0)
    autopar.pipeline_stage(model[2], 1)
    assert shards(autopar.plan(model, DEVICES, example_args=CALL["example_args"], max_shards=2)) == [2, 2]


@pytest.mark.slow
def test_micro_batches_that_are_uneven_have_no_meshes_and_the_plan_says_so() -> None:
    plan = autopar.plan(big_layer(), DEVICES, **CALL, max_shards=2, n_microbatches=3, tune=0)
    assert set(shards(plan)) == {1}
    assert any("3 micro-batches do not divide the batch of 8 samples" in note for note in plan.notes)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "2"])
def test_a_wrong_number_of_shards_is_refused_by_its_value(wrong: Any) -> None:
    with pytest.raises(InputError, match=f"max_shards must be a whole number of at least 1, got {wrong!r}"):
        autopar.parallelize(nn.Linear(2, 2), ["cpu", "cpu"], max_shards=wrong)


@pytest.mark.parametrize("call", [autopar.plan, autopar.parallelize, autopar.compare])
def test_more_shards_than_devices_are_refused_by_both_numbers(call: Any) -> None:
    model = nn.Linear(4, 4)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match="max_shards=3, but there are 2 devices"):
        call(model, ["cpu", "cpu"], example_args=(torch.ones(4, 4),), max_shards=3)
    torch.testing.assert_close(dict(model.state_dict()), dict(before))


def test_meshes_have_devices_of_one_kind() -> None:
    one, two = parse_devices(["cpu", "cpu"])
    other = dataclasses.replace(two, kind="another processor")
    with pytest.raises(InputError, match=r"max_shards=2, but a mesh has devices of one kind.*'another processor'"):
        check_max_shards(2, [one, other])
    check_max_shards(2, [one, two, other])


@pytest.mark.slow
def test_uncaptured_code_is_not_cut_and_the_plan_says_so() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum().item() > 0 else x

    model = nn.Sequential(nn.Linear(8, 8), Odd(), nn.Linear(8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = autopar.plan(model, ["cpu", "cpu"], example_args=(torch.randn(4, 8),), max_shards=2)
    assert set(shards(plan)) == {1}
    assert any("no stage has a mesh" in note for note in plan.notes)


@pytest.mark.slow
def test_a_comparison_searches_shards_too_and_prices_plans_with_meshes() -> None:
    plan = autopar.plan(big_layer(), DEVICES, **CALL, **SHORT, max_shards=2, tune=0)
    compared = autopar.compare(
        big_layer(),
        DEVICES,
        {"found": None, "mine": plan},
        **CALL,
        memory_limit=1.7 * BIG,  # weight and gradient are 2 * BIG: compared plans hold no optimizer's state
        max_shards=2,
        repeats=1,
    )
    assert isinstance(compared, Comparison)
    for row in (compared["mine"], compared["found"]):
        assert row.predicted is not None
        assert max(shards(row.plan)) > 1
