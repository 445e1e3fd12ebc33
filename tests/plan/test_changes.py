"""`plan.move` and `plan.with_`: the changed plan has the price of what it decides now, or a reason why it cannot be."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from models import UNet, mlp
from sharded_plans import llama
from torch import nn

import autopar
from autopar import Cluster, Plan, PlanError
from autopar.plan.stage import Stage
from autopar.sharding.stage_sharding import StageSharding


class Layers(nn.Module):
    """Equal layers below a module, between two others."""

    def __init__(self, n: int = 6) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.body = nn.Module()
        self.body.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.body.layers:
            x = x + layer(x)
        return self.head(x)  # type: ignore[no-any-return]


CLUSTER = Cluster.preset("4xH100")


@cache
def call() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return Layers(), {"example_args": (torch.randn(8, 16),)}


@cache
def priced(n_stages: int = 2) -> Plan:
    """Layers 0-2 on stage 0 and 3-5 on stage 1, or 0-1, 2-3 and 4-5 on three stages."""
    model, example = call()
    split = {"embed": 0, **{f"body.layers.{i}": i * n_stages // 6 for i in range(6)}, "head": n_stages - 1}
    return autopar.plan(model, CLUSTER, plan=Plan.from_split(split, n_microbatches=4), **example)


def anew(plan: Plan) -> Plan:
    """The plan, priced as one that somebody wrote."""
    model, example = call()
    return autopar.plan(model, CLUSTER, plan=plan.without_predictions("asked again"), **example)


def stage_of(plan: Plan, layer: int) -> set[int]:
    inside = f"body.layers.{layer}."
    return {s for s, stage in enumerate(plan.stages) for key in stage.operators if f"{key}.".startswith(inside)}


@pytest.mark.slow
@pytest.mark.parametrize("path", ["body.layers.3", "layers.3"])
def test_a_moved_layer_is_priced_on_its_new_stage(path: str) -> None:
    plan = priced()
    found = plan.move(path, stage=0)
    assert (stage_of(found, 3), stage_of(found, 4)) == ({0}, {1})
    assert found.stages == anew(found).stages
    assert found.predicted_step_time == anew(found).predicted_step_time is not None
    assert found.predicted_step_time != plan.predicted_step_time
    assert "'" + path + "' was moved to stage 0" in found.notes
    back = found.move(path, stage=1)
    assert back.stages == plan.stages
    assert back.predicted_step_time == plan.predicted_step_time
    assert plan.move(path, stage=1) is plan, "it is there"


@pytest.mark.slow
def test_layers_in_a_row_and_single_operators_move() -> None:
    plan = priced(3)
    found = plan.move("layers.2-3", stage=1).move("layers.1", stage=1)
    assert [stage_of(found, i) for i in range(6)] == [{0}, {1}, {1}, {1}, {2}, {2}]
    key = next(key for key in plan.stages[1].operators if key.startswith("body.layers.2.0/"))
    one = plan.move(key, stage=0)
    assert (key in one.stages[0].operators, stage_of(one, 2)) == (True, {0, 1})
    assert one.stages == anew(one).stages


@pytest.mark.parametrize(
    ("path", "stage", "said"),
    [
        ("layers.9", 0, r"no operator of the plan runs in 'layers.9'; did you mean 'body.layers.\d'"),
        ("layesr.3", 0, "did you mean 'body.layers.3'"),
        ("layers.3-9", 0, r"runs in 'layers.6' \(in 'layers.3-9'\)"),
        ("layers.4-3", 0, "a range of layers goes from the lower number to the higher"),
        ("0", 0, "several modules are called '0': body.layers.0, body.layers.0.0"),
        ("layers.3", 2, r"there is no stage 2: stages are 0\.\.1"),
        ("layers.3", "0", "there is no stage '0'"),
        (3, 0, "path must be the path of a module or the key of an operator, got 3"),
        ("body.layers.5/add#7", 0, "no operator of the plan runs in 'body.layers.5/add#7'"),
        (
            "layers.4",
            0,
            r"'body.layers.3' would be on stage 1 and 'body.layers.4', which follows it, on stage 0, but values only "
            r"flow to later stages; move the layers between as well: plan.move\('body.layers.3-4', stage=0\)",
        ),
        ("layers.1", 1, r"plan.move\('body.layers.1-2', stage=1\)"),
        ("embed", 1, "'.*' is on stage 0, but it reads 'embed/linear#0'"),
    ],
)
def test_a_move_that_cannot_be_is_refused_with_what_is_near(path: Any, stage: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        priced().move(path, stage=stage)


def test_a_range_that_a_refusal_proposes_can_move() -> None:
    found = priced().move("body.layers.3-4", stage=0)
    assert [stage_of(found, i) for i in range(6)] == [{0}, {0}, {0}, {0}, {0}, {1}]


def test_what_enclosing_modules_do_between_layers_moves_along() -> None:
    plan = priced()
    one_by_one = plan.move("layers.3", 0).move("layers.4", 0)
    assert one_by_one.stages == plan.move("layers.3-4", 0).stages
    assert one_by_one.move("layers.4", 1).move("layers.3", 1).stages == plan.stages


def test_a_stage_is_never_left_without_operators() -> None:
    model, x = mlp(), torch.randn(8, 16)
    plan = autopar.plan(model, CLUSTER, plan=Plan.from_split({"0": 0, "7": 1}, n_microbatches=2), example_args=(x,))
    with pytest.raises(PlanError, match=r"stage 1 would have no operators without '7'; plan with 1 stage instead$"):
        plan.move("7", stage=0)


def test_a_refusal_proposes_no_range_that_leaves_a_stage_without_operators() -> None:
    """Neither layer of stage 0 can leave it: the first one leaves the other behind, and both leave none."""
    x = torch.randn(8, 16)
    example: dict[str, Any] = {"example_args": (x,), "target": x, "loss_fn": nn.functional.mse_loss}
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    two = Plan.by_hand(model, CLUSTER, pipeline=2, data=2, **example)
    with pytest.raises(PlanError, match=r"; stage 0 would have no operators without '0-1'; plan with 1 stage instead$"):
        two.move("0", stage=1)
    four = Plan.by_hand(model, CLUSTER, pipeline=4, **example)
    with pytest.raises(PlanError, match=r"stage 1 would .*; move others there first, or plan with 3 stages$"):
        four.move("1", stage=0)


def test_a_value_that_skips_stages_holds_a_module_back() -> None:
    model, x = UNet(), torch.randn(4, 3, 8, 8)
    plan = Plan.from_split({"down1": 0, "middle": 1}, n_microbatches=2)
    plan = autopar.plan(model, CLUSTER, plan=plan, example_args=(x,))
    with pytest.raises(PlanError, match="values only flow to later stages"):
        plan.move("down2", stage=1).move("middle", stage=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"n_microbatches": 8},
        {"n_microbatches": 2, "schedule": "gpipe"},
        {"schedule": "zb-h1"},
        {"recompute": "stage"},
        {"recompute": {1: "stage"}},
    ],
)
def test_other_decisions_have_the_price_that_the_plan_has_as_somebody_writes_it(changes: dict[str, Any]) -> None:
    plan, found = priced(), priced().with_(**changes)
    fields = {name: value for name, value in changes.items() if name != "recompute"}
    wanted = plan.without_predictions("x")
    again = changes.get("recompute")
    stages = [
        replace(s, recompute=again == "stage" or (again == {1: "stage"} and i == 1))
        for i, s in enumerate(wanted.stages)
    ]
    expected = anew(replace(wanted, stages=tuple(stages), **fields)) if again else anew(replace(wanted, **fields))
    assert found.stages == expected.stages
    assert (found.n_microbatches, found.schedule) == (expected.n_microbatches, expected.schedule)
    assert found.predicted_step_time == expected.predicted_step_time is not None
    assert found != plan


def test_what_stays_as_it_is_is_the_same_plan() -> None:
    plan = priced()
    assert plan.with_() is plan.with_(n_microbatches=4, schedule="1f1b", recompute="none") is plan


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_microbatches": 9}, "n_microbatches is 9, but the batch has 8 samples"),
        ({"n_microbatches": 0, "schedule": "zigzag"}, "(?s)n_microbatches must be at least 1.*schedule must be one of"),
        (
            {"n_microbatches": 0, "schedule": "zigzag", "recompute": "ful", "zero": 4},
            "(?s)n_microbatches must be at least 1.*schedule must be one of.*recompute must be one of.*zero must be",
        ),
        ({"recompute": "ful"}, "recompute must be one of none, selective, full, selective-op, stage, got 'ful'"),
        ({"recompute": {2: "full"}}, r"recompute names 2, but there are stages 0\.\.1"),
        ({"zero": 4}, "zero must be 0, 1, 2 or 3, got 4"),
        ({"zero": True}, "zero must be 0, 1, 2 or 3, got True"),
        ({"zero": [1]}, r"zero must be 0, 1, 2 or 3, got \[1\]"),
        ({"zero": 1}, "zero=1 cuts states over replicas, and no stage has any; make the plan with Plan.by_hand"),
        ({"n_microbatches": "4"}, "n_microbatches must be a whole number, got '4'"),
        ({"n_microbatches": 2.0}, "n_microbatches must be a whole number, got 2.0"),
        ({"n_microbatches": True}, "n_microbatches must be a whole number, got True"),
        ({"schedule": ["1f1b"]}, r"schedule must be one of gpipe, .*, got \['1f1b'\]"),
        ({"recompute": 1}, "recompute must be one of .*, or by stage {0: 'full'}, got 1"),
        ({"recompute": {0: ["full"]}}, r"recompute must be one of .*, got \['full'\]"),
        ({"recompute": {"0": "full"}}, r"recompute names '0', but there are stages 0\.\.1"),
    ],
)
def test_decisions_that_contradict_each_other_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        priced().with_(**changes)


def test_a_loaded_plan_changes_without_a_price_and_says_so() -> None:
    loaded = Plan.from_json(priced().to_json())
    found = loaded.with_(n_microbatches=2)
    assert found.predicted_step_time is found.stages[0].forward_time is None
    assert found.notes == ("n_microbatches is 2 now, so its predictions were dropped",)
    moved = loaded.move("layers.3", stage=0)
    assert (stage_of(moved, 3), moved.predicted_step_time) == ({0}, None)
    assert anew(moved).stages == priced().move("layers.3", stage=0).stages
    with pytest.raises(PlanError, match="zero can be changed in a plan that this process planned or priced, because"):
        loaded.with_(zero=1)
    assert loaded.with_(zero=0) is loaded, "nothing is cut"


def test_a_split_by_hand_moves_modules_by_name() -> None:
    plan = Plan.from_split({"a": 0, "b.0": 0, "b.1": 1}, n_microbatches=2)
    assert dict(plan.move("b", 1).split) == {"a": 0, "b": 1}
    assert dict(plan.move("a.x", 1).split) == {"a": 0, "b.0": 0, "b.1": 1, "a.x": 1}
    with pytest.raises(PlanError, match=r"the plan has no module or operator 'c'; there are 'a', 'b.0', 'b.1'"):
        plan.move("c", 1)
    with pytest.raises(PlanError, match="no module is put on stage 0"):
        Plan.from_split({"a": 0, "b": 1}, n_microbatches=2).move("a", 1)


def test_strategies_follow_their_operators_to_a_mesh_of_the_same_shape() -> None:
    def stage(devices: str, keys: tuple[str, ...], mesh: tuple[int, ...]) -> Stage:
        texts = {key: "S0 R -> S0" if len(mesh) == 1 else "S0R RR -> S0R" for key in keys}
        sharding = StageSharding.from_texts(
            mesh, ("data", "tensor")[: len(mesh)], texts, {f"{keys[0][:1]}.w": "R" * len(mesh)}
        )
        return Stage(tuple(devices), keys, sharding=sharding)

    plan = Plan((stage("ab", ("0/mm#0", "1/mm#0"), (2,)), stage("cd", ("2/mm#0", "3/mm#0"), (2,))), 1)
    found = plan.move("2", 0)
    assert [dict(s.sharding.texts[0]) for s in found.stages if s.sharding] == [
        dict.fromkeys(("0/mm#0", "1/mm#0", "2/mm#0"), "S0 R -> S0"),
        {"3/mm#0": "S0 R -> S0"},
    ]
    assert [[name for name, _ in s.sharding.parameters] for s in found.stages if s.sharding] == [["0.w", "2.w"], []]
    other = Plan((stage("ab", ("0/mm#0", "1/mm#0"), (2,)), stage("cdef", ("2/mm#0", "3/mm#0"), (2, 2))), 1)
    with pytest.raises(
        PlanError, match="2/mm#0 is cut over a mesh of data 2 x tensor 2, and stage 0 has one of data 2"
    ):
        other.move("2", 0)


@pytest.mark.slow
def test_an_edited_plan_keeps_no_exchange_of_its_old_price() -> None:
    plan = priced_llama(data=2)
    alone = plan.without_predictions("x")
    assert all(s.sharding and s.sharding.exchanges == () and s.sharding.collective_time is None for s in alone.stages)
    assert [s.sharding.strategies for s in alone.stages if s.sharding] == [
        s.sharding.strategies for s in plan.stages if s.sharding
    ]


@cache
def priced_llama(**degrees: int) -> Plan:
    with torch.device("meta"):
        model, ids = llama(2).train(), torch.zeros(8, 64, dtype=torch.long)
    example = {"input_ids": ids, "labels": ids}
    return Plan.by_hand(model, CLUSTER, pipeline=2, micro_batch=2, example_kwargs=example, **degrees)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_cuts_what_a_plan_by_hand_cuts(zero: int) -> None:
    found, expected = priced_llama(data=2).with_(zero=zero), priced_llama(data=2, zero=zero)
    assert found.predicted_step_time == pytest.approx(expected.predicted_step_time, rel=1e-9)
    for mine, wanted in zip(found.stages, expected.stages, strict=True):
        assert mine.peak_memory == wanted.peak_memory
        assert mine.sharding
        assert wanted.sharding
        assert dict(mine.sharding.texts[1]) == dict(wanted.sharding.texts[1])
    back = found.with_(zero=0)
    assert back.predicted_step_time == priced_llama(data=2).predicted_step_time
    assert [s.peak_memory for s in back.stages] == [s.peak_memory for s in priced_llama(data=2).stages]


@pytest.mark.slow
def test_a_layer_moves_between_meshes_with_its_strategies() -> None:
    plan = priced_llama(tensor=2)
    found = plan.move("layers.1", stage=0)
    assert (found.stages[0].peak_memory or 0) > (plan.stages[0].peak_memory or 0)
    back = found.move("layers.1", stage=1)
    assert back.stages == plan.stages
    assert back.predicted_step_time == plan.predicted_step_time


@pytest.mark.slow
def test_plans_of_devices_at_hand_are_priced_again_too() -> None:
    model, x = mlp(), torch.randn(8, 16)
    searched = autopar.plan(model, ["cpu", "cpu"], example_args=(x,), n_microbatches=2, max_replicas=1, tune=0)
    by_hand = autopar.plan(
        model, ["cpu", "cpu"], plan=Plan.from_split({"0": 0, "4": 1}, n_microbatches=2), example_args=(x,)
    )
    for plan in (searched, by_hand):
        found = plan.with_(n_microbatches=4)
        assert found.n_microbatches == 4
        assert found.predicted_step_time is not None
        again = autopar.plan(model, ["cpu", "cpu"], plan=found, example_args=(x,))
        assert again.predicted_step_time == found.predicted_step_time


# -- ZeRO of whole replicas, and at hand ------------------------------------------------------------------------------


def replicated(n_microbatches: int, *stages: int) -> Plan:
    """Layers 0-2 on stage 0 and 3-5 on stage 1, each with its number of replicas in `stages`."""
    names = iter(device.name for device in CLUSTER.devices)
    devices = [[next(names) for _ in range(n)] for n in stages]
    split = {"embed": 0, **{f"body.layers.{i}": i // 3 for i in range(6)}, "head": 1}
    model, example = call()
    plan = Plan.from_split(split, n_microbatches=n_microbatches, devices=devices)
    return autopar.plan(model, CLUSTER, plan=plan, **example)


def decided(plan: Plan) -> list[Any]:
    """How stages are cut; the order of parameters is no decision."""
    cut = [stage.sharding for stage in plan.stages]
    return [None if one is None else (one.mesh, dict(one.texts[0]), dict(one.texts[1])) for one in cut]


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_makes_a_mesh_of_the_replicas_of_a_stage_as_a_plan_by_hand_has_it(zero: int) -> None:
    model, example = call()
    found = replicated(4, 2, 2).with_(zero=zero)
    expected = Plan.by_hand(model, CLUSTER, pipeline=2, data=2, micro_batch=2, zero=zero, **example)
    assert found.n_microbatches == expected.n_microbatches == 2
    assert decided(found) == decided(expected)
    assert found.predicted_step_time == pytest.approx(expected.predicted_step_time, rel=1e-9)
    assert [s.peak_memory for s in found.stages] == [s.peak_memory for s in expected.stages]
    assert any("stage 1: its 2 replicas are a mesh" in note for note in found.notes)
    assert [s.sharding and s.sharding.mesh for s in found.with_(zero=0).stages] == [(2,), (2,)], "it stays a mesh"


@pytest.mark.slow
def test_zero_leaves_a_stage_of_one_device_as_it_is() -> None:
    found = replicated(4, 2, 1).with_(zero=1)
    first, second = found.stages
    assert first.sharding
    assert (found.n_microbatches, first.sharding.mesh, second.sharding) == (4, (2,), None)
    assert "S0" in dict(first.sharding.texts[1])["embed.weight"]
    assert found.predicted_step_time is not None


@pytest.mark.slow
@pytest.mark.parametrize("n_microbatches", [1, 2, 4])
def test_zero_keeps_the_number_of_micro_batches_that_is_given_beside_it(n_microbatches: int) -> None:
    model, example = call()
    for before in (4, 8):  # 8 micro-batches of one sample could not be shared out
        found = replicated(before, 2, 2).with_(zero=1, n_microbatches=n_microbatches)
        size = 4 // n_microbatches
        expected = Plan.by_hand(model, CLUSTER, pipeline=2, data=2, micro_batch=size, zero=1, **example)
        assert found.n_microbatches == expected.n_microbatches == n_microbatches
        assert decided(found) == decided(expected)
        assert found.predicted_step_time == pytest.approx(expected.predicted_step_time, rel=1e-9)


@pytest.mark.parametrize("wrong", [True, 1.0, "1"])
def test_a_number_of_micro_batches_is_whole_even_where_it_is_the_same(wrong: Any) -> None:
    with pytest.raises(PlanError, match=f"n_microbatches must be a whole number, got {wrong!r}"):
        Plan.from_split({"0": 0}, n_microbatches=1).with_(n_microbatches=wrong)


def test_micro_batches_that_sharded_stages_are_told_to_have_are_right() -> None:
    model, example = call()
    plan = Plan.by_hand(model, CLUSTER, data=4, **example)
    with pytest.raises(PlanError, match=r"5 micro-batches do not divide .*; n_microbatches=2 would be right$"):
        plan.with_(n_microbatches=5)
    assert plan.with_(n_microbatches=2).n_microbatches == 2


def test_replicas_that_cannot_share_out_a_micro_batch_are_refused() -> None:
    with pytest.raises(PlanError, match=r"stage 0 has 2 replicas, and 8 samples are no 8 micro-batches of a multiple"):
        replicated(8, 2, 1).with_(zero=1)
    with pytest.raises(PlanError, match=r"8 samples are no 8 micro-batches .* n_microbatches=4 would be right"):
        replicated(4, 2, 2).with_(zero=1, n_microbatches=8)
    whole = StageSharding.from_texts((2,), ("tensor",), {})
    plan = Plan((Stage(tuple(device.name for device in CLUSTER.devices), sharding=whole),), 4, split=(("", 0),))
    model, example = call()
    with pytest.raises(PlanError, match="stage 0 has replicas of a whole mesh, along which no axis runs"):
        autopar.plan(model, CLUSTER, plan=plan, **example).with_(zero=1)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_at_hand_zero_cuts_what_a_plan_by_hand_for_these_devices_cuts(zero: int) -> None:
    model, example = call()
    expected = Plan.by_hand(model, ["cpu", "cpu"], data=2, micro_batch=2, zero=zero, **example)
    by_hand = Plan.by_hand(model, ["cpu", "cpu"], data=2, micro_batch=2, **example)
    replicas = Plan.from_split({"": 0}, n_microbatches=4, devices=[["cpu:0", "cpu:1"]])
    priced_replicas = autopar.plan(model, ["cpu", "cpu"], plan=replicas, **example)
    searched = autopar.plan(model, ["cpu", "cpu"], max_replicas=1, tune=0, **example)
    for plan in (by_hand, priced_replicas):
        found = plan.with_(zero=zero)
        assert (found.n_microbatches, found.devices) == (2, ("cpu:0", "cpu:1"))
        assert decided(found) == decided(expected)
        assert Plan.from_json(found.to_json()) == found
    # What is priced by measurements moves tensors in the steps that were the fastest here.
    moves = [
        s.sharding.redistributions for plan in (by_hand.with_(zero=zero), expected) for s in plan.stages if s.sharding
    ]
    assert moves[0] == moves[1]
    assert searched.with_(zero=0) is searched
    with pytest.raises(PlanError, match="and no stage has any"):
        searched.with_(zero=zero)


@pytest.mark.slow
def test_a_plan_by_hand_for_workers_does_not_keep_the_model() -> None:
    model, x = mlp(), torch.randn(8, 16)
    plan = Plan.by_hand(model, ["cpu", "cpu"], data=2, example_args=(x,))
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    with pytest.raises(PlanError, match=r"the model that this plan was made for is gone; give it again: autopar.plan"):
        plan.with_(zero=1)


def test_a_split_of_modules_without_operators_names_the_root_where_all_of_them_run() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.a.weight @ self.b.weight

    split = Plan.from_split({"a": 0, "b": 1}, n_microbatches=2)
    with pytest.raises(PlanError, match=r"no operator of the model runs in 'a', 'b'; modules are \(root\)$"):
        autopar.plan(Plain(), CLUSTER, plan=split, example_args=(torch.randn(4, 4),))
