"""Plan files of format 5: layers are written once, what is read is what was written, and edits say what they say."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from models import mlp
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar import Cluster, Plan, PlanError
from autopar.plan.file_format.fields import plain
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


@settings(deadline=None, max_examples=examples(60))
@given(layered_plans())
def test_what_is_read_is_what_was_written(plan: Plan) -> None:
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert Plan.from_json(text).to_json() == text


# -- sizes ------------------------------------------------------------------------------------------------------------


def layered_plan(n_layers: int = 16, n_stages: int = 4, *, cut: int = 0, other: int | None = None) -> Plan:
    """Equal layers on stages of a tensor-parallel mesh. `cut`: operators by which each stage ends early. `other`: a
    layer with another strategy in one operator."""
    inside = [".norm/pow#0", ".norm/mul#0", "/add#0"]
    inside += [f".mlp.{name}/linear#0" for name in ("gate", "up", "down")] + [".mlp/mul#0", "/add#1"]
    keys = [f"model.layers.{i}{name}" for i in range(n_layers) for name in inside]
    each = len(keys) // n_stages
    ends = [each * s - cut for s in range(1, n_stages)] + [len(keys)]
    held = [tuple(keys[a:b]) for a, b in zip([0, *ends], ends, strict=False)]

    def placements(key: str) -> OperatorPlacements:
        if key == f"model.layers.{other}.mlp.up/linear#0":
            return OperatorPlacements(((-1,), (1,)), ((-2,),))
        return OperatorPlacements(((-1,), (0,)), ((1,),))

    stages = []
    for s, mine in enumerate(held):
        sharding = StageSharding(
            (2,),
            ("tensor",),
            tuple((key, placements(key)) for key in mine if "linear" in key),
            tuple((key.replace("/linear#0", ".weight"), Stored((0,), (0,))) for key in mine if "linear" in key),
        )
        stages.append(Stage((f"cuda:{2 * s}", f"cuda:{2 * s + 1}"), mine, forward_time=0.1, sharding=sharding))
    return Plan(tuple(stages), 4, devices=tuple(f"cuda:{i}" for i in range(2 * n_stages)))


def test_equal_layers_share_an_entry() -> None:
    data = json.loads(layered_plan().to_json())
    assert [stage["operators"] for stage in data["stages"]] == [[f"model.layers.{4 * s}-{4 * s + 3}"] for s in range(4)]
    assert [stage["sharding"] for stage in data["stages"]] == [
        {"mesh": {"tensor": 2}, "layers": f"model.layers.{4 * s}-{4 * s + 3} as A"} for s in range(4)
    ]
    assert data["layers"]["model.layers"]["operators"] == {
        "A": [
            *("@.norm: pow#0 mul#0", "@: add#0", "@.mlp.gate: linear#0"),
            *("@.mlp.up: linear#0", "@.mlp.down: linear#0", "@.mlp: mul#0", "@: add#1"),
        ]
    }
    more = len(layered_plan(1600).to_json()) - len(layered_plan(16).to_json())
    assert more < 100, "100 times the layers take no more than their numbers"


def test_a_layer_that_differs_is_an_exception_and_a_stage_may_end_inside_of_one() -> None:
    plan = layered_plan(other=5)
    assert json.loads(plan.to_json())["stages"][1]["sharding"]["strategies"] == {
        "model.layers.4-7": "as A",
        "model.layers.5.mlp.up/linear#0": "R S1 -> P",
    }
    assert Plan.from_json(plan.to_json()) == plan
    cut = layered_plan(cut=3)
    stages = json.loads(cut.to_json())["stages"]
    assert stages[0]["operators"] == ["model.layers.0-2", "model.layers.3 before mlp.down/linear#0"]
    assert stages[1]["operators"][0] == "model.layers.3 from mlp.down/linear#0"
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


def llama_of_16_layers() -> tuple[LlamaForCausalLM, Data]:
    """A model on the meta device, and an example call that returns its loss."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=16, vocab_size=4096, **sizes)).train()
        ids = torch.zeros(16, 128, dtype=torch.long)
    return model, {"example_kwargs": {"input_ids": ids, "labels": ids}}


@pytest.mark.slow
def test_an_automatic_plan_of_16_layers_takes_less_than_10_kb() -> None:
    model, call = llama_of_16_layers()
    plan = autopar.plan(model, Cluster.preset("8xH100"), **call)
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert any(stage.sharding is not None for stage in plan.stages), "a plan without strategies is small anyway"
    assert len(text) < 10_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees",
    [
        {"pipeline": 8},
        {"pipeline": 8, "recompute": "full", "schedule": "zb-h1"},
        {"tensor": 8},
        {"data": 8, "zero": 3},
        {"pipeline": 4, "tensor": 2},
        {"pipeline": 4, "tensor": 2, "recompute": "selective", "sequence_parallel": True},
        {"pipeline": 4, "data": 2, "chunks": 4, "zero": 1},
        {"pipeline": 4, "tensor": 2, "chunks": 2},
        {"pipeline": 2, "tensor": 2, "data": 2},
        {"pipeline": 2, "tensor": 2, "data": 2, "zero": 1, "sequence_parallel": True},
        {"tensor": 2, "data": 4, "zero": 3},
    ],
    ids=str,
)
def test_a_plan_by_hand_of_16_layers_takes_less_than_10_kb(degrees: dict[str, Any]) -> None:
    """ZeRO 3 beside tensor parallelism has more to say: every gathering of a parameter."""
    (model, call), cluster = llama_of_16_layers(), Cluster.preset("8xH100")
    plan = Plan.by_hand(model, cluster, micro_batch=1, **degrees, **call)
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert len(text) < (12_000 if "tensor" in degrees and degrees.get("zero") == 3 else 10_000)
    if "tensor" in degrees:
        assert len(json.dumps(plain(plan), indent=1)) > 10 * len(text), "what format 2 took"


# -- edits ------------------------------------------------------------------------------------------------------------


def edited(plan: Plan, edit: Callable[[Data], object]) -> Plan:
    data = json.loads(plan.to_json())
    edit(data)
    return Plan.from_json(json.dumps(data))


def test_a_range_of_layers_that_is_edited_moves_layers() -> None:
    def edit(data: Data) -> None:
        data["stages"][0]["operators"] = ["model.layers.0-4"]
        data["stages"][1]["operators"] = ["model.layers.5-7"]

    found = edited(layered_plan(), edit)
    assert {key.split(".")[2].split("/")[0] for key in found.stages[0].operators} == set("01234")
    assert len(found.stages[1].operators) == 3 * 8
    assert found.stages[0].forward_time is None, "its price was another plan's"


def test_an_exception_by_operator_is_added_by_hand() -> None:
    def edit(data: Data) -> None:
        data["stages"][1]["sharding"]["strategies"] = {"model.layers.5.mlp.up/linear#0": "R S1 -> P"}

    assert edited(layered_plan(), edit).stages[1].sharding == layered_plan(other=5).stages[1].sharding


def put(*place: Any) -> Callable[[Data], None]:
    *steps, last, value = place

    def corrupt(data: Any) -> None:
        for step in steps:
            data = data[step]
        data[last] = value

    return corrupt


SHARDING = ("stages", 1, "sharding")


@pytest.mark.parametrize(
    ("corrupt", "said"),
    [
        (put("stages", 0, "operators", ["model.layers.3-0"]), "stages[0].operators: 'model.layers.3-0': a range of"),
        (
            put("stages", 0, "operators", ["model.layer.0-3"]),
            "no operators of layers of 'model.layer'; did you mean 'model",
        ),
        (
            put("stages", 0, "operators", ["model.layers.0-3 as B"]),
            "defines no operators 'B' of 'model.layers'; it has A",
        ),
        (
            put("stages", 0, "operators", ["model.layers.0 before mlp/mull#0"]),
            "has no 'mlp/mull#0'; did you mean 'mlp/mul#0'",
        ),
        (put("stages", 0, "operators", ["model.layers"]), "stages[0].operators[0] must be like 'module.path: linear#0"),
        (put("stages", 0, "operators", [7]), "stages[0].operators[0] must be like 'module.path: linear#0"),
        (put("stages", 0, "operators", ["model.layers.0-999999999"]), "at most 100000"),
        (
            put("stages", 0, "operators", ["model.layers.0-4"]),
            "8 operators, 'model.layers.4.norm/pow#0' to 'model.layers.4/",
        ),
        (put("layers", 5), "layers must be an object"),
        (put("layers", "model.layers", "colours", {}), "layers['model.layers'].colours is unknown"),
        (put("layers", "model.layers", "operators", 3), "layers['model.layers'].operators must be an object"),
        (put("layers", "model.layers", "operators", "A", ["x"]), "layers['model.layers'].operators.A[0] must be like"),
        (put("layers", "model.layers", "operators", "A", 5), "['model.layers'].operators.A must be a list, got 5"),
        (
            put("layers", "model.layers", "strategies", "A", ["S0"]),
            "['model.layers'].strategies.A must be an object from names to placements, got ['S0']",
        ),
        (put(*SHARDING, "mesh", [2]), "stages[1].sharding.mesh must be an object from axes to numbers of devices"),
        (put(*SHARDING, "strategies", {"model.layers.4-7": "as C"}), "defines no strategies 'C'"),
        (put(*SHARDING, "strategies", {"model.layers.5/x#0": "Q"}), "model.layers.5/x#0: 'Q' is no strategy"),
        (put(*SHARDING, "exchanges", [["a", "b", 3]]), "'a' has collective 3, but there are 0 collectives"),
        (
            put(*SHARDING, "exchanges", [["a"]]),
            "stages[1].sharding.exchanges[0] must be [operator, tensor, numbers ..]",
        ),
        (put(*SHARDING, "redistributions", [["a", "R", "R", 1]]), "redistributions[0] has a value of a wrong type, 1"),
        (
            put(*SHARDING, "layers", "model.layers.4-7"),
            "stages[1].sharding.layers must be like 'model.layers.0-7 as A'",
        ),
        (put(*SHARDING, "layers", "model.layers.4-7 as C"), "'layers' defines nothing 'C' of these layers"),
        (
            put("transfers", [{"source": "0-2", "target": "1-2", "forward_bytes": 1, "seconds": 1.0}]),
            "transfers[0] must have stages as source and target, or equally long ranges of stages such as '0-6' and",
        ),
        (
            put("transfers", [{"source": "0-9", "target": 1, "forward_bytes": 1, "seconds": 1.0}]),
            "'0-6' and '1-7', got '0-9' and 1",
        ),
        (put("times", ["fast"]), "times must be a list of numbers, got ['fast']"),
        (
            put(*SHARDING, "repeated", [["a: x#0", 3]]),
            "stages[1].sharding.repeated[0] has number 3, but there are 0 times",
        ),
        (put("every_stage", 3), "every_stage must be an object of fields that all stages have, got 3"),
        (put("every_stage", {"speed": 3}), "stages[0].speed is unknown"),
        (put("collectives", [[1]]), "collectives[0] must be [collective, axis, nbytes, seconds, flags, "),
        (
            put("layers", "model.layers", "operators", "A", "those of strategies C"),
            "operators.A must be a list of operators, or 'those of strategies A' for those of a definition of "
            "strategies, which has A, got 'C'",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_with_its_place_and_value(
    corrupt: Callable[[Data], None], said: str
) -> None:
    with pytest.raises(PlanError) as caught:
        edited(layered_plan(), corrupt)
    assert said in str(caught.value)


# -- versions ---------------------------------------------------------------------------------------------------------

FORMAT_2 = """{
 "autopar_plan": 2,
 "checksum": "CHECKSUM",
 "stages": [
  {"devices": ["a", "b"], "operators": ["0: linear#0 relu#0"], "forward_time": 1.5,
   "recompute": false, "selective": true,
   "sharding": {
    "mesh": [2], "axes": ["data"],
    "strategies": {"0/linear#0": "S0 R -> S0"}, "parameters": {"0.weight": "R / S0"},
    "redistributions": [["0/linear#0", "0/relu#0", "S0", "S0 > R, back R > S0"]],
    "exchanges": [
     {"collective": "all_reduce", "axis": "data", "operator": "0/relu#0", "tensor": "0/linear#0",
      "nbytes": 8, "seconds": 0.5, "backward": false, "once": false}
    ],
    "collective_bytes": 8}},
  {"devices": ["c"], "operators": ["1: linear#0"], "recompute": true, "selective": false}
 ],
 "n_microbatches": 2, "schedule": "1f1b", "training": true, "predicted_step_time": 2.0, "one_worker": false
}"""


def format_2() -> Plan:
    exchange = Exchange("all_reduce", "data", "0/relu#0", "0/linear#0", 8, 0.5)
    sharding = StageSharding.from_texts((2,), ("data",), {"0/linear#0": "S0 R -> S0"}, {"0.weight": "R / S0"})
    moves = TensorRedistribution("0/linear#0", "0/relu#0", Passage(((0,),), ()), Passage(((0,), (-1,)), ((-1,), (0,))))
    sharding = replace(sharding, redistributions=(moves,), exchanges=(exchange,), collective_bytes=8)
    first = Stage(("a", "b"), ("0/linear#0", "0/relu#0"), forward_time=1.5, selective=True, sharding=sharding)
    return Plan((first, Stage(("c",), ("1/linear#0",), recompute=True)), 2, predicted_step_time=2.0)


def test_a_file_of_format_2_is_still_read_with_its_price() -> None:
    text = FORMAT_2.replace("CHECKSUM", "ff63e0de67dad936")
    assert Plan.from_json(text) == format_2()
    assert Plan.from_json(FORMAT_2) == format_2().without_predictions("this plan was edited after autopar wrote it")


FORMAT_3 = """{
 "autopar_plan": "3.0", "checksum": "CHECKSUM", "n_microbatches": 1, "schedule": "1f1b",
 "stages": [
  {
   "devices": ["a", "b"], "operators": ["layers.0-2"],
   "sharding": {
    "mesh": {"data": 2}, "strategies": {"layers.0-2": "as A"}, "parameters": {},
    "exchanges": [["layers.0/linear#0", "layers.0/relu#0", 0, 1], ["layers.0/linear#0", "layers.0.weight", 0, 1]]
   }
  }
 ],
 "layers": {
  "layers": {
   "operators": {"A": ["@: relu#0 linear#0 add#0"]},
   "strategies": {"A": {"@/relu#0": "S0 -> S0", "@/linear#0": "S0 R -> S0", "@/add#0": "S0 S0 -> S0"}}
  }
 },
 "collectives": [["reduce_scatter", "data", 8, 0.5, "backward once"], ["all_gather", "data", 8, 0.5, "once"]]
}"""


def format_3() -> Plan:
    strategies = {"relu#0": "S0 -> S0", "linear#0": "S0 R -> S0", "add#0": "S0 S0 -> S0"}
    texts = {f"layers.{i}/{name}": text for i in range(3) for name, text in strategies.items()}
    sharding = StageSharding.from_texts((2,), ("data",), texts, {})
    pair = [("reduce_scatter", {"backward": True}), ("all_gather", {})]
    exchanges = tuple(
        Exchange(collective, "data", "layers.0/linear#0", tensor, 8, 0.5, once=True, **backward)
        for tensor in ("layers.0/relu#0", "layers.0.weight")
        for collective, backward in pair
    )
    sharding = replace(sharding, exchanges=exchanges, collective_bytes=0, collective_time=0.0, repeated_time=0.0)
    return Plan((Stage(("a", "b"), tuple(texts), sharding=sharding),), 1)


def test_a_file_of_format_3_is_still_read_and_the_present_one_is_shorter() -> None:
    text = FORMAT_3.replace('"checksum": "CHECKSUM", ', "")
    found = Plan.from_json(text)
    assert found.stages == format_3().stages
    data = json.loads(found.to_json())
    assert data["layers"]["layers"]["operators"] == {"A": "those of strategies A"}
    assert data["collectives"] == [["reduce_scatter", "data", 8, 0.5, "backward once", "all_gather", "once"]]
    sharding = data["stages"][0]["sharding"]
    assert sharding["exchanges"] == [["layers.0/linear#0", "layers.0/relu#0", 0, ".weight", 0]]
    assert Plan.from_json(found.to_json()) == found


FORMAT_4 = """{
 "autopar_plan": "4.0", "n_microbatches": 1, "schedule": "1f1b",
 "stages": [
  {
   "devices": ["a", "b"], "operators": ["0: linear#0 relu#0"],
   "sharding": {
    "mesh": {"data": 2}, "strategies": {"0/linear#0": "S0 R -> S0"}, "parameters": {"0.weight": "S0"},
    "redistributions": [
     ["0.weight", "S0, back S0", "S0 > R, back P > S0", "0/linear#0"], ["0/linear#0", "S0 > R", "R", "0/relu#0"]
    ]
   }
  },
  {"devices": ["c"], "operators": ["1: linear#0"]}, {"devices": ["d"], "operators": ["2: linear#0"]}
 ],
 "transfers": [
  {"source": 0, "target": 1, "forward_bytes": 8, "seconds": 0.5},
  {"source": 1, "target": 2, "forward_bytes": 8, "seconds": 0.5}
 ]
}"""


def format_4() -> Plan:
    sharding = StageSharding.from_texts((2,), ("data",), {"0/linear#0": "S0 R -> S0"}, {"0.weight": "S0"})
    weight = Passage(((0,),), ((0,),)), Passage(((0,), (-1,)), ((-2,), (0,)))
    moves = (
        TensorRedistribution("0.weight", "0/linear#0", *weight),
        TensorRedistribution("0/linear#0", "0/relu#0", Passage(((0,), (-1,)), ()), Passage(((-1,),), ())),
    )
    first = Stage(("a", "b"), ("0/linear#0", "0/relu#0"), sharding=replace(sharding, redistributions=moves))
    others = (Stage(("c",), ("1/linear#0",)), Stage(("d",), ("2/linear#0",)))
    return Plan((first, *others), 1, transfers=tuple(StageTransfer(s, s + 1, 8, 8, 0.5) for s in range(2)))


def test_a_file_of_format_4_is_still_read_and_the_present_one_is_shorter() -> None:
    found = Plan.from_json(FORMAT_4)
    assert found == format_4()
    data = json.loads(found.to_json())
    assert data["transfers"] == [{"source": "0-1", "target": "1-2", "forward_bytes": 8, "seconds": 0.5}]
    assert data["stages"][0]["sharding"]["redistributions"] == [
        [".weight", "", "S0 > R, back P > S0", "0/linear#0"],
        ["0/linear#0", "S0 > R", "R", "0/relu#0"],
    ]
    assert Plan.from_json(found.to_json()) == found


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
    assert data["times"] == [0.5]
    assert data["stages"][0]["sharding"]["repeated"] == [["a: x#0 y#0", 0, 0.25], ["b: x#0", 0]]
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
    assert json.loads(text)["autopar_plan"] == "5.0"
    assert Plan.from_json(text) == plan


def test_a_later_addition_is_left_out_with_a_note_and_a_later_format_is_refused() -> None:
    text = layered_plan().to_json()
    later = text.replace('"autopar_plan": "5.0"', '"autopar_plan": "5.7",\n "weather": "fine"')
    found = Plan.from_json(later)
    assert found == replace(layered_plan().without_predictions("x"), notes=found.notes)
    assert "a later autopar wrote this plan, with 'weather', which this one leaves out" in found.notes[0]
    with pytest.raises(PlanError, match="weather is unknown"):
        Plan.from_json(text.replace('"autopar_plan": "5.0"', '"autopar_plan": "5.0",\n "weather": "fine"'))
    with pytest.raises(PlanError, match=re.escape("got '6.0'; a later autopar wrote this file")):
        Plan.from_json(text.replace('"5.0"', '"6.0"'))


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
