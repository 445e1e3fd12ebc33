"""The strategies that the degrees of a hand plan allow on the mesh of a stage; among them the fastest are taken.

    axis "data"      every operator is cut along its samples; parameters lie whole, or cut as ZeRO says:
                     zero=0  parameters and optimizer's state whole      zero=1  state cut      zero=3  both cut
                     zero=2  as zero=1, and each micro-batch's gradients are scattered to where the state lies
    axis "tensor"    every matrix is cut, by columns or by rows; samples are not.
                     Between two operators a tensor may only be added up (an all-reduce); with sequence_parallel it may
                     also be gathered and scattered, so that normalizations, dropouts and sums work on parts

        x --> columns of A --> gelu --> rows of B --> all-reduce --> + --> norm --> ..         sequence_parallel=False
        x_i --> all-gather --> columns of A --> gelu --> rows of B --> reduce-scatter --> + x_i --> norm --> ..   True

What is not allowed is an offence, which costs `_OFFENCE` in the selection. Where a model leaves no choice without one,
its structure may be the reason, such as queries, keys and values in one matrix: then the plan has a note. If sizes that
a degree does not divide are the reason, such as 12 heads for tensor=8, the plan is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from autopar.errors import PlanError
from autopar.planner.hand_plan.degrees import Degrees
from autopar.planner.hand_plan.offences import Offences
from autopar.planner.intra_op.strategy_search import Sharding, ShardingProblem

# Seconds of an offence in the selection: more than any micro-batch takes, and few enough that its seconds still count.
_OFFENCE = 1e3
_MOST_NAMED = 6


def by_degrees(
    problem: ShardingProblem, degrees: Degrees, batch_dims: Mapping[str, int | None], keys: Mapping[str, str]
) -> tuple[Sharding, tuple[str, ...]]:
    """The fastest strategies that the degrees allow, and notes about operators that do not follow them.

    `batch_dims`: node -> the dimension that counts samples. `keys`: node -> what a plan calls its operator.

    Raises PlanError that names the operators with sizes that the degrees do not divide.
    """
    offences = Offences(problem, degrees, batch_dims, keys)
    problems = list(dict.fromkeys(offences.sizes_not_divided()))
    if problems:
        more = [f"and {len(problems) - _MOST_NAMED} more"] if len(problems) > _MOST_NAMED else []
        raise PlanError("the model cannot follow the degrees:\n  " + "\n  ".join([*problems[:_MOST_NAMED], *more]))
    seconds = [own.copy() for own in problem.seconds]
    for name, (variable, costs) in problem.options.items():
        own = np.array([offences.of_strategy(name, one) for one in costs.strategies])
        seconds[variable] += _OFFENCE * (own - own.min())  # an operator without a rule has one strategy
    for name, (variable, options) in problem.stored_options.items():
        seconds[variable] += _OFFENCE * offences.of_storage(name, options)
    edges = [replace(edge, seconds=edge.seconds + _OFFENCE * offences.of_moves(use)) for edge, use, _ in problem.uses]
    found = problem.with_penalties(seconds, edges)
    return found, tuple(offences.notes(found))
