"""JSON as people read it: what fits a line stands in one; what is longer fills its lines with texts, numbers and short
lists."""

from __future__ import annotations

import itertools
import json
from typing import Any

_WIDTH = 120
_DEEPEST = 3  # levels that are indented: those inside stand as far in


def json_text(value: Any, depth: int = 0) -> str:
    """`value` as JSON. Each of the outer levels is indented by one space. Raises ValueError for NaN and infinities."""
    line = json.dumps(value, allow_nan=False)
    if len(line) + depth <= _WIDTH or not isinstance(value, (dict, list)) or not value:
        return line
    if isinstance(value, dict):
        parts = []
        for short, run in itertools.groupby(value.items(), key=lambda pair: _is_short(pair[1])):
            some = [f"{json.dumps(name)}: {json_text(item, depth + 1)}" for name, item in run]
            parts += _filled(some, depth) if short else some
        return _block("{", parts, "}", depth)
    parts = [json_text(item, depth + 1) for item in value]
    if all(map(_is_short, value)):
        parts = _filled(parts, depth)
    return _block("[", parts, "]", depth)


def _is_short(value: Any) -> bool:
    """Whether others may stand beside it: a text, a number, or a list of some."""
    if isinstance(value, list):
        return not any(isinstance(item, (dict, list)) for item in value)
    return not isinstance(value, dict)


def _block(opening: str, parts: list[str], closing: str, depth: int) -> str:
    inside = ",\n".join(" " * min(depth + 1, _DEEPEST) + part for part in parts)
    return f"{opening}\n{inside}\n{' ' * min(depth, _DEEPEST)}{closing}"


def _filled(parts: list[str], depth: int) -> list[str]:
    """Lines of as many parts as fit."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(part) + depth + 4 <= _WIDTH:
            lines[-1] += f", {part}"
        else:
            lines.append(part)
    return lines
