"""The strategies that the degrees of a hand plan allow on the mesh of a stage; among them the fastest are taken.

    axis "data"      every operator is cut along its samples; parameters lie whole, or cut as ZeRO says:
                     zero=0  parameters and optimizer's state whole      zero=1  state cut      zero=3  both cut
                     zero=2  as zero=1, and each micro-batch's gradients are scattered to where the state lies
    axis "tensor"    every matrix is cut, by columns or by rows; samples are not. States lie where parameters do.
                     Between two operators a tensor may only be added up (an all-reduce); with sequence_parallel it may
                     also be gathered and scattered, so that normalizations, dropouts and sums work on parts

        x --> columns of A --> gelu --> rows of B --> all-reduce --> + --> norm --> ..         sequence_parallel=False
        x_i --> all-gather --> columns of A --> gelu --> rows of B --> reduce-scatter --> + x_i --> norm --> ..   True

What is not allowed is an offence, which costs `_OFFENCE` in the selection. Where a model leaves no choice without one,
its structure may be the reason, such as queries, keys and values in one matrix: then the plan has a note. If sizes that
a degree does not divide are the reason, such as 12 heads for tensor=8, the plan is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar.plan.degrees import Degrees
from autopar.planner.hand_plan.offences import Offences
from autopar.planner.intra_op.elimination.choices import Edge
from autopar.planner.intra_op.strategy_search import Sharding, ShardingProblem

# Seconds of an offence in the selection: more than any micro-batch takes, and few enough that its seconds still count.
_OFFENCE = 1e3


class Allowed(NamedTuple):
    """What of a stage's degrees decides which strategies it may have."""

    replicated: bool
    tensor: int
    zero: int
    sequence_parallel: bool

    @classmethod
    def by(cls, degrees: Degrees) -> Allowed:
        return cls(degrees.data > 1, degrees.tensor, degrees.zero, degrees.sequence_parallel)


@dataclass(frozen=True)
class Penalties:
    """What offences add to the seconds of one problem, whatever the number of micro-batches. Equal arrays are one."""

    offences: Offences
    options: tuple[np.ndarray | None, ...]  # by variable: [options] s
    edges: tuple[np.ndarray, ...]  # by use: [layouts made, layouts read] s


def penalties(
    problem: ShardingProblem, degrees: Degrees, batch_dims: Mapping[str, int | None], keys: Mapping[str, str]
) -> Penalties:
    """What the degrees do not allow.

    `degrees`: those that divide the sizes of the model, see `CutSizes.not_divided`. `batch_dims`: node -> the dimension
    that counts samples. `keys`: node -> what a plan calls its operator.
    """
    offences = Offences(problem, degrees, batch_dims, keys)
    same: dict[tuple[tuple[int, ...], bytes], np.ndarray] = {}

    def shared(counts: np.ndarray) -> np.ndarray:
        seconds = _OFFENCE * counts
        return same.setdefault((seconds.shape, seconds.tobytes()), seconds)

    options: list[np.ndarray | None] = [None] * len(problem.variables)
    for name, (variable, costs) in problem.options.items():
        own = np.array([offences.of_strategy(name, one) for one in costs.strategies])
        options[variable] = shared(own - own.min())  # an operator without a rule has one strategy
    for name, (variable, stored) in problem.stored_options.items():
        options[variable] = shared(offences.of_storage(name, stored))
    return Penalties(offences, tuple(options), tuple(shared(offences.of_moves(use)) for _, use, _ in problem.uses))


def by_degrees(problem: ShardingProblem, added: Penalties) -> tuple[Sharding, tuple[str, ...]]:
    """The fastest strategies that the degrees allow, and notes about operators that do not follow them.

    `added`: of the same problem, for any number of micro-batches.
    """
    edges = [edge for edge, _, _ in problem.uses]
    penalized = _sums([edge.seconds for edge in edges], added.edges)
    found = problem.with_penalties(
        _sums(problem.seconds, added.options),
        [Edge(e.source, e.target, e.out, e.into, seconds) for e, seconds in zip(edges, penalized, strict=True)],
    )
    return found, tuple(added.offences.notes(found))


def _sums(arrays: Sequence[np.ndarray], added: Sequence[np.ndarray | None]) -> list[np.ndarray]:
    """Equal sums are one array, where the summands are."""
    known: dict[tuple[int, int], np.ndarray] = {}
    found = []
    for one, more in zip(arrays, added, strict=True):
        key = (id(one), id(more))
        if key not in known:
            known[key] = one if more is None else one + more
        found.append(known[key])
    return found
