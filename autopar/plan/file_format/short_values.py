"""Names of devices in a row in a plan file: ["0.0-2:H100"] for ["0.0:H100", "0.1:H100", "0.2:H100"].

In descriptions of plans that were not chosen, "0.0-7:H100" is "0.0:H100 .. 0.7:H100 (8)".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from autopar.plan.validation import replicas

MOST_IN_A_ROW = 100_000  # layers, devices or transfers of one entry
_DEVICE = re.compile(r"(\d+)\.(\d+):(.+)")
_DEVICES = re.compile(r"(\d{1,9})\.(\d{1,9})-(\d{1,9}):(.+)")
_NAME = r"\d+\.\d+:[^\s+|()]+"
_LISTED = re.compile(rf"(?P<first>{_NAME}) \.\. (?P<last>{_NAME}) \(\d+\)|{_NAME}(?:\+{_NAME})+")
_SHORT = re.compile(r"\d{1,9}\.\d{1,9}-\d{1,9}:[^\s+|()]+")
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
    if first is None or last is None or first[1] != last[1] or first[3] != last[3]:
        return match[0]
    return f"{first[1]}.{first[2]}-{last[2]}:{first[3]}"
