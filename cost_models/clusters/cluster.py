"""Clusters: nodes of devices and the networks between them, present or planned.

    cluster = Cluster.preset("8xH100", nodes=16)       from data sheets, planned for without the hardware
    cluster = Cluster.from_toml("ours.toml")           the same from your own file
    cluster = Cluster.from_devices(["cuda:0", "cuda:1"])   present, measured

Either way it has devices, a link between any two of them, and the seconds of a collective among any group:

    node 0   0.0:H100 -- 0.1:H100 -- ... -- 0.7:H100    intra_node: one network inside every node
                |           |                  |
    node 1   1.0:H100 -- 1.1:H100 -- ... -- 1.7:H100    inter_node: one network between nodes
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, permutations
from pathlib import Path
from typing import Literal

import torch

from cost_models.clusters.cluster_file import (
    MOST_DEVICES,
    ClusterFile,
    choose_network,
    format_cluster_file,
    node_text,
    parse_node,
    read_cluster_file,
)
from cost_models.collectives.formulas import Collective, Group, collective_seconds
from cost_models.collectives.measured import MeasuredCollectives
from cost_models.errors import DeviceError
from cost_models.hardware.device_specs import DeviceSpec
from cost_models.hardware.devices import Device, parse_devices
from cost_models.hardware.links import Link, measure_links
from cost_models.hardware.networks import Network
from cost_models.measuring.cache import MeasurementCache
from cost_models.measuring.calibration import calibrate
from cost_models.measuring.peak_rates import measure_spec

Level = Literal["device", "intra_node", "inter_node"]

_PLACEHOLDER = re.compile(r"(\d+)\.\d+:")  # how the name of a device begins that is not at hand


@dataclass(frozen=True)
class Cluster:
    """`nodes` nodes, each of the devices `node`. Devices of several kinds may share a node; all nodes are alike.

    Devices at hand may lie in nodes that differ: then `node` has all of them, and `sizes` says how many each node has.

        nodes=2, node=(A, A)                  0.0 0.1 | 1.0 1.1
        nodes=1, node=(A, A, A), sizes=(2, 1)       0   1 | 2

    Measurements take precedence: `measured_links` over the networks' figures, and `measured_collectives`, of groups
    of the same shape, over the formulas. `dataclasses.replace(cluster, measured_collectives=(m,))` adds them.

    Raises:
        DeviceError: no devices, fewer than one node, sizes that do not fit, or kinds that share a name and differ.
    """

    node: tuple[DeviceSpec, ...]  # the devices of a node, in order
    nodes: int
    intra_node: Network
    inter_node: Network
    at_hand: tuple[Device, ...] = ()  # the node's devices if they are present; else `devices` are placeholders
    measured_links: Mapping[tuple[str, str], Link] = field(default_factory=dict, hash=False)  # by names of devices
    measured_collectives: tuple[MeasuredCollectives, ...] = ()
    sizes: tuple[int, ...] = ()  # devices of each node, where nodes differ

    def __post_init__(self) -> None:
        if type(self.nodes) is not int:
            raise DeviceError(f"nodes must be a whole number of at least 1, got {self.nodes!r}")
        if not self.node or self.nodes < 1:
            raise DeviceError(
                f"a cluster needs 1 or more devices a node and nodes, got {len(self.node)} and {self.nodes}"
            )
        if len(self.node) * self.nodes > MOST_DEVICES:
            raise DeviceError(
                f"a cluster has at most {MOST_DEVICES} devices, got {len(self.node)} in each of {self.nodes} nodes"
            )
        if self.sizes and (min(self.sizes) < 1 or self.nodes > 1 or sum(self.sizes) != len(self.at_hand)):
            raise DeviceError(
                f"sizes of nodes are those of the {len(self.at_hand)} devices at hand, one or more in each, with "
                f"nodes=1; got {self.sizes} and nodes={self.nodes}"
            )
        for spec in self.node:
            if self.specs[spec.name] != spec:
                raise DeviceError(f"two kinds of devices are both called {spec.name!r}; name them differently")

    @classmethod
    def preset(
        cls,
        node: str,
        nodes: int = 1,
        *,
        intra_node: str | Network | None = None,
        inter_node: str | Network | None = None,
        cards: int | None = None,
    ) -> Cluster:
        """A cluster of known devices: "8xH100", "L4", "4xA100-80+4xT4" (of two kinds in every node).

        The networks are those such devices usually come with, NVLink and an InfiniBand adapter a device for those of a
        DGX, and the slowest of the kinds; others by name ("EFA", "Ethernet25") or as values. `cards`: adapters of a
        node to the network between nodes, which its devices share, neighbours the same; default as the network says.

        Raises:
            DeviceError: an unknown device or network; the message lists the known ones. No cards.
        """
        specs = parse_node(node, {})
        inside = choose_network(specs, "intra_node", intra_node)
        across = choose_network(specs, "inter_node", inter_node)
        if cards is not None:
            across = replace(across, shared=True, cards=cards)
        return cls(specs, nodes, inside, across)

    @classmethod
    def from_toml(cls, path: str | Path) -> Cluster:
        """A cluster from a file; `to_toml` writes such files.

            node = "8xmine"             # devices defined here or known
            nodes = 2                   # default 1
            intra_node = "NVLink4"      # defined here or known; default as for a preset
            inter_node = "ours"
            [devices.mine]              # the fields of DeviceSpec
            peak_flops = { float32 = 50e12, bfloat16 = 400e12 }
            ...
            [networks.ours]             # the fields of Network
            latency = 20e-6
            ...

        Raises:
            DeviceError: everything that is wrong with the file, or why it cannot be read.
        """
        read = read_cluster_file(path)
        return cls(read.node, read.nodes, read.intra_node, read.inter_node)

    @classmethod
    def from_devices(
        cls,
        devices: Sequence[str | torch.device] | str | Sequence[Device] | None = None,
        *,
        calibrated: bool = False,
        cache: MeasurementCache | None = None,
    ) -> Cluster:
        """The devices at hand as one node, measured in seconds: products, copies, launches and links of every kind.

        `devices`: as for `parse_devices`, or what it returned. The networks carry the slowest of the measured links.
        `calibrated`: every kind is timed on all sorts of kernels, too, for estimates that know its efficiency by size;
        that takes 10 to 30 seconds a kind, once if there is a `cache`. `to_toml` keeps the curves.

        Raises:
            DeviceError: as `parse_devices`.
        """
        parsed = not isinstance(devices, str | None) and len(devices) > 0 and isinstance(devices[0], Device)
        workers: tuple[Device, ...] = tuple(devices) if parsed else parse_devices(devices)  # type: ignore[arg-type]
        specs = {}
        for worker in workers:
            if worker.kind not in specs:
                spec = measure_spec(worker)
                specs[worker.kind] = calibrate(worker, cache).spec(spec) if calibrated else spec
        links = measure_links(workers)
        latency = max((link.latency for link in links.values()), default=0.0)
        rate = min((link.bandwidth for link in links.values()), default=float("inf"))
        connection = Network("measured", latency, rate, sources=dict.fromkeys(("latency", "line_rate"), "measured"))
        return cls(tuple(specs[w.kind] for w in workers), 1, connection, connection, workers, links)

    @cached_property
    def specs(self) -> dict[str, DeviceSpec]:
        """The kinds of devices by name, which is their `Device.kind`."""
        specs: dict[str, DeviceSpec] = {}
        for spec in self.node:
            specs.setdefault(spec.name, spec)
        return specs

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """All devices, node by node; device 3 of node 0 is called "0.3:H100" where it is not at hand."""
        return self.at_hand or tuple(
            Device(f"{node}.{index}:{spec.name}", torch.device("meta"), spec.name, int(spec.memory), threads=1)
            for node in range(self.nodes)
            for index, spec in enumerate(self.node)
        )

    def node_of(self, device: Device | str) -> int:
        """The number of the node that a device, or the device of a name, lies in.

        Raises:
            DeviceError: the cluster has no such device.
        """
        name = device if isinstance(device, str) else device.name
        if name not in self.place_of:
            raise DeviceError(f"{name!r} is no device of {self.title}; the first is {self.devices[0].name!r}")
        place = self.place_of[name]
        return bisect_right(self._ends, place) if self.sizes else place // len(self.node)

    @property
    def n_nodes(self) -> int:
        return len(self.sizes) or self.nodes

    @property
    def largest_node(self) -> int:
        """Devices of the node that has the most."""
        return max(self.sizes, default=len(self.node))

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """Of nodes that differ, the number of the first device behind each."""
        return tuple(accumulate(self.sizes))

    @cached_property
    def place_of(self) -> Mapping[str, int]:
        """The number of each device by name, node by node."""
        return {device.name: index for index, device in enumerate(self.devices)}

    @property
    def cards(self) -> int:
        """Network cards of a node, to the other nodes: as many as devices where each has its own."""
        return self.inter_node.cards if self.inter_node.shared else self.largest_node

    def card_of(self, device: Device | str) -> tuple[int, int]:
        """The node of a device and the number of its card there; devices of one number share the card.

        Raises:
            DeviceError: the cluster has no such device.
        """
        node, name = self.node_of(device), device if isinstance(device, str) else device.name
        place = self.place_of[name]
        if not self.sizes:
            return node, self.inter_node.card(place % len(self.node), len(self.node))
        first = self._ends[node] - self.sizes[node]
        return node, self.inter_node.card(place - first, self.sizes[node])

    def link(self, a: Device | str, b: Device | str) -> Link:
        """The link from `a` to `b`, measured or estimated, with its card to itself; free from a device to itself."""
        first, second = (end if isinstance(end, str) else end.name for end in (a, b))
        same_node = self.node_of(first) == self.node_of(second)
        if first == second:
            return Link(0.0, float("inf"))
        if (first, second) in self.measured_links:
            return self.measured_links[first, second]
        return (self.intra_node if same_node else self.inter_node).link

    @cached_property
    def links(self) -> Mapping[tuple[str, str], Link]:
        """The link of every ordered pair of devices by their names, computed on access."""
        return _Links(self)

    @cached_property
    def shared_links(self) -> dict[Hashable, Link]:
        """Those that `sends.shared_link` has found, by the pairs of meshes."""
        return {}

    def links_among(self, devices: Sequence[Device | str]) -> set[Link]:
        """The different links between any two of the devices."""
        names = [device if isinstance(device, str) else device.name for device in devices]
        if self.measured_links:
            return {self.link(a, b) for a, b in permutations(names, 2)}
        counts = Counter(self.node_of(name) for name in names)
        inside = {self.intra_node.link} if max(counts.values(), default=0) > 1 else set()
        return inside | ({self.inter_node.link} if len(counts) > 1 else set())

    def level(self, devices: Sequence[Device | str]) -> Level:
        """The slowest level that a group spans: one device alone, devices of one node, or devices of several."""
        group = self.group(devices)
        return "inter_node" if group.nodes > 1 else "intra_node" if group.most > 1 else "device"

    def group(self, devices: Sequence[Device | str]) -> Group:
        """The shape of a group: how many of its devices lie in each node.

        Raises:
            DeviceError: the group is empty, has a device twice, or one that is none of the cluster's.
        """
        names = [device if isinstance(device, str) else device.name for device in devices]
        if not names or len(set(names)) < len(names):
            raise DeviceError(f"a group needs devices, and each of them once, got {names}")
        counts = Counter(self.node_of(name) for name in names)
        return Group.of(counts.values(), self.intra_node, self.inter_node, self.largest_node)

    def seconds(
        self, collective: Collective, nbytes: float, devices: Sequence[Device | str], concurrent: int = 1
    ) -> float:
        """Seconds of a collective among `devices`: measured where a group of that shape was, else estimated.

        The arguments and errors are those of `group` and `collective_seconds`; `concurrent` divides shared networks. To
        what was measured it applies only where groups take turns (`MeasuredCollectives.in_turn`).
        """
        return self.seconds_in(self.group(devices), collective, nbytes, concurrent)

    def seconds_in(self, group: Group, collective: Collective, nbytes: float, concurrent: int = 1) -> float:
        """`seconds` of a collective in a group of known shape, see `group`."""
        shape = (group.nodes, group.per_node, group.uneven)
        for measured in self.measured_collectives:
            if (measured.nodes, measured.per_node, measured.uneven) == shape and collective in measured.times:
                return measured.seconds(collective, nbytes) * (concurrent if measured.in_turn else 1)
        return collective_seconds(collective, nbytes, group, concurrent)

    @property
    def title(self) -> str:
        """The devices in short: "16 nodes of 8xH100"."""
        if self.sizes:
            return f"{node_text(self.node)} on nodes of {', '.join(map(str, self.sizes))} devices"
        return f"{self.nodes} node{'s' if self.nodes > 1 else ''} of {node_text(self.node)}"

    def to_toml(self, path: str | Path | None = None) -> str:
        """The text of a file that `from_toml` reads back as an equal cluster, without measurements and devices at hand.

        `path`: write the text to this file, too; a file that exists is replaced.

        Raises:
            DeviceError: networks of one name differ, a device's name holds "+", or nodes differ.
            OSError: the file cannot be written.
        """
        if self.sizes:
            raise DeviceError(f"a cluster's file has nodes that are alike, and these have {self.sizes} devices")
        text = format_cluster_file(ClusterFile(self.node, self.nodes, self.intra_node, self.inter_node))
        if path is not None:
            Path(path).write_bytes(text.encode())  # as bytes: line ends stay as they are
        return text

    def __str__(self) -> str:
        rows = [("device", "a node", "memory", "bandwidth", "peak TFLOP/s (reached)")]
        for name, spec in self.specs.items():
            peaks = ", ".join(f"{dtype} {rate / 1e12:g}" for dtype, rate in spec.peak_flops.items())
            count = sum(s.name == name for s in self.node)
            memory, rate = f"{spec.memory / 1e9:.4g} GB", f"{spec.bandwidth / 1e9:.4g} GB/s"
            rows.append((name, str(count), memory, rate, f"{peaks} ({spec.flops_efficiency:.0%})"))
        rows += [("", "", "", "", ""), ("level", "network", "latency", "bandwidth", "")]
        levels = [("in a node", self.intra_node)] + ([("between nodes", self.inter_node)] if self.n_nodes > 1 else [])
        for level, net in levels:
            of = "each device"
            if net.shared:
                of = "shared by a node" if net.cards == 1 else f"each of {net.cards} cards of a node"
            rows.append((level, net.name, f"{net.latency * 1e6:.3g} us", f"{net.bandwidth / 1e9:.4g} GB/s", of))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([f"{self.title}: {len(self.devices)} devices", *lines])


def node_in_name(name: str) -> int | None:
    """The node in the name of a device that is not at hand ("0.3:H100"); None for other names."""
    match = _PLACEHOLDER.match(name)
    return int(match[1]) if match else None


class _Links(Mapping[tuple[str, str], Link]):
    """A view of a cluster: a thousand devices have a million pairs."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[tuple[str, str], Link] = {}  # those asked for: a search asks for the same ones very often

    def __getitem__(self, pair: tuple[str, str]) -> Link:
        found = self._known.get(pair)
        if found is None:
            try:
                found = self._known[pair] = self._cluster.link(*pair)
            except DeviceError as error:
                raise KeyError(pair) from error
        return found

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return permutations((device.name for device in self._cluster.devices), 2)

    def __len__(self) -> int:
        n = len(self._cluster.devices)
        return n * (n - 1)
