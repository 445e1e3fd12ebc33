"""The solutions of one mesh that the partition search picks from: fast ones and small ones.

What is best for a stage depends on what the partition search decides later: how many stages share the model's bytes,
how many micro-batches each of them holds, how many replicas share the micro-batches. A solution has four costs:

    seconds of a micro-batch        seconds of a step       (shared by the micro-batches that a mesh runs)
    bytes of a micro-batch          resident bytes          (held once for each micro-batch in flight; all the time)

For the most and the fewest micro-batches that a mesh may run, the solutions are those at the breakpoints of the price
of memory (`Prices`). A micro-batch's bytes count as often as it may be in flight:

    0               while the optimizer steps, when its temporaries are there instead
    a part          stages that recompute their layers keep what flows between them
    1               the last stage
    meshes          the first of as many stages under 1F1B
    micro-batches   GPipe, or a caller's loss between the forwards and the backwards

In addition comes the fastest solution with shards of what it gathers kept (`regathering`). Its strategies are not
chosen anew: with the gathers of its backward in the search, another choice could be better.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.planner.intra_op.elimination.envelope import Direction, EnvelopePoint, Prices
from autopar.planner.intra_op.regathering import regathered
from autopar.planner.intra_op.strategy_search import Sharding, ShardingProblem

# Prices to try per solution for each number of micro-batches on a mesh, and entries of their tables (`Effort`).
_PRICES, _EFFORT = 4, 1e8
# With at most this number of solutions, all are for the most micro-batches that a mesh may run.
_ONE_KIND = 2
# Solutions that differ by less, relative, in all costs are one; what happens once a step counts by a micro-batch's
# seconds, and is not shared anew where it is less.
_ALIKE = 0.005
# How much the bytes of `OptionCosts.kinds` count while the optimizer steps.
_STEPPING: Direction = (1.0, 0.0, 1.0)


def frontier(
    problem: ShardingProblem, memory: float, n_meshes: int, most: int, recomputed: float = 0.0
) -> tuple[Sharding, ...]:
    """At most `most` solutions, the fastest first. None is worse than another one in all four costs.

    memory: bytes of each device. n_meshes: meshes that stages and replicas may have together. recomputed: the part of a
    micro-batch's bytes that is there at once in a stage that recomputes its layers. Solutions that are slower but need
    less memory are looked for only where the fastest one, with all micro-batches in flight, leaves no room.
    """
    m, room = problem.task.n_microbatches, _Room(problem, memory, n_meshes, recomputed)
    prices = problem.prices(m, _EFFORT)
    found = [problem.solution_of(point, prices) for point in room.useful(prices, most)[:most]]
    rounds = math.ceil(m / n_meshes)
    if most > _ONE_KIND and found[0].once * (1 / rounds - 1 / m) >= _ALIKE * found[0].seconds:
        fewer, share = problem.prices(rounds, _EFFORT), most // 2
        shared_less = room.useful(fewer, share)[:share]
        found[_ONE_KIND:_ONE_KIND] = [problem.solution_of(point, fewer) for point in shared_less]
    return tuple(_unlike(found)[:most])


def with_regathered(problem: ShardingProblem, found: Sequence[Sharding], memory: float) -> tuple[Sharding, ...]:
    """The solutions of a `frontier`, and the fastest of them once more, with shards of what it gathers kept.

    memory: bytes of each device. Nothing is added where the fastest solution fits with all micro-batches in flight.
    """
    fastest, m = found[0], problem.task.n_microbatches
    if fastest.resident + m * (fastest.nbytes - fastest.resident) + fastest.working <= memory:
        return tuple(found)
    return tuple(_unlike([*found, regathered(problem, fastest)]))


@dataclass(frozen=True)
class _Room:
    """The memory that equal stages on meshes have for solutions."""

    problem: ShardingProblem
    memory: float  # bytes of each device
    n_meshes: int
    recomputed: float  # as in `frontier`

    def useful(self, prices: Prices, most: int) -> list[EnvelopePoint]:
        """The fastest point, and others on the envelopes, the most useful ones first."""
        m, fastest = self.problem.task.n_microbatches, prices.fastest
        working = self.problem.working(fastest.options)
        if _needed(fastest, working, m, 1) <= self.memory:
            return [fastest]
        room = max(0.0, self.memory - working)
        in_flight = dict.fromkeys((1, min(m, self.n_meshes), self.recomputed, m))
        limits = {_passing(n): [n_stages * room for n_stages in self._stages] for n in in_flight if n}
        limits[_STEPPING] = [n_stages * self.memory for n_stages in self._stages]
        found = [fastest, *prices.envelopes(list(limits), _PRICES * most, limits, _ALIKE)]
        return list(dict.fromkeys([fastest, *self._fitting(found), *found]))

    def _fitting(self, points: Sequence[EnvelopePoint]) -> Iterator[EnvelopePoint]:
        """The fastest points that fit a number of stages, for each number of micro-batches in flight; where none does,
        those that need the least."""
        m, by_seconds = self.problem.task.n_microbatches, sorted(points, key=lambda point: point.seconds)
        working = [self.problem.working(point.options) for point in by_seconds]
        pipelines = [(n, float(min(m, n))) for n in self._stages]
        for n, held in [*pipelines, *itertools.product(self._stages, (self.recomputed, m, 1.0))]:
            needed = [_needed(point, beside, held, n) for point, beside in zip(by_seconds, working, strict=True)]
            least = min(range(len(needed)), key=needed.__getitem__)
            yield by_seconds[next((i for i, nbytes in enumerate(needed) if nbytes <= self.memory), least)]

    @property
    def _stages(self) -> list[int]:
        return [1 << n for n in range(self.n_meshes.bit_length())]


def _passing(in_flight: float) -> Direction:
    """The weights of the bytes in `OptionCosts.kinds` with `in_flight` micro-batches in flight."""
    return (1.0, float(in_flight), 0.0)


def _needed(point: EnvelopePoint, working: float, in_flight: float, n_stages: int) -> float:
    """Bytes on each device if the model is cut into `n_stages` equal stages: the more of those with `in_flight`
    micro-batches in flight, and those while the optimizer steps.

    working: bytes while an operator runs. A tensor that several operators keep is counted for each of them, so that
    this is slightly too much.
    """
    return max(point.held(_passing(in_flight)) / n_stages + working, point.held(_STEPPING) / n_stages)


def _unlike(found: Sequence[Sharding]) -> list[Sharding]:
    """The solutions that are better in some cost than each one before them, by more than is alike."""
    kept: list[Sharding] = []
    for one in found:
        saved = one.nbytes - one.resident
        limits = _four_costs(one) + _ALIKE * np.array([one.each, one.each, saved, one.nbytes])
        if not any((_four_costs(other) <= limits).all() for other in kept):
            kept.append(one)
    return kept


def _four_costs(one: Sharding) -> np.ndarray:
    """s of a micro-batch, s of a step, bytes of a micro-batch, resident bytes."""
    return np.array([one.each, one.once, one.nbytes - one.resident, one.resident])
