"""Which devices of a pool run which stage."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Sequence

from autopar.costs.cost_graph import CostGraph
from autopar.costs.device_group import DeviceGroup
from autopar.planner.inter_op.atoms import Atoms
from autopar.planner.inter_op.cut_selection import PartitionResult
from autopar.planner.inter_op.device_pools import neighbours, nodes_of
from autopar.planner.inter_op.mesh_places import place_together

_STARTS = 8  # groups tried for the first stage
_MOST_PLACED = 64


def assign_groups(
    costs: CostGraph,
    pools: Sequence[Sequence[DeviceGroup]],
    atoms: Atoms,
    stages: Sequence[tuple[int, ...]],
    found: PartitionResult,
    rank_of: Sequence[int],
) -> tuple[tuple[DeviceGroup, ...], ...] | None:
    """The replicas of each stage; stages of one rank run on the same groups. None if meshes of several widths do not
    find their places in the nodes.

    `rank_of`: the rank of each stage, whose first stages come in order before all others (`ranks_of_stages`).

    Where all links are alike, groups are many, or widths differ, each stage takes the next devices of its pool in the
    given order (a cluster's: node by node). Otherwise each stage in turn takes the groups that its inputs reach fastest
    from the stages that have theirs. That is tried with several groups as the first of all; the assignment with the
    least seconds of transfers per micro-batch wins.
    """
    ranks = max(rank_of) + 1

    def of_stages(groups: Sequence[tuple[DeviceGroup, ...]]) -> tuple[tuple[DeviceGroup, ...], ...]:
        return tuple(groups[rank] for rank in rank_of)

    solution = found.solution
    pool_of = [found.problem.pools[stage.kind] for stage in solution.stages[:ranks]]
    replicas = [stage.replicas for stage in solution.stages[:ranks]]
    widths = [found.problem.kinds[stage.kind].width for stage in solution.stages[:ranks]]
    if len(set(zip(pool_of, widths, strict=True))) > len(set(pool_of)):
        groups = _of_any_width(costs, pools, list(zip(pool_of, widths, replicas, strict=True)))
        return None if groups is None else of_stages(groups)
    width_of = dict(zip(pool_of, widths, strict=True))
    pools = [neighbours(costs, pool, width_of.get(index, 1)) for index, pool in enumerate(pools)]
    if costs.one_link is not None or not costs.links or len(costs.groups) > _MOST_PLACED:
        free = [list(pool) for pool in pools]
        alike: list[tuple[DeviceGroup, ...]] = []
        for pool, number in zip(pool_of, replicas, strict=True):
            alike.append(tuple(free[pool][:number]))
            del free[pool][:number]
        return of_stages(alike)
    flows = _flows(atoms, stages, rank_of)
    first = pools[pool_of[0]]
    starts = range(0, len(first), max(1, len(first) // _STARTS))
    tried = [_from(costs, pools, pool_of, replicas, flows, start) for start in starts]
    return of_stages(min(tried, key=lambda found: found[0])[1])


class FreeDevices:
    """The free devices of a pool, in runs; a mesh is taken from the shortest run that holds it.

    Widths that divide a node also divide each other; larger ones are whole nodes, which are taken one after the other.
    Runs end where larger meshes within a node do, so meshes lie evenly in their nodes. What is left of a run after a
    mesh has too few devices for a larger one. So a mesh finds its devices exactly if enough are free:

        |0 1|2 3|4 5 6 7|    widths 1, 2, 4; after a mesh of 1: runs of 1, 2 and 4
         x     ^
    """

    def __init__(self, pool: Sequence[DeviceGroup], per_node: int, widths: Collection[int]) -> None:
        """`widths`: of all meshes that will be taken. `per_node`: devices of the pool in each node."""
        self._names = [group.first for group in pool]
        self._runs = [(0, len(pool))]
        self._ends = sorted({per_node, *(width for width in widths if width < per_node)})

    def take(self, width: int) -> tuple[str, ...]:
        """The next mesh of `width` devices."""
        start, stop = min((run for run in self._runs if run[1] - run[0] >= width), key=lambda run: run[1] - run[0])
        self._runs.remove((start, stop))
        at = start + width
        for end in (*(-(-at // size) * size for size in self._ends if size > width), stop):
            if at < min(end, stop):
                self._runs.append((at, min(end, stop)))
                at = min(end, stop)
        return tuple(self._names[start : start + width])


def _of_any_width(
    costs: CostGraph, pools: Sequence[Sequence[DeviceGroup]], needs: Sequence[tuple[int, int, int]]
) -> tuple[tuple[DeviceGroup, ...], ...] | None:
    """The groups of each stage, in order. `needs`: pool, width and replicas of each stage."""
    found: list[list[DeviceGroup]] = [[] for _ in needs]
    for index, pool in enumerate(pools):
        mine = [(stage, width) for stage, (of_pool, width, n) in enumerate(needs) for _ in range(n) if of_pool == index]
        nodes, widths = nodes_of(costs, pool), [width for _, width in mine]
        # At hand, meshes may have any widths, and nodes any numbers of devices.
        planned_ahead = costs.mesh_cluster is not None and costs.shards is None
        if planned_ahead and evenly_divided(nodes, widths):
            free = FreeDevices(pool, nodes.count(nodes[0]), set(widths))
            meshes = [free.take(width) for width in widths]
        else:
            places = place_together(nodes, widths)
            if places is None:
                return None
            meshes = [tuple(pool[device].first for device in place) for place in places]
        for (stage, _), mesh in zip(mine, meshes, strict=True):
            found[stage].append(costs.group(mesh))
    return tuple(map(tuple, found))


def evenly_divided(nodes: Sequence[int], widths: Collection[int]) -> bool:
    """Whether `FreeDevices` finds the places of meshes: nodes have equally many devices, widths divide a node and each
    other, or are whole nodes. `nodes`: the number of each device's node."""
    (per_node, *others) = set(Counter(nodes).values())
    within = sorted({per_node, *(width for width in widths if width < per_node)})
    divided = all(b % a == 0 for a, b in itertools.pairwise(within))
    return not others and divided and all(width % per_node == 0 for width in widths if width > per_node)


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


def _flows(atoms: Atoms, stages: Sequence[tuple[int, ...]], rank_of: Sequence[int]) -> list[dict[int, float]]:
    """For every rank the bytes, both ways, between it and each earlier one."""
    rank_of_atom = {atom: rank for rank, inside in zip(rank_of, stages, strict=True) for atom in inside}
    flows: list[dict[int, float]] = [{} for _ in range(max(rank_of) + 1)]
    for value in atoms.values:
        source = rank_of_atom[value.producer]
        for target in {rank_of_atom[c] for c in value.consumers} - {source}:
            early, late = sorted((source, target))
            flows[late][early] = flows[late].get(early, 0.0) + value.nbytes + value.grad_nbytes
    return flows
