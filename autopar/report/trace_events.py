"""What all Chrome traces share: processes for ranks, streams, slices of streams, arrows, and the file around them.

Fields are those of the Trace Event Format (Google, "Trace Event Format", revision of 2016) and of torch.profiler's
exports, where `distributedInfo` names the rank, and a kernel has its stream, device and correlation among its args.
Times are microseconds from the start of the step.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.schedule.clock import Phase

TraceEvent = dict[str, Any]

COMPUTING = 7  # the stream of a slot's actions, as torch.profiler numbers the default stream; others have the next ones
COMMUNICATION = "ncclKernel"  # Holistic Trace Analysis takes kernels whose names begin so for communication
PHASES = {
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.INPUT: "backward to inputs",
    Phase.WEIGHT: "backward to parameters",
}
_US = 1e6  # microseconds of a second


@dataclass(frozen=True)
class TraceProcesses:
    """Where the ranks of a step are among the processes of a trace: alone, or beside those of another step."""

    label: str = ""  # before the names of its processes
    first: int = 0  # pid of rank 0
    steps: int = 1  # in the trace
    number: int = 0  # of this one
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))  # of arrows and kernels

    def pid(self, rank: int) -> int:
        return self.first + rank

    def named(self, rank: int, what: str, streams: Mapping[int, str]) -> Iterator[TraceEvent]:
        """The names of a rank's process and of its streams. Steps of a rank follow each other."""
        pid = self.pid(rank)
        yield _meta(pid, 0, "process_name", name=f"{self.label}rank {rank}: {what}")
        yield _meta(pid, 0, "process_sort_index", sort_index=self.steps * rank + self.number)
        for stream, name in streams.items():
            yield _meta(pid, stream, "thread_name", name=name)

    def kernel(self, name: str, rank: int, stream: int, start: float, end: float, **about: Any) -> TraceEvent:
        """Something that a stream does from `start` to `end` (s)."""
        args = {"stream": stream, "device": rank, "correlation": next(self.numbers), **about}
        return {**self._slice(name, rank, stream, start, end), "cat": "kernel", "args": args}

    def annotation(self, name: str, rank: int, stream: int, start: float, end: float, **about: Any) -> TraceEvent:
        """A name for a stretch of a stream's time, which is no kernel."""
        return {**self._slice(name, rank, stream, start, end), "cat": "user_annotation", "args": about}

    def arrow(self, name: str, sent: tuple[int, float], received: tuple[int, float]) -> Iterator[TraceEvent]:
        """From a rank at a time (s) to another; both have a slice there."""
        number = next(self.numbers)
        for phase, (rank, time) in zip("sf", (sent, received), strict=True):
            place = {"pid": self.pid(rank), "tid": COMPUTING, "ts": time * _US}
            bound = {"bp": "e"} if phase == "f" else {}
            yield {"ph": phase, "id": number, "cat": "send", "name": name, **place, **bound}

    def counter(self, name: str, rank: int, time: float, values: Mapping[str, int]) -> TraceEvent:
        return {"ph": "C", "name": name, "pid": self.pid(rank), "tid": 0, "ts": time * _US, "args": dict(values)}

    def _slice(self, name: str, rank: int, stream: int, start: float, end: float) -> TraceEvent:
        times = {"ts": start * _US, "dur": (end - start) * _US}
        return {"ph": "X", "name": name, "pid": self.pid(rank), "tid": stream, **times}


def write(path: Path, events: list[TraceEvent], name: str, world_size: int, rank: int | None) -> None:
    """Write a trace, of one rank or of all, compressed if the path ends in .gz. Raises OSError."""
    trace = {
        "schemaVersion": 1,
        "distributedInfo": {"rank": rank or 0, "world_size": world_size},
        "displayTimeUnit": "ms",
        "traceName": name,
        "traceEvents": events,
    }
    text = json.dumps(trace, allow_nan=False)
    if path.suffix.lower() == ".gz":
        path.write_bytes(gzip.compress(text.encode(), mtime=0))  # equal traces are equal files
    else:
        path.write_text(text)


def _meta(pid: int, tid: int, kind: str, **args: Any) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}
