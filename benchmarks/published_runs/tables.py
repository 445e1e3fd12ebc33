"""Tables of published training runs as files: comments with '#', a header, and rows whose cells are checked as they are
read."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn


class TableError(ValueError):
    """A table that cannot be read: file, line and column, and what would be right."""


@dataclass(frozen=True)
class Row:
    """One line of a table, by column."""

    path: Path
    line: int
    cells: dict[str, str]

    def wrong(self, column: str, why: str) -> NoReturn:
        raise TableError(f"{self.path}, line {self.line}, column {column!r}: {why}")

    def text(self, column: str, default: str = "") -> str:
        return self.cells.get(column, "").strip() or default

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
        """Bytes; None where the cell is empty."""
        return self.number(column) * 2**30 if self.text(column) else None


def read_rows(path: Path) -> list[Row]:
    """Raises TableError for a row with more cells than columns."""
    return list(_rows(path))


def _rows(path: Path) -> Iterator[Row]:
    header: list[str] | None = None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{path} cannot be read as text: {error}") from error
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        cells = [cell.strip() for cell in next(csv.reader([line]))]
        if header is None:
            header = cells
        elif len(cells) > len(header):
            raise TableError(f"{path}, line {number}, column {len(header) + 1}: there are {len(header)} columns")
        else:
            yield Row(path, number, dict(zip(header, cells + [""] * (len(header) - len(cells)), strict=True)))
