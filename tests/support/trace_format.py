"""The rules of the Trace Event Format (Google, revision of 2016) that viewers rely on."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

REQUIRED = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid"},
    "M": {"name", "pid", "args"},
    "C": {"name", "ts", "pid", "args"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid"},
}
_METADATA = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index"}
_SLACK = 1e-3  # us, of rounding


def assert_well_formed(trace: dict[str, Any]) -> None:
    """Keys of every phase, flows with two ends inside of slices, nested slices, and named processes and threads."""
    json.dumps(trace, allow_nan=False)
    events = trace["traceEvents"]
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    flows: dict[Any, dict[str, Any]] = defaultdict(dict)
    for event in events:
        assert REQUIRED[event["ph"]] <= set(event), event
        assert event.get("ts", 0) >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "M":
            assert set(event["args"]) == {_METADATA[event["name"]]}
        elif event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
        else:
            ends = flows[event["cat"], event["name"], event["id"]]
            assert event["ph"] not in ends, "an arrow has one start and one end"
            ends[event["ph"]] = event
    for spans in slices.values():
        open_until: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start + _SLACK:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + _SLACK, "slices of a thread are nested or apart"
            open_until.append(end)
    for ends in flows.values():
        assert set(ends) == {"s", "f"}, "an arrow without an end"
        assert ends["s"]["ts"] <= ends["f"]["ts"]
        assert ends["f"]["bp"] == "e"
        for event in ends.values():
            around = slices[event["pid"], event["tid"]]
            assert any(a - _SLACK <= event["ts"] <= b + _SLACK for a, b in around), "an arrow needs a slice at its ends"
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(slices) <= named
    assert {pid for pid, _ in slices} <= {e["pid"] for e in events if e["name"] == "process_name"}
