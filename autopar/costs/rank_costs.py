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
from collections.abc import Mapping, Sequence
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

    cluster: Cluster  # hosts as nodes, its devices at hand; where hosts differ, every rank is a node of its own
    per_machine: int  # ranks of a machine, at most
    notes: tuple[str, ...] = ()
    handling: float = 0.0  # s of CPU time of each end of a message, besides the time of its link

    def crowd(self, sources: Sequence[DeviceGroup], targets: Sequence[DeviceGroup]) -> int:
        """How many of the sources send over one network card at once, to targets on other hosts."""
        cluster = self.cluster
        if not cluster.inter_node.shared:
            return 1
        there = {cluster.node_of(group.first) for group in targets}
        here = Counter(cluster.node_of(group.first) for group in sources)
        return max((count for host, count in here.items() if there - {host}), default=1)


def even(hosts: Sequence[int]) -> bool:
    """Whether every host has as many ranks, next to each other in the order of ranks."""
    counts = Counter(hosts)
    per_host = len(hosts) // len(counts)
    return list(hosts) == sorted(hosts) and set(counts.values()) == {per_host}


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
    hosts, kinds = list(ranks.hosts), {device.kind for device in devices}
    alike = even(hosts) and len(kinds) == 1
    nodes = len(set(hosts)) if alike else len(hosts)
    inside, across = links.within(hosts), links.between(hosts)
    any_link = across or inside or Link(0.0, math.inf)
    intra, inter = _network("within a host", inside or any_link), _network("between hosts", across or any_link)
    if not alike:
        inter = _network("between ranks", any_link)
    if links.shared and alike:
        inter = replace(inter, shared=True)
    known = specs or {kind: _unmeasured(device) for kind, device in {d.kind: d for d in devices}.items()}
    node = tuple(known[devices[i if alike else 0].kind] for i in range(len(devices) // nodes))
    named = {(devices[a].name, devices[b].name): link for (a, b), link in links.links.items()}
    cluster = Cluster(node, nodes, intra, inter, tuple(devices), named)
    collectives = tuple(_collectives(ranks, cluster, group, which, cache) for group in _groups(cluster))
    notes = () if alike else (_uneven(hosts, kinds),)
    cluster = replace(cluster, measured_collectives=collectives)
    return RankCosts(cluster, max(Counter(ranks.machines).values()), notes, _handling(ranks, devices, cache))


def _uneven(hosts: Sequence[int], kinds: set[str]) -> str:
    counts = ", ".join(map(str, Counter(hosts).values()))
    why = f"hosts have {counts} ranks" if len(kinds) == 1 else f"ranks are of different kinds ({', '.join(kinds)})"
    return f"{why}: collectives among n ranks are priced as among the first n, and no stage has a mesh"


def _network(name: str, link: Link) -> Network:
    return Network(name, link.latency, link.bandwidth, sources=dict.fromkeys(("latency", "line_rate"), "measured"))


def _unmeasured(device: Device) -> DeviceSpec:
    """A device's name and memory: groups of devices are priced by their network alone."""
    return replace(known_devices()["cpu"], name=device.kind, memory=max(1, device.memory))


def _groups(cluster: Cluster) -> list[tuple[int, ...]]:
    """Ranks of one group of every shape that replicas and lines of meshes have, the first such ranks.

    The first n ranks, for every n, and n ranks of as many hosts. Of many ranks, powers of two.
    """
    total, per_node = len(cluster.devices), len(cluster.node)
    wanted = [tuple(range(n)) for n in range(2, total + 1)]
    wanted += [tuple(i * per_node for i in range(n)) for n in range(2, cluster.nodes + 1)]
    if total > 8:
        wanted = [group for group in wanted if len(group) & (len(group) - 1) == 0 or len(group) in (per_node, total)]
    wanted = [group for group in wanted if len(group) <= _LARGE]
    found = {_shape(cluster, group): group for group in reversed(wanted)}
    return sorted(found.values(), key=lambda group: (len(group), group))


def _shape(cluster: Cluster, ranks: Sequence[int]) -> tuple[object, ...]:
    group = cluster.group([cluster.devices[rank] for rank in ranks])
    return group.nodes, group.per_node, group.uneven


def _collectives(
    ranks: RankMeasurements,
    cluster: Cluster,
    group: Sequence[int],
    which: Sequence[Collective],
    cache: MeasurementCache | None,
) -> MeasuredCollectives:
    """Of one group alone; and whether all equal groups take turns if they do the same at once."""
    links = sorted({(x.latency, str(x.bandwidth)) for x in cluster.measured_links.values()})
    described = [
        ranks.backend,
        cluster.nodes,
        len(cluster.node),
        [d.kind for d in cluster.devices],
        list(group),
        list(which),
    ]
    key = signature_key("collectives of ranks", described, links)  # other links, other collectives
    known = None if cache is None else cache.get(key, _collectives_from_json)
    if known is not None:
        return known
    found = ranks.collectives(group, which)
    shape = cluster.group([cluster.devices[rank] for rank in group])
    found = replace(found, nodes=shape.nodes, per_node=shape.per_node, uneven=shape.uneven)
    beside = _beside(cluster, group)
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


def _beside(cluster: Cluster, group: Sequence[int]) -> list[tuple[int, ...]]:
    """`group`, and the equal groups of other ranks in the same hosts, which could do the same at the same time."""
    hosts = {rank // len(cluster.node) for rank in group}
    here = [rank for rank in range(len(cluster.devices)) if rank // len(cluster.node) in hosts]
    step = group[1] - group[0]
    found, taken = [tuple(group)], set(group)
    for first in here:
        other = tuple(first + rank - group[0] for rank in group)
        if not taken & set(other) and all(rank in here for rank in other) and (step == 1 or len(hosts) > 1):
            found.append(other)
            taken |= set(other)
    return found
