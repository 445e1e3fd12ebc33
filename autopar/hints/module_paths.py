"""Module paths such as `encoder.layers.0`: which lies in which, and how messages list them. The root's is ""."""

from __future__ import annotations

from collections.abc import Container, Sequence

_MOST = 3  # names in a message


def ancestors(path: str) -> list[str]:
    """From the root down to `path` itself."""
    names = path.split(".") if path else []
    return [".".join(names[:depth]) for depth in range(len(names) + 1)]


def nearest(path: str, known: Container[str]) -> str | None:
    """The most specific of `known` that is `path` or above it."""
    return next((ancestor for ancestor in reversed(ancestors(path)) if ancestor in known), None)


def few(names: Sequence[str]) -> str:
    """`'a', 'b', 'c' and 5 more`."""
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(f"'{name}'" for name in names[:_MOST]) + more
