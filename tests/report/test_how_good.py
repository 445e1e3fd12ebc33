"""What is proven of a plan in short sentences, and drawings of memory that show how near the limit is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from report_plans import Page, priced

from autopar.report.document import Bars, Curves, Fold
from autopar.report.plan_report.how_good import how_good

BEST = "It is less than 0.1% above the best of the plans that were searched."
AHEAD = priced().assumed
assert AHEAD is not None


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        # At hand, bounds are of the objective; on a cluster, the wider one is of the step, which takes 0.31 s here.
        (
            {"objective": 2.0, "bound": 2.0, "searched_bound": 2.0},
            ["It is proven to be the best of the plans that were searched."],
        ),
        (
            {"objective": 2.05, "bound": 2.0, "searched_bound": 2.0},
            ["It is at most 2.5% above the best of the plans that were searched."],
        ),
        (
            {"objective": 2.05, "bound": 0.5, "searched_bound": 2.0},
            [
                "It is at most 2.5% above the best of the plans that were searched.",
                "It is at most 4.1 times a lower bound for any cuts, which may be far out of reach.",
            ],
        ),
        ({"objective": 2.0, "bound": 0.0, "searched_bound": 1.9999}, [BEST]),
        (
            {"objective": 2.0, "bound": 0.25, "searched_bound": 1.9999, "assumed": AHEAD},
            [BEST, "It is at most 24.0% above a lower bound for every plan."],
        ),
        ({"objective": 2.0, "bound": 2.0}, []),
        ({}, []),
    ],
)
def test_what_is_proven_is_two_sentences(facts: dict[str, Any], said: list[str]) -> None:
    """From the plan's numbers, whatever its sentence says."""
    plan = dataclasses.replace(priced(), **{"assumed": None, "optimality": "as the search described it", **facts})
    assert list(how_good(plan)) == said
    section = plan.report().sections[0]
    folded = [block for block in section.blocks if isinstance(block, Fold)]
    assert [f"{plan.optimality}." == block.blocks[0].text for block in folded] == [True] * bool(said)  # type: ignore[union-attr]


@pytest.mark.parametrize("usable", [10, 1000])
def test_bars_are_as_wide_as_the_memory_of_a_device(usable: int) -> None:
    """A device that is a thousandth full has a bar that is a thousandth full, with its limit."""
    plan = priced()
    peak = max(stage.peak_memory or 0 for stage in plan.stages)
    stages = tuple(dataclasses.replace(stage, usable_memory=usable * peak) for stage in plan.stages)
    report = dataclasses.replace(plan, stages=stages).report()
    bars = [block for section in report.sections for block in section.blocks if isinstance(block, Bars)]
    assert bars[0].bars
    for bar in (bar for block in bars for bar in block.bars):
        assert sum(part.share for part in bar.parts) <= 1.01 / usable
        assert bar.limit == pytest.approx(1 / 1.02)
    curves = [block for section in report.sections for block in section.blocks if isinstance(block, Curves)]
    assert [one.limit_name for one in curves] == [""]
    assert "enlarged: the limit of" in curves[0].title
    Page(report._repr_html_())
