"""Sharded stages as data: texts of layouts and strategies, and what is wrong with them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar import Plan, PlanError
from autopar.plan.stage import Stage
from autopar.sharding.layouts import PARTIAL, REPLICATE
from autopar.sharding.stage_sharding import (
    Passage,
    StageSharding,
    Stored,
    TensorRedistribution,
    layout_text,
    parse_layout,
    parse_passage,
    parse_stored,
    parse_strategy,
    passage_text,
    stored_text,
    strategy_text,
)
from autopar.sharding.strategies import Strategy

CODES = st.sampled_from([REPLICATE, PARTIAL, 0, 1, 2, 11])
LAYOUTS = st.tuples(CODES, CODES, CODES)


def sharded(steps: tuple[TensorRedistribution, ...] = (), **changes: object) -> Plan:
    fields = {"mesh": (2, 2), "axes": ("data", "model"), "strategies": {"fc/linear#0": "S0R RS0 -> S0S1"}}
    sharding = StageSharding.from_texts(**{**fields, "parameters": {"fc.weight": "RS0 / S1S0"}, **changes})  # type: ignore[arg-type]
    sharding = replace(sharding, redistributions=steps)
    return Plan((Stage(("a", "b", "c", "d"), ("fc/linear#0",), sharding=sharding),), 1)


@given(LAYOUTS, st.lists(LAYOUTS, max_size=3), st.lists(LAYOUTS, max_size=3))
def test_texts_say_all_of_a_layout_and_a_strategy(layout, inputs, outputs):
    assert parse_layout(layout_text(layout)) == layout
    strategy = Strategy(("-",) * 3, tuple(inputs), tuple(outputs), 1.0)
    assert parse_strategy(strategy_text(strategy)) == strategy.placements == (tuple(inputs), tuple(outputs))
    passage = Passage((layout, *inputs), tuple(outputs))
    assert parse_passage(passage_text(passage)) == passage
    for state in (layout, (0, 1, REPLICATE)):
        assert parse_stored(stored_text(Stored(layout, state))) == Stored(layout, state)


STEPS = TensorRedistribution(
    "fc/linear#0", "", Passage(((0, PARTIAL), (0, REPLICATE)), ((0, REPLICATE),)), Passage(((0, REPLICATE),))
)


@pytest.mark.parametrize("steps", [(), (STEPS,)])
def test_a_sharded_plan_saves_and_loads(steps):
    plan = sharded(steps)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.stages[0].shards == 4
    assert plan.stages[0].replicas == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mesh": (3,), "axes": ("a",), "strategies": {}, "parameters": {}},
            "4 devices do not make meshes of shape (3,)",
        ),
        ({"mesh": (0, 2)}, "a mesh has axes of at least one device"),
        ({"axes": ("a", "a")}, "needs 2 different names"),
        ({"strategies": {"fc/linear#0": "S0 -> S0S1"}}, "fc/linear#0: 'S0' has 1 placements, but the mesh has 2 axes"),
        ({"parameters": {"fc.weight": "S0RR"}}, "fc.weight: 'S0RR' has 3 placements, but the mesh has 2 axes"),
        (
            {"steps": (replace(STEPS, own=Passage(((0, 0), (1, 1)))),)},
            "fc/linear#0: 'S0S0' to 'S1S1' is no step; change one axis",
        ),
        ({"steps": (replace(STEPS, own=Passage(((0, 0), (0, PARTIAL)))),)}, "'S0S0' to 'S0P' is no step"),
    ],
)
def test_what_is_wrong_with_a_sharded_stage_is_reported_with_its_name(changes, message):
    with pytest.raises(PlanError, match="stage 0") as error:
        sharded(**changes)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("strategies", {"S0R": "fc/linear#0"}, "'S0R' is no strategy"),
        ("parameters", {"QR": "fc.weight"}, "'QR' is no list of placements"),
        ("redistributions", [["fc/linear#0", "S0P > S0R", ""]], "must be [tensor, shared steps, own steps, readers"),
        ("redistributions", [["fc/linear#0", "S0P", "x", ""]], "own: 'x' is no list of placements"),
    ],
)
def test_what_a_file_says_wrong_of_a_sharded_stage_is_named(field, value, message):
    data = json.loads(sharded((STEPS,)).to_json())
    data["stages"][0]["sharding"][field] = value
    with pytest.raises(PlanError, match="sharding") as error:
        Plan.from_json(json.dumps(data))
    assert message in str(error.value)
