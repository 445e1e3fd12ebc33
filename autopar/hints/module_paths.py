"""Module paths such as `encoder.layers.0`: which path contains which. The root is ""."""

from __future__ import annotations

from collections.abc import Container


def ancestors(path: str) -> list[str]:
    """All paths that contain `path`, from the root down to `path` itself."""
    names = path.split(".") if path else []
    return [".".join(names[:depth]) for depth in range(len(names) + 1)]


def nearest(path: str, candidates: Container[str]) -> str | None:
    """The longest of `candidates` that is `path` or contains it; None if none does."""
    return next((ancestor for ancestor in reversed(ancestors(path)) if ancestor in candidates), None)
