"""`plan.diff(other)` says what runs elsewhere or otherwise, in the largest modules that it is true of, and no more."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import hand_plans, plans, searched_plans
from typer.testing import CliRunner

import autopar
from autopar import Plan
from autopar.cli import app
from autopar.plan.diff import MovedModule, Recomputed, Setting
from autopar.plan.display import step_parts
from autopar.plan.stage import Stage, StageTransfer
from autopar.planner.predicted_step import step_of_plan
from autopar.report.diff import decisions_in_words

KEYS = tuple(f"{path}/{name}#0" for path in ("a", "a.x", "a.y.u", "a.y.v", "b.x", "b.y", "") for name in ("mm", "add"))


def by_operator(stage_of: dict[str, int], recompute: frozenset[int] = frozenset()) -> Plan:
    n = max(stage_of.values()) + 1
    held = [tuple(key for key, stage in stage_of.items() if stage == s) for s in range(n)]
    stages = tuple(Stage((f"cpu:{s}",), keys, recompute=s in recompute) for s, keys in enumerate(held))
    return Plan(stages, 2)


@st.composite
def assignments(draw: st.DrawFn) -> dict[str, int]:
    """A stage for each of KEYS; all stages are used."""
    n = draw(st.integers(1, 3))
    order = draw(st.permutations(KEYS))
    return dict(zip(order, [*range(n), *(draw(st.integers(0, n - 1)) for _ in order[n:])], strict=True))


def inside(key: str, module: str) -> bool:
    return module in ("", key) or (key.rpartition("/")[0] + ".").startswith(module + ".")


@given(plans)
def test_a_plan_is_the_same_as_itself(plan: Plan) -> None:
    found = plan.diff(plan)
    assert found.same
    assert str(found) == "the plans are the same"


@given(plans, plans)
def test_the_way_back_is_the_difference_turned_round(before: Plan, after: Plan) -> None:
    there, back = before.diff(after), after.diff(before)
    assert there.same == back.same
    assert there.settings == tuple(Setting(s.name, s.after, s.before) for s in back.settings)
    assert set(there.moves) == {MovedModule(m.module, m.after, m.before, m.n_operators) for m in back.moves}
    assert set(there.recomputed) == {Recomputed(r.module, not r.now, r.n_operators) for r in back.recomputed}
    assert set(there.only_before) == set(back.only_after)
    assert str(there)


@given(assignments(), assignments())
def test_moves_tell_the_new_stage_of_every_operator_in_the_largest_modules_that_move_whole(
    before: dict[str, int], after: dict[str, int]
) -> None:
    moves = by_operator(before).diff(by_operator(after)).moves
    moved = {key: (before[key], after[key]) for key in KEYS if before[key] != after[key]}
    listed: Counter[str] = Counter()
    for move in moves:
        mine = [key for key in KEYS if inside(key, move.module)]
        assert {(before[key], after[key]) for key in mine} == {(move.before, move.after)}
        assert len(mine) == move.n_operators
        listed.update(mine)
    assert listed == Counter(moved.keys())
    # None could be larger: the module above holds an operator that stays or goes elsewhere.
    for move in moves:
        path, slash, _ = move.module.rpartition("/")
        above = path if slash else move.module.rpartition(".")[0]
        if move.module != "":
            others = {(before[key], after[key]) for key in KEYS if inside(key, above)}
            assert len(others) > 1


@given(assignments(), st.frozensets(st.integers(0, 2)), st.frozensets(st.integers(0, 2)))
def test_modules_that_only_one_plan_recomputes_are_listed(
    stage_of: dict[str, int], before: frozenset[int], after: frozenset[int]
) -> None:
    found = by_operator(stage_of, before).diff(by_operator(stage_of, after))
    listed: Counter[tuple[str, bool]] = Counter()
    for item in found.recomputed:
        listed.update((key, item.now) for key in KEYS if inside(key, item.module))
    assert listed == Counter((k, s in after) for k, s in stage_of.items() if (s in before) != (s in after))


def test_what_is_shown_reads_well() -> None:
    keys = [f"layers.{i}.{part}/linear#0" for i in range(6) for part in ("up", "down")]
    before = by_operator({key: int(i >= 8) for i, key in enumerate(keys)})
    after = by_operator({key: int(i >= 4) for i, key in enumerate(keys)}, recompute=frozenset([1]))
    before = replace(before, predicted_step_time=0.2, bubble=0.25)
    after = replace(after, predicted_step_time=0.1, bubble=0.2, schedule="gpipe", n_microbatches=4)
    lines = str(before.diff(after)).splitlines()
    assert lines[0] == "100 % faster: 100 ms a step instead of 200 ms (predicted)."
    assert "- layers.2-3 (4 operators) moved from stage 0 to stage 1" in lines
    assert "- recomputes its whole forward in stage 1" in lines
    assert "- 4 micro-batches instead of 2" in lines
    assert "- schedule gpipe instead of 1f1b" in lines
    words = [" ".join(line.split()) for line in lines]
    assert "step, ms 200 100 0.5x" in words
    assert "bubble 25.0% 20.0% 0.8x" in words
    assert all(len(line) <= 80 and line.isascii() for line in lines)


def test_modules_that_moved_to_a_stage_that_recomputes_are_named() -> None:
    keys = [f"layers.{i}/linear#0" for i in range(6)]
    plans = [by_operator({key: int(i >= n) for i, key in enumerate(keys)}, frozenset([1])) for n in (4, 2)]
    assert "- recomputes layers.2-3 (2 operators)" in str(plans[0].diff(plans[1])).splitlines()
    assert "- no longer recomputes layers.2-3 (2 operators)" in str(plans[1].diff(plans[0])).splitlines()


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({}, {"selective": True}, "recomputes attention in stages 0 and 1"),
        ({"layerwise": True}, {}, "no longer recomputes every layer in stages 0 and 1"),
        (
            {"layerwise": True},
            {"recompute": True},
            "recomputes its whole forward instead of every layer in stages 0 and",
        ),
    ],
)
def test_what_stages_recompute_is_said_in_words(before: Any, after: Any, said: str) -> None:
    def plan(modes: Any) -> Plan:
        return Plan(tuple(Stage((f"cpu:{s}",), (f"layers.{s}/mm#0",), **modes) for s in range(2)), 2)

    assert said in " ".join(str(plan(before).diff(plan(after))).split())


@pytest.mark.parametrize(
    ("modes", "said"),
    [
        ({"layerwise": True}, "stages recomputed layer by layer: 0, 1 (before: none)"),
        ({"recompute": True}, "recomputed stages: 0, 1 (before: none)"),
    ],
)
def test_all_stages_that_recompute_are_named_where_plans_have_other_numbers_of_stages(modes: Any, said: str) -> None:
    one = Plan((Stage(("cpu:0",), ("layers.0/mm#0", "layers.1/mm#0")),), 2)
    two = Plan(tuple(Stage((f"cpu:{s}",), (f"layers.{s}/mm#0",), **modes) for s in range(2)), 2)
    there, back = one.diff(two), two.diff(one)
    assert said in decisions_in_words(there)
    assert [said in " ".join(str(diff).split()) for diff in (there, back)] == [True, False]
    assert f"{said.partition(':')[0]}: none (before: 0, 1)" in decisions_in_words(back)
    assert there.modes == back.modes == (), "stage 0 of one plan is no stage of the other"


def priced(m: int = 4, forward: float = 0.01, **fields: Any) -> Plan:
    """Two stages of known times, and the step that follows from them."""
    numbers = {"forward_time": forward, "backward_time": 2 * forward, "weight_time": 0.0}
    stages = tuple(Stage((f"cuda:{s}",), (f"layers.{s}/mm#0",), **numbers, **fields) for s in range(2))
    plan = Plan(stages, m, transfers=(StageTransfer(0, 1, 8, 8, 0.0),), action_time=0.0)
    step = step_of_plan(plan)
    assert step is not None
    return replace(plan, predicted_step_time=step.timeline().step_time)


def test_a_slower_plan_is_explained_by_where_the_busiest_device_spends_more() -> None:
    plain, recomputing = priced(), priced(recompute=True)
    text = " ".join(str(plain.diff(recomputing)).split())
    # A forward of 10 ms runs again for each of 4 micro-batches, and the other stage waits for one of them.
    assert "33 % slower: 200 ms a step instead of 150 ms (predicted)" in text
    assert "because the busiest device spends 40.0 ms more on recomputing and 10.0 ms more on waiting" in text
    back = " ".join(str(recomputing.diff(plain)).split())
    assert "33 % faster" in back
    assert "40.0 ms less on recomputing" in back
    fewer = " ".join(str(priced(8).diff(priced(4, 0.02))).split())
    assert "11 % slower: 300 ms a step instead of 270 ms" in fewer
    assert "because the busiest device spends 30.0 ms more on waiting for other stages." in fewer
    assert "As fast as before" in str(plain.diff(replace(priced(), notes=("a",), schedule="gpipe")))


@given(plans)
def test_the_parts_of_a_step_add_up_to_it(plan: Plan) -> None:
    parts = step_parts(plan)
    step = step_of_plan(plan)
    assert bool(parts) == (step is not None)
    if step is not None:
        timeline = step.timeline()
        assert sum(parts.values()) == pytest.approx(timeline.step_time, rel=1e-6)
        idle = timeline.step_time - max(timeline.busy)
        assert parts["waiting for other stages"] == pytest.approx(idle, rel=1e-6, abs=1e-6 * timeline.step_time)
        assert min(parts.values()) >= -1e-6 * timeline.step_time


def test_where_only_one_plan_is_priced_the_text_says_how_to_price_the_other() -> None:
    plan = priced()
    stages = tuple(replace(stage, forward_time=None, backward_time=None, weight_time=None) for stage in plan.stages)
    without = replace(plan, n_microbatches=8, stages=stages, predicted_step_time=None, bubble=None)
    for pair, which, other in (((plan, without), "first", "second"), ((without, plan), "second", "first")):
        text = " ".join(str(pair[0].diff(pair[1])).split())
        assert f"Only the {which} plan has predictions" in text
        assert f"prices the {other} one, too" in text
        assert "after/before" not in text


def test_equal_decisions_with_other_predictions_say_so() -> None:
    before = by_operator(dict.fromkeys(KEYS, 0))
    found = before.diff(replace(before, predicted_step_time=0.1))
    assert found.same_decisions
    assert not found.same
    assert str(found).startswith("the plans make the same decisions; their predictions differ")


def test_splits_are_compared_by_module_and_with_plans_by_operator() -> None:
    two = Plan.from_split({"a": 0, "b": 1}, n_microbatches=2)
    three = Plan.from_split({"a": 0, "a.y": 1, "b": 1, "c": 2}, n_microbatches=2)
    found = two.diff(three)
    assert found.moves == (MovedModule("a.y", 0, 1, 1),)
    assert found.only_after == ("c",)
    stage_of = {key: int(key.startswith("b")) for key in KEYS}
    assert [(m.module, m.before, m.after) for m in two.diff(by_operator(stage_of)).moves] == []
    moved = by_operator({key: int(not key.startswith("b")) for key in KEYS})
    assert {(m.module, m.before, m.after) for m in two.diff(moved).moves} == {("a", 0, 1), ("b", 1, 0)}


def test_the_plain_model_is_compared_with_a_pipeline_of_it() -> None:
    plain = Plan((Stage(("cpu:0",)),), 1)
    found = plain.diff(by_operator({key: int(key.startswith("b")) for key in KEYS}))
    assert [(m.module, m.before, m.after) for m in found.moves] == [("b", 0, 1)]
    assert not found.only_after


@given(searched_plans(), hand_plans())
def test_as_json_it_is_in_seconds_and_bytes_with_ratios(before: Plan, after: Plan) -> None:
    data = json.loads(before.diff(replace(after, predicted_step_time=1.5)).to_json())
    assert data["same"] is False
    step = next(q for q in data["quantities"] if q["name"] == "step")
    assert (step["unit"], step["before"], step["after"]) == ("s", before.predicted_step_time, 1.5)
    if before.predicted_step_time:
        assert step["ratio"] == 1.5 / before.predicted_step_time


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> tuple[Plan, Plan, str, str]:
    plans = [by_operator({key: int(key.startswith(module)) for key in KEYS}) for module in ("b", "a")]
    for name, plan in zip("ba", plans, strict=True):
        plan.save(tmp_path / f"{name}.json")
    return plans[0], plans[1], str(tmp_path / "b.json"), str(tmp_path / "a.json")


def test_the_command_prints_the_difference_with_status_0_the_same_or_not(files: tuple[Plan, Plan, str, str]) -> None:
    before, after, first, second = files
    done = CliRunner().invoke(app, ["diff", first, second])
    assert (done.exit_code, done.stdout) == (0, f"{before.diff(after)}\n")
    done = CliRunner().invoke(app, ["diff", first, first])
    assert (done.exit_code, done.stdout) == (0, "the plans are the same\n")
    done = CliRunner().invoke(app, ["diff", first, second, "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout) == json.loads(before.diff(after).to_json())


def test_the_command_fails_with_status_2_where_a_file_holds_no_plan(files: tuple[Plan, Plan, str, str]) -> None:
    *_, first, _ = files
    done = CliRunner().invoke(app, ["diff", first, "missing.json"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "error: missing.json" in done.stderr
    assert CliRunner().invoke(app, ["diff", first]).exit_code == 2


def test_a_difference_is_a_public_value() -> None:
    plan = Plan((Stage(("cpu:0",)),), 1)
    assert isinstance(plan.diff(plan), autopar.PlanDiff)
    assert hash(plan.diff(plan)) == hash(plan.diff(plan))


def test_predictions_that_differ_by_rounding_alone_are_the_same() -> None:
    plan = Plan((Stage(("cpu:0",), forward_time=0.1),), 1, predicted_step_time=0.3)
    other = replace(plan, predicted_step_time=0.1 + 0.2)
    assert other.predicted_step_time != plan.predicted_step_time
    assert plan.diff(other).same
    assert not plan.diff(replace(plan, predicted_step_time=0.301)).same
