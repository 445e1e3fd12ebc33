"""Plan files of format 6: layers are written once, what is read is what was written, and edits say what they say."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from layered_plans import layered_plan
from models import mlp

import autopar
from autopar import Cluster, Plan
from autopar.plan.recompute import RECOMPUTE, recompute_flags
from autopar.plan.stage import Stage, StageTransfer
from autopar.plan.step_work import StepWork
from autopar.sharding.stage_sharding import (
    Exchange,
    Passage,
    Repeated,
    StageSharding,
    Stored,
    TensorRedistribution,
    totals,
)
from autopar.sharding.strategies import OperatorPlacements

Data = dict[str, Any]
serialization: Any = importlib.import_module("autopar.plan.serialization")  # `autopar.plan` is the call

# Names that a file must not confuse with its own: layers of layers, ranges, "@", numbers with leading zeros.
PARENTS = ["model.layers", "", "encoder.stages.1.blocks", "a.@", "a.0-1", "x.01"]
INSIDE = ["", ".norm", ".attention.q", ".attention", ".mlp.0", ".mlp.2", ".@", "-3"]
OPERATORS = ["linear", "add", "mul_", "cat"]


@st.composite
def layers_of_operators(draw: st.DrawFn) -> list[str]:
    """Keys of a model whose layers are equal but for a few operators, with others before, between and behind."""
    keys: dict[str, None] = {"embed/embedding#0": None}
    for parent in draw(st.lists(st.sampled_from(PARENTS), min_size=1, max_size=2, unique=True)):
        rows = draw(
            st.lists(st.tuples(st.sampled_from(INSIDE), st.sampled_from(OPERATORS), st.integers(0, 2)), max_size=9)
        )
        first = draw(st.integers(0, 3))
        for layer in range(first, first + draw(st.integers(1, 6))):
            for inside, name, k in rows:
                if draw(st.integers(0, 19)):  # one in twenty is left out
                    keys[f"{parent + '.' if parent else ''}{layer}{inside}/{name}#{k}"] = None
            if draw(st.booleans()):
                keys[f"/add#{len(keys)}"] = None
    return [*keys, "head/linear#0"]


def stage_sharding(draw: st.DrawFn, keys: tuple[str, ...], mesh: tuple[int, ...]) -> StageSharding:
    """A sharding whose details follow the keys, as those of equal layers do, with some that differ."""

    def layout(text: str) -> tuple[int, ...]:
        return tuple((sum(map(ord, text)) + axis) % 4 - 2 for axis in range(len(mesh)))

    def placements(key: str) -> OperatorPlacements:
        name = key.rpartition("/")[2] if draw(st.integers(0, 9)) else key
        return OperatorPlacements((layout(name), layout(name + "a")), (layout(name + "b"),))

    def stored(key: str) -> Stored:
        name = key.rpartition("/")[2]
        return Stored(layout(name), layout(name + "c"), draw(st.booleans()))

    def passage(text: str) -> Passage:
        whole = (-1,) * len(mesh)
        return Passage((whole, (0, *whole[1:])), (((0, *whole[1:]), whole) if len(text) % 2 else ()))

    exchanges = tuple(
        Exchange(
            "all_reduce", "data", key, before, len(key) * 8, 1e-6 / (1 + len(key)), *((True, False)[: len(key) % 3])
        )
        for before, key in zip(("x", *keys), keys, strict=False)
        if draw(st.integers(0, 3))
    )
    repeated = tuple(Repeated(key, 1e-7 * len(key)) for key in keys if "linear" not in key)
    nbytes, seconds, again = totals(
        ((e.nbytes, e.seconds) for e in exchanges if not e.once), (one.seconds for one in repeated)
    )
    has_totals = draw(st.sampled_from(["all", "none", "other"]))
    return StageSharding(
        mesh,
        ("data", "tensor")[: len(mesh)],
        tuple((key, placements(key)) for key in keys if "add" not in key),
        tuple((f"{key.rpartition('/')[0]}.weight", stored(key)) for key in keys if key.endswith("linear#0")),
        tuple(
            TensorRedistribution(before, reader, passage(before), passage(reader))
            for before, reader in zip(keys, (*keys[1:], ""), strict=True)
            if "cat" not in reader
        ),
        exchanges,
        int(nbytes) if has_totals == "all" else None,
        seconds if has_totals == "all" else 0.5 if has_totals == "other" else None,
        again if has_totals == "all" else None,
        repeated,
        regather=draw(st.booleans()),
    )


@st.composite
def layered_plans(draw: st.DrawFn) -> Plan:
    """Pipelines with replicas or meshes, interleaved or not, cut anywhere, that recompute and know their price."""
    keys = draw(layers_of_operators())
    ranks = draw(st.integers(1, min(3, len(keys))))
    chunks = draw(st.integers(1, 2)) if 2 * ranks <= len(keys) else 1
    n = ranks * chunks
    cuts = sorted(draw(st.sets(st.integers(1, len(keys) - 1), min_size=n - 1, max_size=n - 1))) if n > 1 else []
    held = [tuple(keys[a:b]) for a, b in zip([0, *cuts], [*cuts, len(keys)], strict=True)]
    mesh = draw(st.sampled_from([(), (2,), (2, 2)]))
    width = draw(st.integers(1, 2)) * (len(mesh) * 2 or 1)
    devices = [f"cuda:{i}" for i in range(ranks * width)]
    seconds = draw(st.floats(0, 1))
    stages = tuple(
        Stage(
            tuple(devices[s % ranks * width : (s % ranks + 1) * width]),
            held[s],
            forward_time=seconds,
            backward_time=draw(st.none() | st.floats(0, 1)),
            peak_memory=draw(st.none() | st.integers(0, 1 << 40)),
            sharding=stage_sharding(draw, held[s], mesh) if mesh else None,
            **recompute_flags(draw(st.sampled_from(list(RECOMPUTE)))),
        )
        for s in range(n)
    )
    return Plan(
        stages,
        draw(st.integers(1, 9)),
        "interleaved-1f1b" if chunks > 1 else draw(st.sampled_from(["gpipe", "1f1b", "zb-h1"])),
        devices=tuple(devices),
        device_kinds=draw(st.sampled_from([(), ("H100",) * len(devices)])),
        transfers=tuple(StageTransfer(s, s + 1, 8, 8, 0.1, blocking=draw(st.booleans())) for s in range(n - 1)),
        training=draw(st.booleans()),
        one_worker=draw(st.booleans()),
        predicted_step_time=seconds,
        work=draw(st.none() | step_works()),
        notes=tuple(draw(st.lists(st.text(max_size=9), max_size=2))),
    )


@st.composite
def step_works(draw: st.DrawFn) -> StepWork:
    """Up to a step of the largest models on the largest batches: more than 1e19 FLOPs."""
    tokens, flops = draw(st.none() | st.integers(1, 1 << 30)), draw(st.none() | st.floats(0, 1e24))
    return StepWork(tokens, flops, None if flops is None else flops / 1e18)


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(60))
@given(layered_plans())
def test_what_is_read_is_what_was_written(plan: Plan) -> None:
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert Plan.from_json(text).to_json() == text
    ambiguous = any("@" in key or key.startswith(".") for stage in plan.stages for key in stage.operators)
    assert ambiguous or json.loads(text)["autopar_plan"] == "6.1"


# -- layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_equal_layers_share_an_entry() -> None:
    data = json.loads(layered_plan().to_json())
    assert [stage["operators"] for stage in data["stages"]] == [[f"model.layers.{4 * s}-{4 * s + 3}"] for s in range(4)]
    assert data["every_stage"] == {"forward_time": 0.1, "sharding": {"mesh": {"tensor": 2}, "layers": "A"}}
    assert data["layers"]["model.layers"]["operators"] == {
        "A": [
            *("norm: pow mul", ": add", "mlp.gate: linear"),
            *("mlp.up: linear", "mlp.down: linear", "mlp: mul", ": add"),
        ]
    }
    assert data["layers"]["model.layers"]["strategies"] == {"A": {"R S0 -> S1": "mlp.gate,up,down: linear"}}
    assert data["layers"]["model.layers"]["parameters"] == {"A": {"S0": "mlp.gate,up,down: weight"}}
    more = len(layered_plan(1600).to_json()) - len(layered_plan(16).to_json())
    assert more < 100, "100 times the layers take no more than their numbers"


def test_a_layer_that_differs_is_an_exception_and_a_stage_may_end_inside_of_one() -> None:
    plan = layered_plan(other=5)
    assert json.loads(plan.to_json())["stages"][1]["sharding"] == {
        "mesh": {"tensor": 2},
        "layers": "A",
        "strategies": {"R S1 -> P": "model.layers.5.mlp.up: linear"},
    }
    assert Plan.from_json(plan.to_json()) == plan
    cut = layered_plan(cut=3)
    stages = json.loads(cut.to_json())["stages"]
    assert stages[0]["operators"] == ["model.layers.0-3 before mlp.down/linear#0"]
    assert stages[1]["operators"] == ["model.layers.3-7 from mlp.down/linear#0 before mlp.down/linear#0"]
    assert json.loads(cut.to_json())["every_stage"]["sharding"] == {"mesh": {"tensor": 2}, "layers": "A"}
    assert Plan.from_json(cut.to_json()) == cut


def test_a_layer_that_lacks_rows_in_the_middle_has_parts_of_the_others() -> None:
    keys = tuple(f"layers.{i}.{part}/linear#0" for i in range(4) for part in "abcdefghi")
    lacking = [key for key in keys if not key.startswith(("layers.2.d", "layers.2.e", "layers.2.f"))]
    texts = dict.fromkeys(lacking, "S0 R -> S0")
    sharding = StageSharding.from_texts(
        (2,), ("data",), texts, {key.replace("/linear#0", ".w"): "S0" for key in lacking}
    )
    plan = Plan((Stage(("a", "b"), keys, sharding=sharding),), 1)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_file_that_would_not_read_as_the_plan_is_written_without_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, whole = layered_plan(), serialization.layered
    monkeypatch.setattr(serialization, "layered", lambda flat: {**whole(flat), "n_microbatches": 3})
    text = plan.to_json()
    assert json.loads(text)["autopar_plan"] == 2
    assert Plan.from_json(text) == plan


def test_devices_in_a_row_and_numbers_that_repeat_are_written_short() -> None:
    devices = tuple(f"1.{i}:H100" for i in range(7, 12))
    sharding = StageSharding.from_texts((5,), ("data",), {}, {})
    again = (Repeated("a/x#0", 0.5), Repeated("a/y#0", 0.25), Repeated("b/x#0", 0.5))
    sharding = replace(sharding, repeated=again, repeated_time=1.25)
    other = Stage(("0.0:T4", "0.1:T4", "cpu:0"), ("c/x#0",))
    plan = Plan(
        (Stage(devices, ("a/x#0", "a/y#0", "b/x#0"), sharding=sharding), other), 1, devices=(*devices, *other.devices)
    )
    data = json.loads(plan.to_json())
    assert data["devices"] == ["1.7-11:H100", "0.0:T4", "0.1:T4", "cpu:0"]
    assert [stage["devices"] for stage in data["stages"]] == [["1.7-11:H100"], ["0.0:T4", "0.1:T4", "cpu:0"]]
    assert data["stages"][0]["sharding"]["repeated"] == [[0.5, "a,b: x"], [0.25, "a: y"]]
    assert Plan.from_json(plan.to_json()) == plan


def test_what_most_stages_have_is_written_once() -> None:
    times = (0.5, 0.25, 0.5, 0.5)
    plan = Plan(tuple(Stage((f"{s}",), (f"{s}/x#0",), t, peak_memory=8 + s) for s, t in enumerate(times)), 1)
    data = json.loads(plan.to_json())
    assert data["every_stage"] == {"forward_time": 0.5}
    assert [stage.get("forward_time") for stage in data["stages"]] == [None, 0.25, None, None]
    assert Plan.from_json(plan.to_json()) == plan


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), max_size=6), st.lists(st.booleans(), min_size=6))
def test_collectives_under_one_number_are_those_in_their_order(runs: list[list[int]], alike: list[bool]) -> None:
    kinds = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "gather"]
    exchanges = [
        Exchange(kinds[k], "data", f"op/{i}#0", "t", 8 if alike[k] else k, 0.5)
        for i, run in enumerate(runs)
        for k in run
    ]
    sharding = replace(StageSharding.from_texts((2,), ("data",), {}, {}), exchanges=tuple(exchanges))
    plan = Plan((Stage(("a", "b"), ("x/y#0",), sharding=sharding),), 1)
    text = plan.to_json()
    assert json.loads(text)["autopar_plan"] == "6.1"
    assert Plan.from_json(text) == plan


# -- prices -----------------------------------------------------------------------------------------------------------


def test_a_file_is_priced_for_the_model_as_it_says_now(tmp_path: Any) -> None:
    model, x = mlp(), torch.randn(8, 16)
    call = {"example_args": (x,)}
    by_hand = Plan.from_split({"0": 0, "4": 1}, n_microbatches=4)
    priced = autopar.plan(model, Cluster.preset("2xH100"), plan=by_hand, **call)
    priced.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == priced
    assert Plan.load(tmp_path / "plan.json", model, Cluster.preset("2xH100"), **call) == priced
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(text.replace('"n_microbatches": 4', '"n_microbatches": 2'))
    assert Plan.load(tmp_path / "plan.json").predicted_step_time is None
    found = Plan.load(tmp_path / "plan.json", model, Cluster.preset("2xH100"), **call)
    expected = priced.with_(n_microbatches=2)
    assert found.predicted_step_time == expected.predicted_step_time is not None
    assert found.stages == expected.stages
    assert found.predicted_step_time != priced.predicted_step_time
