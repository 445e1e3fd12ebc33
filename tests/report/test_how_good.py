"""What is proven of a plan in short sentences, and drawings of memory that show how near the limit is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from report_plans import Page, priced

from autopar import Plan
from autopar.report.document import Bars, Curves, Fold
from autopar.report.plan_report.how_good import how_good

BEST = "It is less than 0.1% above the best of the plans that were searched."


@pytest.mark.parametrize(
    ("optimality", "said"),
    [
        (
            "proven optimal under 1f1b for the search's objective: 4 micro-batches",
            ["It is proven to be the best of the plans that were searched."],
        ),
        (
            "within 0.01% of the least objective under gpipe, with 8 cuts; within 34.00% of a lower bound, the work",
            [BEST, "It is at most 34.0% above a lower bound for every plan."],
        ),
        (
            "within 2.50% of a lower bound for all plans under 1f1b: 4; within 210.00% of one for any cuts",
            [
                "It is at most 2.5% above the best of the plans that were searched.",
                "It is at most 3.1 times a lower bound for any cuts, which may be far out of reach.",
            ],
        ),
        ("within 0.00% of a lower bound for all plans under 1f1b: 4 micro-batches", [BEST]),
        ("made by another program", []),
    ],
)
def test_what_is_proven_is_two_sentences(optimality: str, said: list[str]) -> None:
    assert list(how_good(optimality)) == said
    section = dataclasses.replace(priced(), optimality=optimality).report().sections[0]
    folded = [block for block in section.blocks if isinstance(block, Fold)]
    assert [f"{optimality}." == block.blocks[0].text for block in folded] == [True] * bool(said)  # type: ignore[union-attr]


def test_the_sentences_are_those_of_a_search() -> None:
    """A plan that an older version saved, as its search described it."""
    plan = Plan.load(Path(__file__).parents[1] / "plan/format_5/two_nodes.json")
    assert list(how_good(plan.optimality)) == [
        BEST,
        "It is at most 14.1 times a lower bound for every plan, which may be far out of reach.",
    ]


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
