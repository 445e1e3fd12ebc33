"""Pools of equal device groups, and what the partition search knows of each pool."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache

from autopar.costs.cost_graph import CostGraph
from autopar.costs.device_group import DeviceGroup
from autopar.costs.gradient_reduction import ReductionCurve, reduction_curve, reduction_seconds_per_byte
from autopar.planner.inter_op.optimizer_seconds import optimizer_rates
from autopar.planner.inter_op.problem import DeviceKind

# Groups of one device kind whose memory differs by less than this factor count as equal, with the smaller memory.
_SAME_MEMORY = 1.1


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


def kind_of_pool(costs: CostGraph, pool: Sequence[DeviceGroup], memory: float, optimizer: str) -> DeviceKind:
    """The groups of a pool as the partition search sees them, with `memory` bytes on each device.

    Transfers take the fastest of their links: which group runs which stage is decided later (`assign_groups`).
    """
    links = costs.links_into(pool)
    return DeviceKind(
        name=pool[0].kind,
        count=len(pool),
        memory=float(memory),
        latency=min((link.latency for link in links), default=0.0),
        seconds_per_byte=1 / max((link.bandwidth for link in links), default=math.inf),
        reduce_seconds_per_byte=reduction_seconds_per_byte(costs, pool),
        all_reduce=_all_reduce(costs, pool),
        exchange=_exchange(costs, pool),
        optimizer=optimizer_rates(costs, pool[0].kind, optimizer),
    )


def _all_reduce(costs: CostGraph, pool: Sequence[DeviceGroup]) -> Callable[[int], ReductionCurve] | None:
    """By their number, the curve of the first groups of `pool`; None where the groups are workers of one process."""
    return None if costs.cluster is None else cache(lambda count: reduction_curve(costs, pool[:count]))


def _exchange(costs: CostGraph, pool: Sequence[DeviceGroup]) -> ReductionCurve | None:
    """The curve of one group of `pool` and the nearest other one; None if there is no other."""
    other = next((group for group in (*pool[1:], *costs.groups) if group != pool[0]), None)
    return None if other is None else reduction_curve(costs, [pool[0], other])
