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
from autopar.planner.communication import exposed_communication, hidden_communication
from autopar.planner.predicted_step import step_of_plan
from autopar.report.plan_report.build import plan_report
from autopar.report.plan_report.subject import Subject
from autopar.runtime.step_profile import MeasuredAction, MeasuredSend, StageStep, StepProfile
from autopar.schedule.timeline import Timeline
from autopar.sharding.stage_sharding import Exchange, StageSharding


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
    assert {e["weights"] for e in first} == {1000}
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
    with pytest.raises(InputError, match=r"rank 4 has no trace; the plan has ranks 0\.\.3"):
        priced_plan().trace(tmp_path / "u.json", rank=4)


def test_every_rank_of_a_mesh_has_a_file(tmp_path: Path) -> None:
    """The devices of a mesh do the same at the same time."""
    plan = priced_plan()
    files = [traced(plan, tmp_path / "t.json", rank=rank) for rank in range(4)]
    for rank, trace in enumerate(files):
        assert {e["pid"] for e in trace["traceEvents"]} == {rank}
        names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
        assert names == [f"rank {rank}: cuda:{rank}, stage {rank // 2}"]

    def times(trace: dict[str, Any]) -> list[tuple[str, float, float]]:
        return [(e["name"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"]

    assert times(files[0]) == times(files[1])
    assert times(files[0]) != times(files[2])


def with_collectives(plan: Plan, hidden: float) -> Plan:
    """The stages exchange tensors in both passes, and once a step."""
    stages = []
    for s, stage in enumerate(plan.stages):
        key = stage.operators[0]
        each = (
            Exchange("all_reduce", "tensor", key, key, 700, 0.002 + 0.001 * s),
            Exchange("all_gather", "tensor", key, key, 300, 0.001),
            Exchange("all_reduce", "tensor", key, key, 700, 0.004, backward=True),
        )
        once = Exchange("all_reduce", "tensor", key, "weight", 50, 0.003, once=True)
        own = replace(
            stage.sharding or StageSharding((2,), ("tensor",)),
            exchanges=(*each, once),
            collective_time=sum(one.seconds for one in each),
        )
        stages.append(replace(stage, sharding=own, hidden_time=hidden))
    return replace(plan, stages=tuple(stages))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("hidden", [0.0, 0.0015, 1.0])
def test_collectives_are_exposed_as_the_plan_says(
    schedule: str, recompute: bool, hidden: float, tmp_path: Path
) -> None:
    """Kernels of communication that no kernel of computing overlaps, as analyses of traces count it."""
    plan = with_collectives(priced_plan(schedule), hidden)
    plan = replace(plan, stages=tuple(replace(stage, recompute=recompute) for stage in plan.stages))
    step = step_of_plan(plan)
    assert step is not None
    timeline = step.timeline()
    trace = traced(plan, tmp_path / "t.json")
    assert_well_formed(trace)
    for slot, wanted in enumerate(exposed_communication(plan)):
        kernels = [e for e in trace["traceEvents"] if e.get("cat") == "kernel" and e["pid"] == 2 * slot]
        beside = {e["tid"] for e in trace["traceEvents"] if e["ph"] == "M" and e["args"].get("name") == "collectives"}
        inside = [e for e in kernels if e["tid"] in beside and "send" not in e["name"]]
        actions = [e for e in kernels if e["tid"] == 7 and "micro-batch" in e["args"]]
        computing = [(e["ts"], e["ts"] + e["dur"]) for e in actions]
        hiding = sum(
            max(0.0, min(end, e["ts"] + e["dur"]) - max(start, e["ts"])) for e in inside for start, end in computing
        )
        each = sum(stage.sync_time or 0.0 for stage in plan.stages[slot :: plan.ranks])
        exposed = (sum(e["dur"] for e in inside) - hiding) / 1e6
        assert exposed == pytest.approx(wanted - each)
        busy = (
            sum(end - start for start, end in computing) / 1e6
            + exposed
            + sum(f.end - f.start for f in timeline.finishes if f.slot == slot)
        )
        assert busy == pytest.approx(timeline.busy[slot]), "computing and collectives fill the actions"
    names = {e["name"].partition(",")[0] for e in trace["traceEvents"] if e["ph"] == "X" and "along" in e["name"]}
    assert names == {"ncclKernel: all-reduce along tensor", "ncclKernel: all-gather along tensor"}


def counters_and_timeline(path: Path, **known: float) -> tuple[list[list[tuple[float, dict[str, int]]]], Timeline]:
    """The counters of bytes of both slots in the trace of a plan whose stages have `known`, and its timeline."""
    plan = priced_plan(m=4)
    plan = replace(plan, stages=tuple(replace(stage, **known) for stage in plan.stages))  # type: ignore[arg-type]
    step = step_of_plan(plan)
    assert step is not None
    counters = [e for e in traced(plan, path)["traceEvents"] if e["ph"] == "C"]
    return [[(e["ts"], e["args"]) for e in counters if e["pid"] == 2 * slot] for slot in range(2)], step.timeline()


def test_counters_show_the_bytes_of_every_owner(tmp_path: Path) -> None:
    """Their sum is what the timeline holds."""
    known = {"gradient_bytes": 500, "optimizer_bytes": 2000, "transient_bytes": 7}
    counters, timeline = counters_and_timeline(tmp_path / "t.json", **known)
    for found, peak in zip(counters, timeline.peak_memory or (), strict=True):
        assert max(sum(args.values()) for _, args in found) == peak
        assert {(args["gradients"], args["optimizer"]) for _, args in found} == {(500, 2000)}
        assert {args["workspace"] for _, args in found} == {0, 7}


def test_counters_show_what_the_optimizers_step_needs(tmp_path: Path) -> None:
    """At every time, owners add up to what the timeline holds, which is most while the optimizer steps."""
    known = {"gradient_bytes": 500, "optimizer_bytes": 2000, "transient_bytes": 7, "step_bytes": 90_000}
    counters, timeline = counters_and_timeline(tmp_path / "t.json", **known, sync_time=0.001, optimizer_time=0.002)
    for slot, found in enumerate(counters):
        wanted = timeline.memory(slot)
        assert [ts for ts, _ in found] == pytest.approx([1e6 * time for time, _ in wanted])
        assert [sum(args.values()) for _, args in found] == [nbytes for _, nbytes in wanted]
        most = max(found, key=lambda one: sum(one[1].values()))[1]
        assert (most["activations"], most["workspace"]) == (0, 90_000)
        assert sum(most.values()) == (timeline.peak_memory or ())[slot]


def measured_beside(plan: Plan) -> StepProfile:
    """A profiled step of the plan's first devices of each mesh, a tenth slower than predicted."""
    step = step_of_plan(plan)
    assert step is not None
    timeline = step.timeline()
    devices = [plan.stages[s].devices[0] for s in range(len(plan.stages))]
    actions = tuple(
        MeasuredAction(a.phase.value, a.stage, a.microbatch, devices[a.stage], ((1.1 * start, 1.1 * end),))
        for _, a, start, end in timeline.events
    )
    read = next(e for e in timeline.events if e.action == ("F", 1, 0))
    sends = (MeasuredSend(0, 1, 0, False, actions[0].spans[0][1], 1.1 * read.end, *devices[:2]),)
    stages = tuple(StageStep(s, name, 4, 0.1, 0.0, 0.2, 0.0, None, None) for s, name in enumerate(devices))
    return StepProfile(1.1 * timeline.step_time, timeline.step_time, 4, 4, plan.schedule, stages, False, actions, sends)


def test_a_report_traces_the_predicted_and_the_measured_step_together(tmp_path: Path) -> None:
    plan = priced_plan(ranks=2)
    profile = measured_beside(plan)
    plan_report(Subject(plan, profile)).trace(tmp_path / "t.json.gz")
    trace = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))
    assert_well_formed(trace)
    events = trace["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert [names[pid] for pid in sorted(names, key=lambda pid: order[pid])] == [
        *("predicted, rank 0: cuda:0 .. cuda:1, stage 0", "measured, rank 0: cuda:0, stage 0"),
        *("predicted, rank 2: cuda:2 .. cuda:3, stage 1", "measured, rank 2: cuda:2, stage 1"),
    ]
    plan.trace(tmp_path / "predicted.json")
    profile.trace(tmp_path / "measured.json")

    def slices(found: dict[str, Any], pids: set[int]) -> list[tuple[str, float, float]]:
        return [(e["name"], e["ts"], e["dur"]) for e in found["traceEvents"] if e["ph"] == "X" and e["pid"] in pids]

    for label, name in (("predicted", "predicted.json"), ("measured", "measured.json")):
        alone = json.loads((tmp_path / name).read_text())
        mine = {pid for pid, text in names.items() if text.startswith(label)}
        assert slices(trace, mine) == slices(alone, {e["pid"] for e in alone["traceEvents"]})


def test_a_report_without_a_measured_step_has_the_plan_s_trace(tmp_path: Path) -> None:
    plan = priced_plan()
    plan.report().trace(tmp_path / "a.json")
    plan.trace(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    plan.report().only("Memory").trace(tmp_path / "c.json", rank=3)
    assert json.loads((tmp_path / "c.json").read_text())["distributedInfo"]["rank"] == 3


def test_a_report_without_a_step_has_no_trace(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no step to trace"):
        Plan.from_split({"a": 0}, n_microbatches=1).report().trace(tmp_path / "t.json")
    assert not list(tmp_path.iterdir())


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


@pytest.mark.slow
def test_holistic_trace_analysis_reads_what_computing_hides(tmp_path: Path) -> None:
    """Collectives of a mesh as the plan counts them, and sums of gradients."""
    pytest.importorskip("hta.trace_analysis")
    from hta.trace_analysis import TraceAnalysis

    plan = with_collectives(replace(priced_plan(), transfers=()), 0.0015)
    plan = replace(plan, stages=plan.stages[:1])
    files = {rank: str(tmp_path / f"rank{rank}.json.gz") for rank in range(2)}
    for rank, file in files.items():
        plan.trace(file, rank=rank)
    analysis = TraceAnalysis(trace_files=files)
    breakdown = analysis.get_temporal_breakdown(visualize=False).set_index("rank")
    overlap = analysis.get_comm_comp_overlap(visualize=False).set_index("rank")
    (exposed,), (hidden,) = exposed_communication(plan), hidden_communication(plan)
    for rank in files:
        assert breakdown.loc[rank, "non_compute_time(us)"] == pytest.approx(exposed * 1e6, rel=1e-3)
        share = 100 * hidden / (hidden + exposed)
        assert overlap.loc[rank, "comp_comm_overlap_pctg"] == pytest.approx(share, rel=1e-2)


@pytest.mark.slow
def test_holistic_trace_analysis_reads_a_measured_step(tmp_path: Path) -> None:
    pytest.importorskip("hta.trace_analysis")
    from hta.trace_analysis import TraceAnalysis

    profile = measured_beside(priced_plan())
    files = {rank: str(tmp_path / f"rank{rank}.json.gz") for rank in range(2)}
    for rank, file in files.items():
        profile.trace(file, rank=rank)
    found = TraceAnalysis(trace_files=files).get_temporal_breakdown(visualize=False).set_index("rank")
    for rank, name in enumerate(("cuda:0", "cuda:2")):
        computed = sum(end - start for one in profile.actions if one.device == name for start, end in one.spans)
        assert found.loc[rank, "compute_time(us)"] == pytest.approx(computed * 1e6, rel=1e-3)
