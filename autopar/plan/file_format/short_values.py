"""Shorter forms of values that a plan file has often: numbers that repeat, names of devices in a row, equal transfers.

"repeated" [["mlp: mul#0", 2.04e-06], ...]                 [["mlp: mul#0", 3], ...]: the number is times[3]
"devices" ["0.0:H100", "0.1:H100", "0.2:H100"]             ["0.0-2:H100"]: devices 0 to 2 of node 0
"transfers" [{"source": 0, "target": 1, ...}, ...]         [{"source": "0-6", "target": "1-7", ...}]
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from autopar.plan.file_format.fields import UNREADABLE

MOST_IN_A_ROW = 100_000  # layers, devices or transfers of one entry
_DEVICE = re.compile(r"(\d+)\.(\d+):(.+)")
_DEVICES = re.compile(r"(\d{1,9})\.(\d{1,9})-(\d{1,9}):(.+)")
_FEWEST = 3  # devices in a row that are written as one
_RANGE = re.compile(r"(\d{1,6})-(\d{1,6})")
_ENDS = ("source", "target")


# -- numbers ----------------------------------------------------------------------------------------------------------


def numbered(lists: Sequence[list[list[Any]]]) -> list[float]:
    """The numbers that rows have several times; in the rows, their places in this list take their places."""
    counts = Counter(cell for rows in lists for row in rows for cell in row if type(cell) is float)
    table = [value for value, times in counts.items() if times > 1]
    places = {value: place for place, value in enumerate(table)}
    for rows in lists:
        for row in rows:
            row[:] = [places.get(cell, cell) if type(cell) is float else cell for cell in row]
    return table


def with_numbers(value: Any, table: Any, where: str, problems: list[str]) -> Any:
    """Rows with the numbers that they have by their places in the table; what is none goes into `problems`."""
    if not isinstance(value, list):
        return value
    found = []
    for index, row in enumerate(value):
        if not isinstance(row, list):
            found.append(row)
            continue
        wrong = [cell for cell in row if type(cell) is int and not 0 <= cell < len(table)]
        problems += [f"{where}[{index}] has number {cell}, but there are {len(table)} times" for cell in wrong[:1]]
        found.append([table[cell] if type(cell) is int and cell not in wrong else cell for cell in row])
    return found


# -- devices ----------------------------------------------------------------------------------------------------------


def devices_in_rows(names: Sequence[str]) -> list[str]:
    """Devices of a node in a row as one entry."""
    found: list[str] = []
    start = 0
    while start < len(names):
        first = _DEVICE.fullmatch(names[start])
        n = 1
        while first and names[start + n : start + n + 1] == [f"{first[1]}.{int(first[2]) + n}:{first[3]}"]:
            n += 1
        if first and n >= _FEWEST:
            found.append(f"{first[1]}.{first[2]}-{int(first[2]) + n - 1}:{first[3]}")
        else:
            found += names[start : start + n]
        start += n
    return found


def each_device(value: Any) -> Any:
    """All names; what is no list of texts, for whoever reads the field."""
    if not isinstance(value, list):
        return value
    found: list[Any] = []
    for name in value:
        match = _DEVICES.fullmatch(name) if isinstance(name, str) else None
        numbers = range(int(match[2]), int(match[3]) + 1) if match is not None else range(0)
        if match is not None and 0 < len(numbers) <= MOST_IN_A_ROW:
            found += [f"{match[1]}.{number}:{match[4]}" for number in numbers]
        else:
            found.append(name)
    return found


# -- transfers --------------------------------------------------------------------------------------------------------


def runs_of_transfers(transfers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Equal transfers from each of several stages to the next one as one: "source": "0-6", "target": "1-7"."""
    found: list[dict[str, Any]] = []
    runs: list[int] = []  # transfers of each
    for one in transfers:
        n = runs[-1] if runs else 0
        if n and one == {**found[-1], "source": found[-1]["source"] + n, "target": found[-1]["target"] + n}:
            runs[-1] += 1
        else:
            found.append(one)
            runs.append(1)
    return [
        {**one, **{end: f"{one[end]}-{one[end] + n - 1}" for end in _ENDS}} if n > 1 else one
        for one, n in zip(found, runs, strict=True)
    ]


def each_transfer(transfers: Sequence[Any], problems: list[str]) -> Iterator[Any]:
    """The transfers of runs, with their backward bytes."""
    for index, one in enumerate(transfers):
        if not isinstance(one, dict):
            yield one
            continue
        one = {"backward_bytes": one.get("forward_bytes", UNREADABLE), **one}
        ends = [one.get(end) for end in _ENDS]
        if not any(isinstance(end, str) for end in ends):
            yield one
            continue
        matches = [_RANGE.fullmatch(end) if isinstance(end, str) else None for end in ends]
        ranges = [range(int(match[1]), int(match[2]) + 1) for match in matches if match is not None]
        if len(ranges) < len(ends) or len({len(one) for one in ranges}) > 1 or not 0 < len(ranges[0]) <= MOST_IN_A_ROW:
            problems.append(
                f"transfers[{index}] must have stages as source and target, or equally long ranges of stages such as "
                f"'0-6' and '1-7', got {ends[0]!r} and {ends[1]!r}"
            )
            continue
        yield from ({**one, "source": source, "target": target} for source, target in zip(*ranges, strict=True))
