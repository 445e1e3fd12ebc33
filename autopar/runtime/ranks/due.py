"""When ranks compare what costs too much to compare with every call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from weakref import WeakKeyDictionary

CHECK_EVERY = 100  # calls between two comparisons
_CHECKED_FIRST = 2  # calls that are compared at the start: the first may be an example


class Due:
    """Counts calls, the same ones on all ranks. Each kind of call, and each capture, is counted by itself: the first
    training steps are compared also where evaluations come before them."""

    def __init__(self) -> None:
        self._n_calls: Counter[Hashable] = Counter()  # by kind, where no capture is given
        # Weak: a capture that is forgotten must not give its count to a new one with the same id.
        self._n_of: WeakKeyDictionary[object, Counter[Hashable]] = WeakKeyDictionary()

    def now(self, kind: Hashable = None, of: object | None = None) -> bool:
        """Whether this call is compared. Once for every call. `of`: the capture, or the like, that the call runs."""
        counts = self._n_calls if of is None else self._n_of.setdefault(of, Counter())
        counts[kind] += 1
        return counts[kind] <= _CHECKED_FIRST or counts[kind] % CHECK_EVERY == 0
