"""Timing several things against each other on a machine that is never quite quiet."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TypeVar

import numpy as np

from benchmarks.kept import Kept

Step = Callable[[], object]
Name = TypeVar("Name")


def interleave(
    steps: Mapping[Name, Step], rounds: int, before: Step = lambda: None, kept: Kept | None = None
) -> dict[Name, tuple[float, ...]]:
    """Seconds of every step in each of `rounds` rounds, run in turn:

        A B C   C A B   B A C ...
        warm up | counted from here

    Steps of one round meet the same state of the machine, so that their ratio is worth more than that of two times
    taken minutes apart. Their order changes, in the same way in every run: a step that always followed the same one
    would always find the caches as that one leaves them. `before` runs before every step, outside its time.

    A round that `kept` has is not run again; one of other steps is. What is run anew warms up first.
    """
    kept = Kept() if kept is None else kept
    names = {str(name) for name in steps}
    seconds: dict[Name, list[float]] = {name: [] for name in steps}
    order, shuffled, warm = list(steps), random.Random(0), False
    shuffled.shuffle(order)
    for number in range(rounds):
        known = kept.get("round", number)
        if known is None or set(known) != names:
            if not warm:
                _round(steps, order, before)
                warm = True
            shuffled.shuffle(order)
            known = _round(steps, order, before)
            kept.put("round", number, value=known)
        else:
            shuffled.shuffle(order)
        for name in steps:
            seconds[name].append(known[str(name)])
    return {name: tuple(found) for name, found in seconds.items()}


def _round(steps: Mapping[Name, Step], order: Sequence[Name], before: Step) -> dict[str, float]:
    seconds = {}
    for name in order:
        before()
        start = time.perf_counter()
        steps[name]()
        seconds[str(name)] = time.perf_counter() - start
    return seconds


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of the ratios of pairs, each taken in one round."""
    return median(a / b for a, b in zip(numerators, denominators, strict=True))


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of the least-squares line through the points."""
    return float(np.polyfit(xs, ys, 1)[0])
