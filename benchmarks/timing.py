"""Timing several things against each other on a machine that is never quite quiet."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TypeVar

import numpy as np

Step = Callable[[], object]
Name = TypeVar("Name")


def interleave(steps: Mapping[Name, Step], rounds: int, before: Step = lambda: None) -> dict[Name, tuple[float, ...]]:
    """Seconds of every step in each of `rounds` rounds, run in turn:

        A B C   C A B   B A C ...
        warm up | counted from here

    Steps of one round meet the same state of the machine, so that their ratio is worth more than that of two times
    taken minutes apart. Their order changes, in the same way in every run: a step that always followed the same one
    would always find the caches as that one leaves them. `before` runs before every step, outside its time.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in steps}
    order, shuffled = list(steps), random.Random(0)
    for _ in range(rounds + 1):
        shuffled.shuffle(order)
        for name in order:
            step = steps[name]
            before()
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    return {name: tuple(found[1:]) for name, found in seconds.items()}


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of the ratios of pairs, each taken in one round."""
    return median(a / b for a, b in zip(numerators, denominators, strict=True))


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of the least-squares line through the points."""
    return float(np.polyfit(xs, ys, 1)[0])
