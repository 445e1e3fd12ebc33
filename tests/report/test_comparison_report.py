"""Reports of comparisons and profiles: their own numbers, every row, and no winner that the rounds do not allow."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from report_plans import Page, priced

from autopar import Comparison, InputError, Plan, Profile
from autopar.costs.profile import Cost, Pass
from autopar.plan.step_work import StepWork
from autopar.planner.cluster_comparison import ClusterComparison, PlannedRow
from autopar.report.comparison import verdict_text
from autopar.runtime.comparing.comparison import Row, SystemRow
from cost_models import Link

FASTER, SLOWER = (0.10, 0.101, 0.102, 0.10, 0.101, 0.102, 0.1), (0.20, 0.21, 0.20, 0.21, 0.20, 0.21, 0.2)
NAMES = ("<b>one</b>", "another & more")  # as users may call their plans


def page_of(report: object, folder: Path) -> Page:
    return Page(report.save(folder / "r.html").read_text())  # type: ignore[attr-defined]


def measured(first: tuple[float, ...], second: tuple[float, ...]) -> Comparison:
    plan = Plan.from_split({"": 0}, n_microbatches=1, devices=["cpu:0"])
    priced_plan = dataclasses.replace(plan, predicted_step_time=0.11)
    rows = [
        Row(name, priced_plan, steps, {"cpu:0": 3_000_000}, {"cpu:0": 2_000_000})
        for name, steps in zip(NAMES, (first, second), strict=True)
    ]
    single = Row("one device", plan, tuple(2 * s for s in first), {}, {})
    systems = (SystemRow("gpipe", "blocks 3 | 4", second), SystemRow("ddp", "2 processes", (), "it has no loss"))
    ceiling = SystemRow("ceiling", "2 processes of half a batch", first)
    return Comparison(single, tuple(rows), ("cpu:0", "cpu:1"), 8, True, systems, ceiling, "a quiet machine")


def planned(*seconds: float, usable: float = 80e9) -> ClusterComparison:
    def plan(s: float) -> Plan:
        found = priced(predicted_step_time=s)
        stages = tuple(dataclasses.replace(stage, usable_memory=int(usable)) for stage in found.stages)
        return dataclasses.replace(found, stages=stages)

    rows = tuple(PlannedRow(name, plan(s), 16, 65536, 0.12) for name, s in zip(NAMES, seconds, strict=True))
    return ClusterComparison(rows, "2 nodes of 4xH100", 8, 16, 2e14, True)


def test_a_measured_comparison_shows_every_row_and_the_winner(tmp_path: Path) -> None:
    comparison = measured(FASTER, SLOWER)
    report = comparison.report()
    page = page_of(report, tmp_path)
    for part in (*NAMES, "gpipe", "it has no loss", "a quiet machine", "2 processes of half a batch"):
        assert part in page.text
    assert report.verdict.lower() == f"{verdict_text(comparison)}.".lower()
    assert comparison.verdict.winner == NAMES[0]
    assert "<b>one" not in (tmp_path / "r.html").read_text()
    assert page.figures["speed-up over one device"][0] == "2.00x"


def test_utilisation_is_shown_where_the_peaks_are_known_and_the_missing_data_sheet_otherwise(tmp_path: Path) -> None:
    works = {"NVIDIA H200": StepWork(None, 4e12, 0.02), "some CPU, 1 thread": StepWork(None, 4e12)}
    shown = {}
    for kind, work in works.items():
        comparison = dataclasses.replace(measured(FASTER, SLOWER), work=work, device_kinds=(kind, kind))
        page = page_of(comparison.report(), tmp_path)
        shown[kind] = (*page.figures["its model FLOPs utilisation"], "MFU" in str(comparison))
        assert json.loads(comparison.to_json())["rows"][1]["utilisation"] == work.utilisation(
            comparison.plans[0].measured
        )
    seconds = comparison.plans[0].measured
    each = f"{4 / seconds / 2:.3g} TFLOP/s a device"
    assert shown["NVIDIA H200"] == (f"{0.02 / seconds:.1%}", each, True)
    assert shown["some CPU, 1 thread"] == ("unknown", f"no data sheet for some CPU, 1 thread; {each}", False)


def test_a_comparison_without_a_clear_winner_names_none(tmp_path: Path) -> None:
    report = measured(FASTER, FASTER[::-1]).report()
    assert report.verdict.startswith("No winner")
    assert "No winner" in page_of(report, tmp_path).text


def test_predicted_plans_are_compared_with_their_own_numbers(tmp_path: Path) -> None:
    comparison = planned(0.31, 0.62)
    report = comparison.report()
    page = page_of(report, tmp_path)
    assert "2.00x as fast as another & more" in report.verdict
    assert page.figures["its step"][0] == "310 ms"
    assert page.figures["its model FLOPs utilisation"][0] == f"{comparison.fastest.utilisation:.1%}"
    assert str(comparison.difference(NAMES[1])).splitlines()[0] in page.text
    assert max(map(len, str(report).splitlines())) <= 80


@pytest.mark.parametrize(
    ("seconds", "usable", "part"),
    [
        ((0.31, 0.3101), 80e9, "about equally fast"),
        ((0.31, 0.3145), 80e9, "about equally fast"),
        ((0.31, 0.33), 80e9, "1.06x as fast"),
        ((0.31, 0.62), 1e9, "No plan fits the memory"),
    ],
)
def test_a_verdict_says_no_more_than_the_predictions(seconds: tuple[float, float], usable: float, part: str) -> None:
    assert part in planned(*seconds, usable=usable).report().verdict


def test_a_profile_shows_modules_operators_passes_and_links(tmp_path: Path) -> None:
    def cost(name: str, seconds: float) -> Cost:
        return Cost(name, 1, 1000, 2000, 3000, {"CPU": seconds / 3}, {"CPU": 2 * seconds / 3})

    operators = (cost("net.0/linear#0", 0.009), cost("net.<i>1/gelu#0", 0.003))
    modules = (cost("", 0.012), cost("net", 0.012), cost("net.0", 0.009), cost("net.<i>1", 0.003))
    links = {("cpu:0", "cpu:1"): Link(1e-6, float("inf"))}
    graph = nx.DiGraph()
    passes = (Pass("CPU", 1, 8, 0.004, 0.008),)
    profile = Profile(8, True, ("CPU",), operators, modules, passes, links, None, graph)
    report = profile.report()
    page = page_of(report, tmp_path)
    assert page.figures["slowest operator"] == ["75.0%", "net.0 linear: 9 ms"]
    for part in ("net.<i>1/gelu#0", "667 samples/s", "by reference", "linear 9 ms", "optimizer="):
        assert part in page.text
    assert "take 12 ms on CPU" in report.verdict


def a_profile() -> Profile:
    cost = Cost("", 1, 1000, 2000, 3000, {"CPU": 0.1}, {"CPU": 0.2})
    passes = (Pass("CPU", 1, 8, 0.004, 0.008),)
    return Profile(
        8, True, ("CPU",), (dataclasses.replace(cost, name="/mm#0"),), (cost,), passes, {}, None, nx.DiGraph()
    )


@pytest.mark.parametrize("result", [measured(FASTER, SLOWER), planned(0.31, 0.62), a_profile()])
def test_what_calls_return_is_shown_in_notebooks_and_saved(result: Any, tmp_path: Path) -> None:
    """Like a report of its own."""
    report = result.report()
    assert result._repr_html_() == report._repr_html_()
    assert result.save(tmp_path / "a.html") == tmp_path / "a.html"
    report.save(tmp_path / "b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    command = "autopar compare 'my model:make' --html <b>.html"
    assert command in page_of(result.report(command=command), tmp_path).text
    with pytest.raises(InputError, match="no step to trace"):
        report.trace(tmp_path / "t.json")


def test_a_plan_that_was_not_compared_is_named_with_those_that_were() -> None:
    for comparison in (measured(FASTER, SLOWER), planned(0.31, 0.62)):
        with pytest.raises(KeyError, match="there is no plan 'mine'; known are <b>one</b>, another & more"):
            comparison["mine"]
