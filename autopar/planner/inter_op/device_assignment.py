"""Which device groups of a pool run which stage, where links differ."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.costs.cost_graph import CostGraph
from autopar.costs.device_group import DeviceGroup
from autopar.planner.inter_op.atoms import Atoms
from autopar.planner.inter_op.cut_selection import PartitionResult

_STARTS = 8  # groups tried for the first stage
_MOST_PLACED = 64


def assign_groups(
    costs: CostGraph,
    pools: Sequence[Sequence[DeviceGroup]],
    atoms: Atoms,
    stages: Sequence[tuple[int, ...]],
    found: PartitionResult,
    chunks: int,
) -> tuple[tuple[DeviceGroup, ...], ...]:
    """The replicas of each stage; with `chunks`, stages s and s + ranks run on the same groups.

    Where all links are alike, or groups are many, each stage takes the next groups of its pool in the given order (a
    cluster's: node by node). Otherwise each stage in turn takes the groups that its inputs reach fastest from the
    stages that have theirs. That is tried with several groups as the first of all; the assignment with the least
    seconds of transfers per micro-batch wins.
    """
    ranks = len(stages) // chunks
    solution = found.solution
    pool_of = [found.problem.pools[stage.kind] for stage in solution.stages[:ranks]]
    replicas = [stage.replicas for stage in solution.stages[:ranks]]
    if costs.one_link is not None or not costs.links or len(costs.groups) > _MOST_PLACED:
        free = [list(pool) for pool in pools]
        alike: list[tuple[DeviceGroup, ...]] = []
        for pool, number in zip(pool_of, replicas, strict=True):
            alike.append(tuple(free[pool][:number]))
            del free[pool][:number]
        return tuple(alike) * chunks
    flows = _flows(atoms, stages, ranks)
    first = pools[pool_of[0]]
    starts = range(0, len(first), max(1, len(first) // _STARTS))
    tried = [_from(costs, pools, pool_of, replicas, flows, start) for start in starts]
    return min(tried, key=lambda found: found[0])[1] * chunks


def _from(
    costs: CostGraph,
    pools: Sequence[Sequence[DeviceGroup]],
    pool_of: Sequence[int],
    replicas: Sequence[int],
    flows: Sequence[dict[int, float]],
    start: int,
) -> tuple[float, tuple[tuple[DeviceGroup, ...], ...]]:
    """Seconds of all transfers, and the groups of each rank; the first rank takes group `start` of its pool first."""
    free = [list(pool) for pool in pools]
    first = free[pool_of[0]]
    free[pool_of[0]] = first[start:] + first[:start]
    total, chosen = 0.0, list[tuple[DeviceGroup, ...]]()
    for rank, flow in enumerate(flows):
        mine = free[pool_of[rank]]
        # Replicas reduce their gradients among themselves: each costs as much as a message to those chosen before it.
        seconds = {
            group: float(
                sum(
                    costs.links[other.first, group.first].seconds(n)
                    for early, n in flow.items()
                    for other in chosen[early]
                )
            )
            for group in mine
        }
        taken: list[DeviceGroup] = []
        for _ in range(replicas[rank]):
            group = min(mine, key=seconds.__getitem__)
            total += seconds[group]
            taken.append(group)
            mine.remove(group)
            for other in mine:
                seconds[other] += costs.links[group.first, other.first].seconds(0.0)
        chosen.append(tuple(taken))
    return total, tuple(chosen)


def _flows(atoms: Atoms, stages: Sequence[tuple[int, ...]], ranks: int) -> list[dict[int, float]]:
    """For every rank the bytes, both ways, between it and each earlier one."""
    rank_of = {atom: index % ranks for index, inside in enumerate(stages) for atom in inside}
    flows: list[dict[int, float]] = [{} for _ in range(ranks)]
    for value in atoms.values:
        source = rank_of[value.producer]
        for target in {rank_of[c] for c in value.consumers} - {source}:
            early, late = sorted((source, target))
            flows[late][early] = flows[late].get(early, 0.0) + value.nbytes + value.grad_nbytes
    return flows
