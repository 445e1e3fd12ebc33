"""The figures of the concept pages show what the schedules do."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
DRAWINGS = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "drawings.py"))


def test_every_action_of_every_schedule_is_a_box_with_its_micro_batch() -> None:
    axes = DRAWINGS["schedules"]().axes
    for (name, chunks), drawn in zip(DRAWINGS["SCHEDULES"].items(), axes, strict=True):
        step = DRAWINGS["timeline"](name, chunks)
        assert len(drawn.collections) == len(step.events)
        assert [text.get_text() for text in drawn.texts] == [str(event.action.microbatch) for event in step.events]
        assert drawn.get_title(loc="left") == f"{name}: idle {step.bubble:.0%}"


def test_the_idle_shares_are_those_of_the_formulas() -> None:
    p, m = DRAWINGS["DEVICES"], DRAWINGS["MICROBATCHES"]
    micro_batches = {
        "gpipe": 1,
        "1f1b": 1,
        "interleaved-1f1b": 1 / 2,
        "zb-h1": 1 / 3,
        "interleaved-zb": 1 / 6,
        "zb-v": 1 / 6,
    }
    for name, each in micro_batches.items():
        waiting = (p - 1) * each
        step = DRAWINGS["timeline"](name, DRAWINGS["SCHEDULES"][name])
        assert step.bubble == pytest.approx(waiting / (m + waiting))
