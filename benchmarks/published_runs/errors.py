"""How far predictions are from what was published, and what following them would cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Errors:
    """Of the figures of one column; fractions of what was published. None where there are no predictions."""

    mean: float | None
    median: float | None
    p95: float | None
    signed: float | None  # above 0 where too much is predicted
    tau: float | None  # Kendall's, of predicted and published figures; 1: all pairs in the right order

    @classmethod
    def of(cls, predicted: Sequence[float], published: Sequence[float]) -> Errors:
        if not predicted:
            return cls(None, None, None, None, None)
        made, known = np.array(predicted), np.array(published)
        errors = made / known - 1
        sizes = np.abs(errors)
        p95 = float(np.percentile(sizes, 95))
        return cls(float(sizes.mean()), float(np.median(sizes)), p95, float(errors.mean()), kendall_tau(made, known))


def kendall_tau(a: np.ndarray, b: np.ndarray) -> float | None:
    """Kendall's tau-b; None where all entries of one are equal.

    (pairs in the same order - pairs in the other order) / sqrt(pairs untied in a x pairs untied in b). O(n^2).
    """
    first, second = (np.sign(x[:, None] - x[None, :]) for x in (a, b))
    untied = float(np.abs(first).sum()) * float(np.abs(second).sum())
    return float((first * second).sum() / np.sqrt(untied)) if untied else None


def regrets(rivals: Sequence[Hashable], predicted: Sequence[float | None], published: Sequence[float]) -> list[float]:
    """For every group of two or more runs that are rivals: how much longer, as published, the run takes that is
    predicted to be the fastest than the fastest one does; fractions.

    `predicted`, `published`: seconds. None: no prediction, so the run is never chosen; groups without any are left out.
    Of runs that are predicted alike the first counts.
    """
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for place, group in enumerate(rivals):
        groups[group].append(place)
    found = []
    for places in groups.values():
        known = {place: seconds for place in places if (seconds := predicted[place]) is not None}
        if len(places) > 1 and known:
            chosen = min(known, key=known.__getitem__)
            found.append(published[chosen] / min(published[i] for i in places) - 1)
    return found
