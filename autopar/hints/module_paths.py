"""Module paths such as `encoder.layers.0`: which path contains which, and how messages list them. The root is ""."""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable, Sequence

_MAX_LISTED = 3  # names in a message


def ancestors(path: str) -> list[str]:
    """All paths that contain `path`, from the root down to `path` itself."""
    names = path.split(".") if path else []
    return [".".join(names[:depth]) for depth in range(len(names) + 1)]


def nearest(path: str, candidates: Container[str]) -> str | None:
    """The longest of `candidates` that is `path` or contains it; None if none does."""
    return next((ancestor for ancestor in reversed(ancestors(path)) if ancestor in candidates), None)


def few(names: Sequence[str]) -> str:
    """The names as messages list them: `'a', 'b', 'c' and 5 more`."""
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(f"'{name}'" for name in names[:_MAX_LISTED]) + more


def near(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'layers.8' or 'layers.0'?`, or which names there are; empty if there are none."""
    names = list(dict.fromkeys(known))
    meant = similar(name, names)
    return f"; {meant}" if meant else f"; there are {few(names)}" if names else ""


def similar(name: str, known: Iterable[str]) -> str:
    """`did you mean 'layers.8' or 'layers.0'?`; empty if no name is similar."""
    close = difflib.get_close_matches(name, list(dict.fromkeys(known)), _MAX_LISTED)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else ""
