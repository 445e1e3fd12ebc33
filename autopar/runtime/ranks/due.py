"""When ranks compare what costs too much to compare with every call."""

from __future__ import annotations

CHECK_EVERY = 100  # calls between two comparisons
_CHECKED_FIRST = 2  # calls that are compared at the start: the first may be an example


class Due:
    """Counts calls, the same ones on all ranks."""

    def __init__(self) -> None:
        self._n_calls = 0

    def now(self) -> bool:
        """Whether this call is compared. Once for every call."""
        self._n_calls += 1
        return self._n_calls <= _CHECKED_FIRST or self._n_calls % CHECK_EVERY == 0
