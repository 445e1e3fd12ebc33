"""What the replicas of a stage take once a step to add up their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.costs.cost_graph import CostGraph
from autopar.costs.device_group import DeviceGroup
from cost_models import Cluster


def reduction_seconds(costs: CostGraph, nbytes: float, replicas: Sequence[DeviceGroup]) -> float:
    """Seconds once a step to add up `nbytes` of gradients per device over the replicas of a stage."""
    if not costs.training or len(replicas) == 1:
        return 0.0
    if costs.cluster is not None:
        return all_reduce_seconds(costs.cluster, nbytes, replicas)
    return (len(replicas) - 1) * nbytes * reduction_seconds_per_byte(costs, replicas)


def all_reduce_seconds(cluster: Cluster, nbytes: float, replicas: Sequence[DeviceGroup]) -> float:
    """Seconds of an all-reduce among the n-th devices of all replicas, for every n at once.

    Where replicas lie on different nodes, the devices of a mesh that share a node share its network, too.
    """
    names = [group.first for group in replicas]
    at_once = 1
    if len({cluster.node_of(name) for name in names}) > 1:
        node = cluster.node_of(names[0])
        at_once = sum(cluster.node_of(name) == node for name in replicas[0].devices)
    return cluster.seconds("all_reduce", nbytes, names, at_once)


def reduction_seconds_per_byte(costs: CostGraph, replicas: Sequence[DeviceGroup]) -> float:
    """Seconds per gradient byte and replica beyond the first, where one device adds up for all replicas of a process.

    It adds each gradient to its own; where devices do not share their memory, the gradient travels to it and the
    parameter back.
    """
    devices = costs.first_devices(replicas)
    if all(device.shares_process_memory for device in devices):
        return costs.accumulate
    if costs.one_link is not None:
        return float(costs.accumulate + 2 / costs.one_link.bandwidth)
    slowest = min((link.bandwidth for link in costs.links_among(replicas)), default=np.inf)
    return float(costs.accumulate + 2 / slowest)
