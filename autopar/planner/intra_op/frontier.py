"""The solutions of one mesh that the partition search picks from: fast ones and small ones.

What is best for a stage depends on what the partition search decides later: how many stages share the model's bytes,
how many micro-batches each of them holds, how many replicas share the micro-batches. A solution has four costs:

    seconds of a micro-batch        seconds of a step       (shared by the micro-batches that a mesh runs)
    bytes of a micro-batch          resident bytes          (held once for each micro-batch in flight; all the time)

For the most and the fewest micro-batches that a mesh may run, the solutions are those at the breakpoints of the price
of memory (`Prices`). A micro-batch's bytes count as often as it may be in flight:

    0               stages that recompute keep hardly anything; while the optimizer steps, no activations are left
    1               the last stage
    meshes          the first of as many stages under 1F1B
    micro-batches   GPipe, or a caller's loss between the forwards and the backwards

Without micro-batches in flight the optimizer's temporaries count beside the resident bytes.

In addition comes the fastest solution with shards of what it gathers kept (`regathering`). Its strategies are not
chosen anew: with the gathers of its backward in the search, another choice could be better.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from autopar.planner.intra_op.elimination.envelope import Direction, EnvelopePoint, Prices
from autopar.planner.intra_op.regathering import regathered
from autopar.planner.intra_op.strategy_search import Sharding, ShardingProblem

# Of the memory. What operators need only while they run, and what stages receive, takes the rest.
_ROOM = 0.9
# Prices to try per solution for each number of micro-batches on a mesh, and entries of their tables (`Effort`).
_PRICES, _EFFORT = 4, 1e8
# With at most this number of solutions, all are for the most micro-batches that a mesh may run.
_ONE_KIND = 2
# Solutions that differ by less, relative, in all costs are one; what happens once a step counts by a micro-batch's
# seconds, and is not shared anew where it is less.
_ALIKE = 0.005
# How much the bytes of `OptionCosts.kinds` count while the optimizer steps.
_STEPPING: Direction = (1.0, 0.0, 1.0)
_TEMPORARIES: Direction = (0.0, 0.0, 1.0)


def frontier(problem: ShardingProblem, memory: float, n_meshes: int, most: int) -> tuple[Sharding, ...]:
    """At most `most` solutions, the fastest first. None is worse than another one in all four costs.

    memory: bytes of each device. n_meshes: meshes that stages and replicas may have together. Solutions that are slower
    but need less memory are looked for only where the fastest one, with all micro-batches in flight, leaves no room.
    """
    m = problem.task.n_microbatches
    prices = problem.prices(m, _EFFORT)
    found = [problem.solution_of(p, prices) for p in _useful(prices, memory, n_meshes, m, most)[:most]]
    rounds = math.ceil(m / n_meshes)
    if most > _ONE_KIND and found[0].once * (1 / rounds - 1 / m) >= _ALIKE * found[0].seconds:
        fewer, share = problem.prices(rounds, _EFFORT), most // 2
        shared_less = _useful(fewer, memory, n_meshes, m, share)[:share]
        found[_ONE_KIND:_ONE_KIND] = [problem.solution_of(point, fewer) for point in shared_less]
    return tuple(_unlike(found)[:most])


def with_regathered(problem: ShardingProblem, found: Sequence[Sharding], memory: float) -> tuple[Sharding, ...]:
    """The solutions of a `frontier`, and the fastest of them once more, with shards of what it gathers kept.

    memory: bytes of each device. Nothing is added where the fastest solution fits with all micro-batches in flight.
    """
    fastest, m = found[0], problem.task.n_microbatches
    if fastest.resident + m * (fastest.nbytes - fastest.resident) <= _ROOM * memory:
        return tuple(found)
    return tuple(_unlike([*found, regathered(problem, fastest)]))


def _useful(prices: Prices, memory: float, n_meshes: int, m: int, most: int) -> list[EnvelopePoint]:
    """The fastest point, and others on the envelopes, the most useful ones first."""
    if _fits(prices.fastest, m, memory):
        return [prices.fastest]
    stages = [1 << n for n in range(n_meshes.bit_length())]
    whole = 1.0 if prices.fastest.held(_TEMPORARIES) else _ROOM
    limits = {_STEPPING: [n * whole * memory for n in stages]}
    limits |= {_passing(n): [n * _ROOM * memory for n in stages] for n in (1, min(m, n_meshes), m)}
    directions = [_passing(1), _passing(min(m, n_meshes)), _STEPPING, _passing(m)]
    found = [prices.fastest, *prices.envelopes(list(dict.fromkeys(directions)), _PRICES * most, limits, _ALIKE)]
    return list(dict.fromkeys([prices.fastest, *_fitting(found, stages, memory, m), *found]))


def _fitting(points: Sequence[EnvelopePoint], stages: Sequence[int], memory: float, m: int) -> Iterator[EnvelopePoint]:
    """The fastest points that fit a number of equal stages, for each number of micro-batches in flight."""
    by_seconds = sorted(points, key=lambda point: point.seconds)
    in_flight = [[(n, min(m, n)) for n in stages], *([(n, held) for n in stages] for held in (0, m, 1))]
    for n, held in itertools.chain(*in_flight):
        fits = (point for point in by_seconds if _fits(point, held, n * memory))
        yield from itertools.islice(fits, 1)


def _passing(in_flight: int) -> Direction:
    """How much the bytes of `OptionCosts.kinds` count with so many micro-batches in flight."""
    return (1.0, float(in_flight), 0.0)


def _fits(point: EnvelopePoint, in_flight: int, memory: float) -> bool:
    """Whether a point may fit so many bytes with so many micro-batches in flight, and as the optimizer steps."""
    return point.held(_passing(in_flight)) <= _ROOM * memory and point.held(_STEPPING) <= memory


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
