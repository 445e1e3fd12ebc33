"""How long a thread was ready to run but had no core, where the system reports it.

Linux counts that in the second field of schedstat (https://docs.kernel.org/scheduler/sched-stats.html). A kernel that
was built without it, and some sandboxes, have no such file or show zeros.
"""

from __future__ import annotations

import time
from functools import cache

_SCHEDSTAT = "/proc/thread-self/schedstat"
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


def _fields() -> tuple[int, int]:
    """Nanoseconds that this thread ran, and that it waited for a core; zeros if they are not reported."""
    try:
        with open(_SCHEDSTAT) as file:
            ran, waited, *_ = file.read().split()
            return int(ran), int(waited)
    except (OSError, ValueError):
        return 0, 0
