"""Plan files of earlier formats are read as they were, and later ones say what they cannot."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from layered_plans import layered_plan

from autopar import Plan, PlanError
from autopar.plan.stage import Stage, StageTransfer
from autopar.sharding.stage_sharding import Exchange, Passage, StageSharding, TensorRedistribution

FORMAT_5 = Path(__file__).parent / "format_5"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["by_hand", "tensor", "two_nodes"])
def test_a_file_of_format_5_is_still_read_with_its_price_and_the_present_one_is_shorter(name: str) -> None:
    """Written by the version of autopar that had format 5, from Llamas of 4 layers; the checksum says that nothing
    else was read than was written."""
    text = (FORMAT_5 / f"{name}.json").read_text()
    assert json.loads(text)["autopar_plan"] == "5.0"
    found = Plan.from_json(text)
    assert found.predicted_step_time == json.loads(text)["predicted_step_time"] is not None
    assert json.loads(found.to_json())["checksum"] == json.loads(text)["checksum"]
    assert json.loads(found.to_json())["autopar_plan"] == "6.1"
    assert Plan.from_json(found.to_json()) == found
    assert len(found.to_json()) < 0.9 * len(text)
    edited = Plan.from_json(text.replace(f'"n_microbatches": {found.n_microbatches}', '"n_microbatches": 2'))
    assert edited.predicted_step_time is None


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"strategies": {\n   "A"', '"strategeis": {\n   "A"', "layers['model.layers'].strategeis is unknown"),
        (
            '["model.layers',
            '["model.layer',
            "no redistributions of layers of 'model.layer'; did you mean 'model.layers'?",
        ),
        (
            '"collectives": [',
            '"collectives": [[1], ',
            "collectives[0] must be [collective, axis, nbytes, seconds, flags, ",
        ),
        ('"times": [', '"times": ["fast", ', "times must be a list of numbers, got ['fast'"),
        ('"every_stage": {', '"every_stage": 3, "every": {', "every_stage must be an object of fields"),
    ],
)
def test_a_wrong_file_of_format_5_is_refused_with_its_place_and_value(old: str, new: str, said: str) -> None:
    text = (FORMAT_5 / "tensor.json").read_text()
    assert old in text
    with pytest.raises(PlanError) as caught:
        Plan.from_json(text.replace(old, new))
    assert said in str(caught.value)


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
    assert data["collectives"] == [[0, "reduce_scatter data backward once, all_gather once", 8, 0.5]]
    sharding = data["stages"][0]["sharding"]
    assert sharding["exchanges"] == [["layers.0: linear", "layers.0/relu#0", 0, ".weight", 0]]
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
    assert data["transfers"] == [{"source": "0-1", "forward_bytes": 8, "seconds": 0.5}]
    assert data["stages"][0]["sharding"]["redistributions"] == [
        [".weight", "", "S0 > R, back", "0: linear"],
        ["0/linear#0", "S0 > R", "", "0: relu"],
    ]
    assert Plan.from_json(found.to_json()) == found


def test_a_later_addition_is_left_out_with_a_note_and_a_later_format_is_refused() -> None:
    text = layered_plan().to_json()
    later = text.replace('"autopar_plan": "6.1"', '"autopar_plan": "6.7",\n "weather": "fine"')
    found = Plan.from_json(later)
    assert found == replace(layered_plan().without_predictions("x"), notes=found.notes)
    assert "a later autopar wrote this plan, with 'weather', which this one leaves out" in found.notes[0]
    with pytest.raises(PlanError, match="weather is unknown"):
        Plan.from_json(text.replace('"autopar_plan": "6.1"', '"autopar_plan": "6.1",\n "weather": "fine"'))
    with pytest.raises(PlanError, match=re.escape("got '7.0'; a later autopar wrote this file")):
        Plan.from_json(text.replace('"6.1"', '"7.0"'))
