"""The report on predictions: what lost comes first, and what tells the machine's speed is not judged by it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autopar import Comparison, Plan
from autopar.plan.stage import Stage
from autopar.runtime.comparing.comparison import Row
from benchmarks.accuracy import AUTOMATIC, BOTH, CONSTRAINTS, PLAIN, SEARCHED, constraint_text, losses, report_of
from benchmarks.accuracy import steps_of as steps_of_comparison
from benchmarks.output import to_markdown

NAMES = ("cpu:0", "cpu:1")


def plan(stages: tuple[Stage, ...], m: int, predicted: float) -> Plan:
    return Plan(
        stages, m, "gpipe", 8, NAMES, predicted_step_time=predicted, device_kinds=("cpu", "cpu"), single_device_time=1.0
    )


ALONE, SHARED = (Stage(NAMES[:1]),), (Stage(NAMES),)
PIPELINE = (Stage(NAMES[:1], ("a/op#0",)), Stage(NAMES[1:], ("b/op#0",)))


def comparison(automatic: float, pipeline: float) -> Comparison:
    """The plain model takes 1.2 s for 1.0 s predicted, replicas on both devices 0.9 s for 0.6 s."""

    def row(name: str, of: Plan, *steps: float) -> Row:
        return Row(name, of, steps, {}, {})

    rows = (
        row(BOTH, plan(SHARED, 2, 0.6), 0.9, 0.8, 1.0),
        row(AUTOMATIC, plan(PIPELINE, 2, 0.7), automatic),
        row(SEARCHED, plan(PIPELINE, 4, 0.5), 0.1),
        row("pure pipeline", plan(PIPELINE, 1, 1.1), pipeline),
    )
    return Comparison(row("one device", plan(ALONE, 1, 1.0), 1.2), rows, NAMES, 8, training=True)


def test_predictions_are_scaled_by_the_steps_of_the_whole_model_alone() -> None:
    steps = {step.plan: step for step in steps_of_comparison("net", comparison(1.05, 1.0))}
    assert steps[PLAIN].expected is steps[BOTH].expected is None
    assert steps[AUTOMATIC].expected == pytest.approx(0.7 * 1.2), "pipelines do not compete as replicas do"
    assert steps[AUTOMATIC].expected_error == pytest.approx(0.84 / 1.05 - 1)
    assert steps["pure pipeline"].expected == pytest.approx(1.1 * 1.2)
    assert steps["pure pipeline"].error == pytest.approx(0.1)


def test_the_report_opens_with_the_plans_that_lost_and_by_how_much() -> None:
    steps = steps_of_comparison("net", comparison(1.5, 1.0)) + steps_of_comparison("other", comparison(0.8, 0.85))
    found = losses(steps)
    assert [(loss.model, loss.rival, loss.slower) for loss in found] == [
        ("net", BOTH, pytest.approx(1.5 / 0.9 - 1)),
        ("net", PLAIN, pytest.approx(1.5 / 1.2 - 1)),
    ]
    report = report_of(steps)
    assert report.tables[0].title == "Plans that lost"
    assert [row[0] for row in report.tables[0].rows] == ["net", "net"]
    assert "1 of 2 automatic plans" in report.tables[0].note
    text = to_markdown(report, {})
    assert text.index("## Plans that lost") < text.index("## Error of predictions") < text.index("## Every plan")
    data = json.loads(json.dumps(report.data))
    assert [loss["slower"] for loss in data["lost"]] == [loss.slower for loss in found]
    assert {row["plan"] for row in data["rows"] if row["expected"] is None} == {PLAIN, BOTH}


def test_equally_fast_plans_do_not_lose() -> None:
    steps = [s for s in steps_of_comparison("net", comparison(0.9, 1.0)) if s.plan != SEARCHED]
    assert losses(steps) == []
    assert losses([replace(s, measured=0.9) for s in steps]) == []
    assert report_of(steps).tables[0].rows == ()


def test_errors_before_and_after_scaling_are_of_the_same_plans() -> None:
    steps = steps_of_comparison("net", comparison(1.05, 1.0))
    before, after = report_of(steps).tables[1].rows[:2]
    assert before[1] == after[1] == str(sum(step.expected is not None for step in steps))
    assert report_of([s for s in steps if s.expected is None]).tables[1].rows == ()


def test_every_constraint_has_a_name_of_its_own() -> None:
    names = [constraint_text(one) for one in CONSTRAINTS]
    assert len(set(names)) == len(names)


def test_a_plan_with_two_names_counts_once() -> None:
    found = comparison(1.05, 1.0)
    named = replace(found, plans=found.plans[:2], same={"again": AUTOMATIC, SEARCHED: BOTH})
    steps = {s.plan: s for s in steps_of_comparison("net", named)}
    assert (steps["again"].same_as, steps[SEARCHED].same_as, steps[AUTOMATIC].same_as) == (AUTOMATIC, BOTH, "")
    assert steps["again"].measured == steps[AUTOMATIC].measured == 1.05
    assert steps[SEARCHED].measured == steps[BOTH].measured == 0.9
    assert steps[SEARCHED].expected is None, "it tells the machine's speed"
    counted = report_of(list(steps.values())).tables[1].rows[0]
    assert counted[1] == "1"


@pytest.mark.parametrize("threads", [None, 2])
def test_the_model_itself_on_other_threads_than_its_prediction_is_for_has_no_error(threads: int | None) -> None:
    found = comparison(1.05, 1.0)
    itself = replace(found.plans[1], plan=plan(ALONE, 1, 1.0), steps=(0.5,), threads=threads)
    steps = {s.plan: s for s in steps_of_comparison("net", replace(found, plans=(found.plans[0], itself)))}
    assert (steps[AUTOMATIC].expected is None) == (threads is not None)


def test_the_plain_model_is_no_other_name_of_a_plan_that_runs_the_model_itself() -> None:
    """That has the threads of the caller, the plain model those of one device."""
    found = comparison(1.05, 1.0)
    itself = replace(found.plans[1], plan=plan(ALONE, 1, 0.5), steps=(0.5, 0.6))
    steps = {s.plan: s for s in steps_of_comparison("net", replace(found, plans=(found.plans[0], itself)))}
    assert (steps[PLAIN].measured, steps[AUTOMATIC].measured) == (1.2, 0.55)
    assert steps[AUTOMATIC].same_as == ""
