"""Reports as HTML: whole, escaped, small, with the plan's own numbers."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import plans
from report_plans import Page, priced
from rich.console import Console

from autopar import Plan, Report
from autopar.errors import InputError, PlanError
from autopar.plan.stage import RunnerUp, Stage
from autopar.plan.step_work import StepWork
from autopar.planner.communication import exposed_communication
from autopar.planner.device_memory import device_memory
from autopar.planner.predicted_step import step_of_plan
from autopar.report.plan_report.build import plan_report
from autopar.report.plan_report.subject import Subject
from autopar.report.plan_report.verdict import verdict
from autopar.report.tables import WIDTH
from autopar.runtime.step_profile import MeasuredAction, StageStep, StepProfile
from autopar.sharding.stage_sharding import StageSharding, Stored
from autopar.sharding.strategies import OperatorPlacements

HOSTILE = '<script>alert(1)</script><img src=x onerror=alert(2)>" onload="alert(3)'
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "MB": 1e6, "GB": 1e9, "%": 0.01, "days": 86400.0, "hours": 3600.0}


def page_of(report: Report, folder: Path) -> Page:
    return Page(report.save(folder / "report.html").read_text())


def number(text: str) -> float:
    """`231 ms` in seconds, `21 GB` in bytes."""
    match = re.match(r"\$?([\d.,]+) ?(%|\w+)?", text)
    assert match is not None, text
    return float(match[1].replace(",", "")) * UNITS.get(match[2] or "", 1.0)


def test_a_file_is_well_formed_html_and_needs_nothing_beside_it(tmp_path: Path) -> None:
    page = page_of(priced().report(), tmp_path)
    assert {tag for tag, _ in page.tags} >= {"html", "main", "nav", "h1", "h2", "table", "caption", "svg", "title"}
    ids = page.attributes("id")
    assert len(set(ids)) == len(ids)
    links = page.attributes("href")
    assert links
    assert all(link.startswith("#") and link[1:] in ids for link in links)
    assert not page.attributes("src")
    assert not {"script", "link", "iframe"} & {tag for tag, _ in page.tags}


def test_every_drawing_and_table_says_what_it_is(tmp_path: Path) -> None:
    page = page_of(priced().report(), tmp_path)
    names = [tag for tag, _ in page.tags]
    assert names.count("caption") == names.count("table") > 4
    drawings = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert drawings
    assert all(one["role"] == "img" and one["aria-label"] for one in drawings)
    scrolled = [one for tag, one in page.tags if "scroll" in (one.get("class") or "").split()]
    assert all(one["tabindex"] == "0" for one in scrolled), "a keyboard can scroll them"


def test_names_of_modules_and_devices_cannot_write_html(tmp_path: Path) -> None:
    plan = priced()
    stages = tuple(
        dataclasses.replace(
            stage,
            devices=tuple(f"{HOSTILE}{index}{name}" for name in stage.devices),
            operators=tuple(f"{HOSTILE}.{key}" for key in stage.operators),
            sharding=None,
        )
        for index, stage in enumerate(plan.stages)
    )
    hostile = dataclasses.replace(
        plan,
        stages=stages,
        devices=tuple(name for stage in stages for name in stage.devices),
        device_kinds=(HOSTILE,) * 8,
        notes=(HOSTILE,),
        optimality=HOSTILE,
        runners_up=tuple(dataclasses.replace(one, description=HOSTILE) for one in plan.runners_up),
    )
    page = page_of(hostile.report(command=HOSTILE), tmp_path)
    assert not {"script", "img"} & {tag for tag, _ in page.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert HOSTILE in page.text
    assert Page(hostile.report()._repr_html_()).text.count(HOSTILE) > 5


def test_the_first_screen_shows_the_numbers_of_the_plan(tmp_path: Path) -> None:
    plan = priced()
    assert plan.work is not None
    assert plan.predicted_step_time is not None
    assert plan.batch_size is not None
    figures = page_of(plan.report(price_per_device_hour=2.0), tmp_path).figures
    step = plan.predicted_step_time
    expected = {
        "step time": step,
        "throughput": (plan.work.tokens or 0) / step,
        "model FLOPs utilisation": (plan.work.least_time or 0) / step,
        "time per 1T tokens": 1e12 / (plan.work.tokens or 1) * step,
        "price per 1T tokens": 1e12 / (plan.work.tokens or 1) * step / 3600 * len(plan.devices) * 2.0,
        "speed-up over one device": (plan.single_device_time or 0) / step,
    }
    assert {name: number(figures[name][0]) for name in expected} == pytest.approx(expected, rel=0.006)
    memory = figures["memory"][0]
    assert (number(f"{memory.split()[0]} GB"), number(memory.split(" of ")[1])) == pytest.approx(
        (21e9, 76e9), rel=0.006
    )


@pytest.mark.parametrize(
    ("kind", "work", "expected"),
    [
        ("some CPU", StepWork(None, 8e12), "no data sheet for some CPU"),
        ("some CPU", StepWork(None), "not counted"),
        ("NVIDIA H200", StepWork(None, 8e12), "no data sheet has a peak"),
    ],
)
def test_an_unknown_utilisation_says_what_is_missing(kind: str, work: StepWork, expected: str, tmp_path: Path) -> None:
    plan = priced(device_kinds=(kind,) * 8, work=work)
    figures = page_of(plan.report(), tmp_path).figures
    value, note = figures["model FLOPs utilisation"]
    assert value == "unknown"
    assert expected in note


def test_time_and_price_of_an_epoch_follow_the_size_of_the_data_set(tmp_path: Path) -> None:
    plan = priced()
    figures = page_of(plan.report(samples_per_epoch=1.6e6, price_per_device_hour=3.0), tmp_path).figures
    seconds = 1.6e6 / (plan.batch_size or 1) * (plan.predicted_step_time or 0)
    assert number(figures["time per epoch"][0]) == pytest.approx(seconds, rel=0.006)
    assert number(figures["price per epoch"][0]) == pytest.approx(seconds / 3600 * 8 * 3.0, rel=0.006)


def test_a_step_without_tokens_shows_the_time_and_price_of_samples(tmp_path: Path) -> None:
    plan = priced(work=StepWork(None, 8e12))
    figures = page_of(plan.report(price_per_device_hour=3.0), tmp_path).figures
    seconds = 1e6 / (plan.batch_size or 1) * (plan.predicted_step_time or 0)
    assert number(figures["time per 1M samples"][0]) == pytest.approx(seconds, rel=0.006)
    assert number(figures["price per 1M samples"][0]) == pytest.approx(seconds / 3600 * 8 * 3.0, rel=0.006)


def test_a_slow_machine_shows_the_time_of_fewer_tokens(tmp_path: Path) -> None:
    plan = priced(predicted_step_time=60.0)
    seconds = 1e9 / (16 * 4096) * 60.0
    figures = page_of(plan.report(), tmp_path).figures
    assert number(figures["time per 1B tokens"][0]) == pytest.approx(seconds, rel=0.006)


@pytest.mark.parametrize(
    "wrong",
    [
        {"samples_per_epoch": 0},
        {"samples_per_epoch": True},
        {"price_per_device_hour": float("nan")},
        {"price_per_device_hour": "2"},
        {"currency": None},
        {"search": "yes"},
        {"command": ["autopar", "plan"]},
    ],
)
def test_what_a_report_is_asked_for_is_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        priced().report(**wrong)


def test_owners_of_memory_add_up_to_the_peak_of_the_plan() -> None:
    for peak in (21_000_000_000, 9_000_000_000, 1):  # rehearsed peaks lie above the formula's or below
        stages = tuple(dataclasses.replace(stage, peak_memory=peak) for stage in priced().stages)
        plan = priced(stages=stages)
        step = step_of_plan(plan)
        assert step is not None
        places = device_memory(plan, step.timeline())
        assert len(places) == plan.ranks
        for one in places:
            assert sum(one.owners.values()) == one.peak == peak
            assert min(one.owners.values()) >= 0


def test_a_plan_from_a_file_has_the_same_report(tmp_path: Path) -> None:
    plan = priced()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").report() == plan.report()


def test_what_a_plan_does_not_know_is_said_in_its_section(tmp_path: Path) -> None:
    by_hand = Plan.from_split({"net.embed": 0, "net.layers": 1}, n_microbatches=2)
    report = by_hand.report()
    assert [section.title for section in report.sections] == [section.title for section in priced().report().sections]
    text = page_of(report, tmp_path).text
    for part in ("no predictions", "no timeline", "does not say what its devices hold", "unknown"):
        assert part in text
    assert not re.search(r"\d (ms|GB)", text), "nothing is made up"


def test_collectives_are_drawn_apart_from_computing(tmp_path: Path) -> None:
    plan = priced()
    page = page_of(plan.report(), tmp_path)
    assert "collectives of stage 0, micro-batch 0: 400 us" in page.text
    spans = [one for tag, one in page.tags if tag == "rect" and "x" in one and one["height"] == "20"]
    step = step_of_plan(plan)
    assert step is not None
    timeline = step.timeline()
    width = sum(float(one["width"] or 0) for one in spans) / 1000 * timeline.step_time
    assert width == pytest.approx(sum(timeline.busy), rel=1e-3), "both parts of an action, and what comes once a step"
    notes = re.findall(r"(\d+)% computing, (\d+)% exchanging", page.text)
    each = [100 * exposed_communication(plan)[rank] / timeline.step_time for rank in range(plan.ranks)]
    assert sorted({int(part) for _, part in notes}) == sorted({round(share) for share in each})
    assert "% busy" not in page.text


def test_a_measured_step_is_drawn_below_the_predicted_one(tmp_path: Path) -> None:
    plan = priced()
    stages = tuple(
        StageStep(s, plan.stages[s].devices[0], 4, 0.04, 0.0, 0.08, 0.01, None, None) for s in range(len(plan.stages))
    )
    actions = tuple(MeasuredAction("F", s, 0, one.device, ((0.1 * s, 0.1 * s + 0.05),)) for s, one in enumerate(stages))
    profile = StepProfile(0.4, 0.31, 16, 8, "1f1b", stages, False, actions)
    report = plan_report(Subject(plan, profile))
    page = page_of(report, tmp_path)
    assert number(page.figures["step time"][0]) == pytest.approx(0.4)
    assert "predicted 310 ms (-22.5%)" in page.figures["step time"][1]
    assert "The measured step, over all micro-batches" in page.text
    assert "40 ms" in page.text, "what the stages took"
    measured = [label for label in page.attributes("aria-label") if ", measured:" in label]
    predicted = [label for label in page.attributes("aria-label") if ", predicted:" in label]
    assert len(measured) == len(predicted) == 2
    spans = [one for tag, one in page.tags if tag == "rect" and "x" in one and one["height"] == "20"]
    ends = [float(one["x"] or 0) + float(one["width"] or 0) for one in spans]
    assert max(ends) <= 1000.01
    assert "width" in spans[0]
    assert "125" in [one["width"] for one in spans], "a twentieth of a second on the axis of the longer step"


@pytest.mark.slow
def test_ten_thousand_operators_fit_in_three_megabytes(tmp_path: Path) -> None:
    plan = priced(n_layers=3334)
    assert sum(len(stage.operators) for stage in plan.stages) > 10_000
    path = plan.report().save(tmp_path / "large.html")
    assert path.stat().st_size < 3_000_000
    assert "layers.3333" in path.read_text() or ">3333<" in path.read_text()


def test_text_and_page_show_the_same_figures(tmp_path: Path) -> None:
    report = priced().report()
    text = str(report)
    assert max(map(len, text.splitlines())) <= WIDTH
    for label, (value, *_) in page_of(report, tmp_path).figures.items():
        assert re.search(rf"{re.escape(label)} +{re.escape(value)}", text)
    console = Console(width=WIDTH, record=True, force_terminal=True)
    with console.capture() as shown:
        console.print(report)
    assert "\x1b[1m" in shown.get(), "rich shows headings in bold"


def test_a_wide_terminal_shows_wider_tables() -> None:
    """What 80 columns have no room for is shown in 120; no line is longer than the terminal."""
    stages = tuple(dataclasses.replace(stage, optimizer_time=0.01) for stage in priced().stages)
    report = priced(stages=stages).report()
    shown = {}
    for width in (80, 100, 120, 200):
        console = Console(width=width, file=io.StringIO(), color_system=None)
        console.print(report)
        shown[width] = console.file.getvalue()  # type: ignore[attr-defined]
        assert max(map(len, shown[width].splitlines())) <= min(width, 120)
    assert shown[80].rstrip().splitlines() == str(report).splitlines(), "what print() shows"
    assert "columns left out" in shown[80]
    assert shown[120].count("columns left out") < shown[80].count("columns left out")
    assert shown[120] == shown[200]
    for value, *_ in Page(report._repr_html_()).figures.values():
        assert value in shown[120]


def test_a_section_can_be_shown_alone() -> None:
    report = priced().report()
    assert [section.title for section in report.only("Memory", "Stages").sections] == ["Memory", "Stages"]
    with pytest.raises(KeyError):
        report.only("Recipes")


@pytest.mark.slow
@given(plans)
def test_every_plan_has_a_report(plan: Plan) -> None:
    report = plan.report()
    Page(report._repr_html_())
    titles = [section.title for section in report.sections if section.title != "Timeline of one step"]
    text = str(report.only(*titles))  # a schedule is as wide as it has micro-batches
    assert max(map(len, text.splitlines())) <= WIDTH


@pytest.mark.slow
@given(st.integers(1, 12), st.integers(1, 40))
def test_the_legend_of_many_devices_stays_short(replicas: int, microbatches: int) -> None:
    """However many devices a plan has, lanes and bars are few; the text says how many are left out."""
    names = tuple(f"cuda:{i}" for i in range(replicas * 8))
    stage = Stage(names, ("net/linear#0",), 0.01, 0.02)
    plan = Plan((stage,), microbatches, "1f1b", microbatches, names, predicted_step_time=0.03)
    section = plan.report().only("Timeline of one step")
    page = Page(section._repr_html_())
    lanes = sum(tag == "svg" for tag, _ in page.tags)
    assert lanes <= 24
    assert lanes == len(names) or "replica" in page.text


def test_idle_devices_with_one_reason_share_a_line() -> None:
    names = tuple(f"cuda:{i}" for i in range(400))
    plan = Plan((Stage(names[:1], ("net/linear#0",), 0.01, 0.02),), 1, "1f1b", 4, names, predicted_step_time=0.03)
    plan = dataclasses.replace(plan, runners_up=(RunnerUp("another", 0.04),))
    text = " ".join(str(plan.report().only("Runners-up")).split())
    assert text.count("nothing to do") == 1
    assert "cuda:1 .. cuda:399 (399) have nothing to do" in text


def mixed(n_in_parts: int) -> Plan:
    """Two meshes of two devices, which cut the samples of all operators, and some of eight matrices."""
    keys = tuple(f"layers.{i}/linear#0" for i in range(8))
    sharding = StageSharding(
        (2,),
        ("model",),
        strategies=tuple(
            (
                key,
                OperatorPlacements(((-1,), (0,)), ((2,),))
                if i < n_in_parts
                else OperatorPlacements(((0,), (-1,)), ((0,),)),
            )
            for i, key in enumerate(keys)
        ),
        parameters=tuple(
            (f"layers.{i}.weight", Stored(((0,) if i < n_in_parts else (-1,)), (0,), False)) for i in range(8)
        ),
    )
    stage = Stage(("cuda:0", "cuda:1", "cuda:2", "cuda:3"), keys, 0.01, 0.02, sharding=sharding)
    return Plan((stage,), 4, "1f1b", 16, stage.devices, predicted_step_time=0.1)


def test_a_mesh_that_cuts_samples_and_parameters_is_not_called_data_parallel() -> None:
    assert verdict(mixed(1)).startswith("Data parallel 4, ZeRO-1"), "a head alone may be cut"
    for n_in_parts, words in (
        (3, "Data parallel 2 x mostly data parallel 2 (tensor parallel in 38% of the matrix products), ZeRO-1"),
        (4, "Data parallel 2 x partly data parallel 2 (tensor parallel in 50% of the matrix products), ZeRO-1"),
        (5, "Data parallel 2 x mostly tensor parallel 2 (data parallel in 38% of the matrix products), "),
    ):
        assert verdict(mixed(n_in_parts)).startswith(words)
    with pytest.raises(PlanError, match="some operators cut samples, and others parameters"):
        mixed(4).to_megatron_args()


def test_a_schedule_without_times_is_drawn_with_few_of_many_micro_batches() -> None:
    plan = Plan.from_split({"a": 0, "b": 1}, n_microbatches=2000)
    text = str(plan.report().only("Timeline of one step"))
    assert "with 32 of 2,000" in " ".join(text.split())
    assert len(text) < 5000
    assert "B31" in text


def test_a_measured_step_without_predictions_says_that_nothing_was_predicted() -> None:
    plan = Plan.from_split({"a": 0, "b": 1}, n_microbatches=2)
    stages = tuple(StageStep(s, f"cpu:{s}", 2, 0.1, 0.0, 0.2, 0.0, None, None) for s in range(2))
    actions = tuple(MeasuredAction("F", s, 0, f"cpu:{s}", ((0.1 * s, 0.1 * s + 0.1),)) for s in range(2))
    report = plan_report(Subject(plan, StepProfile(0.6, None, 8, 2, "1f1b", stages, False, actions)))
    text = " ".join(str(report).split())
    for part in (
        "measured, 8 samples",
        "nothing was predicted",
        "what its devices hold, and what bounds it, is unknown",
    ):
        assert part in text
    assert "400 ms of the measured step are outside of these actions" in text


@pytest.mark.parametrize("name", ["r.pdf", "r.json", "r.html.txt"])
def test_a_page_is_no_file_of_another_kind(name: str, tmp_path: Path) -> None:
    message = rf"{name}: a report is a page in HTML; give a name that ends in .html or .htm"
    with pytest.raises(InputError, match=message):
        priced().report().save(tmp_path / name)
    assert not list(tmp_path.iterdir())
    for right in ("r.html", "R.HTM", "report"):
        assert priced().report().save(tmp_path / right).read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("name", ["t.txt", "t.pickle", "t.json.zip"])
def test_a_trace_is_no_file_of_another_kind(name: str, tmp_path: Path) -> None:
    plan = priced()
    for write in (plan.trace, plan.report().trace):
        with pytest.raises(InputError, match=f"{name}: a trace is JSON, .* ends in .json, .json.gz or .gz"):
            write(tmp_path / name)
    with pytest.raises(InputError, match=r"m.txt: a snapshot of memory is a pickle; give .* .pickle or .pkl"):
        plan.memory_snapshot(tmp_path / "m.txt")
    assert not list(tmp_path.iterdir())
    plan.trace(tmp_path / "T.JSON.GZ")
    assert json.loads(gzip.decompress((tmp_path / "T.JSON.GZ").read_bytes()))["traceEvents"]
