"""Sends between meshes: what shares a card, and how long that takes, against a clock that serves byte after byte."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import Cluster, Network
from cost_models.clusters.sends import MeshSend, send_seconds, shared_link
from cost_models.hardware.device_specs import device_spec

DEVICE = device_spec("T4")


def cluster_of(per_node: int, nodes: int, inside: Network, across: Network) -> Cluster:
    return Cluster((DEVICE,) * per_node, nodes, inside, across)


rates = st.sampled_from([1.0, 3.0, 8.0])
networks = st.builds(Network, st.just("own"), st.just(0.25), rates) | st.builds(
    Network, st.just("shared"), st.just(0.5), rates, shared=st.just(True), cards=st.integers(1, 6)
)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    return cluster_of(draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(networks), draw(networks))


def by_clock(cluster: Cluster, messages: Sequence[MeshSend]) -> list[float]:
    """Oracle: every port serves its lanes alike, one little interval after the other, until they are through."""
    n = len(cluster.node)
    latest, latencies = [0.0] * len(messages), [0.0] * len(messages)
    ports: dict[tuple[object, ...], list[tuple[int, float, float, float]]] = {}
    for number, message in enumerate(messages):
        width = math.lcm(len(message.source), len(message.target))
        for k in range(width):
            a = cluster.place_of[message.source[k * len(message.source) // width]]
            b = cluster.place_of[message.target[k * len(message.target) // width]]
            nbytes = message.nbytes * len(message.target) / width
            if a == b or not nbytes:
                continue
            net = cluster.intra_node if a // n == b // n else cluster.inter_node
            for side, end in (("out", a), ("in", b)):
                port = (a // n == b // n, side, end // n, net.card(end % n, n))
                ports.setdefault(port, []).append((number, nbytes, net.bandwidth * net.reach(1, n), net.latency))
    for lanes in ports.values():
        left, now = sorted(lanes, key=lambda lane: lane[1]), 0.0
        done = 0.0  # bytes that every lane that is left has had
        while left:
            number, nbytes, rate, latency = left[0]
            now += (nbytes - done) * len(left) / rate
            done = nbytes
            latest[number] = max(latest[number], now)
            latencies[number] = max(latencies[number], latency)
            left.pop(0)
    return [a + b for a, b in zip(latencies, latest, strict=True)]


@pytest.mark.slow
@given(clusters(), st.data())
def test_sends_take_as_long_as_their_busiest_card(cluster: Cluster, data: st.DataObject) -> None:
    names = [device.name for device in cluster.devices]
    meshes = st.lists(st.sampled_from(names), min_size=1, max_size=4, unique=True)
    message = st.builds(MeshSend, meshes, meshes, st.integers(0, 9).map(float))
    messages = data.draw(st.lists(message, max_size=4))
    assert send_seconds(cluster, messages) == pytest.approx(by_clock(cluster, messages))
    alike = [message._replace(nbytes=3.0) for message in messages]
    link = shared_link(cluster, [(message.source, message.target) for message in alike])
    seconds = by_clock(cluster, alike)
    assert max(seconds, default=0.0) <= link.seconds(3.0) * (1 + 1e-9)
    assert link.seconds(3.0) <= max(seconds, default=0.0) + abs(
        cluster.intra_node.latency - cluster.inter_node.latency
    ) + 1e-9  # fmt: skip


@given(st.integers(1, 8), st.integers(1, 8), st.data())
def test_more_cards_never_make_a_send_slower(per_node: int, n_messages: int, data: st.DataObject) -> None:
    inside = Network("inside", 0.0, 100.0)
    ends = st.integers(1, per_node)
    shapes = data.draw(st.lists(st.tuples(ends, ends, st.integers(1, 9)), min_size=1, max_size=n_messages))
    before = [math.inf] * len(shapes)
    for cards in range(1, 2 * per_node):
        cluster = cluster_of(per_node, 2, inside, Network("across", 0.1, 1.0, shared=True, cards=cards))
        names = [device.name for device in cluster.devices]
        messages = [MeshSend(names[:v], names[per_node : per_node + w], nbytes) for v, w, nbytes in shapes]
        after = send_seconds(cluster, messages)
        if per_node % cards == 0 or cards % per_node == 0:  # otherwise neighbours are paired anew
            assert all(b <= a * (1 + 1e-12) for a, b in zip(before, after, strict=True))
            before = after


@given(st.integers(1, 8), st.integers(1, 8), st.floats(1.0, 1e6))
def test_a_mesh_on_one_card_sends_no_faster_than_one_device(n: int, cards: int, nbytes: float) -> None:
    inside = Network("inside", 0.0, 1e12)
    cluster = cluster_of(8, 2, inside, Network("across", 1e-5, 1e6, shared=True, cards=cards))
    names = [device.name for device in cluster.devices]
    mesh = [name for name in names[:n] if cluster.inter_node.card(cluster.place_of[name], 8) == 0]
    alone, together = (
        send_seconds(cluster, [MeshSend(senders, names[8:9], nbytes)])[0] for senders in (mesh[:1], mesh)
    )
    assert together >= alone * (1 - 1e-12)
    # And a mesh of n devices to another one: each of the n lanes has its part of the cards.
    (wide,) = send_seconds(cluster, [MeshSend(names[:8], names[8:], nbytes)])
    share = max(sum(cluster.inter_node.card(device, 8) == card for device in range(8)) for card in range(cards))
    assert wide == pytest.approx(1e-5 + share * nbytes / 1e6)


def test_replicas_that_send_at_once_share_the_card_of_their_node() -> None:
    cluster = Cluster.preset("8xV100", nodes=2, inter_node="Ethernet25")
    names = [device.name for device in cluster.devices]
    (one,) = send_seconds(cluster, [MeshSend(names[:1], names[8:9], 1e6)])
    four = send_seconds(cluster, [MeshSend([names[i]], [names[8 + i]], 1e6) for i in range(4)])
    latency = cluster.inter_node.latency
    assert one == pytest.approx(cluster.link(names[0], names[8]).seconds(1e6))
    assert four == pytest.approx([latency + 4 * (one - latency)] * 4)
    own = Cluster.preset("8xA100-80", nodes=2)
    names = [device.name for device in own.devices]
    eight = send_seconds(own, [MeshSend([names[i]], [names[8 + i]], 1e6) for i in range(8)])
    assert eight == pytest.approx([own.link(names[0], names[8]).seconds(1e6)] * 8)
