"""What a job of one process a device costs: hosts, measured links and collectives between the ranks, shared cores.

    host 0   cpu:0 -- cpu:1        links and collectives inside of a host, and between hosts, are measured by size
               |        |          cores and memory are those of the machine that the ranks share
    host 1   cpu:2 -- cpu:3

The process that plans asks for measurements, and all processes make them (`RankMeasurements`, implemented by
`runtime/ranks/planning.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from autopar.costs.device_group import DeviceGroup
from cost_models import Cluster, Collective, Device, Link, MeasuredCollectives, MeasurementCache, Network, signature_key
from cost_models.hardware.device_specs import DeviceSpec, known_devices
from cost_models.measuring.operator_times import GraphTimes
from cost_models.measuring.process_links import ProcessLinks

OTHERWISE = 2.0
"""If a message over a network takes this many times as long or as short as the cache says, all is measured anew."""

IN_TURN = 1.5
"""If equal groups do the same at once, and take this many times as long as one alone, they share what they wait for."""

_LARGE = 256  # ranks: beyond, only groups whose sizes are powers of two are measured


class RankMeasurements(Protocol):
    """Measurements that all processes of a job make together; the process that plans calls these."""

    @property
    def hosts(self) -> Sequence[int]:
        """By rank, the number of its host: ranks of one host reach each other without a network."""

    @property
    def machines(self) -> Sequence[int]:
        """By rank, the number of the machine whose cores and memory it uses."""

    @property
    def cores(self) -> int:
        """Cores of a machine that its ranks may use together; of the machine with the fewest for each rank."""

    @property
    def backend(self) -> str:
        """Of torch.distributed, that carries tensors between the ranks."""

    def spec(self, rank: int) -> DeviceSpec:
        """What the device of a rank reaches."""

    def passes(self, ranks: Sequence[int], workers: int, rows: int) -> GraphTimes:
        """The times of the example's operators with `rows` samples, while all of `ranks`, of one machine, run them."""

    def links(self) -> ProcessLinks: ...

    def handling(self) -> float:
        """Seconds of CPU time of each end of a small message: the mean of sending and receiving it."""

    def differ(self, known: ProcessLinks) -> float:
        """The largest factor by which a message takes longer or shorter now."""

    def collectives(self, ranks: Sequence[int], which: Sequence[Collective]) -> MeasuredCollectives: ...

    def at_once(self, groups: Sequence[Sequence[int]], nbytes: int) -> float:
        """Seconds of an all-reduce of `nbytes` if all groups do it at the same time."""


@dataclass(frozen=True)
class RankCosts:
    """The hosts of a job, and what its ranks take to send to each other."""

    cluster: Cluster  # hosts as nodes, its devices at hand
    per_machine: int  # ranks of a machine, at most
    notes: tuple[str, ...] = ()
    handling: float = 0.0  # s of CPU time of each end of a message, besides the time of its link
    # Whether ranks exchange messages between two actions, and wait for that (runtime/ranks/messages/exchanges.py).
    exchanges: bool = False

    def crowd(self, sources: Sequence[DeviceGroup], targets: Sequence[DeviceGroup]) -> int:
        """How many of the sources send over one network card at once, to targets on other hosts."""
        cluster = self.cluster
        if not cluster.inter_node.shared:
            return 1
        there = {cluster.node_of(group.first) for group in targets}
        here = Counter(cluster.node_of(group.first) for group in sources)
        return max((count for host, count in here.items() if there - {host}), default=1)


def measured_links(ranks: RankMeasurements, devices: Sequence[Device], cache: MeasurementCache | None) -> ProcessLinks:
    """The links between all ranks: from the cache, unless a message shows that the network is another one."""
    key = signature_key("links of ranks", ranks.backend, list(ranks.hosts), [(d.kind, d.threads) for d in devices])
    known = None if cache is None else cache.get(key, _links_from_json)
    if known is not None and ranks.differ(known) <= OTHERWISE:
        return known
    found = ranks.links()
    if cache is not None:
        rows = [(a, b, link.latency, str(link.bandwidth)) for (a, b), link in found.links.items()]
        cache.put(key, {"links": rows, "shared": found.shared})
    return found


def _links_from_json(value: Any) -> ProcessLinks:
    """Cached links. Raises KeyError, TypeError or ValueError for anything else."""
    links = {(int(a), int(b)): Link(float(latency), float(rate)) for a, b, latency, rate in value["links"]}
    return ProcessLinks(links, bool(value["shared"]))


def _handling(ranks: RankMeasurements, devices: Sequence[Device], cache: MeasurementCache | None) -> float:
    key = signature_key("handling of messages", ranks.backend, [(d.kind, d.threads) for d in devices])
    known = None if cache is None else cache.get(key, float)
    if known is None:
        known = ranks.handling()
        if cache is not None:
            cache.put(key, known)
    return known


def rank_costs(
    ranks: RankMeasurements,
    devices: Sequence[Device],
    links: ProcessLinks,
    cache: MeasurementCache | None,
    *,
    specs: Mapping[str, DeviceSpec] | None = None,
    which: Sequence[Collective] = ("all_reduce",),
) -> RankCosts:
    """The cluster that the ranks make, with collectives measured in groups of every shape that a plan may use.

    `specs`: of the kinds of devices, where meshes are priced. `which`: the collectives to measure.
    """
    hosts, kinds = list(ranks.hosts), {device.kind: device for device in devices}
    inside, across = links.within(hosts), links.between(hosts)
    any_link = across or inside or Link(0.0, math.inf)
    intra, inter = _network("within a host", inside or any_link), _network("between hosts", across or any_link)
    if links.shared:
        inter = replace(inter, shared=True)
    known = specs or {kind: _unmeasured(device) for kind, device in kinds.items()}
    named = {(devices[a].name, devices[b].name): link for (a, b), link in links.links.items()}
    cluster = _hosts_as_nodes(hosts, devices, known, intra, inter)
    cluster = replace(cluster, measured_links=named)
    rank_of = {device.name: rank for rank, device in enumerate(devices)}
    measured = [sorted(rank_of[cluster.devices[i].name] for i in group) for group in _groups(cluster)]
    collectives = tuple(_collectives(ranks, cluster, devices, group, which, cache) for group in measured)
    notes = (_mixed(kinds),) if len(kinds) > 1 else ()
    cluster = replace(cluster, measured_collectives=collectives)
    handling = _handling(ranks, devices, cache)
    return RankCosts(cluster, max(Counter(ranks.machines).values()), notes, handling, ranks.backend == "nccl")


def _hosts_as_nodes(
    hosts: Sequence[int], devices: Sequence[Device], specs: Mapping[str, DeviceSpec], intra: Network, inter: Network
) -> Cluster:
    """The devices host by host, whatever the order of ranks. Nodes are alike where hosts are."""
    by_host: dict[int, list[Device]] = {host: [] for host in sorted(set(hosts))}
    for host, device in zip(hosts, devices, strict=True):
        by_host[host].append(device)
    at_hand = tuple(device for mine in by_host.values() for device in mine)
    kinds = [tuple(specs[device.kind] for device in mine) for mine in by_host.values()]
    if len(set(kinds)) == 1:
        return Cluster(kinds[0], len(kinds), intra, inter, at_hand)
    every = tuple(spec for of_host in kinds for spec in of_host)
    return Cluster(every, 1, intra, inter, at_hand, sizes=tuple(map(len, kinds)))


def _mixed(kinds: Collection[str]) -> str:
    return (
        f"ranks are of different kinds ({', '.join(kinds)}): collectives are priced as those of the first ranks that "
        "lie alike in their hosts"
    )


def _network(name: str, link: Link) -> Network:
    return Network(name, link.latency, link.bandwidth, sources=dict.fromkeys(("latency", "line_rate"), "measured"))


def _unmeasured(device: Device) -> DeviceSpec:
    """A device's name and memory: groups of devices are priced by their network alone."""
    return replace(known_devices()["cpu"], name=device.kind, memory=max(1, device.memory))


def _groups(cluster: Cluster) -> list[tuple[int, ...]]:
    """Places in the cluster of one group of every shape that replicas and lines of meshes have, the first such devices.

    The first n devices, for every n, and n devices of as many nodes: of all, and where nodes differ, of those that have
    as many. Of many devices, powers of two.
    """
    nodes = [cluster.node_of(device) for device in cluster.devices]
    size = Counter(nodes)
    alike = [[i for i, node in enumerate(nodes) if size[node] == n] for n in dict.fromkeys(size.values())]
    wanted: list[tuple[int, ...]] = []
    for mine in [list(range(len(nodes))), *(alike if len(alike) > 1 else ())]:
        firsts = [i for place, i in enumerate(mine) if place == 0 or nodes[i] != nodes[mine[place - 1]]]
        wanted += [tuple(mine[:n]) for n in range(2, len(mine) + 1)]
        wanted += [tuple(firsts[:n]) for n in range(2, len(firsts) + 1)]
    if len(nodes) > 8:
        kept = (*size.values(), len(nodes))
        wanted = [group for group in wanted if len(group) & (len(group) - 1) == 0 or len(group) in kept]
    wanted = [group for group in wanted if len(group) <= _LARGE]
    found = {_shape(cluster, [cluster.devices[i] for i in group]): group for group in reversed(wanted)}
    return sorted(found.values(), key=lambda group: (len(group), group))


def _shape(cluster: Cluster, devices: Sequence[Device]) -> tuple[object, ...]:
    group = cluster.group(devices)
    return group.nodes, group.per_node, group.uneven


def _collectives(
    ranks: RankMeasurements,
    cluster: Cluster,
    devices: Sequence[Device],
    group: Sequence[int],
    which: Sequence[Collective],
    cache: MeasurementCache | None,
) -> MeasuredCollectives:
    """Of one group of ranks alone; and whether all equal groups take turns if they do the same at once."""
    links = sorted({(x.latency, str(x.bandwidth)) for x in cluster.measured_links.values()})
    described = [
        ranks.backend,
        [cluster.node_of(device) for device in devices],
        [device.kind for device in devices],
        list(group),
        list(which),
    ]
    key = signature_key("collectives of ranks", described, links)  # other links, other collectives
    known = None if cache is None else cache.get(key, _collectives_from_json)
    if known is not None:
        return known
    found = ranks.collectives(group, which)
    shape = cluster.group([devices[rank] for rank in group])
    found = replace(found, nodes=shape.nodes, per_node=shape.per_node, uneven=shape.uneven)
    beside = _beside([cluster.node_of(device) for device in devices], group)
    if len(beside) > 1 and "all_reduce" in found.times:
        alone = found.times["all_reduce"][-1]
        found = replace(found, in_turn=ranks.at_once(beside, found.sizes[-1]) > IN_TURN * alone)
    if cache is not None:
        fields = {name: getattr(found, name) for name in ("nodes", "per_node", "sizes", "times", "uneven", "in_turn")}
        cache.put(key, fields)
    return found


def _collectives_from_json(value: Any) -> MeasuredCollectives:
    """Cached times. Raises KeyError, TypeError or ValueError for anything else."""
    times = {name: tuple(map(float, of)) for name, of in value["times"].items()}
    return MeasuredCollectives(
        int(value["nodes"]),
        int(value["per_node"]),
        tuple(map(int, value["sizes"])),
        times,
        tuple(map(int, value["uneven"])),
        bool(value["in_turn"]),
    )


def _beside(nodes: Sequence[int], group: Sequence[int]) -> list[tuple[int, ...]]:
    """`group`, and the equal groups of other ranks in the same hosts, which could do the same at the same time.

    `nodes`: by rank.
    """
    wanted = Counter(nodes[rank] for rank in group)
    free = {node: [rank for rank, of in enumerate(nodes) if of == node and rank not in group] for node in wanted}
    found = [tuple(group)]
    while all(len(free[node]) >= n for node, n in wanted.items()):
        found.append(tuple(sorted(rank for node, n in wanted.items() for rank in free[node][:n])))
        free = {node: free[node][n:] for node, n in wanted.items()}
    return found
