"""Progress of long work with the time left, on terminals that accept escapes only: not with NO_COLOR, nor TERM=dumb.

    ⠹ profiling AMD EPYC: 8 samples, 2 busy  ━━━━━━━━━━━━╸━━━━━━━━━  0:00:04  3 s left

There is one display in a process. What starts while it is shown, in any thread, joins it.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed
from rich.text import Text

from autopar.capture.work_shown import show_work_with

_FIRST_ESTIMATE = 0.5  # s: before, the time left would be a guess from next to nothing


def seconds_left(elapsed: float, done: float) -> float | None:
    """Seconds until all is done, if it goes on as fast; None: too early to say. `done`: fraction."""
    if not 0 < done <= 1 or elapsed < _FIRST_ESTIMATE:
        return None
    return elapsed * (1 - done) / done


class _TimeLeft(ProgressColumn):
    """ "3 s left", "2 min left" once there is an estimate."""

    def render(self, task: Task) -> Text:
        left = None if task.total is None else seconds_left(task.elapsed or 0.0, task.completed / task.total)
        if left is None:
            return Text("")
        return Text(f"{left:.0f} s left" if left < 100 else f"{left / 60:.0f} min left")


class _Display:
    """What is being done: one line for the phases of a call, and one for each work without a fraction."""

    def __init__(self, clock: Callable[[], float]) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), Elapsed(), _TimeLeft())
        self.bar = Progress(
            *columns, console=Console(stderr=True), transient=True, refresh_per_second=4, get_time=clock
        )
        self._phases: TaskID | None = None
        self._phase, self._done = "", 0.0

    def show(self, what: str, done: float) -> None:
        """`what` is being done; the fraction `done` of its phase, or NaN. The first word of `what` names the phase."""
        phase, known = what.partition(" ")[0], not math.isnan(done)
        if self._phases is None:
            self._phases = self.bar.add_task(what, total=1.0)
        if phase != self._phase or not done >= self._done:  # a new phase, or the same one for something else
            self.bar.reset(self._phases, total=1.0 if known else None)
        self._phase, self._done = phase, done
        self.bar.update(self._phases, description=what, completed=done if known else 0.0)

    def forget_phases(self) -> None:
        """The call is done; other work may go on."""
        if self._phases is not None:
            self.bar.remove_task(self._phases)
        self._phases, self._phase, self._done = None, "", 0.0


_lock = threading.RLock()
_current: list[_Display] = []  # at most one


@contextmanager
def _display(clock: Callable[[], float] = time.monotonic) -> Iterator[tuple[_Display, bool] | None]:
    """The display in use, and whether it is new; None where nothing is shown."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if plain or not sys.stderr.isatty():
        yield None
        return
    with _lock:
        joins = bool(_current)
        if not joins:
            _current.append(_Display(clock))
            _current[0].bar.start()
        display = _current[0]
    try:
        yield display, not joins
    finally:
        if not joins:
            with _lock:
                _current.clear()
                display.bar.stop()


@contextmanager
def progress_bar(clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[[str, float], None]]:
    """A function (what is being done, fraction done or NaN) that shows a bar on a terminal's stderr."""
    with _display(clock) as found:
        if found is None:
            yield lambda what, done: None
            return
        try:
            yield found[0].show
        finally:
            found[0].forget_phases()


@contextmanager
def work_bar(what: str) -> Iterator[None]:
    """While inside, a terminal shows `what` and how long it takes."""
    with _display() as found:
        if found is None:
            yield
            return
        bar = found[0].bar
        task = bar.add_task(what, total=None)
        try:
            yield
        finally:
            bar.remove_task(task)


show_work_with(work_bar)
