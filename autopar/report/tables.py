"""Tables and numbers as plain text: no colours, at most 120 columns, control characters escaped."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from io import StringIO

from rich.box import Box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autopar.plan.display import printable

WIDTH = 120
_NAME = 20  # characters of the first column that do not wrap

_RULE_UNDER_HEAD = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> str:
    """Lines of a table. The first `words` columns are text and may wrap; the others are numbers, to the right."""
    shown = Table(box=_RULE_UNDER_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        text = index < words
        longest = max((len(row[index]) for row in rows), default=0)
        shown.add_column(
            column,
            justify="left" if text else "right",
            no_wrap=not text,
            overflow="fold",
            min_width=min(longest, _NAME) if index == 0 else None,
        )
    for row in rows:
        shown.add_row(*(Text(printable(cell)) for cell in row))
    out = StringIO()
    Console(file=out, width=WIDTH, color_system=None, force_terminal=False).print(shown)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def bullet(text: str) -> str:
    """A paragraph of a list."""
    return paragraph(text, "- ", "  ")


def paragraph(text: str, first: str = "", others: str = "") -> str:
    """Lines of a text, with the indent of the first and of the others."""
    words = printable(" ".join(text.splitlines()))
    return textwrap.fill(words, WIDTH, initial_indent=first, subsequent_indent=others)


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else _digits(seconds * 1e3)


def megabytes(nbytes: float | None) -> str:
    return "-" if nbytes is None else _digits(nbytes / 1e6)


def _digits(value: float) -> str:
    """Three significant digits, but all digits before the point; `0` for nothing at all."""
    if not value:
        return "0"
    if abs(value) < 0.001:
        return "<0.001"
    for limit, places in ((0.1, 4), (1, 3), (10, 2), (100, 1)):
        if abs(value) < limit:
            return f"{value:.{places}f}"
    return f"{value:.0f}"
