"""Seconds that collective operations take, from constants of the network.

A collective of n devices moves a tensor in steps, each of some latency, and every device sends a share of the bytes:

    collective        steps           bytes a device sends of S     S is
    all_reduce        2 ceil(log2 n)  2 (n - 1) / n  S              the tensor, the same on all
    reduce_scatter    ceil(log2 n)      (n - 1) / n  S              the tensor to reduce, on each
    all_gather        ceil(log2 n)      (n - 1) / n  S              the gathered tensor
    all_to_all        ceil(log2 n)      (n - 1) / n  S              what each device has, for itself included
    broadcast         ceil(log2 n)                   S              the tensor
    send_recv         1                              S              the tensor

Latencies of recursive halving and doubling, and of a binomial tree; bytes of ring or halving, which no algorithm beats
without help of the switch (Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH,
2005); a broadcast is pipelined. "Bus bandwidth" is the bytes a device sends over the time (nccl-tests, PERFORMANCE.md).

Across m nodes with g devices each, a collective works in both levels at once, chunk after chunk (hierarchically:
reduce-scatter within the nodes, all-reduce across them among devices of one rank, all-gather within):

    node 0    0 --- 1 --- 2 --- 3        inside:  all n devices' bytes at the network's bandwidth, ceil(log2 g) steps
              |     |     |     |        across:  (m - 1) / m instead of (n - 1) / n, through the adapters of the g
    node 1    4 --- 5 --- 6 --- 7                 devices (or through the one they share), ceil(log2 m) steps

The slower level decides the bytes' time T; the latencies L of both add up. A message is cut into chunks that follow
each other through the steps; few chunks fill the pipe late and many pay latency often. The best number of chunks gives
(sqrt(L) + sqrt(T))^2 (Johnsson, Ho: Optimum Broadcasting and Personalized Communication in Hypercubes, 1989); real
libraries do better or worse, by a factor `ramp` of the network:

    seconds = L + T + 2 sqrt(ramp L T)

Latencies, efficiencies, ramps and gains of the switch are in `data/networks.toml`. Some are fitted to the measured
all-reduces of `data/allreduce_busbw.csv`; the header of networks.toml lists which, and what was held out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from cost_models.hardware.networks import Network

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)


@dataclass(frozen=True)
class Group:
    """The shape of a group of devices that run a collective: the same number of devices in each node.

    Raises:
        ValueError: a count is below one, or the network that connects the devices is missing.
    """

    per_node: int  # devices in each node
    nodes: int = 1
    intra_node: Network | None = None  # may be None where per_node is 1
    inter_node: Network | None = None  # may be None where nodes is 1

    def __post_init__(self) -> None:
        if self.per_node < 1 or self.nodes < 1:
            raise ValueError(f"a group needs 1 or more devices a node and nodes, got {self.per_node} and {self.nodes}")
        if (self.per_node > 1 and self.intra_node is None) or (self.nodes > 1 and self.inter_node is None):
            raise ValueError(f"a group of {self.nodes} x {self.per_node} devices needs the networks that connect them")

    @property
    def size(self) -> int:
        """Devices in all."""
        return self.nodes * self.per_node


def collective_seconds(collective: Collective, nbytes: float, group: Group, concurrent: int = 1) -> float:
    """Seconds that a collective on `nbytes` bytes (S above) takes in `group`; 0 for a group of one.

    `send_recv` is from one device of the group to another, across nodes where the group has several.
    `concurrent`: number of groups in the same nodes that run the same collective at once; they divide shared networks.

    Raises:
        ValueError: an unknown collective, negative bytes, or `concurrent` below one.
    """
    if collective not in COLLECTIVES:
        raise ValueError(f"unknown collective {collective!r}; known are {', '.join(COLLECTIVES)}")
    if not nbytes >= 0 or concurrent < 1:
        raise ValueError(f"needs bytes >= 0 and concurrent >= 1, got {nbytes} and {concurrent}")
    if group.size == 1:
        return 0.0
    latency = duration = ramp = 0.0
    if group.intra_node is not None and group.per_node > 1 and not (collective == "send_recv" and group.nodes > 1):
        inside = group.intra_node
        latency += _steps(collective, group.per_node) * inside.latency
        duration = _inside_bytes(collective, nbytes, group) / _device_rate(inside, collective, group, concurrent)
        ramp = inside.ramp
    if group.inter_node is not None and group.nodes > 1:
        across = group.inter_node
        latency += _steps(collective, group.nodes) * across.latency
        bytes_a_node = _across_bytes(collective, nbytes, group)
        duration = max(duration, bytes_a_node / _node_rate(across, collective, group, concurrent))
        ramp = max(ramp, across.ramp)
    return latency + duration + 2 * math.sqrt(ramp * latency * duration)


def _steps(collective: Collective, n: int) -> int:
    """Messages that follow each other among n devices, or n nodes."""
    if collective == "send_recv":
        return 1
    steps = (n - 1).bit_length()  # ceil(log2 n)
    return 2 * steps if collective == "all_reduce" else steps


def _share(collective: Collective, n: int) -> float:
    """Bytes that each of n sends over the bytes of the tensor."""
    if collective in ("broadcast", "send_recv"):
        return 1.0
    return (2 if collective == "all_reduce" else 1) * (n - 1) / n


def _inside_bytes(collective: Collective, nbytes: float, group: Group) -> float:
    """Bytes that a device sends within its node.

    Those of the whole group, a little more than those for the node's own devices: what comes from other nodes has to
    be passed on. So spreading a group over several nodes never makes it faster.
    """
    return nbytes * _share(collective, group.size)


def _across_bytes(collective: Collective, nbytes: float, group: Group) -> float:
    """Bytes that a node sends to the others."""
    if collective == "all_to_all":  # each of its devices has a part for every device outside; nothing can be combined
        return nbytes * group.per_node * (group.size - group.per_node) / group.size
    return nbytes * _share(collective, group.nodes)


def _device_rate(network: Network, collective: Collective, group: Group, concurrent: int) -> float:
    """Bytes/s that a device sends within its node."""
    gain = network.in_switch if collective == "all_reduce" else 1.0
    senders = 1 if collective == "send_recv" else group.per_node
    return network.bandwidth * gain / (senders * concurrent if network.shared else 1)


def _node_rate(network: Network, collective: Collective, group: Group, concurrent: int) -> float:
    """Bytes/s that the group's devices in a node send to other nodes."""
    gain = network.in_switch if collective == "all_reduce" else 1.0
    if network.shared:
        return network.bandwidth * gain / concurrent
    adapters = 1 if collective == "send_recv" else group.per_node
    return network.bandwidth * gain * adapters
