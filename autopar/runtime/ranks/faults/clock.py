"""How long something has lasted, for the watcher's threads."""

from __future__ import annotations

import time
from typing import Any


class Clock:
    """Time since something began."""

    def __init__(self) -> None:
        self._start: float | None = None
        self._of: Any = None

    @property
    def running(self) -> bool:
        return self._start is not None

    def begin(self, of: Any = None) -> None:
        if self._start is None or self._of != of:
            self._start, self._of = time.monotonic(), of

    def reset(self) -> None:
        self._start = None

    def passed(self, seconds: float, of: Any = None) -> bool:
        """Whether it began that long ago; begins now if it had not, or for something else."""
        self.begin(of)
        assert self._start is not None
        return time.monotonic() - self._start > seconds
