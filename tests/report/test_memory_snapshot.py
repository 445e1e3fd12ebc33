"""The predicted memory as a snapshot: PyTorch's own reader takes it, owners add up to the plan's bytes and its peak."""

from __future__ import annotations

import itertools
import pickle
import pickletools
import re
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from models import mlp
from torch.cuda import _memory_viz

import autopar
from autopar import Cluster, InputError, Plan
from autopar.plan.stage import Stage, StageTransfer

Snapshot = dict[str, Any]
SCHEDULES = ["gpipe", "1f1b", "zb-h1"]


@cache
def priced(schedule: str = "1f1b", training: bool = True) -> Plan:
    """Two stages of a model that a cluster's data sheets price."""
    split = Plan.from_split({"0": 0, "4": 1}, n_microbatches=4, schedule=schedule)
    call = {"example_args": (torch.randn(8, 16),)}
    return autopar.plan(mlp().train(training), Cluster.preset("2xH100"), plan=split, **call)


def replicated(peak: int = 5000) -> Plan:
    """Chunks on two devices each, a micro-batch more on the first replica than on the second."""
    numbers = {"forward_time": 0.01, "backward_time": 0.02, "weight_time": 0.0, "parameter_bytes": 100}
    numbers |= {"activation_bytes": 300, "peak_memory": peak, "gradient_bytes": 100, "optimizer_bytes": 200}
    stages = tuple(Stage((f"cuda:{s % 2}", f"cuda:{s % 2 + 2}"), (f"{s}/mm#0",), **numbers) for s in range(4))
    sends = tuple(StageTransfer(s, s + 1, 8, 8, 0.001) for s in range(3))
    return Plan(stages, 6, "interleaved-1f1b", batch_size=6, transfers=sends)


def snapshot(plan: Plan, folder: Path) -> Snapshot:
    plan.memory_snapshot(folder / "m.pickle")
    loaded: Snapshot = pickle.loads((folder / "m.pickle").read_bytes())
    return loaded


def peaks(found: Snapshot) -> dict[int, tuple[int, dict[str, int]]]:
    """By device, the most bytes held at a time, and by owner the most of each."""
    result = {}
    for device, trace in enumerate(found["device_traces"]):
        live: dict[int, tuple[str, int]] = {}
        highest, most, now = 0, defaultdict(int), defaultdict(int)
        for event in trace[1:]:  # behind the allocation of the segment
            owner = event["frames"][0]["name"].partition(" of ")[0]
            if event["action"] == "alloc":
                below = [(a, size) for a, (_, size) in live.items()]
                assert all(event["addr"] + event["size"] <= a or a + s <= event["addr"] for a, s in below), "overlap"
                live[event["addr"]] = owner, event["size"]
                now[owner] += event["size"]
            elif event["action"] == "free_completed":
                assert live.pop(event["addr"]) == (owner, event["size"])
                now[owner] -= event["size"]
            highest = max(highest, sum(now.values()))
            for name, nbytes in now.items():
                most[name] = max(most[name], nbytes)
        if trace:
            result[device] = highest, dict(most)
    return result


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_highest_sum_of_a_device_is_the_peak_of_the_plan(schedule: str, tmp_path: Path) -> None:
    plan = priced(schedule)
    found = peaks(snapshot(plan, tmp_path))
    assert {device: peak for device, (peak, _) in found.items()} == {
        s: stage.peak_memory for s, stage in enumerate(plan.stages)
    }
    for s, stage in enumerate(plan.stages):
        owners = found[s][1]
        assert owners["weights"] == stage.parameter_bytes
        assert owners["state"] == stage.optimizer_bytes
        assert 0 < owners["gradients"] <= (stage.gradient_bytes or 0)
        assert owners["activations"] % (stage.activation_bytes or 1) == 0


def test_replicas_and_chunks_have_what_is_in_flight(tmp_path: Path) -> None:
    found = peaks(snapshot(replicated(), tmp_path))
    assert sorted(found) == [0, 1, 2, 3]
    assert max(peak for peak, _ in found.values()) == 5000
    assert all(owners["weights"] == 200 and owners["gradients"] == 200 for _, owners in found.values())
    tight = peaks(snapshot(replicated(peak=2100), tmp_path))
    assert max(peak for peak, _ in tight.values()) == 2100, "gradients have what activations leave"


def test_inference_has_no_gradients(tmp_path: Path) -> None:
    plan = priced("gpipe", training=False)
    for s, (peak, owners) in peaks(snapshot(plan, tmp_path)).items():
        assert peak == plan.stages[s].peak_memory
        assert "gradients" not in owners


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pytorch_reads_it(schedule: str, tmp_path: Path) -> None:
    found = snapshot(priced(schedule), tmp_path)
    held = [sum(b["size"] for b in seg["blocks"] if b["state"] == "active_allocated") for seg in found["segments"]]
    summary = _memory_viz.segsum(found)  # raises where sizes of blocks do not add up
    assert f"total_allocated: {_memory_viz.Bytes(sum(held))}" in summary
    text = _memory_viz.trace(found)
    allocated = [event for events in found["device_traces"] for event in events if event["action"] == "alloc"]
    assert len(re.findall(r"^\w+ = \w+\[\d+:", text, re.MULTILINE)) == len(allocated)
    assert "= MEM[" not in text, "a block outside of its device's segment"
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "MemoryViz.js" in plot(found)
    lines = _memory_viz.memory(found, format_flamegraph=lambda lines: lines)
    assert "4 .. 7:0:weights of stage 1" in lines
    assert "0 .. 3:0:state of the optimizer, stage 0" in lines
    # What PyTorch itself writes has these keys (torch.cuda.memory._snapshot, 2.13).
    assert {"segments", "device_traces"} <= set(found)
    segment = {"device", "address", "total_size", "stream", "segment_type", "allocated_size", "active_size", "blocks"}
    assert all(segment <= set(one) for one in found["segments"])
    assert all({"size", "state", "frames", "requested_size"} <= set(b) for s in found["segments"] for b in s["blocks"])


def test_times_are_those_of_the_trace(tmp_path: Path) -> None:
    plan = priced()
    times = [event["time_us"] for event in snapshot(plan, tmp_path)["device_traces"][0]]
    assert times == sorted(times)
    assert 0 < times[-1] <= round((plan.predicted_step_time or 0) * 1e6)


def test_a_plan_without_memory_or_with_numbers_that_contradict_each_other_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no predicted memory; price it first"):
        Plan.from_split({"a": 0}, n_microbatches=1).memory_snapshot(tmp_path / "m")
    stages = tuple(replace(stage, peak_memory=500) for stage in replicated().stages)
    with pytest.raises(InputError, match=r"stage 0 has 200 bytes of weights and .* of activations at once, but a peak"):
        replace(replicated(), stages=stages).memory_snapshot(tmp_path / "m")


# What the unpickler of memory_viz's page knows (torch/utils/viz/MemoryViz.js, 2026).
OPCODES = {
    *("APPENDS", "BINGET", "BININT", "BININT1", "BININT2", "EMPTY_DICT", "EMPTY_LIST", "FRAME", "LONG1", "LONG_BINGET"),
    *("MARK", "MEMOIZE", "PROTO", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE2", "APPEND", "NEWFALSE", "BINPUT"),
    *("BINUNICODE", "EMPTY_TUPLE", "NEWTRUE", "NONE", "BINFLOAT", "TUPLE", "TUPLE1", "TUPLE3", "LONG_BINPUT", "LIST"),
    *("DICT", "SETITEM"),
}


@pytest.mark.slow
def test_the_page_of_memory_viz_can_read_the_file(tmp_path: Path) -> None:
    """Its opcodes and protocol; its numbers are doubles, also for the addresses of a thousand devices."""
    names = tuple(f"cuda:{i}" for i in range(1024))
    numbers = {"forward_time": 0.01, "backward_time": 0.02, "parameter_bytes": 101, "activation_bytes": 307}
    numbers |= {"peak_memory": 5001, "gradient_bytes": 103, "optimizer_bytes": 211}
    stage = Stage(names, ("0/mm#0",), **numbers)  # type: ignore[arg-type]
    plan = Plan((stage,), 1024, "1f1b", 1024)
    found = snapshot(plan, tmp_path)
    written = list(pickletools.genops((tmp_path / "m.pickle").read_bytes()))
    assert {opcode.name for opcode, _, _ in written} <= OPCODES
    assert [argument for opcode, argument, _ in written if opcode.name == "PROTO"] in ([2], [3], [4])
    addresses = [event["addr"] + event["size"] for trace in found["device_traces"] for event in trace]
    assert max(addresses) < 2**53
    starts = sorted((one["address"], one["total_size"]) for one in found["segments"])
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(starts)), "devices have addresses of their own"
