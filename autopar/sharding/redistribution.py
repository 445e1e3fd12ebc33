"""From one layout of a tensor to another: the fastest sequence of collectives, each along one axis of the mesh.

```
    Shard(d)   -> Replicate   all-gather          Replicate -> Shard(d)   every device takes its part: free
    Shard(d)   -> Shard(e)    all-to-all          Replicate -> Partial    all but one count zero: free
    Partial    -> Replicate   all-reduce
    Partial    -> Shard(d)    reduce-scatter
```
Of several axes that shard one dimension only the last can be gathered or exchanged, and a new one must come after them
(the parts would not be contiguous otherwise). Such moves between all layouts of a tensor make a graph; its shortest
paths are found for all pairs at once (Floyd and Warshall, 1962), in seconds of the cluster at hand: which way round is
fastest depends on sizes and networks, and no table knows it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.sharding.layouts import PARTIAL, REPLICATE, Placements, layouts, parts
from autopar.sharding.mesh import Mesh
from cost_models import Cluster, Collective


@dataclass(frozen=True)
class RedistributionStep:
    """One step of a redistribution."""

    axis: int
    collective: Collective | None  # None: every device changes what it has by itself
    before: Placements
    after: Placements
    nbytes: float  # of the collective, as `collective_seconds` counts them
    seconds: float


class Redistribution:
    """Seconds from any layout of a tensor to any other, and the way."""

    def __init__(
        self, shape: Sequence[int], itemsize: int, mesh: Mesh, cluster: Cluster, *, partial: bool = True
    ) -> None:
        """`partial`: also from and to layouts with sums to come, which tensors of whole numbers do not have."""
        self.shape, self.mesh = tuple(shape), mesh
        self.layouts = layouts(shape, mesh.shape, partial=partial)
        self.number = {layout: i for i, layout in enumerate(self.layouts)}
        self._nbytes = math.prod(shape) * itemsize
        self._cluster = cluster
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
        """[from, to] by number of the layout; inf where there is no way."""
        return self._shortest[0]

    def between(self, before: Placements, after: Placements) -> float:
        """Seconds."""
        return float(self.seconds[self.number[before], self.number[after]])

    def path(self, before: Placements, after: Placements) -> tuple[RedistributionStep, ...]:
        """The fastest way. Raises KeyError for what is no layout of the tensor, ValueError where there is no way."""
        here, there = self.number[before], self.number[after]
        if not np.isfinite(self.seconds[here, there]):
            raise ValueError(f"no way from {before} to {after}")
        found = []
        while here != there:
            following = int(self._shortest[1][here, there])
            found.append(self._moves[here, following])
            here = following
        return tuple(found)

    @cached_property
    def _shortest(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds, and the first step of the way."""
        n = len(self.layouts)
        seconds = np.full((n, n), np.inf)
        first = np.full((n, n), -1)
        steps = np.full((n, n), np.inf)  # of equally fast ways the one with fewest moves
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
        local = self._nbytes / parts(layout, self.mesh.shape)
        for axis, (n, code) in enumerate(zip(self.mesh.shape, layout, strict=True)):
            if n == 1:
                continue
            for new in (REPLICATE, PARTIAL, *range(len(self.shape))):
                if new == code or any(c in (code, new) and c >= 0 for c in layout[axis + 1 :]):
                    continue
                if code >= 0 and new == PARTIAL:
                    continue  # gather first
                collective, nbytes = _step(code, new, local, n)
                seconds = 0.0
                if collective is not None:
                    seconds = self.mesh.seconds(collective, nbytes, axis, self._cluster)
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
