"""Numbers as messages and reports write them: 4 stages, 231 ms, 12.4 days."""

from __future__ import annotations

_MINUTE, _HOUR, _DAY, _YEAR = 60.0, 3600.0, 86400.0, 365.25 * 86400.0
_DURATIONS = ((_YEAR, "years"), (_DAY, "days"), (_HOUR, "hours"), (_MINUTE, "minutes"))
_SHORT = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def digits(value: float, count: int = 3) -> str:
    """With `count` significant digits, but all digits before the point: 1,234; 12.3; 0.0123."""
    if not value:
        return "0"
    if abs(value) >= 10 ** (count - 1):
        return f"{value:,.0f}"
    return f"{value:.{count}g}"


def seconds_text(seconds: float | None) -> str:
    """`231 ms`."""
    if seconds is None:
        return "unknown"
    if seconds >= 2 * _MINUTE:
        return duration_text(seconds)
    for unit, name in _SHORT:
        if seconds >= unit:
            return f"{digits(seconds / unit)} {name}"
    return "0 s" if not seconds else f"{digits(seconds / 1e-6)} us"


def duration_text(seconds: float) -> str:
    """`12.4 days`."""
    for unit, name in _DURATIONS:
        if seconds >= 1.5 * unit:
            return f"{digits(seconds / unit)} {name}"
    return f"{digits(seconds)} s"


def count(number: int, one: str, many: str | None = None) -> str:
    """`1 stage`, `4 stages`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
