"""How long a thread was ready to run but had no core, where the system reports it.

Linux counts that in the second field of schedstat (https://docs.kernel.org/scheduler/sched-stats.html). A kernel that
was built without it, and some sandboxes, have no such file or show zeros.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

_SCHEDSTAT = "/proc/thread-self/schedstat"
_TASKS = "/proc/self/task"
_SPIN = 1e-3  # s of computing that the first field must show


def waited_for_core() -> float:
    """Seconds since its start that this thread waited for a core; 0 if the system does not report it."""
    return _fields()[1] * 1e-9


@cache
def waiting_is_known() -> bool:
    """Whether the system reports waiting: its count of this thread's own seconds grows while the thread computes."""
    before, end = _fields()[0], time.thread_time() + _SPIN
    while time.thread_time() < end:
        pass
    return _fields()[0] > before


@dataclass(frozen=True)
class ThreadsWaiting:
    """How long each thread of this process has waited for a core."""

    seconds: Mapping[str, float] | None  # by thread; None: the system does not report it

    @classmethod
    def now(cls) -> Self:
        return cls(_waited_of_threads() if waiting_is_known() else None)

    def since(self) -> float | None:
        """Seconds that all threads that are still there have waited since then."""
        if self.seconds is None:
            return None
        return sum(waited - self.seconds.get(thread, 0.0) for thread, waited in _waited_of_threads().items())


def _waited_of_threads() -> dict[str, float]:
    return {task.name: _fields(f"{task}/schedstat")[1] * 1e-9 for task in Path(_TASKS).iterdir()}


def _fields(path: str | None = None) -> tuple[int, int]:
    """Nanoseconds that a thread (None: this one) ran, and that it waited for a core; zeros if not reported."""
    try:
        with open(path or _SCHEDSTAT) as file:
            ran, waited, *_ = file.read().split()
            return int(ran), int(waited)
    except (OSError, ValueError):
        return 0, 0
