"""How much a search may do, counted instead of timed: the same input gives the same answer on any machine."""

from __future__ import annotations

import math


class Effort:
    """What is left of a number of entries: numbers that a search computes for its tables and states.

    On a present-day core a hundred million of them take about a second.
    """

    def __init__(self, entries: float = math.inf) -> None:
        self._left = entries

    def spend(self, entries: float) -> None:
        self._left -= entries

    @property
    def is_spent(self) -> bool:
        return self._left <= 0
