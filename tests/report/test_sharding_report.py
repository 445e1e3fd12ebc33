"""Plans with sharded stages: what they print, their numbers and their differences. Facts, not whole texts."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from printed_tables import table_in
from sharded_plans import M, chosen, sharding_in

from autopar import Plan
from autopar.plan.stage import Stage, StageTransfer
from autopar.planner.arrangement import Conditions
from autopar.planner.intra_op.solution import exchanges_within
from autopar.planner.predict import predict
from autopar.report.layer_names import folded
from autopar.report.sharding import axis_text, stored_words
from autopar.sharding.stage_sharding import Exchange, Repeated, StageSharding, parse_stored, parse_strategy
from benchmarks.planning import Case, synthetic_costs

INSIDE = Conditions(loss_inside=True)
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "room"), [("gpt2", 1.0), ("llama", 1.0), ("llama", 0.8), ("mlp", 0.5)])
def test_a_stage_lists_every_chosen_collective_as_often_as_it_happens(name: str, room: float) -> None:
    plan, problem, found, keys, _ = chosen(name, room)
    sharding = sharding_in(plan)
    inner = exchanges_within(problem.task, problem.facts, found)
    within = Counter(replace(e, operator=keys[e.operator], tensor=keys[e.tensor]) for e in inner)
    assert within <= Counter(sharding.exchanges)
    between = list((Counter(sharding.exchanges) - within).elements())
    for once in (False, True):
        wanted = [c for c in found.collectives if c.once is once]
        mine = [e for e in between if e.once is once]
        assert len(mine) == sum(c.times * sum(step.collective is not None for step in c.steps) for c in wanted)
        assert math.fsum(e.seconds for e in mine) == pytest.approx(math.fsum(c.seconds for c in wanted))
    work = math.fsum(w.forward + w.backward for w in found.work.values())
    once = math.fsum(c.seconds for c in found.collectives if c.once)
    assert sharding.collective_time == pytest.approx(
        found.seconds - work - once / M + math.fsum(e.seconds for e in within.elements())
    )
    inputs = {node.name for node in problem.task.module.graph.nodes if node.op == "placeholder"}
    assert not inputs & {key for key, _ in sharding.parameters}
    assert {e.operator for e in sharding.exchanges} <= set(keys.values())
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_text_of_a_plan_counts_all_collectives_of_a_step_and_says_their_share(name: str) -> None:
    plan = chosen(name)[0]
    text, sharding = str(plan), sharding_in(plan)
    count = sum(1 if e.once else M for e in sharding.exchanges)
    seconds = sum(e.seconds * (1 if e.once else M) for e in sharding.exchanges)
    (stage,) = table_in(text, "stage  mesh")
    assert stage[1] == "data 2 x model 2"
    assert int(stage[3]) == count
    assert stage[6].split()[0] == f"{seconds / (plan.predicted_step_time or 0):.1%}"
    rows = table_in(text, "collective ")
    numbers = [int(row[4]) for row in rows]
    assert sum(numbers) == count
    assert all(row[0] in COLLECTIVES or row[0].startswith("...") for row in rows)


@pytest.mark.parametrize("room", [1.0, pytest.param(0.8, marks=pytest.mark.slow)])
def test_nothing_is_listed_twice(room: float) -> None:
    text = str(chosen("llama", room)[0])
    for head in ("operators", "parameters", "collective "):
        if f"\n{head}" in text:
            rows = [tuple(row) for row in table_in(text, head)]
            assert len(rows) == len(set(rows))


def layered(layers: int, stages: int = 1, **more: Any) -> Plan:
    """Layers of a linear operator split by columns and a relu that keeps the layout."""
    per_stage = layers // stages
    made = []
    for s in range(stages):
        paths = [f"layers.{i}.fc" for i in range(s * per_stage, (s + 1) * per_stage)]
        strategies = [(f"{p}/linear#0", "S0R RS0 -> S0S1") for p in paths]
        strategies += [(f"{p}/relu#0", "S0S1 -> S0S1") for p in paths]
        sharding = replace(StageSharding.from_texts((2, 2), ("data", "model"), dict(strategies)), **more)
        keys = tuple(key for p in paths for key in (f"{p}/linear#0", f"{p}/relu#0", f"{p}/norm#0"))
        made.append(Stage(tuple(f"{s}:{i}" for i in range(4)), keys, sharding=sharding))
    return Plan(tuple(made), M)


@pytest.mark.parametrize("stages", [1, 2])
def test_equal_layers_share_a_line_and_operators_that_keep_layouts_are_counted(stages: int) -> None:
    text = str(layered(8, stages))
    assert table_in(text, "operators") == [["layers.0-7.fc linear", "Shard(0)", "columns, Shard(1)", "S0R RS0 -> S0S1"]]
    counts = "keep the layouts of their operands: 8; operators that every device of a mesh does as a whole: 8"
    assert counts in " ".join(text.split())


def test_repeated_work_names_the_operators_that_make_most_of_it() -> None:
    repeated = tuple(Repeated(f"layers.{i}.fc/norm#0", 0.001) for i in range(8))
    plan = layered(8, repeated_time=0.008, repeated=repeated)
    assert f"layers.0-7.fc norm {M * 8:.1f} ms" in str(plan)


def test_micro_batches_that_replicas_share_and_forwards_that_run_again_count_as_often_as_they_happen() -> None:
    exchange = Exchange("all_reduce", "model", "layers.0.fc/relu#0", "layers.0.fc/linear#0", 1000, 0.001)
    plan = layered(8, exchanges=(exchange, replace(exchange, backward=True), replace(exchange, once=True)))
    stage = replace(plan.stages[0], devices=tuple(f"d:{i}" for i in range(8)), recompute=True)
    rows = table_in(str(replace(plan, stages=(stage,))), "collective ")
    assert {row[2]: int(row[4]) for row in rows} == {"forward": 2 * M // 2, "backward": M // 2, "once per step": 1}


@pytest.mark.parametrize(
    ("text", "gathered", "words"),
    [
        ("RS0", (), "Shard(0) over model"),
        ("RR / S0R", (), "state over data (ZeRO 1)"),
        ("RR / RS0", (), "state over model"),
        ("RR / S0S0", (), "state over data and model (ZeRO 1)"),
        ("S1S0", ("data",), "Shard(1) over data, gathered for every use (ZeRO 3); Shard(0) over model"),
        ("S1S0", ("model",), "Shard(1) over data; Shard(0) over model, gathered for every use"),
        ("RR", (), ""),
    ],
)
def test_parameters_are_described_in_the_words_of_zero(text: str, gathered: tuple[str, ...], words: str) -> None:
    assert stored_words(parse_stored(text), ("data", "model"), gathered, ("data",)) == words


@pytest.mark.parametrize(
    ("name", "strategy", "words"),
    [
        ("linear", "S0R RS0 -> S0S2", ["Shard(0)", "columns, Shard(2)"]),
        ("linear", "S0S2 RS1 -> S0P", ["Shard(0)", "rows, Partial"]),
        ("addmm", "RR S0S1 RS0 -> S0P", ["Shard(0)", "rows, Partial"]),
        ("embedding", "S0S1 RR -> PS2", ["rows of the table, Partial", "columns, Shard(2)"]),
        ("sum", "S0P -> PP", ["Partial", "Partial, passed on"]),
        ("softmax", "RS1 -> RS1", ["Replicate", "Shard(1)"]),
    ],
)
def test_the_splits_of_an_axis_are_described_in_the_words_of_torch(name: str, strategy: str, words: list[str]) -> None:
    sides = parse_strategy(strategy)
    assert [axis_text(name, sides, axis) for axis in range(2)] == words


PARTS = st.sampled_from(["a", "layers", "b2", "0", "1", "2", "3", "17"])
NAMES = st.lists(PARTS, min_size=1, max_size=4).map(".".join)
KEYS = st.tuples(NAMES, st.sampled_from(["", "/linear#0", "/linear#1", "/mul_2#3"])).map("".join)


def unfolded(pattern: str) -> set[str]:
    """All names that match a folded one."""
    match = re.search(r"\d+(?:[-,]\d+)+", pattern)
    if match is None:
        return {pattern}
    ends = [[int(n) for n in run.split("-")] for run in match[0].split(",")]
    numbers = [n for run in ends for n in range(run[0], run[-1] + 1)]
    return {name for n in numbers for name in unfolded(f"{pattern[: match.start()]}{n}{pattern[match.end() :]}")}


@given(st.lists(KEYS, max_size=30))
def test_folded_names_unfold_to_exactly_the_original_names(names: list[str]) -> None:
    found = folded(names)
    assert sorted(name for members in found.values() for name in members) == sorted(set(names))
    assert all(unfolded(pattern) == set(members) for pattern, members in found.items())


def test_an_operator_of_a_stage_that_is_not_split_says_so() -> None:
    plan = layered(8, 2)
    plan = replace(plan, stages=(plan.stages[0], replace(plan.stages[1], sharding=None)))
    (row, *_) = table_in(str(plan.explain("layers.7")), "operators")
    assert "stage 1 is not split: each of its replicas" in row[1]
    (row,) = table_in(str(plan.explain("layers.0.fc/norm#0")), "operators")
    assert "every device does all of it" in row[1]


def test_a_diff_names_meshes_and_operators_with_other_strategies() -> None:
    plan = layered(8)
    other = replace(
        sharding_in(plan), mesh=(4, 1), strategies=(("layers.0.fc/linear#0", parse_strategy("RR RR -> RR")),)
    )
    diff = plan.diff(replace(plan, stages=(replace(plan.stages[0], sharding=other),)))
    settings = {setting.name: (setting.before, setting.after) for setting in diff.settings}
    assert settings["meshes"] == ("data 2 x model 2", "data 4 x model 1")
    assert "layers.0.fc/linear#0" in str(settings["strategies"][1])
    assert plan.diff(plan).same


def priced(sharded: bool = True, **numbers: Any) -> Plan:
    """A plan of two stages, the first one sharded, priced with the costs of single devices."""
    costs = synthetic_costs(Case(4, devices=(5,), batch=8))
    nodes = [name for name, operator in costs.operators.items() if not operator.replicable]
    stage_of = {name: int(place >= len(nodes) // 2) for place, name in enumerate(nodes)}
    names = [device.name for device in costs.devices]
    sharding = StageSharding((4,), ("model",)) if sharded else None
    first = Stage(tuple(names[: 4 if sharded else 1]), sharding=sharding, **numbers)
    return predict(
        costs, Plan((first, Stage((names[4],))), 4, transfers=(StageTransfer(0, 1, 8, 8, 1e-6),)), stage_of, INSIDE
    )


def test_a_sharded_stage_without_numbers_is_not_priced_as_replicas() -> None:
    plan = priced()
    assert (plan.predicted_step_time, plan.bubble, plan.stages[0].forward_time) == (None, None, None)
    assert plan.stages[0].sharding is not None
    assert plan.stages[1].forward_time == priced(sharded=False).stages[1].forward_time
    assert "predicted step" not in str(plan)


def test_a_sharded_stage_keeps_its_own_numbers_and_the_step_follows_from_them() -> None:
    plan = priced(forward_time=1.0, backward_time=2.0, peak_memory=7)
    stage = plan.stages[0]
    assert (stage.forward_time, stage.backward_time, stage.peak_memory) == (1.0, 2.0, 7)
    assert stage.operators
    own = sum((plan.stages[1].forward_time or 0.0, plan.stages[1].backward_time or 0.0))
    assert 4 * 3.0 < (plan.predicted_step_time or 0.0) < 4 * (3.0 + own) + 0.01
