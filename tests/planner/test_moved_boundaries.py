"""Partitions with moved boundaries against their definition."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from examples import examples
from hypothesis import assume, given, settings
from partition_oracle import OracleStage, lacking, objective, problems

from autopar.planner.inter_op.cut_selection import PartitionResult
from autopar.planner.inter_op.moved_boundaries import partitions_near
from autopar.planner.inter_op.partition import solve
from autopar.planner.inter_op.problem import Problem


def over(problem: Problem, cuts: np.ndarray) -> Problem:
    """The problem over other cuts."""
    kinds = tuple(
        dataclasses.replace(kind, space=kind.space and dataclasses.replace(kind.space, cuts=cuts))
        for kind in problem.kinds
    )
    return dataclasses.replace(problem, space=dataclasses.replace(problem.space, cuts=cuts), kinds=kinds)


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(problems())
def test_moved_boundaries_keep_the_devices_of_each_pool_and_have_the_price_of_their_definition(
    problem: Problem,
) -> None:
    """Also where devices of one kind are in two pools, as where their memory differs."""
    kinds = tuple(dataclasses.replace(k, name="0" if k.pool == 1 else k.name) for k in problem.kinds)
    problem = dataclasses.replace(problem, kinds=kinds)
    solution, counts = solve(problem), problem.counts
    assume(solution is not None and len(solution.stages) > 1)
    assert solution is not None
    found = PartitionResult(problem, solution, True)

    def devices(of: PartitionResult) -> list[tuple[int, int]]:
        return [(of.problem.pools[stage.kind], stage.replicas) for stage in of.solution.stages]

    seconds = np.ones(problem.n_atoms)
    for _, moved in partitions_near(found, problem.space.cuts, seconds, lambda cuts: over(problem, cuts), counts, 20):
        assert devices(moved) == devices(found)
        stages = tuple(
            OracleStage(frozenset(np.flatnonzero(atoms).tolist()), stage.kind, stage.replicas, stage.recompute)
            for atoms, stage in zip(moved.stages(), moved.solution.stages, strict=True)
        )
        assert lacking(problem, stages, counts) <= 0
        assert moved.solution.objective == pytest.approx(objective(problem, stages))
        assert moved.solution.objective >= solution.objective * (1 - 1e-9)
