"""Results as tables on the terminal, as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from cost_models.measuring.intervals import median_interval


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]  # the first is text, the others are numbers or short words
    rows: tuple[tuple[str, ...], ...]
    note: str = ""  # how to read it


@dataclass(frozen=True)
class Rounds:
    """Times of several systems in the same rounds."""

    what: str  # the model and its batch; unique in a report
    seconds: Mapping[str, Sequence[float]]  # by system, one for each round
    ceiling: str | None = None  # the system that is the machine's ceiling: independent processes, parts of the batch

    def to_data(self) -> dict[str, Any]:
        """As JSON has it, with the spread of every system."""
        spread = {}
        for name, taken in self.seconds.items():
            found = median_interval(taken)
            spread[name] = {"median": median(taken), "low": found.low, "high": found.high, "level": found.level}
        seconds = {name: list(taken) for name, taken in self.seconds.items()}
        return {"what": self.what, "ceiling": self.ceiling, "seconds": seconds, "spread": spread}


@dataclass(frozen=True)
class Report:
    """What a benchmark found."""

    title: str
    tables: tuple[Table, ...]
    data: dict[str, Any]  # JSON values, in seconds
    draw: Callable[[Path], None] | None = None  # writes the figure; raises ImportError without matplotlib
    measured: tuple[Rounds, ...] = ()  # all times, for `diff`
    by_case: bool = False  # the JSON file has a key for each case, and no other; the page names the machine


def show(report: Report, header: Mapping[str, str], console: Console) -> None:
    console.print(f"[bold]{escape(report.title)}[/bold]")
    console.print(escape(", ".join(f"{name}: {text}" for name, text in header.items())), style="dim")
    for table in report.tables:
        shown = RichTable(title=escape(table.title), title_justify="left", caption=escape(table.note), box=box.SIMPLE)
        shown.caption_justify = "left"
        for index, column in enumerate(table.columns):
            shown.add_column(escape(column), justify="right" if index else "left")
        for row in table.rows:
            shown.add_row(*map(escape, row))
        console.print(shown)


def to_markdown(report: Report, header: Mapping[str, str], figure: str | None = None) -> str:
    """A page of its own. `figure`: where the picture lies, relative to the page."""
    lines = [f"# {report.title}", "", *(f"- {name}: {text}" for name, text in header.items())]
    if figure is not None:
        lines += ["", f"![{report.title}]({figure})"]
    for table in report.tables:
        lines += ["", f"## {table.title}", "", _line(table.columns)]
        lines += [_line([":--", *["--:"] * (len(table.columns) - 1)]), *map(_line, table.rows)]
        if table.note:
            lines += ["", table.note]
    return "\n".join(lines) + "\n"


def to_json(report: Report, header: Mapping[str, str]) -> str:
    head = {} if report.by_case else {"title": report.title, "machine": dict(header)}
    measured = {"measured": [rounds.to_data() for rounds in report.measured]} if report.measured else {}
    return json.dumps({**head, **report.data, **measured}, indent=1) + "\n"


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
