"""On ranks that have a part of it, the model itself says what it cannot do; each rank's own state loads."""

from __future__ import annotations

import re

import pytest
from rank_parts import called_by_itself, called_with_whole_tensors, loaded_again, loaded_whole, needs_the_model
from rank_pool import RankPool

pytestmark = pytest.mark.slow

TOLERANCE = 1e-10  # float64
PARTS = {
    "chain": r"this rank has only its part of the model: '.*' and \d+ more are on other ranks",
    "replicas 2": r"on ranks the model's parameters are DTensors \('0.weight' among them\), which take no plain",
}


@pytest.mark.parametrize("plan", PARTS)
def test_a_model_that_is_called_by_itself_says_what_to_do(ranks: RankPool, plan: str) -> None:
    """And `pm` runs as before, with the user's hooks in their order."""
    for found in ranks.run(called_by_itself, 2, plan):
        for message in (found["model"], found["copy"]):
            assert re.match(
                f"InputError: {PARTS[plan]}.*, so that the model itself cannot run here: call pm, ", message
            ), message
        assert found["same modules"]
        assert found["same keys"]
        assert found["calls"] == ["first", "second"]
        assert found["error"] < TOLERANCE


def test_the_model_runs_with_whole_tensors_in_the_places_of_its_parts(ranks: RankPool) -> None:
    for error in ranks.run(called_with_whole_tensors, 2):
        assert error < TOLERANCE


@pytest.mark.parametrize(
    ("plan", "by"),
    [("chain", "pm"), ("replicas 2", "pm"), ("hand tensor=2", "pm"), ("hand data=2 zero=1", "pm"), ("chain", "model")],
)
def test_a_ranks_own_state_loads_in_place(ranks: RankPool, plan: str, by: str) -> None:
    """And training goes on from it. Other states are refused, and nothing of them is loaded."""
    for found in ranks.run(loaded_again, 2, plan, by):
        wanted, again = found["losses"]
        assert again == pytest.approx(wanted, abs=TOLERANCE)
        assert found["missing"].endswith(f'Missing key(s) in state_dict: "{found["name"]}". ')
        name = re.escape(f"InputError: load_state_dict() got a plain tensor for '{found['name']}', of which this rank")
        assert re.match(name, found["plain"]), found["plain"]
        assert found["assigned"].startswith("InputError: load_state_dict(assign=True) would put other parameters")
        if plan in ("hand tensor=2", "hand data=2 zero=1"):
            assert f"got '{found['name']}' as (Replicate(),) on " in found["other placements"]
        assert found["loss"] == pytest.approx(wanted, abs=TOLERANCE)


@pytest.mark.parametrize("by", ["pm", "model"])
def test_the_state_of_the_whole_model_is_refused(ranks: RankPool, by: str) -> None:
    for message in ranks.run(loaded_whole, 2, by):
        assert re.match(r"InputError: load_state_dict\(\) got '.*', which other ranks have: each rank loads", message)


def test_what_needs_the_model_itself_is_advised_to_run_in_one_process(ranks: RankPool) -> None:
    for messages in ranks.run(needs_the_model, 2):
        for message in messages:
            assert message.endswith(
                "; do that in one process, as no rank has the whole model: save with autopar.save, and load it there"
            )
