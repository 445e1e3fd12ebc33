"""Plan files: a plan survives a file and edits by hand, and an error lists everything wrong with a file."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from layered_plans import put
from models import assert_same_gradients, gpt2, gradients, mlp, tokens
from plans import hand_plans, plans, searched_plans
from torch import nn

import autopar
from autopar import Cluster, Plan, PlanError
from autopar.analysis.operators import compute_nodes, operator_keys, replicable_nodes
from autopar.capture.program import Program, capture
from autopar.plan.stage import RunnerUp, Stage, StageTransfer
from autopar.schedule.builders import SCHEDULES
from autopar.sharding.stage_sharding import Exchange, StageSharding

Data = dict[str, Any]


def stage_numbers(plan: Plan, program: Program) -> dict[str, int]:
    keys = operator_keys(program)
    return {keys[node]: stage for node, stage in plan.assign(program).items()}


@settings(deadline=None)
@given(plans)
def test_a_plan_survives_json(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan


@settings(deadline=None, max_examples=examples(10))
@given(searched_plans())
def test_what_may_be_left_out_may_also_be_null_or_empty(plan: Plan) -> None:
    data = json.loads(plan.to_json())
    for name in ("batch_size", "predicted_step_time", "bubble", "objective", "model"):
        data.setdefault(name, None)
    for name in ("notes", "runners_up", "device_kinds", "transfers"):
        data.setdefault(name, [])
    assert Plan.from_json(json.dumps(data)) == plan


@pytest.mark.slow
def test_an_automatic_plan_survives_json_and_files_and_gives_the_same_stages(tmp_path: Path) -> None:
    model, inputs = gpt2(), {"input_ids": tokens(4)}
    made = autopar.plan(model, ["cpu", "cpu"], example_kwargs=inputs, max_replicas=1, n_microbatches=2)
    made.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == made
    program = capture(model, (), inputs)
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


# -- what is wrong ----------------------------------------------------------------------------------------------------


def full() -> Data:
    """The JSON of a plan with everything that a plan may have."""
    stages = [
        Stage((f"cpu:{s}",), (f"{s}/linear#0", f"{s}/relu#0"), 1.0, 2.0, 1.0, 8, 16, 32, 0.1, recompute=s == 0)
        for s in range(3)
    ]
    return json.loads(
        Plan(
            tuple(stages),
            n_microbatches=2,
            batch_size=8,
            devices=("cpu:0", "cpu:1", "cpu:2", "cpu:3"),
            predicted_step_time=9.0,
            single_device_time=20.0,
            bubble=0.25,
            transfers=(StageTransfer(0, 1, 4, 4, 0.1), StageTransfer(1, 2, 4, 4, 0.2)),
            notes=("a reason",),
            objective=8.0,
            bound=8.0,
            optimality="proven best",
            runners_up=(RunnerUp("gpipe", 10.0),),
            measured_step_time=9.5,
            model="a:00000000",
            device_kinds=("AMD EPYC, 1 thread",) * 4,
        ).to_json()
    )


def drop(*place: Any) -> Callable[[Data], None]:
    *steps, last = place

    def corrupt(data: Any) -> None:
        for step in steps:
            data = data[step]
        del data[last]

    return corrupt


# What is edited into a valid file, in which place, and what must be said.
CORRUPTIONS: list[tuple[str, Callable[[Data], None], str]] = [
    ("unknown", put("speed", 9), "speed is unknown"),
    ("unknown", put("explainer", None), "explainer is unknown"),
    ("unknown in a stage", put("stages", 0, "colour", 1), "stages[0].colour is unknown"),
    ("m", drop("n_microbatches"), "n_microbatches is missing"),
    ("m", put("n_microbatches", "two"), "n_microbatches must be a whole number, got 'two'"),
    ("m", put("n_microbatches", 1.5), "n_microbatches must be a whole number, got 1.5"),
    ("m", put("n_microbatches", True), "n_microbatches must be a whole number, got True"),
    ("m", put("n_microbatches", None), "n_microbatches must be a whole number, got None"),
    ("m", put("n_microbatches", 0), "n_microbatches must be at least 1, got 0"),
    ("m", put("n_microbatches", 9), "n_microbatches is 9, but the batch has 8 samples"),
    ("schedule", put("schedule", "zigzag"), f"schedule must be one of {', '.join(SCHEDULES)}, got 'zig"),
    ("schedule", put("schedule", 1), "schedule must be a text, got 1"),
    ("training", put("training", 1), "training must be true or false, got 1"),
    ("step", put("predicted_step_time", float("nan")), "predicted_step_time must be a finite number"),
    ("step", put("predicted_step_time", -1), "predicted_step_time must be a finite number of at least 0, got -1"),
    ("bound", put("bound", float("inf")), "bound must be a finite number of at least 0, got inf"),
    ("bubble", put("bubble", 1.5), "bubble is a fraction of at most 1, got 1.5"),
    ("step", put("predicted_step_time", 1e200), "predicted_step_time must be at most 1e+18, got 1e+200"),
    ("step", put("predicted_step_time", 10**400), "predicted_step_time must be a finite number of at least 0, got inf"),
    ("m", put("n_microbatches", 10**400), "n_microbatches must be a whole number, got inf"),
    ("stage bytes", put("stages", 2, "peak_memory", 10**1000), "stages[2].peak_memory must be a whole number, got inf"),
    ("stage bytes", put("stages", 2, "peak_memory", 10**19), "stages[2].peak_memory must be at most 1e+18"),
    ("devices", put("devices", "cpu:0"), "devices must be a list, got 'cpu:0'"),
    ("devices", put("devices", 3, "cpu:0"), "devices lists cpu:0 twice"),
    ("devices", put("devices", 3, 7), "devices[3] must be a text, got 7"),
    ("devices", put("device_kinds", ["x"]), "device_kinds must name a kind for each of the 4 devices, got 1"),
    ("device 0", put("stages", 0, "devices", "cpu:0"), "stages[0].devices must be a list, got 'cpu:0'"),
    ("device 0", put("stages", 0, "devices", [None]), "stages[0].devices[0] must be a text, got None"),
    ("device 0", put("stages", 0, "devices", []), "stage 0 has no device"),
    ("device 0", drop("stages", 0, "devices"), "stages[0].devices is missing"),
    ("device 1", put("stages", 1, "devices", ["cpu:2"]), "devices cpu:2 serve more than one stage"),
    ("device 1", put("stages", 1, "devices", ["cpu:1", "cpu:1"]), "stage 1 lists cpu:1 twice"),
    ("devices", put("stages", 2, "devices", ["tpu:7", "cpu:2"]), "stage 2 is on tpu:7"),
    ("stage time", put("stages", 0, "forward_time", -0.5), "stages[0].forward_time must be a finite number"),
    ("stage time", put("stages", 0, "forward_time", "1"), "stages[0].forward_time must be a number, got '1'"),
    ("stage bytes", put("stages", 2, "peak_memory", -1), "stages[2].peak_memory must be a finite number"),
    ("stage bytes", put("stages", 2, "peak_memory", 1.5), "stages[2].peak_memory must be a whole number, got 1.5"),
    ("recompute", put("stages", 1, "recompute", "yes"), "stages[1].recompute must be one of none, selective, full"),
    ("recompute", put("stages", 1, "recompute", ["full"]), "stages[1].recompute must be one of none, selective, full"),
    ("recompute", put("stages", 1, "selective", True), "stages[1].selective is unknown; write 'recompute' with one of"),
    ("operators 0", put("stages", 0, "operators", []), "stage 0 has no operators"),
    (
        "operators 0",
        put("stages", 0, "operators", 0, "x"),
        "stages[0].operators[0] must be like 'module.path: linear#0",
    ),
    ("operators 0", put("stages", 0, "operators", "0: linear#0"), "stages[0].operators must be a list"),
    (
        "operators 2",
        put("stages", 2, "operators", ["1: relu#0"]),
        "operator 1/relu#0 is listed 2 times, in stages 1, 2",
    ),
    ("split", put("split", {"x": "first"}), "split: 'x' must have a stage number, got 'first'"),
    ("split", put("split", []), "split must be an object from module paths to stages, got []"),
    ("transfers", put("transfers", 0, "target", 0), "transfers[0] goes from stage 0 to 0"),
    ("transfers", put("transfers", 0, "target", 3), "transfers[0] goes from stage 0 to 3"),
    ("transfers", put("transfers", 0, 5), "transfers[0] must be an object, got 5"),
    ("link", put("transfers", 1, "seconds", float("nan")), "transfers[1].seconds must be a finite number"),
    ("link", drop("transfers", 1, "forward_bytes"), "transfers[1].forward_bytes is missing"),
    ("notes", put("notes", [3]), "notes[0] must be a text, got 3"),
    ("runner-up", put("runners_up", 0, 1, -1.0), "runners_up[0].step_time must be a finite number"),
    ("runner-up", put("runners_up", 0, 0, 3), "runners_up[0].description must be a text, got 3"),
]


def complaint(data: Data) -> str:
    with pytest.raises(PlanError) as caught:
        Plan.from_json(json.dumps(data))
    return str(caught.value)


@pytest.mark.parametrize(
    ("corrupt", "said"),
    [(c, said) for _, c, said in CORRUPTIONS],
    ids=[f"{i}-{said}"[:60] for i, (_, _, said) in enumerate(CORRUPTIONS)],
)
def test_a_corruption_of_one_field_is_reported_alone(corrupt: Callable[[Data], None], said: str) -> None:
    data = full()
    corrupt(data)
    text = complaint(data)
    assert said in text
    assert len(text.splitlines()) == 2, "the heading and one violation"


@pytest.mark.slow
def test_of_any_two_corruptions_both_are_reported() -> None:
    for (place, first, said), (other, second, also) in itertools.combinations(CORRUPTIONS, 2):
        if place != other:
            data = full()
            first(data)
            second(data)
            text = complaint(data)
            assert said in text, (said, also)
            assert also in text, (said, also)


def test_a_file_with_stages_needs_operators_or_a_split() -> None:
    data = full()
    for stage in data["stages"]:
        del stage["operators"]
    assert "no stage has operators; list them, or give a split of the modules" in complaint(data)
    split = {"a": 0, "b": 1, "c": 2}
    assert dict(Plan.from_json(json.dumps(data | {"split": split})).split) == split
    alone = {"autopar_plan": "6.1", "stages": data["stages"][:1], "n_microbatches": 2}
    assert Plan.from_json(json.dumps(alone)).stages[0].operators == (), "the whole model"


@pytest.mark.parametrize(
    ("places", "said"),
    [
        (["a", "b", "b", "a"], "go round the devices in turn.*a | b | b | a"),
        (["a", "b", "a"], "go round the devices in turn"),
        (["a", "b", "c", "a", "b"], "go round the devices in turn"),
        (["a+b", "c", "a+b", "c"], "all stages have the same number of devices, here 2, 1, 2, 1"),
        (["a+b", "b+c", "a+b", "b+c"], "devices b serve more than one stage"),
    ],
)
def test_interleaved_stages_that_do_not_go_round_the_devices_are_refused(places: list[str], said: str) -> None:
    stages = tuple(Stage(tuple(names.split("+"))) for names in places)
    with pytest.raises(PlanError, match=said):
        Plan(stages, 4, "interleaved-1f1b")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_only_interleaved_stages_share_devices(schedule: str) -> None:
    stages = tuple(Stage((name,)) for name in "abab")
    assert (Plan(stages, 4, "interleaved-1f1b").ranks, Plan(stages, 4, "interleaved-1f1b").chunks) == (2, 2)
    with pytest.raises(PlanError, match="devices a, b serve more than one stage"):
        Plan(stages, 4, schedule)


def test_a_name_given_twice_is_reported_wherever_it_is() -> None:
    text = Plan.from_split({"a": 0, "b": 1}, n_microbatches=2).to_json()
    text = text.replace('"b": 1', '"b": 1, "b": 0').replace('"schedule"', '"schedule": "gpipe", "schedule"')
    with pytest.raises(PlanError, match=r"(?s)schedule appears twice.*split\.b appears twice"):
        Plan.from_json(text)
    text = (
        Plan((Stage(("a",), ("0/x#0",)), Stage(("b",), ("1/x#0",))), 1)
        .to_json()
        .replace('["b"]', '["b"], "devices": []')
    )
    with pytest.raises(PlanError, match=r"stages\[1\]\.devices appears twice"):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a plan"),
        ("{", "not a plan"),
        ("[]", "not a plan"),
        ("3", "not a plan"),
        ("[" * 100_000, "not a plan"),
        ("{}", "autopar_plan"),
        ('{"autopar_plan": 99}', "version of the format, '6.1' or 2, got 99"),
        ('{"autopar_plan": 1}', "version of the format, '6.1' or 2, got 1"),
        ('{"autopar_plan": 2.0}', "version of the format, '6.1' or 2, got 2.0"),
        ('{"autopar_plan": true}', "version of the format, '6.1' or 2, got True"),
        ('{"autopar_plan": "3"}', "version of the format, '6.1' or 2, got '3'"),
        ('{"autopar_plan": "7.0"}', "got '7.0'; a later autopar wrote this file; plan again"),
        ('{"autopar_plan": 2}', "stages is missing"),
        ('{"autopar_plan": 2, "stages": [], "n_microbatches": 1}', "at least one stage"),
        ('{"autopar_plan": 2, "stages": 3, "n_microbatches": 1}', "stages must be a list, got 3"),
        (
            '{"autopar_plan": 2, "stages": [{"devices": ["a"]}, 5], "n_microbatches": 1}',
            r"stages\[1\] must be an object",
        ),
        ('{"autopar_plan": 2, "stages": [{"devices": ["a"]}], "split": {"x": 7}, "n_microbatches": 1}', "'x'.*stage 7"),
    ],
)
def test_what_is_no_plan_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_json(text)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"missing\.json"):
        Plan.load(tmp_path / "missing.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match=r"bytes\.json"):
        Plan.load(tmp_path / "bytes.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(PlanError, match=r"other\.json: not a plan"):
        Plan.load(tmp_path / "other.json")


@pytest.mark.parametrize("value", ["1e400", "-1e400", "1" + "0" * 5000, "NaN"])
def test_a_number_that_no_float_holds_is_refused_by_its_place(value: str) -> None:
    exchange = Exchange("all_reduce", "data", "fc/linear#0", "fc.weight", 8, 1.0)
    sharding = StageSharding((2,), ("data",), exchanges=(exchange,))
    text = Plan((Stage(("a", "b"), sharding=sharding),), 1).to_json()
    assert Plan.from_json(text).stages[0].sharding == sharding
    assert '[0,"all_reduce data",8,1.0]' in text
    with pytest.raises(PlanError, match=re.escape("stages[0].sharding.exchanges[0].seconds must be a finite number")):
        Plan.from_json(text.replace('data",8,1.0', f'data",8,{value}'))


@pytest.mark.slow
def test_loading_compares_every_name_with_few_others(monkeypatch: pytest.MonkeyPatch) -> None:
    n, most = 20_000, 100_000
    comparisons = 0

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal comparisons
            comparisons += 1
            assert comparisons <= most
            return str.__eq__(self, other)

    def named(text: str, object_pairs_hook: Callable[[list[tuple[str, Any]]], Data], **options: Any) -> Any:
        def hook(pairs: list[tuple[str, Any]]) -> Data:
            return object_pairs_hook([(Name(name), value) for name, value in pairs])

        return parse(text, object_pairs_hook=hook, **options)

    plan = Plan.from_split({f"layers.{i}": 0 for i in range(n)}, n_microbatches=1)
    parse = json.loads
    monkeypatch.setattr(json, "loads", named)
    assert Plan.from_json(plan.to_json()) == plan


def test_an_interrupted_save_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = (Plan.from_split({name: 0}, n_microbatches=2) for name in "ab")
    path, link = tmp_path / "plan.json", tmp_path / "link.json"
    link.symlink_to(path)
    old.save(link)
    path.chmod(0o640)

    def full_disk(_: int) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError, match="no space"):
            new.save(path)
    assert Plan.load(path) == old
    assert sorted(tmp_path.iterdir()) == [link, path]
    new.save(link)
    assert Plan.load(path) == new
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640


@given(hand_plans())
def test_the_split_is_an_object_from_paths_to_stages(plan: Plan) -> None:
    assert json.loads(plan.to_json())["split"] == dict(plan.split)


def edited(plan: Plan, edit: Callable[[Data], object]) -> Plan:
    """The plan after a user changed its file."""
    data = json.loads(plan.to_json())
    edit(data)
    return Plan.from_json(json.dumps(data))


@pytest.mark.slow
@pytest.mark.parametrize(
    "edit",
    [
        lambda data: data.update(n_microbatches=2),
        lambda data: data.update(schedule="gpipe"),
        lambda data: data["stages"][0].update(recompute="stage"),
        lambda data: data.update(predicted_step_time=1e-9),
        lambda data: data.update(optimality="proven"),
        lambda data: data.pop("checksum"),
    ],
)
def test_an_edited_plan_loses_its_predictions(edit: Callable[[Data], object]) -> None:
    plan = priced_mlp()
    assert plan.predicted_step_time is not None
    assert edited(plan, lambda data: None) == plan
    found = edited(plan, edit)
    assert found.predicted_step_time is found.bound is found.single_device_time is None
    assert not found.optimality
    assert not found.runners_up
    assert not found.transfers
    assert all(s.forward_time is s.peak_memory is None for s in found.stages)
    assert "edited" in found.notes[0]
    assert "no predictions" in str(found)


@pytest.mark.slow
def test_predictions_of_an_edited_plan_come_back_by_pricing_it() -> None:
    model, x = mlp(), torch.randn(8, 16)
    plan = priced_mlp()
    other = edited(plan, lambda data: data.update(n_microbatches=2))
    priced = autopar.plan(model, ["cpu", "cpu"], example_args=(x,), plan=other)
    assert priced.predicted_step_time is not None
    assert priced.n_microbatches == 2
    assert [s.operators for s in priced.stages] == [s.operators for s in plan.stages]
    assert "no predictions" not in str(priced)


@pytest.mark.slow
def test_options_of_a_call_that_replace_decisions_drop_the_predictions() -> None:
    plan = priced_mlp()
    pm = autopar.parallelize(mlp(), ["cpu", "cpu"], plan=plan, n_microbatches=2)
    pm(torch.randn(8, 16))
    assert pm.plan is not None
    assert (pm.plan.n_microbatches, pm.plan.predicted_step_time) == (2, None)
    same = autopar.parallelize(mlp(), ["cpu", "cpu"], plan=plan, n_microbatches=plan.n_microbatches)
    same(torch.randn(8, 16))
    assert same.plan is not None
    assert same.plan.predicted_step_time == plan.predicted_step_time


def test_an_operator_before_its_input_is_refused_with_both_names() -> None:
    def swap(data: Data) -> None:
        first, last = data["stages"]
        first["operators"].append(last["operators"].pop())

    plan = edited(priced_mlp(), swap)
    late = plan.stages[0].operators[-1]
    pm = autopar.parallelize(mlp(), ["cpu", "cpu"], plan=plan)
    with pytest.raises(PlanError, match=re.escape(f"'{late}' is on stage 0, but it reads '")) as caught:
        pm(torch.randn(8, 16))
    reads = re.findall(r"'([^']+)'", str(caught.value))[1]
    assert reads in plan.stages[1].operators


def test_operators_that_contradict_the_split_of_modules_are_refused_with_both_stages() -> None:
    by_hand = Plan.from_split({"0": 0, "2": 1}, n_microbatches=2)
    priced = autopar.plan(mlp(), ["cpu", "cpu"], plan=by_hand, example_args=(torch.randn(8, 16),))
    moved = priced.stages[0].operators[-1]

    def move(data: Data) -> None:
        data["stages"][1]["operators"].insert(0, data["stages"][0]["operators"].pop())

    pm = autopar.parallelize(mlp(), ["cpu", "cpu"], plan=edited(priced, move))
    with pytest.raises(PlanError, match=re.escape(f"stage 1 lists '{moved}', which the plan's split")):
        pm(torch.randn(8, 16))
    pm = autopar.parallelize(mlp(), ["cpu", "cpu"], plan=priced)
    assert pm(torch.randn(8, 16)).shape[0] == 8


class SplitsAndWrites(nn.Module):
    """A tuple of tensors, and a write through a view that others read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.a(x).split(4, dim=1)
        h = self.b(torch.cat([right, left.relu()], 1))
        h[:, :4] = h[:, 4:].sigmoid()
        return self.c(h) + h.tanh()  # type: ignore[no-any-return]


class WritesEarly(nn.Module):
    """Memory that is written at the beginning, in several steps, and read at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted = x.new_zeros(x.shape)
        shifted[:, 1:] = self.a(x)[:, :-1]
        shifted[:, 0] = 0.5
        before = shifted + 2
        h = self.b(x).relu()
        shifted[:, 2:4].mul_(h[:, :2])
        return self.c(h + before) * shifted + shifted[:, 1:2]  # type: ignore[no-any-return]


class WritesTwice(nn.Module):
    """Reads between two writes, through views made before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x) * 1
        left, right = h[:, :4], h[:, 4:]
        left.add_(right)
        middle = self.b(h.tanh())
        right.mul_(middle[:, :4])
        return h + middle + left.cos().repeat(1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
@pytest.mark.parametrize("kind", [SplitsAndWrites, WritesEarly, WritesTwice])
def test_every_cut_of_the_operators_is_exact_or_refused(kind: type[nn.Module], schedule: str) -> None:
    """Memory that is overwritten cannot be sent; items of a tuple are taken out where the tuple is."""
    torch.manual_seed(0)
    model, x = kind(), torch.randn(6, 8)
    keys = autopar.plan(model, ["cpu"], example_args=(x,)).stages[0].operators
    expected = model(x)
    expected.square().mean().backward()
    wanted = gradients(model)
    refused, moved_items = [], set()
    for cut in range(1, len(keys)):
        stages = (Stage(("cpu:0",), keys[:cut]), Stage(("cpu:1",), keys[cut:]))
        pm = autopar.parallelize(model, ["cpu", "cpu"], plan=Plan(stages, n_microbatches=3, schedule=schedule))
        model.zero_grad()
        try:
            found = pm(x)
        except PlanError as error:
            refused.append((keys[cut - 1], keys[cut], str(error)))
            continue
        found.square().mean().backward()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert_same_gradients(gradients(model), wanted)
        assert pm.plan is not None
        if keys[cut - 1] == "/split#0":
            moved_items = {key for key in pm.plan.stages[0].operators if "getitem" in key}
        pm.close()
    assert kind is not SplitsAndWrites or moved_items == {"/getitem#0", "/getitem#1"}
    assert all("is on stage 0, but it" in message for *_, message in refused)
    assert len(refused) < len(keys) - 2


def test_a_plan_that_leaves_operators_out_shows_where_they_run() -> None:
    whole = priced_mlp()
    plan = edited(whole, lambda data: data["stages"][1]["operators"].pop())
    pm = autopar.parallelize(mlp(), ["cpu", "cpu"], plan=plan)
    pm(torch.randn(8, 16))
    assert pm.plan is not None
    assert [s.operators for s in pm.plan.stages] == [s.operators for s in whole.stages]
    assert pm.plan.stages != plan.stages


def priced_mlp() -> Plan:
    """Two stages by operators, with predictions."""
    split = Plan.from_split({"0": 0, "4": 1}, n_microbatches=4)
    x = torch.randn(8, 16)
    priced = autopar.plan(mlp(), ["cpu", "cpu"], example_args=(x,), plan=split)
    return dataclasses.replace(priced, split=(), optimality="within 1 %", bound=1e-6)


NAMES = ("first", "second", "third", "fourth")


def named() -> nn.Sequential:
    return nn.Sequential(OrderedDict((name, nn.Linear(16, 16)) for name in NAMES))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operators", "said"),
    [
        (["third: linaer#0", "fourth: linear#0"], "stage 1 lists 'third/linaer#0', which the model does not have; did"),
        (["third: linear#0", "forth: linear#0"], "it has no modules 'forth'; did you mean 'fourth'"),
    ],
)
def test_a_misspelt_operator_or_module_is_refused_with_the_one_that_was_meant(operators: list[str], said: str) -> None:
    call: dict[str, Any] = {"example_args": (torch.randn(8, 16),)}
    cluster = Cluster.preset("2xH100")
    split = Plan.from_split({"first": 0, "third": 1}, n_microbatches=2)
    plan = dataclasses.replace(autopar.plan(named(), cluster, plan=split, **call), split=())
    with pytest.raises(PlanError, match=re.escape(said)):
        autopar.plan(named(), cluster, plan=edited(plan, put("stages", 1, "operators", operators)), **call)
    stage = Stage(plan.devices, tuple(f"{name}/linear#0" for name in NAMES))
    mesh = {"mesh": {"data": 2}, "strategies": {"S0 R R -> S0": "third/linaer#0"}}
    with pytest.raises(PlanError, match="the stage has no operator 'third/linaer#0'; did you mean 'third/linear#0'"):
        edited(Plan((stage,), 2), put("stages", 0, "sharding", mesh))
    sharding = StageSharding.from_texts((2,), ("data",), {"third/linaer#0": "S0 R R -> S0"})
    with pytest.raises(PlanError, match="stage 0 lists 'third/linaer#0', which the model does not have; did you mean"):
        autopar.plan(named(), cluster, plan=Plan((dataclasses.replace(stage, sharding=sharding),), 2), **call)
    more = put("stages", 1, "operators", ["third: linear#0 linear#1", "fourth: linear#0"])
    found = autopar.plan(named(), cluster, plan=edited(plan, more), **call)
    assert "the plan lists 'third/linear#1', which this call does not run" in found.notes
    assert [stage.operators for stage in found.stages] == [stage.operators for stage in plan.stages]
