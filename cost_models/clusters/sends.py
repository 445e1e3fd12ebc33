"""Seconds that meshes take to send tensors to each other, where sends that go at once share cards.

Each device of the receiving mesh gets its part of a tensor. The devices of both meshes form lanes, as many as the wider
mesh has devices if the narrower one divides it, and each lane carries the same bytes:

    2 -> 4   0 --- 4      8 -> 1   0 --.      in a node       a lane has the port of its sender and that of its receiver
             0 --- 5               .    >- 8                  to the network inside the node
             1 --- 6               7 --'      across nodes    all lanes out of a card, or into it, share its bandwidth:
             1 --- 7                                          of 8 lanes over one card, each has an eighth

All messages of one call start together. A card serves its lanes alike, so a lane of x bytes beside others of y bytes
ends after the sum of min(x, y) over all of them. Both directions of a card work at the same time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cost_models.clusters.cluster import Cluster
from cost_models.hardware.links import Link


class MeshSend(NamedTuple):
    """What one mesh sends to another."""

    source: Sequence[str]  # names of devices
    target: Sequence[str]
    nbytes: float  # that each device of the target receives


def send_seconds(cluster: Cluster, messages: Sequence[MeshSend]) -> list[float]:
    """Seconds of each of the messages, which start at the same time; 0 for those without bytes and within a device.

    Each takes the latency of the slowest network that it crosses, and the seconds of its slowest lane.
    """
    links = _served_links(cluster, messages)
    return [
        0.0 if link is None else link.seconds(message.nbytes) for message, link in zip(messages, links, strict=True)
    ]


def shared_link(cluster: Cluster, pairs: Sequence[tuple[Sequence[str], Sequence[str]]]) -> Link:
    """The link that every message sees where messages of one size go at once from a mesh to another for all `pairs`.

    Its bandwidth is that of the slowest, in bytes that a device of the target receives.
    """
    key = tuple((tuple(source), tuple(target)) for source, target in pairs)
    if key not in cluster.shared_links:
        links = _served_links(cluster, [MeshSend(source, target, 1.0) for source, target in key])
        served = [link for link in links if link is not None]
        latency = max((link.latency for link in served), default=0.0)
        cluster.shared_links[key] = Link(latency, min((link.bandwidth for link in served), default=math.inf))
    return cluster.shared_links[key]


def _served_links(cluster: Cluster, messages: Sequence[MeshSend]) -> list[Link | None]:
    """Latency, and bytes over seconds, of each message; None where nothing moves."""
    lanes = _lanes(cluster, messages)
    found: list[Link | None] = [None] * len(messages)
    if not lanes.nbytes.size:
        return found
    networks = (cluster.intra_node, cluster.inter_node)
    rates = np.array([network.bandwidth * network.reach(1, len(cluster.node)) for network in networks])
    latencies = np.array([network.latency for network in networks])
    level = lanes.across.astype(int)
    served = np.maximum(_served(lanes.leaves, lanes.nbytes), _served(lanes.arrives, lanes.nbytes))
    longest, latest = np.zeros(len(messages)), np.zeros(len(messages))
    np.maximum.at(longest, lanes.message, served / rates[level])
    np.maximum.at(latest, lanes.message, latencies[level])
    for number in np.unique(lanes.message).tolist():
        seconds = float(longest[number])
        rate = messages[number].nbytes / seconds if seconds > 0 else math.inf
        found[number] = Link(float(latest[number]), rate)
    return found


class _Lanes(NamedTuple):
    """Lanes that lead from one device to another."""

    message: np.ndarray  # [lanes] number of the message
    nbytes: np.ndarray  # [lanes]
    across: np.ndarray  # [lanes] bool: to another node
    leaves: np.ndarray  # [lanes] number of the port
    arrives: np.ndarray  # [lanes] number of the port


def _lanes(cluster: Cluster, messages: Sequence[MeshSend]) -> _Lanes:
    by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, message in enumerate(messages):
        if message.nbytes > 0:
            by_shape[len(message.source), len(message.target)].append(number)
    parts = [_lanes_of_shape(cluster, messages, numbers) for numbers in by_shape.values()]
    if not parts:
        return _Lanes(*(np.zeros(0, dtype=int) for _ in _Lanes._fields))
    return _Lanes(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _lanes_of_shape(cluster: Cluster, messages: Sequence[MeshSend], numbers: Sequence[int]) -> _Lanes:
    """Of messages whose sources, and whose targets, have as many devices each."""
    first, width, place = messages[numbers[0]], len(cluster.node), cluster.place_of
    n = math.lcm(len(first.source), len(first.target))
    sources, targets = (
        np.repeat([[place[name] for name in getattr(messages[i], end)] for i in numbers], n // count, axis=1).ravel()
        for end, count in (("source", len(first.source)), ("target", len(first.target)))
    )
    each = np.repeat([messages[i].nbytes * len(first.target) / n for i in numbers], n)
    kept = np.flatnonzero(sources != targets)
    sources, targets = sources[kept], targets[kept]
    across = sources // width != targets // width
    leaves, arrives = (
        np.where(across, 2 * _cards(cluster, ends, between=True), 2 * _cards(cluster, ends, between=False) + 1)
        for ends in (sources, targets)
    )
    return _Lanes(np.repeat(numbers, n)[kept], each[kept], across, leaves, arrives)


def _cards(cluster: Cluster, places: np.ndarray, *, between: bool) -> np.ndarray:
    """A number for the card of each device."""
    network, width = cluster.inter_node if between else cluster.intra_node, len(cluster.node)
    of_device = np.array([network.card(device, width) for device in range(width)])
    return np.asarray(places // width * width + of_device[places % width])


def _served(ports: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    """[lanes] bytes that a port serves until the lane ends: the sum of min(x, y) over its lanes."""
    _, port = np.unique(ports, return_inverse=True)
    served = np.zeros(len(nbytes))
    sizes, size = np.unique(nbytes, return_inverse=True)
    for other, y in enumerate(sizes):
        count = np.bincount(port[size == other], minlength=int(port.max()) + 1)
        served += count[port] * np.minimum(nbytes, y)
    return served
