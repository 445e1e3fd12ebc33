"""Progress is drawn on terminals only, and says how much time is left."""

from __future__ import annotations

import io
import math
import re

import pytest
import torch
from torch import nn

from autopar.capture.program import capture
from autopar.capture.work_shown import shown_work
from autopar.report import progress
from autopar.report.progress import progress_bar, seconds_left


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def as_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """stderr is a terminal from now on. (In a fixture pytest would replace it before the test.)"""
    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return stderr


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_a_terminal_shows_what_is_done_and_everything_else_stays_silent(
    stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = stream()
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar() as show:
        show("measuring layer.3", 0.5)
    with shown_work("capturing Net"):
        pass
    assert ("measuring layer.3" in stderr.getvalue()) is stderr.isatty()
    assert ("capturing Net" in stderr.getvalue()) is stderr.isatty()


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_that_wants_no_escapes_gets_none(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = as_terminal(monkeypatch)
    monkeypatch.setenv(name, value)
    with progress_bar() as show:
        show("measuring layer.3", 0.5)
    assert terminal.getvalue() == ""


def test_the_time_left_is_that_of_the_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = as_terminal(monkeypatch)
    clock = Clock()
    with progress_bar(clock) as show:
        show("profiling 1 sample", 0.0)
        clock.now += 10
        show("profiling 2 samples", 0.25)
        display = shown_now(terminal)
        assert "30 s left" in display, "a quarter took 10 s"
        show("measuring plans", 0.0)
        clock.now += 4
        show("measuring plans", 0.5)
        assert "4 s left" in shown_now(terminal), "the phase before does not count"
        show("measuring plans", 0.0)
        clock.now += 600
        show("measuring plans", 0.5)
        assert "10 min left" in shown_now(terminal), "nor does an earlier round of the same"
        show("searching plans", math.nan)
        clock.now += 5
        assert "left" not in shown_now(terminal), "nothing is known of this phase"
        assert "searching plans" in shown_now(terminal)


def shown_now(terminal: Terminal) -> str:
    """The display as it is drawn at this moment."""
    terminal.truncate(0)
    terminal.seek(0)
    progress._current[0].bar.refresh()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())


@pytest.mark.parametrize(
    ("elapsed", "done", "left"),
    [(10, 0.5, 10), (9, 0.9, 1), (5, 1, 0), (5, 0, None), (0.1, 0.5, None), (5, math.nan, None)],
)
def test_seconds_left(elapsed: float, done: float, left: float | None) -> None:
    assert seconds_left(elapsed, done) == (None if left is None else pytest.approx(left))


def test_work_within_a_call_joins_its_display(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one display on a terminal; it is gone at the end, whatever happened."""
    terminal = as_terminal(monkeypatch)

    def fails() -> None:
        with progress_bar() as show:
            show("profiling", 0.5)
            with shown_work("compiling stage 1"), progress_bar() as inner:
                inner("searching plans", 0.5)
                assert "compiling stage 1" in shown_now(terminal)
                assert len(progress._current) == 1
            assert "compiling stage 1" not in shown_now(terminal)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert progress._current == []
    with progress_bar() as show:
        show("profiling again", 0.5)
        assert "profiling again" in shown_now(terminal)


def test_capturing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = as_terminal(monkeypatch)
    capture(nn.Sequential(nn.Linear(4, 4)), (torch.ones(2, 4),), {})
    assert "capturing Sequential" in terminal.getvalue()
