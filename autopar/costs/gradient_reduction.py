"""What the devices of a stage take once a step to add up their gradients: with replicas, and with other stages.

Gradients travel in buckets, as in torch.nn.parallel.DistributedDataParallel, so latency counts per bucket and not per
parameter:

    seconds |          ____/      up to a bucket: what the collective takes
            |     __.-'           beyond: whole and partial buckets at the rate of a full one
            |__.-'
            +---------|-------> bytes of all parameters together
                   BUCKET
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar.costs.cost_graph import CostGraph
from autopar.costs.device_group import DeviceGroup
from cost_models import Cluster

BUCKET = 25 << 20
"""Bytes of a bucket: the default `bucket_cap_mb=25` of torch.nn.parallel.DistributedDataParallel (Li et al.: PyTorch
Distributed, 2020)."""

_SIZES = np.concatenate(
    [[0.0], BUCKET / 2 ** np.arange(24, -0.125, -0.25)]
)  # bytes for which a curve knows the seconds


def bucketed(seconds: Callable[[float], float], nbytes: float) -> float:
    """Seconds for `nbytes` in buckets, equal to `ReductionCurve.at`. `seconds`: of one collective, by its bytes."""
    if nbytes <= 0:
        return 0.0
    below, weight, buckets = SizePosition.of(np.array(float(nbytes)))
    smaller, larger = (seconds(float(size)) for size in _SIZES[below : below + 2])
    return float(buckets * (smaller * (1 - weight) + larger * weight))


class SizePosition(NamedTuple):
    """Where numbers of bytes lie among the sizes that a curve knows. All curves share the sizes."""

    below: np.ndarray  # index of the next smaller size
    weight: np.ndarray  # of the next larger size, from 0 to 1
    buckets: np.ndarray  # at least 1; 0 where there are no bytes

    @classmethod
    def of(cls, nbytes: np.ndarray) -> SizePosition:
        within = np.minimum(nbytes, BUCKET)
        below = np.clip(np.searchsorted(_SIZES, within, side="right") - 1, 0, len(_SIZES) - 2)
        weight = (within - _SIZES[below]) / (_SIZES[below + 1] - _SIZES[below])
        return cls(below, weight, np.where(nbytes > 0, np.maximum(nbytes / BUCKET, 1.0), 0.0))


@dataclass(frozen=True)
class ReductionCurve:
    """`bucketed` seconds for many numbers of bytes at once, interpolated between sizes whose ratio is 2^(1/4).

    That is within 0.1 % of the formulas of collectives.
    """

    seconds: tuple[float, ...]  # by size

    @classmethod
    def of(cls, seconds: Callable[[float], float]) -> ReductionCurve:
        """`seconds`: of a single collective, by its bytes."""
        return cls(tuple(float(seconds(float(size))) for size in _SIZES))

    @property
    def bucket(self) -> float:
        """Seconds of a full bucket."""
        return self.seconds[-1]

    def at(self, position: SizePosition) -> np.ndarray:
        known = np.array(self.seconds)
        between = known[position.below] * (1 - position.weight) + known[position.below + 1] * position.weight
        return np.asarray(position.buckets * between)


def reduction_seconds(costs: CostGraph, nbytes: float, replicas: Sequence[DeviceGroup]) -> float:
    """Seconds once a step to add up `nbytes` of gradients per device over the replicas of a stage."""
    if not costs.training or len(replicas) == 1:
        return 0.0
    return bucketed(_collective(costs, replicas), nbytes)


def bucket_seconds(costs: CostGraph, replicas: Sequence[DeviceGroup]) -> float:
    """Seconds to add up a full bucket of gradients over the replicas of a stage."""
    return bucketed(_collective(costs, replicas), BUCKET)


def reduction_curve(costs: CostGraph, replicas: Sequence[DeviceGroup]) -> ReductionCurve:
    """`reduction_seconds` for any number of bytes."""
    if len(replicas) == 1:
        return ReductionCurve((0.0,) * len(_SIZES))
    return ReductionCurve.of(_collective(costs, replicas))


def _collective(costs: CostGraph, replicas: Sequence[DeviceGroup]) -> Callable[[float], float]:
    """Seconds of one collective by its bytes on each device."""
    cluster = costs.cluster if costs.ranks is None else costs.ranks.cluster
    if cluster is not None:
        return _all_reduce(cluster, replicas)
    rate = (len(replicas) - 1) * reduction_seconds_per_byte(costs, replicas)
    return lambda nbytes: rate * nbytes


def _all_reduce(cluster: Cluster, replicas: Sequence[DeviceGroup]) -> Callable[[float], float]:
    """An all-reduce among the n-th devices of all replicas, for every n at once.

    Where replicas lie on different nodes, the devices of a mesh that share a node share its network, too.
    """
    names = [group.first for group in replicas]
    at_once = 1
    if len({cluster.node_of(name) for name in names}) > 1:
        node = cluster.node_of(names[0])
        at_once = sum(cluster.node_of(name) == node for name in replicas[0].devices)
    shape = cluster.group(names)
    return lambda nbytes: cluster.seconds_in(shape, "all_reduce", nbytes, at_once)


def reduction_seconds_per_byte(costs: CostGraph, replicas: Sequence[DeviceGroup]) -> float:
    """Seconds per gradient byte and replica beyond the first, where one device adds up for all replicas of a process.

    It adds each gradient to its own; where devices do not share their memory, the gradient travels to it and the
    parameter back. Bytes are those on each device, and of meshes it adds up all devices' gradients.
    """
    devices, width = costs.first_devices(replicas), len(replicas[0].devices)
    if all(device.shares_process_memory for device in devices):
        return width * costs.accumulate
    if costs.one_link is not None:
        return float(width * (costs.accumulate + 2 / costs.one_link.bandwidth))
    slowest = min((link.bandwidth for link in costs.links_among(replicas)), default=np.inf)
    return float(width * (costs.accumulate + 2 / slowest))
