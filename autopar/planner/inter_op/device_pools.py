"""Pools of equal device groups, and what the partition search knows of each pool."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache

from autopar.costs.cost_graph import CostGraph
from autopar.costs.device_group import DeviceGroup
from autopar.costs.gradient_reduction import ReductionCurve, reduction_curve, reduction_seconds_per_byte
from autopar.costs.sends import Lane, Lanes, estimated_sends
from autopar.planner.inter_op.device_kind import DeviceKind
from autopar.planner.inter_op.mesh_places import counts_exactly, mesh_places
from autopar.planner.inter_op.optimizer_seconds import optimizer_rates

# Groups of one device kind whose memory differs by less than this factor count as equal, with the smaller memory.
_SAME_MEMORY = 1.1


def pools_of(groups: Sequence[DeviceGroup]) -> list[list[DeviceGroup]]:
    """Groups of one device kind and about as much memory together, in the order in which they were given. The pools are
    in the order of their kinds' names, so that the order of devices in a node does not change the plan."""
    by_kind: dict[str, list[DeviceGroup]] = defaultdict(list)
    for group in groups:
        by_kind[group.kind].append(group)
    order = {group: place for place, group in enumerate(groups)}
    pools: list[list[DeviceGroup]] = []
    for _, same in sorted(by_kind.items()):
        mine: list[list[DeviceGroup]] = []
        for group in sorted(same, key=lambda g: -g.memory):
            if mine and mine[-1][0].memory <= group.memory * _SAME_MEMORY:
                mine[-1].append(group)
            else:
                mine.append([group])
        pools += [sorted(pool, key=order.__getitem__) for pool in mine]
    return pools


def with_places_apart(costs: CostGraph, pools: Sequence[Sequence[DeviceGroup]], width: int) -> list[list[DeviceGroup]]:
    """The pools, and of each that holds fewer meshes of `width` than its number of devices says, two: the devices that
    such meshes have, and the others.

        nodes of 3 and 3 devices     0 1 2 | 3 4 5     width 2: the pools 0 1 3 4 and 2 5
    """
    found: list[list[DeviceGroup]] = []
    for pool in pools:
        nodes = nodes_of(costs, pool)
        inside = {device for place in mesh_places(nodes, width) for device in place}
        if not inside or counts_exactly(nodes, width, len(pool)):
            found.append(list(pool))
            continue
        found += [[group for device, group in enumerate(pool) if (device in inside) is part] for part in (True, False)]
    return found


def neighbours(costs: CostGraph, pool: Sequence[DeviceGroup], width: int) -> list[DeviceGroup]:
    """The meshes of `width` neighbouring devices of a pool, node by node; or its devices alone."""
    if width == 1:
        return list(pool)
    names = [group.first for group in pool]
    places = mesh_places(nodes_of(costs, pool), width)
    return [costs.group(tuple(names[device] for device in place)) for place in places]


def nodes_of(costs: CostGraph, pool: Sequence[DeviceGroup]) -> list[int]:
    """The number of the node of each device of a pool; all in one where no mesh is priced."""
    cluster = costs.mesh_cluster
    return [0 if cluster is None else cluster.node_of(group.first) for group in pool]


def kind_of_pool(
    costs: CostGraph, pool: Sequence[DeviceGroup], memory: float, optimizer: str, width: int = 1
) -> DeviceKind:
    """Meshes of `width` devices of a pool as the partition search sees them, with `memory` bytes on each device.

    Transfers take the fastest of their links: which devices run which stage is decided later (`assign_groups`). Into
    stages that fill their nodes, that is the network between nodes (`Lanes`).
    """
    meshes = neighbours(costs, pool, width)
    lanes = cache(Lanes.of(costs, pool[0].kind, width)) if estimated_sends(costs.cluster) else None
    least = lanes(1) if lanes is not None else _fastest(costs, pool if width == 1 else meshes, width)
    return DeviceKind(
        name=pool[0].kind,
        count=len(pool),
        memory=float(memory),
        latency=least.latency,
        seconds_per_byte=least.seconds_per_byte,
        reduce_seconds_per_byte=reduction_seconds_per_byte(costs, meshes),
        all_reduce=_all_reduce(costs, meshes),
        exchange=_exchange(costs, meshes),
        width=width,
        lanes=lanes,
        optimizer=optimizer_rates(costs, pool[0].kind, optimizer),
    )


def _fastest(costs: CostGraph, meshes: Sequence[DeviceGroup], width: int) -> Lane:
    """The fastest of the measured links into meshes of a width, or into devices."""
    links = costs.links_into(meshes) if width == 1 else costs.links_among(meshes) or costs.links_into(meshes)
    return Lane(
        min((link.latency for link in links), default=0.0),
        1 / max((link.bandwidth for link in links), default=math.inf),
    )


def _all_reduce(costs: CostGraph, pool: Sequence[DeviceGroup]) -> Callable[[int], ReductionCurve] | None:
    """By their number, the curve of the first groups of `pool`; None where the groups are workers of one process."""
    if costs.cluster is None and costs.ranks is None:
        return None
    return cache(lambda count: reduction_curve(costs, pool[:count]))


def _exchange(costs: CostGraph, pool: Sequence[DeviceGroup]) -> ReductionCurve | None:
    """The curve of one group of `pool` and the nearest other one; None if there is no other."""
    others = (group for group in (*pool[1:], *costs.groups) if group.first not in pool[0].devices)
    other = next(others, None)
    return None if other is None else reduction_curve(costs, [pool[0], other])
