"""Reads the tables that reports print."""

from __future__ import annotations

import re


def table_in(text: str, begin: str) -> list[list[str]]:
    """Cells of the rows of a table; a cell that goes on in more lines is one text.

    `begin`: how the last line of the table's head, or its first row, begins.
    """
    lines = text.splitlines()
    rules = (i for i, line in enumerate(lines) if line and set(line) == {"-"})
    rule = next(i for i in rules if any(lines[j].startswith(begin) for j in (i - 1, i + 1)))
    ends = (i for i in range(rule + 1, len(lines)) if not lines[i].strip() or lines[i].startswith("(columns left out"))
    body = [line.ljust(80) for line in lines[rule + 1 : next(ends, len(lines))]]
    whole = [lines[rule - 1].ljust(80), *body]
    used = "".join("x" if any(line[i] != " " for line in whole) else " " for i in range(80))
    columns = [match.span() for match in re.finditer(r"x(?:x| (?=x))*", used)]
    rows: list[list[str]] = []
    for line in body:
        cells = [line[a:b].strip() for a, b in columns]
        if not rows or all(cells[-2:]) or cells[0].startswith("..."):
            rows.append(cells)
        else:
            joined = zip(rows[-1], cells, strict=True)
            rows[-1] = [a + ("" if not b or a.endswith((".", "_", "/", "#")) else " ") + b for a, b in joined]
    return rows
