"""What was chosen for one graph as the sharding of a plan's stage: by names that survive another capture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from torch import fx

from autopar.planner.intra_op.strategy_search import Facts, Sharding, ShardingProblem, Task
from autopar.sharding.group_operators.operators import collectives
from autopar.sharding.layouts import REPLICATE
from autopar.sharding.stage_sharding import Exchange, Repeated, StageSharding, Stored, stored_text, strategy_text
from autopar.sharding.strategies import REPEATED


def assignment(problem: ShardingProblem, found: Sharding, keys: Mapping[str, str]) -> StageSharding:
    """What was `found` for `problem`. `keys`: node name -> operator key, as of `operators.operator_keys`.

    Operators that every device does and parameters that every device has are left out: they are so without a word.
    """
    whole = (REPLICATE,) * len(found.mesh.shape)
    inputs = {str(node.target) for node in problem.task.module.graph.nodes if node.op == "placeholder"}
    exchanged = (*exchanges(found, keys), *exchanges_within(problem.task, problem.facts, found, keys))
    share = [1 / problem.task.n_microbatches if e.once else 1.0 for e in exchanged]
    repeated = tuple(repetitions(found, keys))
    return StageSharding(
        found.mesh.shape,
        found.mesh.names,
        tuple(
            (keys[name], strategy_text(strategy))
            for name, strategy in found.strategies.items()
            if name in keys and any(axis != REPEATED for axis in strategy.axes)
        ),
        tuple(
            (name, stored_text(stored))
            for name, stored in found.stored.items()
            if name not in inputs and stored != Stored(whole, whole)
        ),
        exchanged,
        round(math.fsum(e.nbytes * s for e, s in zip(exchanged, share, strict=True))),
        math.fsum(e.seconds * s for e, s in zip(exchanged, share, strict=True)),
        math.fsum(one.seconds for one in repeated),
        repeated,
    )


def times(found: Sharding) -> tuple[float, float]:
    """Seconds of a micro-batch forward, and backward with its part of what happens once a step."""
    forward = [work.forward for work in found.work.values()]
    forward += [one.seconds for one in found.collectives if not (one.backward or one.once)]
    whole = math.fsum(forward)
    return whole, max(0.0, found.seconds - whole)


def exchanges(found: Sharding, keys: Mapping[str, str]) -> Iterator[Exchange]:
    """Every collective between operators, as often as it happens: of a path from one layout to another each move that
    is one."""
    for one in found.collectives:
        tensor = keys.get(one.tensor, one.tensor)
        for move in one.moves * one.times:
            if move.collective is not None:
                yield Exchange(
                    move.collective,
                    found.mesh.names[move.axis],
                    keys.get(one.reader, tensor),  # what nobody here reads is a result, wanted whole
                    tensor,
                    round(move.nbytes),
                    move.seconds,
                    one.backward,
                    one.once,
                )


def exchanges_within(task: Task, facts: Facts, found: Sharding, keys: Mapping[str, str]) -> Iterator[Exchange]:
    """Every collective inside of an operator that devices do together."""
    nodes = {node.name: node for node in task.module.graph.nodes}
    for name, strategy in found.strategies.items():
        bound = facts.bound(nodes[name])
        if not strategy.special or bound.rule is None:
            continue
        operands = [facts.values.get(o) if isinstance(o, fx.Node) else None for o in bound.operands]
        for inner in collectives(strategy, bound.rule, operands, found.mesh.shape):
            if inner.backward and not task.training:
                continue
            seconds = found.mesh.seconds(inner.collective, inner.nbytes, inner.axis, task.cluster)
            axis, key = found.mesh.names[inner.axis], keys.get(name, name)
            yield Exchange(inner.collective, axis, key, key, round(inner.nbytes), seconds, inner.backward)


def repetitions(found: Sharding, keys: Mapping[str, str]) -> Iterator[Repeated]:
    """Operators of which devices do the same, and the seconds of a micro-batch that each would not need."""
    for name, work in found.work.items():
        parts = round(1 / work.share)
        seconds = (work.forward + work.backward) * (1 - parts / found.mesh.size)
        if seconds > 0:
            yield Repeated(keys.get(name, name), seconds)
