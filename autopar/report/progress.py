"""A progress bar for long work, on terminals that accept escapes only: not with NO_COLOR, nor TERM=dumb."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """A function (what is being done, fraction done) that shows a bar on a terminal's stderr."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if plain or not sys.stderr.isatty():
        yield lambda what, done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)

        def show(what: str, done: float) -> None:
            bar.update(task, description=what, completed=done)

        yield show
