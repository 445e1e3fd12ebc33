"""Names of devices in a row in a plan file: ["0.0-2:H100"] for ["0.0:H100", "0.1:H100", "0.2:H100"]."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

MOST_IN_A_ROW = 100_000  # layers, devices or transfers of one entry
_DEVICE = re.compile(r"(\d+)\.(\d+):(.+)")
_DEVICES = re.compile(r"(\d{1,9})\.(\d{1,9})-(\d{1,9}):(.+)")
_FEWEST = 3  # devices in a row that are written as one


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
