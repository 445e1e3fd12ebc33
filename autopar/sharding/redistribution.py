"""From one list of placements of a tensor to another: the cheapest sequence of steps, each along one axis of the mesh.

```
    Shard(d)   -> Replicate   all-gather          Replicate -> Shard(d)   every device takes its part: free
    Shard(d)   -> Shard(e)    all-to-all          Replicate -> Partial    all but one count zero: free
    Partial    -> Replicate   all-reduce
    Partial    -> Shard(d)    reduce-scatter
```
Where several axes shard one dimension, only the last of them can be gathered or exchanged, and a new one must come
after them: the parts would not be contiguous otherwise. The steps between all placements of a tensor make a graph. Its
shortest paths for all pairs (Floyd and Warshall, 1962) are the redistributions. Which path is fastest depends on sizes
and networks, so the search prices steps in seconds on the cluster at hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.sharding.layouts import PARTIAL, REPLICATE, Placements, layouts, parts
from cost_models import Collective


@dataclass(frozen=True)
class RedistributionStep:
    """One step of a redistribution."""

    axis: int
    collective: Collective | None  # None: every device changes what it has by itself
    before: Placements
    after: Placements
    nbytes: float  # of the collective, as `collective_seconds` counts them
    seconds: float


def before_gathers(passed: Sequence[Placements]) -> int:
    """The place in `passed` from which on all steps are all-gathers; that of the last placements if none is.

    P > S1 > R      1, as the second step gathers           S0 > R      0           S0 > S1     1
    """
    place = len(passed) - 1
    while place and _gathers(passed[place - 1], passed[place]):
        place -= 1
    return place


def _gathers(before: Placements, after: Placements) -> bool:
    return all(a == b or (a >= 0 and b == REPLICATE) for a, b in zip(before, after, strict=True))


StepPrice = Callable[[Collective, float, int], float]  # (collective, its bytes, mesh axis) -> seconds


def bytes_sent(mesh: Sequence[int]) -> StepPrice:
    """A price that needs no cluster: the bytes that a device sends in a ring of the n devices along the axis.

    With lists as in `collective_seconds`, (n - 1) / n of the bytes, and twice that for an all-reduce
    (Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH, 2005).
    """

    def price(collective: Collective, nbytes: float, axis: int) -> float:
        rounds = 2 if collective == "all_reduce" else 1
        return rounds * nbytes * (mesh[axis] - 1) / mesh[axis]

    return price


class RedistributionTable:
    """Seconds from any placements of a tensor to any others, and the steps."""

    def __init__(
        self, shape: Sequence[int], itemsize: int, mesh: Sequence[int], price: StepPrice, *, partial: bool = True
    ) -> None:
        """`mesh`: its shape. `price`: seconds of a collective, see `bytes_sent` and `Mesh.seconds`.
        `partial`: whether the tensor may be Partial, which integers and booleans cannot be."""
        self.shape, self.mesh, self._price = tuple(shape), tuple(mesh), price
        self.layouts = layouts(shape, mesh, partial=partial)
        self.number = {layout: i for i, layout in enumerate(self.layouts)}
        self._nbytes = math.prod(shape) * itemsize
        self._moves: dict[tuple[int, int], RedistributionStep] = {}
        for number, layout in enumerate(self.layouts):
            for move in self._from(layout):
                target = self.number.get(move.after)
                if target is not None:
                    known = self._moves.get((number, target))
                    if known is None or move.seconds < known.seconds:
                        self._moves[number, target] = move

    @cached_property
    def seconds(self) -> np.ndarray:
        """[from, to] by number of the placements; inf where no steps lead there."""
        return self._shortest[0]

    def between(self, before: Placements, after: Placements) -> float:
        """Seconds."""
        return float(self.seconds[self.number[before], self.number[after]])

    def path(self, before: Placements, after: Placements) -> tuple[RedistributionStep, ...]:
        """The fastest steps.

        Raises KeyError for placements that the tensor cannot have, ValueError where no steps lead there.
        """
        here, there = self.number[before], self.number[after]
        if not np.isfinite(self.seconds[here, there]):
            raise ValueError(f"no steps lead from {before} to {after}")
        found = []
        while here != there:
            following = int(self._shortest[1][here, there])
            found.append(self._moves[here, following])
            here = following
        return tuple(found)

    @cached_property
    def _shortest(self) -> tuple[np.ndarray, np.ndarray]:
        """[from, to] seconds, and the number of the placements after the first step."""
        n = len(self.layouts)
        seconds = np.full((n, n), np.inf)
        first = np.full((n, n), -1)
        steps = np.full((n, n), np.inf)  # of equally fast paths the one with fewest steps
        np.fill_diagonal(seconds, 0.0)
        np.fill_diagonal(steps, 0.0)
        for (a, b), move in self._moves.items():
            seconds[a, b], first[a, b], steps[a, b] = move.seconds, b, 1.0
        for k in range(n):
            through = seconds[:, k, None] + seconds[None, k, :]
            length = steps[:, k, None] + steps[None, k, :]
            better = (through < seconds) | ((through == seconds) & (length < steps))
            seconds = np.where(better, through, seconds)
            steps = np.where(better, length, steps)
            first = np.where(better, first[:, k, None], first)
        return seconds, first

    def _from(self, layout: Placements) -> Iterator[RedistributionStep]:
        """All steps that start at these placements."""
        local = self._nbytes / parts(layout, self.mesh)
        for axis, (n, code) in enumerate(zip(self.mesh, layout, strict=True)):
            if n == 1:
                continue
            for new in (REPLICATE, PARTIAL, *range(len(self.shape))):
                if new == code or any(c in (code, new) and c >= 0 for c in layout[axis + 1 :]):
                    continue
                if code >= 0 and new == PARTIAL:
                    continue  # gather first
                collective, nbytes = _step(code, new, local, n)
                seconds = 0.0 if collective is None else self._price(collective, nbytes, axis)
                yield RedistributionStep(
                    axis, collective, layout, (*layout[:axis], new, *layout[axis + 1 :]), nbytes, seconds
                )


def _step(code: int, new: int, local: float, n: int) -> tuple[Collective | None, float]:
    """The collective from one placement to another, and its bytes; `local` bytes on each device before."""
    if code == PARTIAL:
        return ("all_reduce" if new == REPLICATE else "reduce_scatter"), local
    if code == REPLICATE:
        return None, 0.0
    return ("all_gather", local * n) if new == REPLICATE else ("all_to_all", local)
