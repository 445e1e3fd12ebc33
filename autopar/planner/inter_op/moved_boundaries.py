"""A plan's boundaries between stages, moved to cuts near them.

The objective counts the slowest stage (m - 1) times beside the first micro-batch, wherever it lies. In a step, an early
stage begins its next micro-batches while later stages work on the first:

    slowest stage first           stage 0   F1 F2 .. B1 .. B2      F2 runs while stage 1 has micro-batch 1,
    (m = 2, 1F1B)                 stage 1      F1 B1 F2 B2         but the objective adds it to the first pass

With few micro-batches that is a large part of a step, so that the least objective is not the shortest step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise

import numpy as np

from autopar.planner.inter_op.cut_selection import PartitionResult, ProblemOf
from autopar.planner.inter_op.solution import Solution, StageChoice
from autopar.planner.inter_op.stage_costs import Costs
from autopar.planner.inter_op.stage_tables import Mode


def partitions_near(
    found: PartitionResult,
    cuts: np.ndarray,
    weight: np.ndarray,
    problem_of: ProblemOf,
    counts: Sequence[int],
    most: int,
) -> Iterator[tuple[float, PartitionResult]]:
    """(seconds that its slowest stage is busy at least, partition) of those with other boundaries that hints and memory
    allow, on the same kinds of devices; at most `most`.

    `cuts`: [n_cuts, n] to move boundaries to. `weight`: [n] of the atoms, by which cuts are near. `counts`: devices of
    each pool.
    """
    chains = list(islice(_chains_near(found.chain(), cuts, weight), most))
    if not chains:
        return
    rows = np.unique(np.concatenate([found.chain(), *chains]), axis=0)
    rows = rows[np.argsort(rows.sum(axis=1), kind="stable")]
    number = {row.tobytes(): place for place, row in enumerate(rows)}
    problem = problem_of(rows)
    costs = Costs(problem, tuple(counts))
    # Devices of one kind are in two pools where their memory, or the places that they have in meshes, differ.
    named = {
        (pool, kind.name): place for place, (pool, kind) in enumerate(zip(problem.pools, problem.kinds, strict=True))
    }
    before = found.problem
    stages = [replace(s, kind=named[before.pools[s.kind], before.kinds[s.kind].name]) for s in found.solution.stages]
    for chain in chains:
        places = [number[row.tobytes()] for row in chain]
        moved = [replace(s, start=a, stop=b) for s, (a, b) in zip(stages, pairwise(places), strict=True)]
        if any(not chain[place + 1][atom] or chain[place][atom] for atom, place in problem.space.pinned):
            continue
        priced = _priced(costs, moved)
        if priced is not None:
            busy = max(math.ceil(problem.n_microbatches / s.replicas) * s.time for s in priced[0])
            solution = Solution(*priced, min(found.solution.bound, priced[1]), found.solution.used)
            yield busy, PartitionResult(problem, solution, found.complete, found.bound)


def _priced(costs: Costs, stages: Sequence[StageChoice]) -> tuple[tuple[StageChoice, ...], float] | None:
    """(the stages with their seconds, their objective); None where one of them may not be so, or does not fit."""
    fills, largest, priced, following = 0.0, 0.0, [], sum(stage.replicas for stage in stages)
    for stage in stages:
        following -= stage.replicas
        mode, pair = Mode(stage.kind, stage.recompute), costs.pair(stage.start, stage.stop)
        if mode not in costs.terms or not costs.fits(mode, stage.replicas, following, stage.start, stage.stop):
            return None
        terms = costs.terms_of(mode, stage.replicas)
        fills += float(terms.fill[pair])
        largest = max(largest, costs.max_term_of(mode, stage.replicas, stage.start, stage.stop))
        priced.append(replace(stage, time=float(terms.time[pair])))
    return (tuple(priced), fills + largest) if math.isfinite(fills + largest) else None


def _chains_near(chain: np.ndarray, cuts: np.ndarray, weight: np.ndarray) -> Iterator[np.ndarray]:
    """The chain [n_stages + 1, n] with one of its inner cuts replaced, or with two neighbouring ones, so that the stage
    between them moves: by one of `cuts` on either side that is near."""
    inner = range(1, len(chain) - 1)
    sides = {place: _sides(chain, place, cuts, weight) for place in inner}
    for place in inner:
        for side in sides[place]:
            for step in _steps(len(side)):
                moved = chain.copy()
                moved[place] = side[step]
                yield moved
    for place in inner[:-1]:
        for one, other in zip(sides[place], sides[place + 1], strict=True):
            for step in _steps(min(len(one), len(other))):
                moved = chain.copy()
                moved[place], moved[place + 1] = one[step], other[step]
                if (moved[place] <= moved[place + 1]).all() and (moved[place] != moved[place + 1]).any():
                    yield moved


def _steps(n: int) -> list[int]:
    """The places of the nearest of `n`, of the 2nd, 4th, 8th .. nearest."""
    return [(1 << step) - 1 for step in range(n.bit_length())]


def _sides(chain: np.ndarray, place: int, cuts: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The cuts between those before and after the chain's cut at `place` that contain it, and those that it contains;
    the nearest first."""
    before, here, after = chain[place - 1 : place + 2]
    between = cuts[(cuts >= before).all(axis=1) & (cuts <= after).all(axis=1)]
    sizes = between.sum(axis=1)
    between = between[(sizes > before.sum()) & (sizes < after.sum())]
    other = between[(between != here).any(axis=1)]
    later, earlier = (other[mask.all(axis=1)] for mask in (other >= here, other <= here))
    return _nearest_first(later, here, weight), _nearest_first(earlier, here, weight)


def _nearest_first(side: np.ndarray, here: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return np.asarray(side[np.argsort((side ^ here) @ weight, kind="stable")])
