"""A plan is data: it is checked when made, and refuses models and devices that it was not made for."""

from __future__ import annotations

import copy
import re
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import TwoTowers, UNet, gpt2, mlp
from plans import searched_plans
from torch import nn

import autopar
from autopar import InputError, Plan, PlanError
from autopar.analysis.operators import compute_nodes, operator_keys
from autopar.capture.module_hooks import is_hook_point
from autopar.capture.program import Program, capture
from autopar.plan.fingerprint import fingerprint
from autopar.plan.recompute import Recompute
from autopar.plan.stage import Stage


def stage_numbers(plan: Plan, program: Program) -> dict[str, int]:
    keys = operator_keys(program)
    return {keys[node]: stage for node, stage in plan.assign(program).items()}


def captured(model: nn.Module, **inputs: torch.Tensor) -> Program:
    return capture(model, (), inputs)


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
        ({"a": 0, "b": 1}, {"recompute": [1, 2]}, "recompute names 2, but there are stages 0..1"),
        ({"a": 0, "b": True}, {}, "'b': True"),
        ({"a": 0, "b": 10**9}, {}, "no module is put on stage 1, 2, 3, 4; number the stages"),
        ({0: 0}, {}, r"split has paths of modules, as in named_modules\(\), got \[0\]"),
        ([("a", 0)], {}, "split must be a mapping from module paths to stages"),
        ({"a": 0}, {"n_microbatches": "2"}, "n_microbatches must be a whole number, got '2'"),
        ({"a": 0}, {"n_microbatches": None}, "n_microbatches must be a whole number, got None"),
        ({"a": 0}, {"schedule": None}, "schedule must be one of .*, got None"),
        ({"a": 0, "b": 1}, {"devices": "cpu:0,cpu:1"}, "devices must have one entry for each stage.*got 'cpu:0,cpu:1'"),
        ({"a": 0}, {"devices": [0]}, "devices of stage 0 must be names such as 'cuda:0', got 0"),
        ({"a": 0}, {"recompute": "ful"}, "recompute must be one of none, .*, got 'ful'"),
        ({"a": 0}, {"recompute": 1}, "recompute must be one of .*, got 1"),
        ({"a": 0}, {"recompute": {0: ["full"]}}, r"recompute must be one of .*, got \['full'\]"),
        ({"a": 0}, {"selective": "0"}, r"selective must list stages, as in \[0, 1\], got '0'"),
    ],
)
def test_a_split_that_makes_no_plan_is_refused_naming_what_is_wrong(split: Any, options: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_split(split, **{"n_microbatches": 2, **options})


def test_the_stages_named_recompute() -> None:
    plan = Plan.from_split({"a": 0, "b": 1, "c": 2}, n_microbatches=2, recompute=[0, 2])
    assert [stage.recompute for stage in plan.stages] == [True, False, True]
    every = Plan.from_split({"a": 0, "b": 1}, n_microbatches=2, recompute="full", devices=[torch.device("cpu"), "x"])
    assert [stage.mode for stage in every.stages] == [Recompute.FULL] * 2
    assert every.stages[0].devices == ("cpu",)


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


@pytest.mark.parametrize("how", ["modules", "operators", "listed"])
def test_hooks_of_a_module_are_in_the_stages_where_it_begins_and_ends(how: str) -> None:
    """Whatever a plan lists: a plan that was made before the hooks lists none of them."""
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    plain = captured(model, input=torch.randn(4, 6))
    for module in (model[0], model[1], model[1][0]):
        module.register_full_backward_hook(lambda *_: None)
    hooked = captured(model, input=torch.randn(4, 6))
    plan = Plan.from_split({"0": 0, "1": 1}, n_microbatches=1)
    if how != "modules":
        wanted = stage_numbers(plan, plain if how == "operators" else hooked)
        if how == "listed":  # the hooks on the wrong sides
            wanted |= {key: 1 - stage for key, stage in wanted.items() if "_module" in key or "getitem" in key}
        stages = [tuple(key for key, stage in wanted.items() if stage == number) for number in (0, 1)]
        plan = replace(
            plan, split=(), stages=tuple(replace(s, operators=o) for s, o in zip(plan.stages, stages, strict=True))
        )
    stage_of = plan.assign(hooked)
    found = [(node.target.__name__, stage) for node, stage in stage_of.items() if is_hook_point(node)]
    assert found == [("enter_module", 0), ("leave_module", 0), *[("enter_module", 1)] * 2, *[("leave_module", 1)] * 2]


# -- models and devices -----------------------------------------------------------------------------------------------


def test_a_plan_for_more_devices_than_given_is_refused() -> None:
    plan = Plan.from_split({"0": 0, "2": 1, "4": 2}, n_microbatches=2)
    with pytest.raises(PlanError, match=r"uses 3 devices, but 2 are given: cpu:0, cpu:1"):
        autopar.parallelize(mlp(), ["cpu", "cpu"], plan=plan)


def test_a_plan_for_devices_that_are_not_there_is_refused() -> None:
    plan = Plan.from_split({"0": 0, "2": 1}, n_microbatches=2, devices=["cpu:0", "cuda:7"])
    with pytest.raises(PlanError, match=r"uses cuda:7, but the devices are cpu:0, cpu:1"):
        autopar.parallelize(mlp(), ["cpu", "cpu"], plan=plan)


def by_stage(n_stages: int, **options: Any) -> Plan:
    return Plan.from_split({f"{2 * s}": s for s in range(n_stages)}, n_microbatches=2, **options)


@given(n_stages=st.integers(1, 8), n_devices=st.integers(1, 8))
def test_interleaved_stages_go_round_the_devices_offered_where_they_go_evenly(n_stages: int, n_devices: int) -> None:
    plan, offered = by_stage(n_stages, schedule="interleaved-1f1b"), [f"cpu:{i}" for i in range(n_devices)]
    if n_devices < n_stages and n_stages % n_devices:
        with pytest.raises(PlanError, match=f"{n_stages} stages cannot go round {n_devices} devices evenly"):
            plan.on(offered)
        return
    placed = plan.on(offered)
    assert [stage.devices for stage in placed.stages] == [(f"cpu:{s % n_devices}",) for s in range(n_stages)]
    assert (placed.ranks, placed.chunks) == (min(n_stages, n_devices), max(1, n_stages // n_devices))
    assert placed.used_devices == tuple(offered[:n_stages])


@given(searched_plans(), st.data())
def test_a_plan_runs_on_its_own_devices_in_any_order_and_on_no_fewer(plan: Plan, data: st.DataObject) -> None:
    offered = data.draw(st.permutations(plan.devices))
    placed = plan.on(offered)
    assert placed.stages == plan.stages
    assert placed.devices == tuple(offered)
    assert placed.device_kinds == plan.device_kinds
    lost = data.draw(st.sampled_from(plan.used_devices))
    with pytest.raises(PlanError, match=f"uses.*{lost}"):
        plan.on([name for name in offered if name != lost] + ["cuda:99"])


def test_devices_of_a_cluster_take_their_places_among_as_many_offered() -> None:
    names = [f"{node}.{index}:cpu" for node in range(2) for index in range(2)]
    plan = Plan.from_split({"a": 0, "b": 1}, devices=[[names[2]], [names[1]]], n_microbatches=1)
    offered, kinds = [f"cpu:{i}" for i in range(4)], ["AMD, 1 thread"] * 4
    placed = replace(plan, devices=tuple(names)).on(offered, kinds)
    assert [stage.devices for stage in placed.stages] == [("cpu:2",), ("cpu:1",)]
    fewer = replace(plan, devices=tuple(names)).on(offered[:2], kinds[:2])  # in the cluster's order
    assert [stage.devices for stage in fewer.stages] == [("cpu:1",), ("cpu:0",)]


def test_devices_of_other_kinds_are_refused_with_both() -> None:
    made = replace(by_stage(2).on(["cuda:0", "cuda:1", "cuda:2"], ["H200", "H200", "L4"]), n_microbatches=4)
    assert made.device_kinds == ("H200", "H200", "L4")
    assert made.on(["cuda:0", "cuda:1"], ["H200", "H200"]).device_kinds == ("H200", "H200"), "L4 is not used"
    assert made.on(["cuda:1", "cuda:0"]).device_kinds == ("H200", "H200"), "not asked about kinds"
    with pytest.raises(PlanError, match=r"made for cuda:1 = 'H200', which here is 'A100'; plan again.*device_kinds"):
        made.on(["cuda:0", "cuda:1"], ["H200", "A100"])


def test_kinds_that_changed_places_are_refused_device_by_device() -> None:
    made = by_stage(2).on(["a", "b"], ["H200", "L4"])
    with pytest.raises(PlanError, match=r"a = 'H200', which here is 'L4', b = 'L4', which here is 'H200'"):
        made.on(["a", "b"], ["L4", "H200"])
    assert made.on(["b", "a"], ["L4", "H200"]).device_kinds == ("L4", "H200"), "the order does not matter"


def test_all_that_is_wrong_with_the_devices_is_said_at_once() -> None:
    plan = Plan.from_split({"0": 0, "2": 1}, n_microbatches=2, devices=[["cpu:0", "cpu:1"], "tpu:3"])
    with pytest.raises(PlanError, match=r"uses 3 devices, but 2 are given.*uses tpu:3, but the devices are"):
        plan.on(["cpu:0", "cpu:1"])
    with pytest.raises(PlanError, match=r"uses 0.5:any, but the devices are cpu:0, cpu:1"):
        Plan.from_split({"0": 0}, n_microbatches=2, devices=["0.5:any"]).on(["cpu:0", "cpu:1"])


@pytest.mark.parametrize("change", ["none", "values", "dtype", "eval", "frozen"])
def test_the_model_that_a_plan_was_made_for_may_change_in_all_but_its_parameters_names_and_shapes(change: str) -> None:
    plan = replace(Plan.from_split({"left": 0, "right": 1}, n_microbatches=2), model=fingerprint(TwoTowers()))
    model = TwoTowers()
    if change == "values":
        nn.init.zeros_(model.head.weight)
    if change == "dtype":
        model.to(torch.bfloat16)
    if change == "eval":
        model.eval()
    if change == "frozen":
        model.requires_grad_(False)
    plan.check_model(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head": nn.Linear(8, 9)}, r"'head' have other names or shapes, here head.weight \(9, 8\), head.bias \(9,\)"),
        ({"head": nn.Identity()}, "no parameters in 'head'"),
        (
            {"extra": nn.Linear(1, 1)},
            "parameters in 'extra', which the other model does not have.*nothing about.*'extra'",
        ),
        ({"left": nn.Sequential(nn.Linear(6, 8))}, "'left' have other.*no modules 'left.2'.*nothing about.*'head'"),
    ],
)
def test_a_plan_made_for_other_parameters_is_refused_naming_some(change: dict[str, nn.Module], message: str) -> None:
    split = {"left.0": 0, "left.2": 0, "right": 1}
    plan = replace(Plan.from_split(split, n_microbatches=2), model=fingerprint(TwoTowers()))
    model = TwoTowers()
    for name, module in change.items():
        setattr(model, name, module)
    with pytest.raises(PlanError, match=f"made for another model than this TwoTowers: .*{message}"):
        plan.check_model(model)


def test_an_operator_whose_module_a_model_has_not_is_enough_to_refuse_it() -> None:
    plan = Plan((Stage(("a",), ("left.0/linear#0", "head.5/relu#0")), Stage(("b",), ("/sum#0", "tail/add#0"))), 2)
    lost, bare = r"no modules 'head\.5', 'tail' \(did you mean 'head'\?\)", r"'left\.2', 'right\.0'"
    with pytest.raises(PlanError, match=f"{lost}; the plan says nothing about.*{bare}"):
        plan.check_model(TwoTowers())


def test_tied_and_lazy_parameters_and_none_at_all_have_fingerprints() -> None:
    tied = gpt2()
    assert fingerprint(tied) == fingerprint(copy.deepcopy(tied)) != fingerprint(mlp())
    lazy = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))
    before = fingerprint(lazy)
    lazy(torch.ones(2, 5))
    assert set(before.split()) < set(fingerprint(lazy).split())
    assert fingerprint(nn.ReLU()) == "no parameters"
    with pytest.raises(PlanError, match="parameters in '0', '2', '4' and 1 more, which the other model does not have"):
        replace(by_stage(1), model=fingerprint(nn.ReLU())).check_model(mlp())


def test_a_split_of_a_module_that_is_not_there_blames_no_other() -> None:
    """A split may leave modules out: those that it does not name are no fault."""
    plan = Plan.from_split({"left.0": 0, "right.7": 1}, n_microbatches=2)
    with pytest.raises(PlanError, match=r"no modules 'right.7' \(did you mean 'right\.\d'( or '[\w.]+')*\?\)$"):
        plan.check_model(TwoTowers())


@pytest.mark.slow
def test_more_micro_batches_than_samples_are_refused_where_a_plan_is_priced() -> None:
    plan, x = Plan.from_split({"0": 0, "2": 1}, n_microbatches=5), torch.randn(4, 16)
    for devices in (autopar.Cluster.preset("2xH100"), ["cpu", "cpu"]):
        with pytest.raises(PlanError, match="5 micro-batches, but the batch has 4 samples; give n_microbatches=4"):
            autopar.plan(mlp(), devices, plan=plan, example_args=(x,))
    with pytest.raises(PlanError, match="5 micro-batches, but the batch has 4 samples"):
        autopar.compare(mlp(), autopar.Cluster.preset("2xH100"), {"split": plan}, example_args=(x,))


@pytest.mark.parametrize("how", ["searched", "split"])
def test_a_plan_of_another_model_is_refused(how: str) -> None:
    model, x = mlp(), torch.randn(4, 16)
    keys = [operator_keys(p)[n] for p in [capture(model, (x,), {})] for n in compute_nodes(p.graph)]
    searched = Plan((Stage(("cpu:0",), tuple(keys[:3])), Stage(("cpu:1",), tuple(keys[3:]))), 2)
    plan = searched if how == "searched" else Plan.from_split({"0": 0, "2": 1}, n_microbatches=2)
    with pytest.raises(PlanError, match=r"made for another model than this TwoTowers: it has no modules '0', "):
        autopar.parallelize(TwoTowers(), ["cpu", "cpu"], plan=plan)


def test_a_plan_none_of_whose_operators_runs_is_refused_with_those_that_do() -> None:
    plan = Plan((Stage(("cpu:0",), ("0/conv2d#0",)), Stage(("cpu:1",), ("2/conv2d#0",))), 2)
    with pytest.raises(PlanError, match=r"with '0/conv2d#0', '2/conv2d#0'; this model has '0/linear#0', '1/relu_#0'"):
        plan.assign(capture(mlp(), (torch.randn(4, 16),), {}))


def test_a_stage_that_no_operator_falls_into_is_refused() -> None:
    plan = Plan((Stage(("cpu:0",), ("0/linear#0",)), Stage(("cpu:1",), ("2/linear#7",))), 2)
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
    with pytest.raises(FrozenInstanceError):
        plan.n_microbatches = 3  # type: ignore[misc]
    with pytest.raises(PlanError):
        replace(plan, n_microbatches=0)


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


def test_a_split_that_contradicts_the_operators_is_refused() -> None:
    stages = (Stage(("cpu:0",), ("0/linear#0",)), Stage(("cpu:1",), ("1.inner/linear#0",)))
    Plan(stages, n_microbatches=1, split=(("0", 0), ("1", 1)))
    with pytest.raises(PlanError, match=r"stage 1 lists operator 1\.inner/linear#0, but the split puts '1' on stage 0"):
        Plan(stages, n_microbatches=1, split=(("0", 1), ("1", 0)))


@pytest.mark.parametrize("path", [3, True, ["0"], ("0",), b"0"])
def test_what_is_no_path_is_not_looked_up(path: Any) -> None:
    plan = Plan.from_split({"0": 0}, n_microbatches=1)
    with pytest.raises(InputError, match=rf"^path must be the path of a module .*, got {re.escape(repr(path))}$"):
        plan.explain(path)


@pytest.mark.parametrize("offered", [3, "cpu", [3], None])
def test_devices_that_a_plan_is_put_on_are_names(offered: Any) -> None:
    plan = Plan.from_split({"0": 0}, n_microbatches=1)
    with pytest.raises(
        InputError, match=rf"^devices must be a list of their names, .*, got {re.escape(repr(offered))}$"
    ):
        plan.on(offered)


@pytest.mark.parametrize("path", [3, None, b"plan.json"])
def test_what_is_no_name_of_a_file_is_refused(path: Any) -> None:
    plan = Plan.from_split({"0": 0}, n_microbatches=1)
    calls = [Plan.load, plan.save, plan.trace, plan.memory_snapshot, plan.report().save]
    for call in calls:
        with pytest.raises(InputError, match=rf"^path must be the name of a file, got {re.escape(repr(path))}$"):
            call(path)
    with pytest.raises(InputError, match=rf"^text must be the JSON of a plan, got {re.escape(repr(path))}$"):
        Plan.from_json(path)


def test_files_are_written_where_a_file_can_be(tmp_path: Path) -> None:
    plan = Plan.from_split({"0": 0}, n_microbatches=1)
    kinds = {".json": [plan.save, plan.trace], ".pickle": [plan.memory_snapshot], ".html": [plan.report().save]}
    for ending, calls in kinds.items():
        for call in calls:
            path = tmp_path / "none" / f"file{ending}"
            with pytest.raises(InputError, match=f"^{re.escape(str(path))}: there is no directory .*none$"):
                call(path)
            folder = tmp_path / f"folder{ending}"
            folder.mkdir(exist_ok=True)
            with pytest.raises(InputError, match=f"^{re.escape(str(folder))}: this is a directory; give the name"):
                call(folder)
