"""A plan is data: it is checked when made, survives JSON, and refuses models and devices that it was not made for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import TwoTowers, UNet, gpt2, mlp, tokens
from torch import nn

import autopar
from autopar import InputError, Plan, PlanError
from autopar.capture import Program, capture
from autopar.operators import compute_nodes, operator_keys, replicable_nodes
from autopar.plan import Link, Stage

paths = st.from_regex(r"[a-z_][a-z0-9_]{0,6}(\.[a-z0-9_]{1,6}){0,3}", fullmatch=True)


@st.composite
def hand_plans(draw: st.DrawFn) -> Plan:
    names = draw(st.lists(paths, min_size=1, max_size=8, unique=True))
    n_stages = draw(st.integers(1, len(names)))
    numbers = [*range(n_stages), *(draw(st.integers(0, n_stages - 1)) for _ in names[n_stages:])]
    devices = None
    if draw(st.booleans()):
        free = iter(range(1000))
        devices = [[f"cpu:{next(free)}" for _ in range(draw(st.integers(1, 3)))] for _ in range(n_stages)]
    return Plan.from_split(
        dict(zip(names, numbers, strict=True)),
        n_microbatches=draw(st.integers(1, 64)),
        schedule=draw(st.sampled_from(["gpipe", "1f1b"])),
        devices=devices,
    )


operators = st.builds(
    lambda path, name, k: f"{path}/{name}#{k}", paths | st.just(""), st.just("linear"), st.integers(0)
)
seconds = st.none() | st.floats(0, 1e6)
nbytes = st.none() | st.integers(0, 1 << 50)


@st.composite
def searched_plans(draw: st.DrawFn) -> Plan:
    n = draw(st.integers(1, 3))
    stages = tuple(
        Stage(
            (f"cuda:{2 * i}", f"cuda:{2 * i + 1}")[: draw(st.integers(1, 2))],
            tuple(draw(st.lists(operators, max_size=6, unique=True))),
            forward_time=draw(seconds),
            backward_time=draw(seconds),
            parameter_bytes=draw(nbytes),
            peak_memory=draw(nbytes),
        )
        for i in range(n)
    )
    links = tuple(Link(i, i + 1, draw(st.integers(0, 9)), 0, draw(st.floats(0, 1))) for i in range(n - 1))
    return Plan(
        stages,
        draw(st.integers(1, 9)),
        batch_size=draw(st.none() | st.integers(1, 99)),
        devices=("cuda:0", "cuda:1"),
        training=draw(st.booleans()),
        predicted_step_time=draw(seconds),
        bubble=draw(st.none() | st.floats(0, 1)),
        transfers=links,
        notes=tuple(draw(st.lists(st.text(max_size=20), max_size=2))),
    )


def stage_numbers(plan: Plan, program: Program) -> dict[str, int]:
    keys = operator_keys(program)
    return {keys[node]: stage for node, stage in plan.assign(program).items()}


def captured(model: nn.Module, **inputs: torch.Tensor) -> Program:
    return capture(model, (), inputs)


# -- JSON -------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(hand_plans() | searched_plans())
def test_a_plan_survives_json(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan


def test_an_automatic_plan_survives_json_and_files_and_gives_the_same_stages(tmp_path: Path) -> None:
    model, inputs = gpt2(), {"input_ids": tokens(4)}
    made = autopar.plan(model, ["cpu", "cpu"], example_kwargs=inputs, max_replicas=1, n_microbatches=2)
    made.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == made
    program = captured(model, **inputs)
    assert stage_numbers(loaded, program) == stage_numbers(made, program)
    assert made.batch_size == 4
    assert set(made.used_devices) <= set(made.devices) == {"cpu:0", "cpu:1"}
    owned = [key for stage in made.stages for key in stage.operators]
    assert len(set(owned)) == len(owned)
    needed = {operator_keys(program)[n] for n in compute_nodes(program.graph) if n not in replicable_nodes(program)}
    assert set(owned) >= needed, "every operator that is not replicated has a stage"


def test_an_operator_moved_by_hand_in_the_json_runs_in_its_new_stage() -> None:
    model, x = mlp(), torch.randn(4, 16)
    program = capture(model, (x,), {})
    keys = [operator_keys(program)[n] for n in compute_nodes(program.graph)]
    plan = Plan((Stage(("cpu:0",), tuple(keys[:2])), Stage(("cpu:1",), tuple(keys[2:]))), 2)
    data = json.loads(plan.to_json())
    assert data["stages"][1]["operators"][0] == "2: linear#0"
    data["stages"][0]["operators"].append(data["stages"][1]["operators"].pop(0))
    edited = Plan.from_json(json.dumps(data))
    assert stage_numbers(edited, program)["2/linear#0"] == 0
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=edited)
    torch.testing.assert_close(pm(x), model(x))


def test_edited_json_with_several_errors_lists_them_all() -> None:
    data = json.loads(Plan.from_split({"a": 0, "b": 1}, n_microbatches=2, devices=["cpu:0", "cpu:1"]).to_json())
    data["n_microbatches"] = 0
    data["schedule"] = "zigzag"
    data["stages"][1]["devices"] = ["cpu:0"]
    data["split"]["b"] = 7
    with pytest.raises(PlanError) as caught:
        Plan.from_json(json.dumps(data))
    for part in ("n_microbatches", "0", "'zigzag'", "gpipe", "cpu:0", "'b'", "stage 7"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a plan"),
        ("{", "not a plan"),
        ("[]", "not a plan"),
        ("3", "not a plan"),
        ("{}", "autopar_plan"),
        ('{"autopar_plan": 99}', "version 1.*99"),
        ('{"autopar_plan": 1}', "stages"),
        ('{"autopar_plan": 1, "stages": [], "n_microbatches": 1}', "at least one stage"),
        ('{"autopar_plan": 1, "stages": 3, "n_microbatches": 1}', "plan"),
        ('{"autopar_plan": 1, "stages": [{"devices": ["cpu:0"], "colour": 1}], "n_microbatches": 1}', "colour"),
        ('{"autopar_plan": 1, "stages": [{"devices": ["cpu:0"]}], "n_microbatches": 1, "speed": 9}', "speed"),
        ('{"autopar_plan": 1, "stages": [{"devices": ["cpu:0"]}], "n_microbatches": "two"}', "two|'str'"),
        ('{"autopar_plan": 1, "stages": [{"devices": ["cpu:0"]}], "n_microbatches": 1.5}', "1.5"),
        ('{"autopar_plan": 1, "stages": [{"devices": "cpu:0"}], "n_microbatches": 1}', "devices"),
        ('{"autopar_plan": 1, "stages": [{"devices": []}], "n_microbatches": 1}', "at least one device"),
        ('{"autopar_plan": 1, "stages": [{"devices": ["a"], "operators": ["x"]}], "n_microbatches": 1}', "plan"),
        ('{"autopar_plan": 1, "stages": [{"devices": ["a"]}], "n_microbatches": 1, "split": {"x": "first"}}', "first"),
        ('{"autopar_plan": 1, "stages": [{"devices": ["a"]}], "n_microbatches": 1, "split": {"x": 0.7}}', "0.7"),
    ],
)
def test_what_is_no_plan_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_json(text)


# -- splits by hand ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "options", "message"),
    [
        ({}, {}, "empty"),
        ({"a": 0, "b": 2}, {}, "stage 1"),
        ({"a": 1, "b": 4}, {}, "stage 0, 2, 3"),
        ({"a": -1}, {}, "'a': -1"),
        ({"a": "0"}, {}, "'a': '0'"),
        ({"a": 0, "b": 1}, {"devices": ["cpu:0"]}, "2 stages, but devices names 1"),
        ({"a": 0, "b": 1}, {"devices": ["cpu:0", "cpu:0"]}, "cpu:0"),
        ({"a": 0}, {"devices": [()]}, "at least one device"),
        ({"a": 0}, {"n_microbatches": 0}, "n_microbatches.*0"),
        ({"a": 0}, {"schedule": "zigzag"}, "'zigzag'"),
    ],
)
def test_a_split_that_makes_no_plan_is_refused_naming_what_is_wrong(split: Any, options: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_split(split, **{"n_microbatches": 2, **options})


def test_a_path_that_no_module_has_is_refused_with_those_that_there_are() -> None:
    plan = Plan.from_split({"left": 0, "rihgt": 1}, n_microbatches=2)
    with pytest.raises(PlanError, match=r"'rihgt'.*left\.0"):
        plan.assign(captured(TwoTowers(), a=torch.randn(4, 6), b=torch.randn(4, 10)))


def test_a_split_against_the_flow_is_refused_naming_both_ends() -> None:
    with pytest.raises(PlanError, match=r"'middle' is on stage 0.*'down2' on stage 1|'middle' is on stage 0.*stage 1"):
        Plan.from_split({"down2": 1, "middle": 0}, n_microbatches=2).assign(captured(UNet(), x=torch.randn(2, 3, 8, 8)))


def test_modules_that_a_split_does_not_name_follow_their_inputs_and_the_most_specific_path_counts() -> None:
    program = captured(TwoTowers(), a=torch.randn(4, 6), b=torch.randn(4, 10))
    found = stage_numbers(Plan.from_split({"left": 0, "left.2": 1, "right": 2}, n_microbatches=1), program)
    assert found == {
        "left.0/linear#0": 0,
        "left.1/tanh#0": 0,
        "left.2/linear#0": 1,
        "right.0/linear#0": 2,
        "right.1/tanh#0": 2,
        "right.2/linear#0": 2,
        "head/linear#0": 1,
        "/mul#0": 2,
        "/sum#0": 2,
    }


# -- models and devices -----------------------------------------------------------------------------------------------


def test_a_plan_for_more_devices_than_given_is_refused() -> None:
    plan = Plan.from_split({"0": 0, "2": 1, "4": 2}, n_microbatches=2)
    with pytest.raises(PlanError, match=r"uses 3 devices, but 2 are given: cpu:0, cpu:1"):
        autopar.parallelize(mlp(), ["cpu", "cpu"], plan=plan)


def test_a_plan_for_devices_that_are_not_there_is_refused() -> None:
    plan = Plan.from_split({"0": 0, "2": 1}, n_microbatches=2, devices=["cpu:0", "cuda:7"])
    with pytest.raises(PlanError, match=r"uses cuda:7, but the devices are cpu:0, cpu:1"):
        autopar.parallelize(mlp(), ["cpu", "cpu"], plan=plan)


@pytest.mark.parametrize("how", ["searched", "split"])
def test_a_plan_of_another_model_is_refused(how: str) -> None:
    model, x = mlp(), torch.randn(4, 16)
    keys = [operator_keys(p)[n] for p in [capture(model, (x,), {})] for n in compute_nodes(p.graph)]
    searched = Plan((Stage(("cpu:0",), tuple(keys[:3])), Stage(("cpu:1",), tuple(keys[3:]))), 2)
    plan = searched if how == "searched" else Plan.from_split({"0": 0, "2": 1}, n_microbatches=2)
    pm = autopar.parallelize(TwoTowers(), ["cpu", "cpu"], plan=plan)
    with pytest.raises(PlanError, match=r"made for another|no operator of the model runs in '0', '2'"):
        pm(torch.randn(4, 6), torch.randn(4, 10))


def test_a_stage_that_no_operator_falls_into_is_refused() -> None:
    plan = Plan((Stage(("cpu:0",), ("0/linear#0",)), Stage(("cpu:1",), ("nowhere/linear#0",))), 2)
    with pytest.raises(PlanError, match=r"2 stages.*only 1"):
        autopar.parallelize(mlp(), ["cpu", "cpu"], plan=plan)(torch.randn(4, 16))


def test_n_microbatches_and_schedule_given_beside_a_plan_win() -> None:
    plan = Plan.from_split({"0": 0, "2": 1}, n_microbatches=2, schedule="1f1b")
    pm = autopar.parallelize(mlp(), ["cpu", "cpu"], plan=plan, n_microbatches=3, schedule="gpipe")
    pm(torch.randn(6, 16))
    assert pm.plan is not None
    assert (pm.plan.n_microbatches, pm.plan.schedule) == (3, "gpipe")
    assert plan == Plan.from_split({"0": 0, "2": 1}, n_microbatches=2, schedule="1f1b")


def test_a_plan_is_a_value() -> None:
    plan = Plan.from_split({"a": 0}, n_microbatches=2)
    assert hash(plan) == hash(Plan.from_split({"a": 0}, n_microbatches=2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.n_microbatches = 3  # type: ignore[misc]
    with pytest.raises(PlanError):
        dataclasses.replace(plan, n_microbatches=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_microbatches": 0}, "n_microbatches.*0"),
        ({"n_microbatches": 2.0}, "n_microbatches.*2.0"),
        ({"n_microbatches": True}, "n_microbatches.*True"),
        ({"max_replicas": 0}, "max_replicas.*0"),
        ({"schedule": "zigzag"}, "schedule.*'zigzag'"),
        ({"memory_limit": -1}, "memory_limit.*-1"),
        ({"memory_limit": float("nan")}, "memory_limit.*nan"),
        ({"optimizer": "lion"}, "optimizer.*'lion'"),
        ({"batch_norm": "frozen"}, "batch_norm.*'frozen'"),
        ({"example_args": torch.randn(4, 16)}, r"example_args.*\(x,\)"),
        ({"example_kwargs": [1]}, "example_kwargs.*list"),
        ({"example_args": (torch.randn(4, 16),), "n_microbatches": 5}, "n_microbatches=5.*4 samples"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name_and_value(options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        autopar.parallelize(mlp(), ["cpu", "cpu"], **options)


def test_planning_needs_a_model_and_an_example() -> None:
    with pytest.raises(InputError, match="function"):
        autopar.parallelize(torch.relu, ["cpu"])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="example_args="):
        autopar.plan(mlp(), ["cpu"])
