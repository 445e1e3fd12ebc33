"""What is checked of the numbers of a partition problem."""

from __future__ import annotations

import numpy as np


def check(holds: bool, message: str) -> None:
    """Raise ValueError unless it holds."""
    if not holds:
        raise ValueError(message)


def check_costs(name: str, costs: object) -> None:
    """Raise ValueError unless every number in `costs` is finite and >= 0."""
    array = np.asarray(costs, dtype=float)
    bad = array[~(np.isfinite(array) & (array >= 0))]
    check(bad.size == 0, f"{name} must be finite and >= 0, got {bad.flat[0] if bad.size else None}")
