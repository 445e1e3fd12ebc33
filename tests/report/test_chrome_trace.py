"""The predicted step as a Chrome trace: what the timeline has, in the fields of the format; read by an analysis."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trace_format import assert_well_formed

from autopar import InputError, Plan
from autopar.plan.stage import Stage, StageTransfer
from autopar.planner.predicted_step import step_of_plan
from autopar.sharding.stage_sharding import StageSharding


def priced_plan(schedule: str = "1f1b", m: int = 4, ranks: int = 2, chunks: int = 1, replicas: int = 1) -> Plan:
    """Stages of different times on two-device meshes, each sending to the next."""
    names = [tuple(f"cuda:{p * replicas * 2 + i}" for i in range(replicas * 2)) for p in range(ranks)]
    n_stages = ranks * chunks
    stages = tuple(
        Stage(
            names[s % ranks],
            (f"layers.{s}/linear#0",),
            forward_time=0.01 * (s + 1),
            backward_time=0.02 * (s + 1),
            weight_time=0.01,
            parameter_bytes=1000 + s,
            activation_bytes=10,
            sync_time=0.003,
            optimizer_time=0.002,
            sharding=StageSharding((2,), ("tensor",)),
        )
        for s in range(n_stages)
    )
    sends = tuple(StageTransfer(s, s + 1, 8, 8, 0.004, 0.002) for s in range(n_stages - 1))
    return Plan(stages, m, schedule, m, transfers=sends)


def traced(plan: Plan, path: Path, rank: int | None = None) -> dict[str, Any]:
    plan.trace(path, rank)
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


PLANS = [
    priced_plan(),
    priced_plan("gpipe", m=3, ranks=3),
    priced_plan("zb-h1", m=5, ranks=3),
    priced_plan("interleaved-1f1b", m=4, ranks=2, chunks=2),
    priced_plan(m=6, replicas=2),
]


@pytest.mark.parametrize("plan", PLANS)
def test_a_trace_has_every_action_of_the_timeline_at_its_time(plan: Plan, tmp_path: Path) -> None:
    step = step_of_plan(plan)
    assert step is not None
    timeline = step.timeline()
    events = traced(plan, tmp_path / "t.json.gz")["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    actions = [e for e in slices if "of stage" in e["name"] and "micro-batch" in e["args"] and e["tid"] == 7]
    letters = {"forward": "F", "backward": "B", "backward to inputs": "I", "backward to parameters": "W"}
    found = sorted(
        (e["pid"], letters[e["name"].split(" of ")[0]], e["args"]["stage"], e["args"]["micro-batch"], e["ts"], e["dur"])
        for e in actions
    )
    pids = [slot * 2 for slot in range(timeline.schedule.n_slots)]
    wanted = sorted(
        (pids[slot], a.phase.value, a.stage, a.microbatch, start * 1e6, (end - start) * 1e6)
        for slot, a, start, end in timeline.events
    )
    assert found == wanted
    assert max(e["ts"] + e["dur"] for e in slices) == pytest.approx(timeline.step_time * 1e6)
    assert sum("send" in e["name"] for e in slices) == len(timeline.sends)


@pytest.mark.parametrize("plan", PLANS)
def test_a_trace_follows_the_format(plan: Plan, tmp_path: Path) -> None:
    assert_well_formed(traced(plan, tmp_path / "t.json"))
    assert_well_formed(traced(plan, tmp_path / "u.json", rank=0))


@pytest.mark.parametrize("plan", PLANS)
def test_slices_of_a_stream_do_not_overlap(plan: Plan, tmp_path: Path) -> None:
    rows: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in traced(plan, tmp_path / "t.json")["traceEvents"]:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in rows.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize("plan", PLANS)
def test_arrows_go_forward_in_time_from_sender_to_receiver(plan: Plan, tmp_path: Path) -> None:
    events = traced(plan, tmp_path / "t.json")["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    ends: dict[int, dict[str, Any]] = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            ends[event["id"]][event["ph"]] = event
            around = [
                s
                for s in slices
                if (s["pid"], s["tid"]) == (event["pid"], event["tid"]) and s["ts"] <= event["ts"] <= s["ts"] + s["dur"]
            ]
            assert around, "an arrow needs a slice at its ends"
    assert len(ends) == 2 * len(plan.transfers) * plan.n_microbatches  # values and gradients
    assert all(pair["s"]["ts"] < pair["f"]["ts"] for pair in ends.values())


def test_counters_show_the_bytes_in_flight(tmp_path: Path) -> None:
    plan = priced_plan(m=4)
    events = traced(plan, tmp_path / "t.json")["traceEvents"]
    first = [e["args"] for e in events if e["ph"] == "C" and e["pid"] == 0]
    assert {e["parameters"] for e in first} == {1000}
    assert max(e["activations"] for e in first) == 20  # two micro-batches in flight
    assert first[-1]["activations"] == 0
    stages = tuple(replace(stage, activation_bytes=None) for stage in plan.stages)
    events = traced(replace(plan, stages=stages), tmp_path / "u.json")["traceEvents"]
    assert not [e for e in events if e["ph"] == "C"]


def test_ranks_are_named_and_sorted(tmp_path: Path) -> None:
    trace = traced(priced_plan(), tmp_path / "t.json")
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {0: "rank 0: cuda:0 .. cuda:1, stage 0", 2: "rank 2: cuda:2 .. cuda:3, stage 1"}
    order = {e["pid"]: e["args"]["sort_index"] for e in trace["traceEvents"] if e["name"] == "process_sort_index"}
    assert order == {0: 0, 2: 2}
    assert trace["distributedInfo"] == {"rank": 0, "world_size": 4}


def test_a_file_of_one_rank(tmp_path: Path) -> None:
    trace = traced(priced_plan(), tmp_path / "t.json", rank=2)
    assert {e["pid"] for e in trace["traceEvents"]} == {2}
    assert trace["distributedInfo"]["rank"] == 2
    with pytest.raises(InputError, match="rank 1 has no trace; ranks that drive a slot are 0, 2"):
        priced_plan().trace(tmp_path / "u.json", rank=1)


def test_equal_plans_have_equal_files(tmp_path: Path) -> None:
    for name in ("a.json.gz", "b.json.gz"):
        priced_plan().trace(tmp_path / name)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_a_plan_without_prices_has_no_trace(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no predicted times"):
        Plan.from_split({"a": 0}, n_microbatches=1).trace(tmp_path / "t.json")


@pytest.mark.slow
@pytest.mark.parametrize("plan", [PLANS[1], PLANS[3]])
def test_holistic_trace_analysis_reads_the_busy_time(plan: Plan, tmp_path: Path) -> None:
    pytest.importorskip("hta.trace_analysis")
    from hta.trace_analysis import TraceAnalysis

    step = step_of_plan(plan)
    assert step is not None
    timeline = step.timeline()
    files = {}
    for slot in range(timeline.schedule.n_slots):
        files[slot * 2] = str(tmp_path / f"rank{slot * 2}.json.gz")
        plan.trace(files[slot * 2], rank=slot * 2)
    found = TraceAnalysis(trace_files=files).get_temporal_breakdown(visualize=False).set_index("rank")
    for slot in range(timeline.schedule.n_slots):
        computing = [e.end - e.start for e in timeline.events if e.slot == slot]
        computing += [f.end - f.reduced for f in timeline.finishes if f.slot == slot]
        assert found.loc[slot * 2, "compute_time(us)"] == pytest.approx(sum(computing) * 1e6, rel=1e-3)
