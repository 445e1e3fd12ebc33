"""Sharded stages as data: texts of layouts and strategies, and what is wrong with them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar import Plan, PlanError
from autopar.plan.plan import Stage
from autopar.sharding.layouts import PARTIAL, REPLICATE
from autopar.sharding.stage_sharding import (
    StageSharding,
    Stored,
    layout_text,
    parse_layout,
    parse_stored,
    parse_strategy,
    stored_text,
    strategy_text,
)
from autopar.sharding.strategies import Strategy

CODES = st.sampled_from([REPLICATE, PARTIAL, 0, 1, 2, 11])
LAYOUTS = st.tuples(CODES, CODES, CODES)


def sharded(**changes: object) -> Plan:
    fields = {"mesh": (2, 2), "axes": ("data", "model"), "strategies": (("fc/linear#0", "S0R RS0 -> S0S1"),)}
    sharding = StageSharding(**{**fields, "parameters": (("fc.weight", "RS0 / S1S0"),), **changes})  # type: ignore[arg-type]
    return Plan((Stage(("a", "b", "c", "d"), ("fc/linear#0",), sharding=sharding),), 1)


@given(LAYOUTS, st.lists(LAYOUTS, max_size=3), st.lists(LAYOUTS, max_size=3))
def test_texts_say_all_of_a_layout_and_a_strategy(layout, inputs, outputs):
    assert parse_layout(layout_text(layout), 3) == layout
    strategy = Strategy(("-",) * 3, tuple(inputs), tuple(outputs), 1.0)
    assert parse_strategy(strategy_text(strategy), 3) == (tuple(inputs), tuple(outputs))
    for state in (layout, (0, 1, REPLICATE)):
        assert parse_stored(stored_text(Stored(layout, state)), 3) == Stored(layout, state)


def test_a_sharded_plan_saves_and_loads():
    plan = sharded()
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.stages[0].shards == 4
    assert plan.stages[0].replicas == 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"mesh": (3,), "axes": ("a",), "strategies": (), "parameters": ()},
            "4 devices do not make meshes of shape (3,)",
        ),
        ({"mesh": (0, 2)}, "a mesh has axes of at least one device"),
        ({"axes": ("a", "a")}, "needs 2 different names"),
        ({"strategies": (("fc/linear#0", "S0R"),)}, "fc/linear#0: 'S0R' is no strategy"),
        ({"strategies": (("fc/linear#0", "S0 -> S0S1"),)}, "'S0' is no layout over 2 axes"),
        ({"parameters": (("fc.weight", "QR"),)}, "fc.weight: 'QR' is no layout"),
    ],
)
def test_what_is_wrong_with_a_sharded_stage_is_told_with_its_name(changes, told):
    with pytest.raises(PlanError, match="stage 0") as error:
        sharded(**changes)
    assert told in str(error.value)
