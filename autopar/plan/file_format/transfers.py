"""What stages send each other, in a plan file: equal transfers are one entry.

[{"source": "0-2 4", "forward_bytes": 8388608, "seconds": 4.9e-05}, {"source": 0, "target": 2, ...}]

The target is left out where it is the next stage, and the bytes of gradients where they are those of values.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from autopar.plan.file_format.fields import UNREADABLE
from autopar.plan.file_format.short_values import MOST_IN_A_ROW

_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_ENDS = ("source", "target")


def short_transfers(transfers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Transfers of format 2, shorter."""
    ends = [_ends(one) for one in transfers]
    in_order = all(a < b for a, b in itertools.pairwise(ends))
    runs: dict[str, list[tuple[int, int]]] = {}
    rest: dict[str, dict[str, Any]] = {}
    for number, one in enumerate(transfers):
        short = _without_defaults(one)
        key = repr((one["target"] - one["source"] == 1, short)) if in_order else str(number)
        rest[key] = short
        runs.setdefault(key, []).append(_ends(one))
    return [_texts(runs[key]) | short for key, short in rest.items()]


def _ends(transfer: dict[str, Any]) -> tuple[int, int]:
    return transfer["source"], transfer["target"]


def _without_defaults(transfer: dict[str, Any]) -> dict[str, Any]:
    left_out = set(_ENDS)
    if transfer["backward_bytes"] == transfer["forward_bytes"]:
        left_out.add("backward_bytes")
    if not transfer.get("blocking"):
        left_out.add("blocking")
    return {name: value for name, value in transfer.items() if name not in left_out}


def _texts(ends: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """`{"source": "0-2 4"}`, and a target unless it is the next stage."""
    if len(ends) == 1:
        texts: tuple[Any, Any] = ends[0]
    else:
        runs: list[list[tuple[int, int]]] = []
        for source, target in ends:
            if runs and runs[-1][-1] == (source - 1, target - 1):
                runs[-1].append((source, target))
            else:
                runs.append([(source, target)])
        sides = ([(run[0][side], run[-1][side]) for run in runs] for side in range(2))
        source_text, target_text = (" ".join(f"{a}-{b}" if b > a else str(a) for a, b in side) for side in sides)
        texts = source_text, target_text
    next_ones = all(target - source == 1 for source, target in ends)
    return {name: text for name, text in zip(_ENDS, texts, strict=True) if not (next_ones and name == "target")}


def each_transfer(transfers: Sequence[Any], problems: list[str], *, in_order: bool = True) -> list[Any]:
    """The transfers of runs, with their backward bytes. `in_order`: by their stages, where there are any runs, and to
    the next stage, where no target is said."""
    found: list[Any] = []
    any_runs = False
    for index, one in enumerate(transfers):
        if not isinstance(one, dict):
            found.append(one)
            continue
        one = {"backward_bytes": one.get("forward_bytes", UNREADABLE), **one}
        if in_order and type(one.get("source")) is int:
            one.setdefault("target", one["source"] + 1)
        ends = [one.get(end) for end in _ENDS]
        if not any(isinstance(end, str) for end in ends):
            found.append(one)
            continue
        any_runs = True
        sources = list(_numbers(ends[0]))
        targets = [source + 1 for source in sources] if in_order and "target" not in one else list(_numbers(ends[1]))
        if not sources or len(sources) != len(targets):
            problems.append(
                f"transfers[{index}] must have stages as source and target, or equally long ranges of stages such as "
                f"'0-6' and '1-7', got {ends[0]!r} and {ends[1]!r}"
            )
            continue
        found += [{**one, "source": a, "target": b} for a, b in zip(sources, targets, strict=True)]
    if (
        any_runs
        and in_order
        and all(isinstance(one, dict) and all(type(one.get(e)) is int for e in _ENDS) for one in found)
    ):
        found.sort(key=_ends)
    return found


def _numbers(end: Any) -> Iterator[int]:
    """Of "0-2 4"; none of what is no such text."""
    matches = [_RANGE.fullmatch(part) for part in end.split(" ")] if isinstance(end, str) else [None]
    ranges = [range(int(match[1]), int(match[2] or match[1]) + 1) for match in matches if match is not None]
    if len(ranges) == len(matches) and all(ranges) and sum(map(len, ranges)) <= MOST_IN_A_ROW:
        for one in ranges:
            yield from one
