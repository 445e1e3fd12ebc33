"""Amounts of memory as text, both ways: "8GB" <-> 8e9 bytes."""

from __future__ import annotations

import math
import re

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", 1)}
_UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtp", 1)}
_NUMBER = re.compile(r"(\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})(e[+-]?\d{1,3})?\s*([a-z]*)")


def parse_bytes(amount: object) -> float:
    """Bytes of an amount of memory: a number of bytes, or a text such as "8GB" (8e9), "8GiB" (8 * 2**30) or "8e9".

    Raises:
        ValueError: anything else, and amounts that are not above 0.
    """
    if isinstance(amount, str):
        match = _NUMBER.fullmatch(amount.strip().lower())
        if match is None or match[3] not in _UNITS:
            raise ValueError(f'give a number of bytes or a text such as "8GB", "8GiB" or "500MB", got {amount!r}')
        nbytes = float(match[1] + (match[2] or "")) * _UNITS[match[3]]
        if not nbytes > 0:
            raise ValueError(f"give an amount of memory above 0, got {amount!r}")
        if nbytes == math.inf:
            raise ValueError(
                f'give an amount that a device may have, such as "8GB", or leave it out for no limit, got {amount!r}'
            )
        return nbytes
    if isinstance(amount, bool) or not isinstance(amount, int | float) or not amount > 0:
        raise ValueError(f'give a positive number of bytes or a text such as "8GB", got {amount!r}')
    return amount


def bytes_text(nbytes: float) -> str:
    """Three or four digits and the largest decimal unit that fits: "341 GB", "15.96 MB"."""
    for power, unit in ((5, "PB"), (4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if abs(nbytes) >= 1000**power:
            return f"{nbytes / 1000**power:.4g} {unit}"
    return f"{nbytes:.4g} bytes"
