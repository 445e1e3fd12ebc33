"""What stages take to send values to each other over the networks of a cluster.

    lanes       the n-th device of a mesh sends to the n-th of the next one, all at once: `cost_models.clusters.sends`
    scattering  a value that n devices of the receiving mesh hold alike crosses the network once, 1/n over each of their
                lanes, and they gather it inside their node, if that is faster than n copies over the network
                (Narayanan et al.: Efficient Large-Scale Language Model Training on GPU Clusters, 2021, section 4.1)

Which sends go at once. Within a stage the conservative view: its replicas run in step, so they end a pass and send
together, each to the replica whose turn it is, and to all stages that read the value. Between stages the average view:
stages end their passes at different times, so a send seldom meets one of another stage, and they share no card here.

    stage 0, 4 replicas      0.0 0.1 0.2 0.3     micro-batches 0 1 2 3 leave together over the card of node 0
                              |   |   |   |
    stage 1, 4 replicas      1.0 1.1 1.2 1.3

The objective knows one stage at a time, so it prices what a stage receives as if the stage before it had as many
replicas and devices (`Lanes`). The simulator prices the meshes that send and receive (`pass_seconds`). The two agree
where neighbouring stages are alike.

The runtime sends whole values between meshes of one process, whose links are measured: then those are the prices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

from autopar.costs.cost_graph import CostGraph
from autopar.costs.device_group import DeviceGroup
from cost_models import Cluster, Link, Network
from cost_models.clusters.sends import MeshSend, send_seconds, shared_link


class Lane(NamedTuple):
    """What each device of a stage sees of the sends into its mesh."""

    latency: float  # s before the first byte
    seconds_per_byte: float  # that the device receives
    across: bool = False  # between nodes, where values are scattered if that is faster


class Sent(NamedTuple):
    """A value on its way into a mesh. Bytes and seconds of one micro-batch, or of the whole batch."""

    nbytes: float  # that each device of the mesh holds
    copies: int = 1  # devices of a node that hold the same
    gather: float = 0.0  # s to gather it inside the node from a part on each of them

    def per_micro_batch(self, n_microbatches: int) -> Sent:
        """Of one micro-batch, if this is of the whole batch."""
        return Sent(self.nbytes / n_microbatches, self.copies, self.gather / n_microbatches)

    def over(self, seconds_per_byte: float) -> Sent:
        """What each lane carries, and the seconds of gathering: the faster of sending it whole and scattering it."""
        scattered = self.nbytes / self.copies
        if self.copies == 1 or (self.nbytes - scattered) * seconds_per_byte <= self.gather:
            return Sent(self.nbytes)
        return Sent(scattered, 1, self.gather)


def estimated_sends(cluster: Cluster | None) -> TypeGuard[Cluster]:
    """Whether sends are estimated over the networks of a cluster; else links are measured, or within a process."""
    return cluster is not None and not cluster.measured_links


@dataclass(frozen=True)
class Lanes:
    """The lanes into a stage on meshes of devices of one kind, as if the stage before it were alike."""

    cluster: Cluster
    per_node: int  # devices of the kind
    width: int  # devices of a mesh
    near: bool  # another mesh may lie in the same node

    @classmethod
    def of(cls, costs: CostGraph, kind: str, width: int) -> Lanes:
        """For meshes of `width` neighbouring devices of a kind."""
        assert costs.cluster is not None, "lanes are those of a cluster's networks"
        per_node = max(1, sum(device.kind == kind for device in costs.devices) // costs.cluster.nodes)
        near = len(costs.cluster.node) > 1 if width == 1 else 2 * width <= per_node
        return cls(costs.cluster, per_node, width, near)

    def __call__(self, replicas: int) -> Lane:
        """The lane of a stage with `replicas`. A stage that fills its nodes receives everything from other nodes; a
        smaller one may share a node with its sender."""
        cluster, devices = self.cluster, len(self.cluster.node)
        n = min(replicas * self.width, self.per_node)
        inside = self._lane(cluster.intra_node, n)
        if cluster.nodes == 1:
            return inside
        across = self._lane(cluster.inter_node, n)._replace(across=True)
        if not self.near or replicas * self.width >= devices:
            return across
        return Lane(min(inside.latency, across.latency), min(inside.seconds_per_byte, across.seconds_per_byte))

    @property
    def between_nodes(self) -> float:
        """Seconds per byte of a lane between nodes, if all devices of a node send."""
        return self._lane(self.cluster.inter_node, self.per_node).seconds_per_byte

    def _lane(self, network: Network, n: int) -> Lane:
        """With `n` devices of a node that send at once."""
        return Lane(network.latency, network.crowd(n, len(self.cluster.node)) / network.bandwidth)


def pass_seconds(
    cluster: Cluster,
    sender: Sequence[DeviceGroup],
    receivers: Mapping[int, Sequence[DeviceGroup]],
    values: Mapping[int, Sequence[Sent]],
    n_microbatches: int,
) -> dict[int, float]:
    """Seconds of what a stage sends to others when it ends a micro-batch, by receiving stage: the longest of any.

    `sender`: its replicas. `receivers`: those of the other stages. `values`: what each of them gets, of a micro-batch.
    """
    rounds = _rounds(len(sender), {stage: len(groups) for stage, groups in receivers.items()}, n_microbatches)
    links = {
        stage: _slowest(cluster, sender, groups, [pairs[stage] for pairs in rounds])
        for stage, groups in receivers.items()
    }
    parts = {stage: [value.over(1 / links[stage].bandwidth) for value in values[stage]] for stage in receivers}
    carried = {stage: math.fsum(part.nbytes for part in mine) for stage, mine in parts.items()}
    if len(receivers) == 1:
        longest = {stage: link.seconds(carried[stage]) if carried[stage] else 0.0 for stage, link in links.items()}
    else:
        longest = _together(cluster, sender, receivers, carried, rounds)
    return {
        stage: seconds + (math.fsum(part.gather for part in parts[stage]) if seconds else 0.0)
        for stage, seconds in longest.items()
    }


Pairs = tuple[tuple[int, int], ...]  # (replica that sends, replica that receives)


def _rounds(senders: int, receivers: Mapping[int, int], n_microbatches: int) -> list[dict[int, Pairs]]:
    """The different sets of sends that go at once, by receiving stage: micro-batch k goes from replica k mod senders to
    replica k mod receivers."""
    found: dict[tuple[Pairs, ...], dict[int, Pairs]] = {}
    period = math.lcm(senders, *receivers.values())
    for first in range(0, min(n_microbatches, period), senders):
        ks = range(first, min(first + senders, n_microbatches))
        pairs = {stage: tuple((k % senders, k % n) for k in ks) for stage, n in receivers.items()}
        found.setdefault(tuple(pairs.values()), pairs)
    return list(found.values())


def _slowest(
    cluster: Cluster, sender: Sequence[DeviceGroup], receiver: Sequence[DeviceGroup], rounds: Sequence[Pairs]
) -> Link:
    """The link from one stage to one other if it sends to no further one, in the slowest round."""
    links = [shared_link(cluster, [(sender[i].devices, receiver[j].devices) for i, j in pairs]) for pairs in rounds]
    return Link(max(link.latency for link in links), min(link.bandwidth for link in links))


def _together(
    cluster: Cluster,
    sender: Sequence[DeviceGroup],
    receivers: Mapping[int, Sequence[DeviceGroup]],
    carried: Mapping[int, float],
    rounds: Sequence[Mapping[int, Pairs]],
) -> dict[int, float]:
    """Seconds by receiving stage of the slowest round, where a stage sends to several. `carried`: bytes to each."""
    longest = dict.fromkeys(receivers, 0.0)
    for pairs in rounds:
        at_once = [(stage, i, j) for stage, mine in pairs.items() for i, j in mine]
        messages = [MeshSend(sender[i].devices, receivers[s][j].devices, carried[s]) for s, i, j in at_once]
        for (stage, _, _), seconds in zip(at_once, send_seconds(cluster, messages), strict=True):
            longest[stage] = max(longest[stage], seconds)
    return longest
