"""Names of devices in a row in a plan file: ["0.0-2:H100"] for ["0.0:H100", "0.1:H100", "0.2:H100"],
and ["0-1.0-2:H100"] for those of node 0 and then of node 1.

In descriptions of plans that were not chosen, "0.0-7:H100" is "0.0:H100 .. 0.7:H100 (8)".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from autopar.plan.validation import replicas

MOST_IN_A_ROW = 100_000  # layers, devices or transfers of one entry
_DEVICE = re.compile(r"(\d+)\.(\d+):(.+)")
_DEVICES = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?\.(\d{1,9})-(\d{1,9}):(.+)")
_NAME = r"\d+\.\d+:[^\s+|(),]+"
_LISTED = re.compile(rf"(?P<first>{_NAME}) \.\. (?P<last>{_NAME}) \(\d+\)|{_NAME}(?:\+{_NAME})+")
_SHORT = re.compile(r"\d{1,9}(?:-\d{1,9})?\.\d{1,9}-\d{1,9}:[^\s+|(),]+")
_FEWEST = 3  # devices in a row that are written as one


def devices_in_rows(names: Sequence[str]) -> list[str]:
    """Devices of a node in a row as one entry, and nodes in a row with the same devices."""
    rows: list[tuple[list[str], tuple[Any, ...] | None]] = []  # names, and (first node, last node, devices, kind)
    start = 0
    while start < len(names):
        first = _DEVICE.fullmatch(names[start])
        n = 1
        while first and names[start + n : start + n + 1] == [f"{first[1]}.{int(first[2]) + n}:{first[3]}"]:
            n += 1
        mine = list(names[start : start + n])
        start += n
        if first is None or n < _FEWEST or str(int(first[1])) != first[1] or str(int(first[2])) != first[2]:
            rows.append((mine, None))
            continue
        node, devices = int(first[1]), f"{first[2]}-{int(first[2]) + n - 1}:{first[3]}"
        last = rows[-1][1] if rows else None
        if last is not None and last[1:] == (node - 1, devices):
            rows[-1] = rows[-1][0] + mine, (last[0], node, devices)
        else:
            rows.append((mine, (node, node, devices)))
    found: list[str] = []
    for mine, row in rows:
        if row is None:
            found += mine
        else:
            found.append(f"{row[0]}{f'-{row[1]}' if row[1] > row[0] else ''}.{row[2]}")
    return found


def each_device(value: Any) -> Any:
    """All names; what is no list of texts, for whoever reads the field."""
    if not isinstance(value, list):
        return value
    found: list[Any] = []
    for name in value:
        match = _DEVICES.fullmatch(name) if isinstance(name, str) else None
        nodes = range(int(match[1]), int(match[2] or match[1]) + 1) if match is not None else range(0)
        numbers = range(int(match[3]), int(match[4]) + 1) if match is not None else range(0)
        if match is not None and 0 < len(nodes) * len(numbers) <= MOST_IN_A_ROW:
            found += [f"{node}.{number}:{match[5]}" for node in nodes for number in numbers]
        else:
            found.append(name)
    return found


def short_description(text: str) -> str:
    """With devices in a row as one, unless `long_description` would say something else."""
    short = _LISTED.sub(_in_a_row, text)
    return short if long_description(short) == text else text


def long_description(text: str) -> str:
    return _SHORT.sub(lambda match: replicas(each_device([match[0]])), text)


def _in_a_row(match: re.Match[str]) -> str:
    names = match[0].split("+")
    if len(names) > 1:
        return "+".join(devices_in_rows(names))
    first, last = _DEVICE.fullmatch(match["first"]), _DEVICE.fullmatch(match["last"])
    if first is None or last is None or first[3] != last[3]:
        return match[0]
    nodes = f"{first[1]}-{last[1]}" if first[1] != last[1] else first[1]
    return f"{nodes}.{first[2]}-{last[2]}:{first[3]}"
