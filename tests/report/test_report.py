"""Plans as text: all that matters is there, in ASCII, within 120 columns."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autopar
from autopar.costs.python_overhead import ACTION_OVERHEAD
from autopar.errors import InputError, PlanError
from autopar.plan.plan import Plan
from autopar.plan.stage import RunnerUp, Stage, StageTransfer
from autopar.report.plan import module_ranges, plan_text
from autopar.report.quantities import seconds_text
from autopar.report.tables import WIDTH, milliseconds, table

OPERATORS = (
    "net.embed/embedding#0",
    "net.layers.0.attention/linear#0",
    "net.layers.0.feed/linear#0",
    "net.layers.1.attention/linear#0",
    "net.layers.1.feed/linear#0",
    "head/linear#0",
)


def plan_of(*cuts: int, **changes: object) -> Plan:
    """The operators above in stages that end before `cuts`, with made-up numbers."""
    ends = [0, *cuts, len(OPERATORS)]
    stages = tuple(
        Stage((f"cpu:{s}",), OPERATORS[a:b], 0.01, 0.02, 0.01, 4_000_000, 500_000, 9_000_000)
        for s, (a, b) in enumerate(itertools.pairwise(ends))
    )
    links = tuple(StageTransfer(s, s + 1, 123_000, 123_000, 1e-5) for s in range(len(cuts)))
    plan = Plan(
        stages,
        n_microbatches=4,
        batch_size=10,
        devices=tuple(f"cpu:{s}" for s in range(len(stages))),
        predicted_step_time=0.15,
        single_device_time=0.24,
        bubble=0.2,
        transfers=links,
        notes=("a reason",),
    )
    return dataclasses.replace(plan, **changes)  # type: ignore[arg-type]


def assert_printable(text: str) -> None:
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= WIDTH
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_a_plan_prints_its_numbers_its_stages_and_its_reasons() -> None:
    text = str(plan_of(3))
    assert_printable(text)
    for part in ("4 micro-batches of 2-3 samples", "1f1b", "150 ms", "240 ms", "1.60x", "20.0%", "a reason", "0 -> 1"):
        assert part in text
    assert text.count("cpu:1") == 2  # in the head and in its row


def test_long_names_notes_and_many_stages_fit_the_width() -> None:
    deep = ".".join(["a_rather_long_module_name"] * 8)
    stages = tuple(
        dataclasses.replace(plan_of().stages[0], devices=(f"cuda:{s}#1",), operators=(f"{deep}.{s}/op#0",))
        for s in range(8)
    )
    names = tuple(stage.devices[0] for stage in stages)
    plan = plan_of(stages=stages, devices=names, transfers=(), notes=("why " * 100,))
    assert_printable(plan_text(plan))
    assert deep.count("name") == 8
    assert_printable(str(plan.report()))


@pytest.mark.parametrize(
    ("cuts", "expected"),
    [
        ((), ["the whole model"]),
        ((5,), ["net", "head"]),
        ((3,), ["net.embed .. net.layers.0", "net.layers.1 .. head"]),
        ((2,), ["net.embed .. net.layers.0.attention", "net.layers.0.feed .. head"]),
    ],
)
def test_a_stage_is_named_by_the_largest_modules_that_lie_in_it_whole(
    cuts: tuple[int, ...], expected: list[str]
) -> None:
    assert module_ranges(plan_of(*cuts)) == expected


def test_a_plan_made_by_hand_prints_its_split_and_no_invented_numbers() -> None:
    text = str(Plan.from_split({"net.embed": 0, "net.layers": 1, "head": 1}, n_microbatches=2, schedule="gpipe"))
    assert_printable(text)
    assert "net.layers, head" in text
    assert "ms" not in text


def test_a_report_without_a_plan_says_so() -> None:
    pm = autopar.parallelize(nn.Linear(2, 2), "cpu,cpu")
    assert "No plan yet" in str(pm.report())


def test_a_misspelt_argument_of_a_report_is_named() -> None:
    pm = autopar.parallelize(nn.Linear(2, 2), "cpu,cpu")
    with pytest.raises(InputError, match="report has no option 'price_per_hour'; did you mean 'price_per_device_hour'"):
        pm.report(price_per_hour=2)  # type: ignore[call-arg]
    with pytest.raises(InputError, match="report has no option 'comand'; did you mean 'command'"):
        plan_of(2).report(comand="autopar plan")  # type: ignore[call-arg]
    with pytest.raises(InputError, match="samples_per_epoch must be"):
        pm.report(samples_per_epoch=-1)


def test_a_report_draws_the_timeline_of_the_plans_own_times() -> None:
    """Two equal stages, m micro-batches: m + 1 units of a forward and a backward, and the runtime's overhead."""
    plan = plan_of(3, batch_size=8, transfers=(StageTransfer(0, 1, 1000, 1000, 0.0),))
    text = str(plan.report())
    assert f"4 micro-batches, step {seconds_text((4 + 1) * (0.01 + 0.02 + 2 * ACTION_OVERHEAD))}, bubble" in text
    assert_printable(text)
    by_hand = Plan.from_split({"a": 0, "b": 1}, n_microbatches=2)
    assert "F0" in str(by_hand.report())


@given(st.floats(1e-6, 1e6))
def test_times_keep_at_least_two_digits(seconds: float) -> None:
    assert float(milliseconds(seconds)) == pytest.approx(seconds * 1e3, rel=0.06)


def test_a_table_shows_markup_and_emoji_codes_as_they_are() -> None:
    assert "[red]x[/red] :smile:" in table(["what"], [["[red]x[/red] :smile:"]])


@pytest.mark.parametrize("hostile", ["\x1b[2J", "\x9b31m", "\r", "\x07", "\u202e", "\x00"])
def test_texts_of_a_plan_file_do_not_steer_the_terminal(hostile: str) -> None:
    plan = plan_of(
        3,
        notes=(f"a {hostile}note",),
        optimality=f"proven {hostile}best",
        runners_up=(RunnerUp(f"another {hostile}plan", 0.2),),
        device_kinds=(f"CPU{hostile}",) * 2,
    )
    names = {f"cpu:{s}": f"cpu{hostile}:{s}" for s in range(2)}
    stages = tuple(dataclasses.replace(s, devices=tuple(names[d] for d in s.devices)) for s in plan.stages)
    plan = Plan.from_json(dataclasses.replace(plan, stages=stages, devices=tuple(names.values())).to_json())
    broken = plan.to_json().replace('"1f1b"', json.dumps(hostile)).replace('"devices"', json.dumps(f"x{hostile}"))
    with pytest.raises(PlanError) as refused:
        Plan.from_json(broken)
    texts = [str(plan), str(plan.explain()), str(plan.diff(plan_of(2))), str(plan.report()), str(refused.value)]
    for text in texts:
        assert all(c.isprintable() or c == "\n" for c in text)
        assert hostile.encode("unicode_escape").decode() in text
