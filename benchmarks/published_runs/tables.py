"""Tables of published training runs as files: comments with '#', a header, and rows whose cells are checked as they are
read."""

from __future__ import annotations

import csv
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NoReturn, TypeVar

log = logging.getLogger(__name__)
_Read = TypeVar("_Read")
_NOTHING = ("", "-", "n/a", "na", "nan", "none")  # in cells of figures that were not published


class TableError(ValueError):
    """A table or a row that cannot be read: file, line and column, and what would be right."""


class RowError(TableError):
    """A row that cannot be read. Other rows of its table can be."""

    def __init__(self, row: Row, column: str, why: str) -> None:
        super().__init__(f"{row.path}, line {row.line}, column {column!r}: {why}")
        self.row, self.column, self.why = row, column, why

    @property
    def in_words(self) -> str:
        """Without the file."""
        return f"line {self.row.line}, column {self.column!r}: {self.why}"


@dataclass(frozen=True)
class Row:
    """One line of a table, by column."""

    path: Path
    line: int
    cells: dict[str, str]
    comments: str = ""  # of the whole table
    surplus: tuple[str, ...] = ()  # cells beyond the last column

    def wrong(self, column: str, why: str) -> NoReturn:
        raise RowError(self, column, why)

    def text(self, column: str, default: str = "") -> str:
        return self.cells.get(column, "").strip() or default

    def has(self, column: str) -> bool:
        """Whether the cell says anything."""
        return self.text(column).lower() not in _NOTHING

    def number(self, column: str) -> float:
        try:
            value = float(self.text(column))
        except ValueError:
            self.wrong(column, f"needs a number, got {self.text(column)!r}")
        return value if 0 < value < float("inf") else self.wrong(column, f"needs a number > 0, got {value:g}")

    def count(self, column: str, default: int | None = None) -> int:
        if default is not None and not self.text(column):
            return default
        value = self.number(column)
        return int(value) if value == int(value) else self.wrong(column, f"needs a whole number, got {value:g}")

    def counts(self, *columns: str) -> tuple[int, ...]:
        return tuple(self.count(column) for column in columns)

    def gib(self, column: str) -> float | None:
        """Bytes; None if the cell is empty or no number. The latter is logged, and the row's other figures count."""
        if not self.has(column):
            return None
        try:
            return self.number(column) * 2**30
        except RowError as error:
            log.warning("%s; it is left out", error)
            return None

    def check_width(self) -> None:
        """Raise RowError for cells beyond the last column."""
        if self.surplus:
            self.wrong(str(len(self.cells) + 1), f"there are {len(self.cells)} columns")


def _is_comment(line: str) -> bool:
    """Spreadsheets put comments in quotes."""
    return line.lstrip('"').startswith("#")


@dataclass(frozen=True)
class _Lines:
    """The lines of a file, apart."""

    path: Path

    @cached_property
    def _every(self) -> list[tuple[int, str]]:
        try:
            text = self.path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise TableError(f"{self.path} cannot be read as text: {error}") from None
        return [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]

    @property
    def comments(self) -> str:
        return "\n".join(line.strip('"').lstrip("# ") for _, line in self._every if _is_comment(line))

    @property
    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """Cells by line; lines of empty cells are left out."""
        for number, line in self._every:
            try:
                cells = [] if _is_comment(line) else [cell.strip() for cell in next(csv.reader([line]), [])]
            except csv.Error as error:
                raise TableError(f"{self.path}, line {number} is no line of a table: {error}") from None
            if any(cells):
                yield number, cells


def read_rows(path: Path) -> tuple[list[str], list[Row]]:
    """The header and the rows of a table; an empty file has neither.

    Raises:
        TableError: the file is no text, or two columns have one name.
    """
    lines = _Lines(path)
    comments, found = lines.comments, list[Row]()
    header: list[str] = []
    for number, cells in lines.rows:
        if not header:
            header = cells
            twice = [name for name, times in Counter(header).items() if name and times > 1]
            if twice:
                raise TableError(f"{path}, line {number}: several columns are called {', '.join(twice)}")
            continue
        width = len(header)
        padded = cells + [""] * (width - len(cells))
        surplus = tuple(padded[width:]) if any(padded[width:]) else ()
        found.append(Row(path, number, dict(zip(header, padded, strict=False)), comments, surplus))
    return header, found


def read_each(files: Mapping[str, Path], read: Callable[[Path], _Read | None]) -> dict[str, _Read]:
    """By name, what `read` makes of each file. Those for which it raises TableError are skipped, with a line that says
    why; so are files for which `read` returns None.

    Raises:
        TableError: the first one, where nothing is read.
    """
    found, errors = dict[str, _Read](), list[TableError]()
    for name, path in files.items():
        try:
            one = read(path)
        except TableError as error:
            errors.append(error)
            print(f"{name}: skipped: {error}", file=sys.stderr)
            continue
        if one is not None:
            found[name] = one
    if errors and not found:
        raise errors[0]
    return found
