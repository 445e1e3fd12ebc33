"""Progress is drawn on terminals only."""

from __future__ import annotations

import io

import pytest

from autopar.report.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_a_terminal_shows_what_is_done_and_everything_else_stays_silent(
    stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = stream()
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar() as show:
        show("measuring layer.3", 0.5)
    assert ("measuring layer.3" in stderr.getvalue()) is stderr.isatty()


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_that_wants_no_escapes_gets_none(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, value)
    with progress_bar() as show:
        show("measuring layer.3", 0.5)
    assert stderr.getvalue() == ""
