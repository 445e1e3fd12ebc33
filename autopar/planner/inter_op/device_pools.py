"""Pools of equal device groups, and what the partition search knows of each pool."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from autopar.costs.cost_graph import CostGraph
from autopar.costs.device_group import DeviceGroup
from autopar.costs.gradient_reduction import all_reduce_seconds, reduction_seconds_per_byte
from autopar.costs.python_overhead import ACTION_OVERHEAD
from autopar.planner.inter_op.problem import DeviceKind

# Groups of one device kind whose memory differs by less than this factor count as equal, with the smaller memory.
_SAME_MEMORY = 1.1
# Bytes of gradients that are reduced together: the rate of large messages counts.
_BUCKET = 1 << 28


def pools_of(groups: Sequence[DeviceGroup]) -> list[list[DeviceGroup]]:
    """Groups of one device kind and about as much memory together, in the order in which they were given."""
    by_kind: dict[str, list[DeviceGroup]] = defaultdict(list)
    for group in groups:
        by_kind[group.kind].append(group)
    order = {group: place for place, group in enumerate(groups)}
    pools: list[list[DeviceGroup]] = []
    for same in by_kind.values():
        mine: list[list[DeviceGroup]] = []
        for group in sorted(same, key=lambda g: -g.memory):
            if mine and mine[-1][0].memory <= group.memory * _SAME_MEMORY:
                mine[-1].append(group)
            else:
                mine.append([group])
        pools += [sorted(pool, key=order.__getitem__) for pool in mine]
    return pools


def kind_of_pool(costs: CostGraph, pool: Sequence[DeviceGroup], memory: float) -> DeviceKind:
    """The groups of a pool as the partition search sees them, with `memory` bytes on each device.

    Transfers take the fastest of their links: which group runs which stage is decided later (`assign_groups`).
    """
    links = costs.links_into(pool)
    return DeviceKind(
        name=pool[0].kind,
        count=len(pool),
        memory=float(memory),
        latency=min((link.latency for link in links), default=0.0) + ACTION_OVERHEAD,
        seconds_per_byte=1 / max((link.bandwidth for link in links), default=math.inf),
        reduce_seconds_per_byte=reduction_seconds_per_byte(costs, pool),
        all_reduce=_all_reduce(costs, pool),
    )


def _all_reduce(costs: CostGraph, pool: Sequence[DeviceGroup]) -> tuple[float, ...]:
    """Seconds per byte among the first 1, 2, .. groups of `pool`; empty where the groups are workers of one process."""
    if costs.cluster is None:
        return ()
    counts = range(1, len(pool) + 1)
    return tuple(all_reduce_seconds(costs.cluster, _BUCKET, pool[:count]) / _BUCKET for count in counts)
