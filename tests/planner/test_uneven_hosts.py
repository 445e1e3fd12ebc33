"""Meshes on hosts with any numbers of devices: they lie alike in their hosts, and the search counts devices rightly."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from simulated_ranks import SimulatedRanks
from torch import nn

from autopar.analysis.example import capture_example, example_ahead
from autopar.costs.device_group import DeviceGroup
from autopar.costs.estimated import estimate_costs
from autopar.costs.measured import measure_costs
from autopar.costs.rank_costs import _beside, rank_costs
from autopar.options import PlanOptions
from autopar.plan.plan import Plan
from autopar.planner.inter_op.device_assignment import FreeDevices, _of_any_width, evenly_divided
from autopar.planner.inter_op.device_pools import pools_of
from autopar.planner.inter_op.mesh_places import counts_exactly, mesh_places, place_together
from autopar.planner.price_sharded import predict_any
from autopar.planner.search import make_plan
from autopar.planner.search_at_hand import shards_at_hand
from autopar.planner.search_options import search_options
from cost_models import Cluster, DeviceError, Link, MeasuredCollectives, parse_devices
from cost_models.hardware.networks import Network

HOSTS = st.lists(st.integers(0, 3), min_size=1, max_size=10)


def shape_of(nodes: list[int], place: tuple[int, ...]) -> list[int]:
    return sorted(Counter(nodes[device] for device in place).values())


@given(HOSTS, st.integers(1, 10))
def test_meshes_of_one_width_are_disjoint_and_lie_alike(nodes: list[int], width: int) -> None:
    places = mesh_places(nodes, width)
    used = [device for place in places for device in place]
    assert len(used) == len(set(used))
    assert all(len(place) == width for place in places)
    assert len({tuple(shape_of(nodes, place)) for place in places}) <= 1
    most = max(Counter(nodes).values())
    if width <= most:  # none could be added
        left = Counter(node for device, node in enumerate(nodes) if device not in used)
        assert all(count < width for count in left.values())


@given(HOSTS)
def test_a_mesh_may_have_all_devices(nodes: list[int]) -> None:
    (place,) = mesh_places(nodes, len(nodes))
    assert sorted(place) == list(range(len(nodes)))


@given(HOSTS, st.data())
def test_meshes_that_a_search_counts_find_their_places(nodes: list[int], data: st.DataObject) -> None:
    """As many meshes as the number of devices allows, of widths that divide each other."""
    n_devices = data.draw(st.integers(1, len(nodes)))
    chain = [width for width in (1, 2, 4, 8) if counts_exactly(nodes, width, n_devices)]
    assume(1 in chain)
    wanted: list[int] = []
    while True:
        fitting = [width for width in chain if width <= n_devices - sum(wanted)]
        if not fitting or data.draw(st.booleans()):
            break
        wanted.append(data.draw(st.sampled_from(fitting)))
    places = place_together(nodes, wanted)
    assert places is not None
    assert [len(place) for place in places] == wanted
    used = [device for place in places for device in place]
    assert len(used) == len(set(used))
    for place in places:
        assert shape_of(nodes, place) == shape_of(nodes, mesh_places(nodes, len(place))[0])


def network(name: str) -> Network:
    return Network(name, 1e-6, 1e9)


def test_a_cluster_of_uneven_nodes_knows_where_devices_lie() -> None:
    devices = parse_devices(["cpu"] * 3)
    spec = dataclasses.replace(Cluster.preset("cpu").node[0], name=devices[0].kind)
    cluster = Cluster((spec,) * 3, 1, network("in"), network("out"), devices, sizes=(2, 1))
    assert [cluster.node_of(device) for device in devices] == [0, 0, 1]
    assert [cluster.card_of(device) for device in devices] == [(0, 0), (0, 1), (1, 0)]
    assert (cluster.n_nodes, cluster.largest_node) == (2, 2)
    assert cluster.group(devices).uneven == (1, 2)
    assert cluster.link(devices[0], devices[1]) == network("in").link
    assert cluster.link(devices[1], devices[2]) == network("out").link
    assert "nodes of 2, 1 devices" in str(cluster)
    assert "between nodes" in str(cluster)
    with pytest.raises(DeviceError, match=r"has nodes that are alike, and these have \(2, 1\) devices"):
        cluster.to_toml()
    for sizes, nodes in (((2, 2), 1), ((3, 0), 1), ((2, 1), 2)):
        with pytest.raises(DeviceError, match="sizes of nodes are those of the"):
            Cluster((spec,) * 3, nodes, network("in"), network("out"), devices, sizes=sizes)


@pytest.mark.parametrize("hosts", [[0, 0, 1], [0, 1, 0, 1], [1, 0, 0], [0, 0, 0, 1, 1], [0, 1, 2]])
def test_hosts_of_ranks_become_nodes_whatever_their_sizes_and_order(hosts: list[int]) -> None:
    """Links and groups are those of the ranks' hosts; one group of every shape is measured."""
    devices = parse_devices(["cpu"] * len(hosts))
    ranks = SimulatedRanks(hosts, devices)
    costs = rank_costs(ranks, devices, ranks.links(), None)
    assert not costs.notes
    cluster = costs.cluster
    for (a, first), (b, second) in itertools.combinations(enumerate(devices), 2):
        assert (cluster.node_of(first) == cluster.node_of(second)) == (hosts[a] == hosts[b])
        assert cluster.link(first, second) == ranks.links().links[a, b]
    measured = [cluster.group([devices[rank] for rank in group]) for group in ranks.asked]
    shapes = [(group.nodes, group.per_node, group.uneven) for group in measured]
    assert len(shapes) == len(set(shapes))
    found = [(one.nodes, one.per_node, one.uneven) for one in cluster.measured_collectives]
    assert sorted(found) == sorted(shapes)
    everyone = cluster.group(devices)
    assert (everyone.nodes, everyone.per_node, everyone.uneven) in shapes


@pytest.mark.slow
def test_ranks_wait_for_what_they_send_over_nccl() -> None:
    """Over gloo, messages travel while ranks compute."""
    devices = parse_devices(["cpu"] * 2)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(8, 8)
    example = capture_example(model, devices, (x,), {}, loss_fn=nn.functional.mse_loss, target=x)
    example, search = search_options(example, PlanOptions(), 2)
    ranks, steps = SimulatedRanks([0, 1], devices, example), {}
    for backend in ("gloo", "nccl"):
        ranks.backend = backend
        costs = measure_costs(example, devices, cache=False, ranks=ranks)
        links = dict.fromkeys(costs.links, Link(0.1, math.inf))
        tables = [
            dataclasses.replace(t, forward=np.full_like(t.forward, 0.1), backward=np.full_like(t.backward, 0.1))
            for t in costs.tables
        ]
        slow = dataclasses.replace(costs, links=links, tables=tuple(tables))
        plan = predict_any(Plan.from_split({"0": 0, "1": 1}, n_microbatches=4), example, slow, search.conditions)
        assert all(transfer.blocking is (backend == "nccl") for transfer in plan.transfers)
        steps[backend] = plan.predicted_step_time or 0.0
    assert steps["nccl"] > steps["gloo"] + 0.05  # a message and more, but for what handling one was measured to take


@given(HOSTS, st.data())
def test_groups_beside_another_lie_like_it(nodes: list[int], data: st.DataObject) -> None:
    group = data.draw(st.lists(st.integers(0, len(nodes) - 1), min_size=1, unique=True))
    found = _beside(nodes, group)
    assert found[0] == tuple(group)
    assert sum(map(len, found)) == len({rank for one in found for rank in one})
    assert len({tuple(sorted(nodes[rank] for rank in one)) for one in found}) == 1


def planned(
    hosts: list[int],
    widest: int,
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, ...] = (512,) * 5,
    rows: int = 16,
    **options: Any,
) -> Plan:
    """A plan of ranks on these hosts, where collectives cost nothing, so that meshes gain time.

    `sizes`: features between the layers.
    """
    monkeypatch.setattr(MeasuredCollectives, "seconds", lambda *_: 1e-9)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))
    x = torch.randn(rows, sizes[0])
    devices = parse_devices(["cpu"] * len(hosts))
    example = capture_example(model, devices, (x,), {}, loss_fn=nn.functional.mse_loss, target=x)
    example, search = search_options(example, PlanOptions(**options), len(devices))
    ranks = SimulatedRanks(hosts, devices, example)
    costs = measure_costs(example, devices, cache=False, ranks=ranks)
    at_hand = shards_at_hand(example, costs, search, widest, cache=False, ranks=ranks)
    assert at_hand.meshes is not None
    return make_plan(at_hand.costs, search, at_hand.meshes)


@pytest.mark.parametrize(
    ("hosts", "widest"),
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (([0, 0, 1], 3), ([0, 1, 0, 1], 2))),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (([0, 0, 1], 2), ([0, 0, 0, 1, 1], 3), ([0, 0, 1, 1, 2], 4), ([0, 1], 2))
        ),
    ],
)
def test_ranks_of_uneven_hosts_get_meshes_that_lie_in_them(
    hosts: list[int], widest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(hosts, widest, monkeypatch, max_replicas=1, n_microbatches=1)
    meshes = [stage.devices[: stage.shards] for stage in plan.stages]
    assert 1 < max(map(len, meshes)) <= widest
    numbers = [[int(name.rpartition(":")[2]) for name in mesh] for mesh in meshes]
    assert len({rank for mesh in numbers for rank in mesh}) == sum(map(len, numbers))
    for mesh in numbers:
        if len(mesh) <= max(Counter(hosts).values()):
            assert len({hosts[rank] for rank in mesh}) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize(("hosts", "left_out"), [([0, 0, 0, 1, 1, 1], True), ([0, 0, 1, 1], False)])
def test_a_proof_says_which_meshes_were_left_out(
    hosts: list[int], left_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts of three devices have two places for meshes of 2, and not three. A search with pools of their own for
    these finds no faster plan, where one mesh is best, and the proof is that of the usual search."""
    plan = planned(hosts, 2, monkeypatch, max_replicas=1, n_microbatches=1)
    assert ("meshes of 2 only where plans leave devices unused" in plan.optimality) is left_out


@pytest.mark.slow
def test_devices_without_a_place_in_a_mesh_run_stages_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of twice the work get the two meshes of 2 that two hosts of three devices have, the other two layers
    the two devices beside these: no other plan is balanced."""
    sizes, options = (1024, 2048, 1024, 1024, 1024), {"max_replicas": 1, "n_microbatches": 8, "schedule": "gpipe"}
    plan = planned([0, 0, 0, 1, 1, 1], 2, monkeypatch, sizes, 256, **options)
    assert [stage.shards for stage in plan.stages] == [2, 2, 1, 1]
    used = [device for stage in plan.stages for device in stage.devices]
    assert len(set(used)) == len(used) == 6
    assert "meshes of 2 apart from the devices that have no place in any" in plan.optimality


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.lists(st.integers(1, 12), min_size=1, max_size=8),
    st.booleans(),
)
def test_meshes_of_any_widths_get_places_that_are_alike_or_none(
    sizes: list[int], wanted: list[int], even: bool
) -> None:
    """Whatever the widths and the nodes' devices, also where widths do not divide each other."""
    sizes = sizes[:1] * len(sizes) if even else sizes
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    widths = [width for width in wanted if mesh_places(nodes, width)]
    if evenly_divided(nodes, widths) and sum(widths) <= len(nodes):
        pool = [DeviceGroup((str(i),), "device", 1) for i in range(len(nodes))]
        free = FreeDevices(pool, sizes[0], set(widths))
        places = [tuple(map(int, free.take(width))) for width in widths]
    else:
        together = place_together(nodes, widths)
        if together is None:
            return
        places = together
    assert [len(place) for place in places] == widths
    used = [device for place in places for device in place]
    assert len(used) == len(set(used))
    for place in places:
        assert shape_of(nodes, place) == shape_of(nodes, mesh_places(nodes, len(place))[0])


def test_meshes_of_two_and_three_devices_share_nodes_of_six() -> None:
    """A cluster of two nodes with 6 A100 and 4 H100 each: of its A100, stages may have meshes of 2 and of 3."""
    cluster = Cluster.preset("6xA100-80+4xH100", nodes=2)
    with torch.device("meta"):
        model, x = nn.Linear(8, 8), torch.empty(16, 8)
    costs = estimate_costs(example_ahead(model, (x,), {}, batch_dim=None), cluster)
    pools = pools_of(costs.groups)
    (pool,) = (number for number, groups in enumerate(pools) if len(groups) == 12)
    groups = _of_any_width(costs, pools, [(pool, 2, 2), (pool, 2, 1), (pool, 3, 2)])
    assert groups is not None
    meshes = [group.devices for stage in groups for group in stage]
    assert [len(mesh) for mesh in meshes] == [2, 2, 2, 3, 3]
    assert len({device for mesh in meshes for device in mesh}) == 12
    assert all(len({cluster.node_of(device) for device in mesh}) == 1 for mesh in meshes)


def test_meshes_of_whole_nodes_take_those_that_are_free() -> None:
    assert place_together([0, 0, 1, 1, 2, 2, 3, 3, 4, 4], [6, 4]) == [tuple(range(6)), tuple(range(6, 10))]
