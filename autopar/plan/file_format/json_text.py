"""JSON as people read it: what fits a line stands in one; what is longer fills its lines, and of what lies deep inside
the brackets stand beside what they hold."""

from __future__ import annotations

import json
from typing import Any

_WIDTH = 120
_DEEPEST = 2  # levels whose brackets have lines of their own; those inside stand one space in


def json_text(value: Any, depth: int = 0) -> str:
    """`value` as JSON. What the outermost object's values hold is indented by one space. Raises ValueError for NaN."""
    line = _line(value)
    if len(line) + depth <= _WIDTH or not isinstance(value, (dict, list)) or not value:
        return line
    if isinstance(value, dict):
        parts = [f"{json.dumps(name)}: {json_text(item, depth + 1)}" for name, item in value.items()]
        return _block("{", _filled(parts, depth), "}", depth)
    parts = [json_text(item, depth + 1) for item in value]
    return _block("[", _filled(parts, depth, _comma(value)), "]", depth)


def _line(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(name)}: {_line(item)}' for name, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{_comma(value).join(map(_line, value))}]"
    return json.dumps(value, allow_nan=False)


def _comma(items: list[Any]) -> str:
    """Long numbers stand close together."""
    return "," if any(type(item) is float for item in items) else ", "


def _block(opening: str, parts: list[str], closing: str, depth: int) -> str:
    space = " " if depth else ""
    inside = f",\n{space}".join(parts)
    if depth >= _DEEPEST:
        return f"{opening}{inside}{closing}"
    return f"{opening}\n{space}{inside}\n{closing}"


def _filled(parts: list[str], depth: int, comma: str = ", ") -> list[str]:
    """Lines of as many parts as fit."""
    lines: list[str] = []
    for part in parts:
        if lines and "\n" not in part and "\n" not in lines[-1] and len(lines[-1]) + len(part) + depth + 4 <= _WIDTH:
            lines[-1] += f"{comma}{part}"
        else:
            lines.append(part)
    return lines
