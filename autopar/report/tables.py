"""Tables and numbers as plain text: no colours, 80 columns or what `at_width` says, control characters escaped."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from io import StringIO

from rich.box import Box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autopar.plan.display import printable

WIDTH = 80
_MOST = 120  # columns: longer lines are hard to read
_width = ContextVar("columns of a text", default=WIDTH)
_NAME = 20  # characters of the first column that do not wrap
_GAP = 2  # characters between columns
_WORDS = 14  # characters that other columns of text keep at least

_RULE_UNDER_HEAD = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


@contextmanager
def at_width(columns: int) -> Iterator[None]:
    """Texts that are made inside are this wide, between 80 and 120 columns."""
    token = _width.set(max(WIDTH, min(columns, _MOST)))
    try:
        yield
    finally:
        _width.reset(token)


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    words: int = 1,
    first_to_go: Sequence[str] = (),
) -> str:
    """Lines of a table. The first `words` columns are text and may wrap; the others are numbers, to the right.

    Numbers that do not fit the width are left out, and a line below names them: first the columns `first_to_go`, then
    from the last column on.
    """
    kept = _columns_that_fit(columns, rows, words, first_to_go)
    widths = _widths(columns, rows, words, kept)
    shown = Table(box=_RULE_UNDER_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for index in kept:
        text = index < words
        shown.add_column(
            columns[index],
            justify="left" if text else "right",
            no_wrap=not text,
            overflow="fold",
            width=widths[index],
        )
    for row in rows:
        shown.add_row(*(Text("\n".join(_lines(printable(row[index]), widths[index]))) for index in kept))
    out = StringIO()
    Console(file=out, width=_width.get(), color_system=None, force_terminal=False).print(shown)
    lines = [line.rstrip() for line in out.getvalue().rstrip().splitlines()]
    missing = [_title(column) for index, column in enumerate(columns) if index not in kept]
    if missing:
        lines.append(paragraph(f"(columns left out to fit the width: {', '.join(missing)})"))
    return "\n".join(lines)


def _columns_that_fit(
    columns: Sequence[str], rows: Sequence[Sequence[str]], words: int, first_to_go: Sequence[str]
) -> list[int]:
    """The columns that have room side by side; text always stays."""
    least = []
    for index, column in enumerate(columns):
        longest = max((len(printable(row[index])) for row in rows), default=0)
        head = max(map(len, column.split("\n")))
        most = (_NAME if index == 0 else _WORDS) if index < words else longest
        least.append(max(min(longest, most), head))
    numbers = range(words, len(columns))
    going = [index for index in numbers if columns[index] in first_to_go]
    going += [index for index in reversed(numbers) if index not in going]
    kept = list(range(len(columns)))
    for index in going:
        if sum(least[i] for i in kept) + _GAP * (len(kept) - 1) <= _width.get():
            break
        kept.remove(index)
    return kept


def _widths(columns: Sequence[str], rows: Sequence[Sequence[str]], words: int, kept: Sequence[int]) -> dict[int, int]:
    """Characters of each kept column: numbers whole, text with the room that is left, short text first."""
    longest = {i: max([*map(len, columns[i].split("\n")), *(len(printable(row[i])) for row in rows)]) for i in kept}
    least = {i: max(map(len, columns[i].split("\n")), default=0) for i in kept}
    floor = {i: max(least[i], min(longest[i], _NAME if i == 0 else _WORDS)) if i < words else longest[i] for i in kept}
    spare = _width.get() - sum(floor.values()) - _GAP * (len(kept) - 1)
    widths = dict(floor)
    for i in sorted(kept, key=lambda i: longest[i]):
        more = max(0, min(longest[i] - floor[i], spare))
        widths[i] += more
        spare -= more
    return widths


def _lines(text: str, width: int) -> list[str]:
    """`text` in lines of at most `width` characters. Lines end at a space, or in a path before a name, if they can."""
    lines = [""]
    for piece in re.split(r"(?<= )|(?<=[./_#])(?=[a-z])", text):
        if lines[-1] and len(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return [line.rstrip() for line in lines]


def _title(column: str) -> str:
    """The head of a column in one line: a word that was divided at a hyphen is whole again."""
    return column.replace("-\n", "").replace("\n", " ")


def bullet(text: str) -> str:
    """A paragraph of a list."""
    return paragraph(text, "- ", "  ")


def paragraph(text: str, first: str = "", others: str = "") -> str:
    """Lines of a text, with the indent of the first and of the others."""
    words = printable(" ".join(text.split("\n")))  # other ends of lines are control characters, and shown as such
    return textwrap.fill(words, _width.get(), initial_indent=first, subsequent_indent=others)


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
