"""Seconds that collective operations take, from constants of the network.

A collective of n devices moves a tensor in steps, each of some latency, and every device sends a share of the bytes.
Each has one algorithm, so that an all_reduce costs what a reduce_scatter and an all_gather after it cost:

    collective        steps      bytes a device sends of S   S is                                   algorithm
    reduce_scatter    n - 1        (n - 1) / n  S            the tensor to reduce, on each          ring
    all_gather        n - 1        (n - 1) / n  S            the gathered tensor                    ring
    all_reduce        2 (n - 1)  2 (n - 1) / n  S            the tensor, the same on all            the two rings
    all_to_all        n - 1        (n - 1) / n  S            what each device has, its own part     pairwise exchange
                                                             included
    broadcast         n - 1                     S            the tensor                             pipelined ring
    send_recv         1                         S            the tensor                             one message

In a ring each device sends S / n to the next one n - 1 times (Patarasuk, Yuan: Bandwidth optimal all-reduce algorithms
for clusters of workstations, 2009, sections 3 and 4; NCCL counts the same steps, `nsteps` in src/graph/tuning.cc). In a
pairwise exchange it sends S / n to another one each time (Thakur, Rabenseifner, Gropp: Optimization of Collective
Communication Operations in MPICH, 2005, section 3.2). "Bus bandwidth" is the bytes a device sends over the time
(nccl-tests, PERFORMANCE.md).

A switch that reduces (NVLink SHARP) needs each device to send its S and to receive S once, whatever n: an all_reduce
then takes 2 S / in_switch over the bandwidth, where `in_switch`, from 1 to 2, is the gain over a ring of very many
devices. Two devices send S each in the ring as well and gain nothing; NCCL does not even try (`gpuCount <= 2` in
src/transport/nvls.cc). The faster of ring and switch counts.

Across m nodes with g devices each, both levels work at once, chunk after chunk: what a ring across the nodes brings,
from devices of one rank to each other, is passed around in a ring within each node (and reduced the other way round):

    node 0    0 --- 1 --- 2 --- 3        inside:  all n devices' bytes at the network's bandwidth, n - m steps
              |     |     |     |        across:  (m - 1) / m instead of (n - 1) / n, through the adapters of the g
    node 1    4 --- 5 --- 6 --- 7                 devices (or through those that they share), m - 1 steps

So these are n - 1 steps as well, m (g - 1) of them inside (as NCCL counts, `nInterSteps` there). A pairwise exchange
has its g - 1 steps to devices of the node, and n - g across, where each node sends g (n - g) / n S.

Nodes may have different numbers of the devices, g_i of the n in node i. Inside, the fullest node decides. Across, node
i lacks the (n - g_i) / n of the tensor that lie elsewhere, which reach it through its own adapters; the node for which
that takes longest decides. Of 8 + 1 devices it is the lone one, with 8/9 of the tensor through one adapter:

    node 0    0  1  2  3  4  5  6  7     lacks 1/9, has 8 adapters
                    |
    node 1          8                    lacks 8/9, has 1 adapter

With g devices in every node this is the rule above, (n - g) / n = (m - 1) / m.

Several groups in the same nodes, such as the data-parallel groups of the ranks of a tensor-parallel mesh, often run the
same collective at once. Then each has its part of the adapters that all their devices reach, which are taken for
neighbours (`Network.reach`):

    8 devices, 4 shared adapters; 8 groups of one device a node     each has 4/8 of an adapter
                                  1 group of one device a node      one adapter
                                  1 group of three devices a node   two adapters

The slower level decides the bytes' time T; the latencies L of both add up. A message is cut into chunks that follow
each other through the steps; few chunks fill the pipe late and many pay latency often. The best number of chunks gives
(sqrt(L) + sqrt(T))^2 (Johnsson, Ho: Optimum Broadcasting and Personalized Communication in Hypercubes, 1989); real
libraries do better or worse, by a factor `ramp` of the network:

    seconds = L + T + 2 sqrt(ramp L T) + start

`start` does not depend on the number of steps: the kernel waits for those that make the tensor, on another stream. It
is 0 for networks that were measured by collectives one after another.

Latencies, efficiencies, ramps and gains of the switch are in `data/networks.toml`. Some are fitted to the measured
all-reduces of `data/allreduce_busbw.csv`; the header of networks.toml lists which, and what was held out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from cost_models.errors import DeviceError
from cost_models.hardware.networks import Network

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)


@dataclass(frozen=True)
class Group:
    """The shape of a group of devices that run a collective.

    Raises:
        ValueError: a count is below one, the counts contradict each other, or a network between devices is missing.
    """

    per_node: int  # devices in each node; where the numbers differ, in the node with the fewest
    nodes: int = 1
    intra_node: Network | None = None  # may be None where no node has more than one
    inter_node: Network | None = None  # may be None where nodes is 1
    uneven: tuple[int, ...] = ()  # devices in every node, ascending, where the numbers differ
    devices: int = 0  # of a node, in the group or not; 0: no others than those that run the collective

    def __post_init__(self) -> None:
        if self.per_node < 1 or self.nodes < 1:
            raise ValueError(f"a group needs 1 or more devices a node and nodes, got {self.per_node} and {self.nodes}")
        counts = self.uneven
        if counts and (len(counts) != self.nodes or counts[0] != self.per_node or list(counts) != sorted(counts)):
            raise ValueError(
                f"uneven numbers of devices are one per node, ascending from the fewest: {self.nodes} numbers from "
                f"{self.per_node} on, got {counts}"
            )
        if (self.most > 1 and self.intra_node is None) or (self.nodes > 1 and self.inter_node is None):
            raise ValueError(f"a group of {self.nodes} x {self.most} devices needs the networks that connect them")

    @classmethod
    def of(
        cls, counts: Iterable[int], intra_node: Network | None, inter_node: Network | None, devices: int = 0
    ) -> Group:
        """The group with these numbers of devices in its nodes, e.g. (8, 1). `devices`: of a node in all."""
        ascending = tuple(sorted(counts))
        if not ascending:
            raise ValueError("a group needs 1 or more nodes, got none")
        even = ascending[0] == ascending[-1]
        return cls(ascending[0], len(ascending), intra_node, inter_node, () if even else ascending, devices)

    @property
    def size(self) -> int:
        """Devices in all."""
        return sum(self.uneven) if self.uneven else self.nodes * self.per_node

    @property
    def most(self) -> int:
        """Devices in the node with the most."""
        return self.uneven[-1] if self.uneven else self.per_node

    @property
    def counts(self) -> tuple[int, ...]:
        """The different numbers of devices that nodes have, ascending."""
        return tuple(dict.fromkeys(self.uneven)) or (self.per_node,)

    def adapters(self, network: Network, senders: int, concurrent: int) -> float:
        """Adapters of one node for each of `concurrent` groups that have `senders` sending devices in it."""
        devices = self.devices or self.most * concurrent
        return network.reach(min(senders * concurrent, devices), devices) / concurrent


def collective_seconds(collective: Collective, nbytes: float, group: Group, concurrent: int = 1) -> float:
    """Seconds that a collective on `nbytes` bytes (S above) takes in `group`; 0 for a group of one.

    `send_recv` is from one device of the group to another, across nodes where the group has several.
    `concurrent`: number of groups in the same nodes that run the same collective at once; they divide shared adapters.

    Raises:
        DeviceError: an unknown collective, negative bytes, or `concurrent` below one.
    """
    if collective not in COLLECTIVES:
        raise DeviceError(f"unknown collective {collective!r}; known are {', '.join(COLLECTIVES)}")
    if not nbytes >= 0 or concurrent < 1:
        raise DeviceError(f"needs bytes >= 0 and concurrent >= 1, got {nbytes} and {concurrent}")
    if group.size == 1:
        return 0.0
    latency = duration = ramp = start = 0.0
    if group.intra_node is not None and group.most > 1 and not (collective == "send_recv" and group.nodes > 1):
        inside = group.intra_node
        latency += _steps_inside(collective, group) * inside.latency
        duration = _inside_seconds(collective, nbytes, group, inside, concurrent)
        ramp, start = inside.ramp, inside.start
    if group.inter_node is not None and group.nodes > 1:
        across = group.inter_node
        latency += _steps_across(collective, group) * across.latency
        duration = max(duration, _across_seconds(collective, nbytes, group, across, concurrent))
        ramp, start = max(ramp, across.ramp), max(start, across.start)
    return latency + duration + 2 * math.sqrt(ramp * latency * duration) + start


def _steps_inside(collective: Collective, group: Group) -> int:
    """Messages within a node that follow each other, of the n - 1 of a round."""
    if collective == "send_recv":
        return 1
    if collective == "all_to_all":  # those of a device in the emptiest node, which has most to send across
        return group.per_node - 1
    return _rounds(collective) * (group.size - group.nodes)


def _steps_across(collective: Collective, group: Group) -> int:
    """Messages between nodes that follow each other, of the n - 1 of a round."""
    if collective == "send_recv":
        return 1
    if collective == "all_to_all":
        return group.size - group.per_node
    return _rounds(collective) * (group.nodes - 1)


def _rounds(collective: Collective) -> int:
    """How often the tensor goes around the ring: an all_reduce is a reduce_scatter and an all_gather."""
    return 2 if collective == "all_reduce" else 1


def _inside_seconds(collective: Collective, nbytes: float, group: Group, network: Network, concurrent: int) -> float:
    """Seconds of the bytes that a device sends within its node.

    Those of the whole group, a little more than those for the node's own devices: what comes from other nodes has to
    be passed on. So spreading a group over several nodes never makes it faster.
    """
    whole = collective in ("broadcast", "send_recv")
    share = 1.0 if whole else _rounds(collective) * (group.size - 1) / group.size
    senders = 1 if collective == "send_recv" else group.most
    rate = network.bandwidth
    if network.shared:
        rate *= group.adapters(network, senders, concurrent) / senders
    return nbytes * share / (rate * _switch_gain(collective, group.most, network))


def _across_seconds(collective: Collective, nbytes: float, group: Group, network: Network, concurrent: int) -> float:
    """Seconds of the bytes between nodes, of the node that takes the longest: see the rule for uneven groups above."""
    rate = network.bandwidth * _switch_gain(collective, group.nodes, network)
    n = group.size

    def seconds(own: int) -> float:
        """Of a node that has `own` of the n devices."""
        adapters = group.adapters(network, 1 if collective == "send_recv" else own, concurrent)
        if collective in ("broadcast", "send_recv"):
            return nbytes / (rate * adapters)
        if collective == "all_to_all":  # each of its devices has a part for every device outside; nothing is combined
            return nbytes * own * (n - own) / n / (rate * adapters)
        return _rounds(collective) * nbytes * (n - own) / n / (rate * adapters)

    return max(seconds(own) for own in group.counts)


def _switch_gain(collective: Collective, n: int, network: Network) -> float:
    """Bandwidth of an all_reduce of n devices, or nodes, over that of their ring: the faster of ring and switch."""
    if collective != "all_reduce" or n <= 2:
        return 1.0
    return max(1.0, network.in_switch * (n - 1) / n)
