"""Between loading a checkpoint on ranks and the first call, which reads the optimizer's states."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rank_pending_states import (
    replaced_before_the_first_call,
    saved_before_the_first_call,
    saved_in_the_background_before_the_first_call,
)
from rank_pool import RankPool

pytestmark = pytest.mark.slow


def test_a_save_before_the_first_call_is_refused_and_one_after_it_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(saved_before_the_first_call, 2, tmp_path)
    assert first == second
    assert first["found"] == [first["wanted"]] * 2
    assert first["left"] == ["a", "model"]
    for kind, message, shown_once in first["refused"]:
        assert kind == "CheckpointError"
        assert re.search(r"[ab]/step-00000002 cannot be saved: the optimizer's states .*; call the model once", message)
        assert shown_once


@pytest.mark.parametrize(
    ("how", "why"), [("replaced", "another checkpoint has replaced it"), ("deleted", "manifest.json, .* is missing")]
)
def test_the_states_of_another_checkpoint_are_never_read(ranks: RankPool, tmp_path: Path, how: str, why: str) -> None:
    first, second = ranks.run(replaced_before_the_first_call, 2, tmp_path, how)
    assert first == second
    assert first["found"] == first["wanted"]
    (kind, call, shown_once), (_, save, _) = first["refused"]
    assert kind == "CheckpointError"
    assert re.search(
        rf"step-00000002 is no longer the checkpoint that was loaded \({why}.*: call autopar.load again", call
    )
    assert shown_once
    assert "step-00000003 cannot be saved: the optimizer's states" in save


@pytest.mark.parametrize("built_without_values", [False, True])
def test_the_first_call_waits_for_a_save_in_the_background(
    ranks: RankPool, tmp_path: Path, built_without_values: bool
) -> None:
    for wanted, found in ranks.run(saved_in_the_background_before_the_first_call, 2, tmp_path, built_without_values):
        assert found == wanted
