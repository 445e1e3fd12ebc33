"""What stages send over shared cards: one price in the objective and in the simulator, and what scattering gains."""

from __future__ import annotations

import itertools
import math
from functools import cache

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from test_prices import OPTIONS, SAME, line_of, meshes_of
from torch import nn

from autopar import Cluster
from autopar.analysis.example import example_ahead
from autopar.costs.cost_graph import CostGraph
from autopar.costs.device_group import DeviceGroup
from autopar.costs.estimated import estimate_costs
from autopar.costs.sends import Lanes, Sent, pass_seconds
from autopar.planner.arrangement import Arrangement, Conditions
from autopar.planner.inter_op.candidates import Searching
from autopar.planner.inter_op.device_pools import kind_of_pool
from autopar.planner.inter_op.mesh_configuration import MeshConfiguration
from autopar.planner.inter_op.meshes import Meshes, mesh_program_of
from autopar.planner.inter_op.scattering import Scattering
from autopar.planner.inter_op.stage_costs import Costs
from autopar.planner.inter_op.stage_tables import Mode
from autopar.planner.predict import as_plan
from autopar.planner.predicted_step import step_of_plan
from autopar.planner.priced_step import predicted_step
from autopar.sharding.layouts import PARTIAL, REPLICATE
from autopar.sharding.mesh import Mesh

INSIDE = Conditions(optimizer="none", loss_inside=True)


def group(cluster: Cluster, first: int, width: int) -> DeviceGroup:
    return DeviceGroup(tuple(d.name for d in cluster.devices[first : first + width]), cluster.devices[0].kind, 1)


def stage(cluster: Cluster, first: int, width: int, replicas: int) -> tuple[DeviceGroup, ...]:
    return tuple(group(cluster, first + i * width, width) for i in range(replicas))


def sent(cluster: Cluster, source: tuple[DeviceGroup, ...], target: tuple[DeviceGroup, ...], *values: Sent) -> float:
    return pass_seconds(cluster, source, {1: target}, {1: values}, 64)[1]


clusters = st.builds(
    lambda per_node, cards: Cluster.preset(f"{per_node}xH100", nodes=4, cards=cards),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
) | st.sampled_from([Cluster.preset("8xH100", nodes=4), Cluster.preset("8xV100", nodes=4, inter_node="Ethernet25")])
values = st.builds(Sent, st.floats(1.0, 1e9), st.sampled_from([1, 2, 4, 8]), st.floats(0.0, 1e-2))


# -- the objective and the simulator -----------------------------------------------------------------------------------


@given(clusters, st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 4, 8]), st.lists(values, max_size=3))
def test_the_objective_prices_sends_between_equal_stages_as_the_simulator_does(
    cluster: Cluster, width: int, replicas: int, values: list[Sent]
) -> None:
    """Stages that lie beside each other in a node, and stages that fill nodes."""
    n, devices = width * replicas, len(cluster.node)
    assume(2 * n <= len(cluster.devices))
    assume(n % devices == 0 or 2 * n <= devices)
    costs = line_of([0.1], [4], cluster)
    lanes = Lanes.of(costs, cluster.devices[0].kind, width)
    lane = lanes(replicas)
    assert lane.across is (n % devices == 0)
    parts = [value.over(lanes.between_nodes) if lane.across else Sent(value.nbytes) for value in values]
    expected = sum(part.nbytes * lane.seconds_per_byte + part.gather for part in parts)
    expected += lane.latency if values else 0.0
    found = sent(cluster, stage(cluster, 0, width, replicas), stage(cluster, n, width, replicas), *values)
    if lane.across:
        assert lane.seconds_per_byte == pytest.approx(lanes.between_nodes)
        assert found == pytest.approx(expected)
    else:  # the simulator may scatter inside a node, too, if gathering is said to be faster
        assert found <= expected * (1 + 1e-9)
        whole = [value._replace(copies=1, gather=0.0) for value in values]
        assert sent(cluster, stage(cluster, 0, width, replicas), stage(cluster, n, width, replicas), *whole) == (
            pytest.approx(expected)
        )


@given(
    seconds=st.lists(st.floats(1e-3, 1e-1), min_size=2, max_size=4),
    mbytes=st.floats(1e-2, 1e3),
    cluster=clusters,
    replicas=st.sampled_from([1, 2, 4, 8]),
    rounds=st.sampled_from([1, 2, 4]),
    data=st.data(),
)
def test_a_pipeline_of_replicas_has_one_price_with_what_it_sends(
    seconds: list[float], mbytes: float, cluster: Cluster, replicas: int, rounds: int, data: st.DataObject
) -> None:
    """One micro-batch on each replica: nothing overlaps, so the objective is the step. With more it is not below it."""
    devices, m = len(cluster.node), replicas * rounds
    assume(m <= 16)
    assume(2 * replicas <= len(cluster.devices))
    assume(replicas % devices == 0 or 2 * replicas <= devices)
    costs = line_of(seconds, [4] * len(seconds), cluster, sent=mbytes * 2**20)
    searching = Searching(costs, OPTIONS)
    n = len(seconds)
    assume(len(searching.atoms.nodes) == n)
    cut = data.draw(st.integers(1, n - 1))
    found = Costs(searching.problem(m, "gpipe", searching.full), searching.full)
    cuts = found.problem.space.cuts
    middle = next(i for i, row in enumerate(cuts) if row.tolist() == [a < cut for a in range(n)])
    ends, mode = [(0, middle), (middle, len(cuts) - 1)], Mode(0, recompute=False)
    price = sum(found.terms_of(mode, replicas).fill[found.pair(*at)] for at in ends)
    price += max(found.max_term(mode, replicas)[found.pair(*at)] for at in ends)
    halves = (tuple(range(cut)), tuple(range(cut, n)))
    groups = (costs.groups[:replicas], costs.groups[replicas : 2 * replicas])
    step = predicted_step(costs, searching.atoms, Arrangement(halves, groups, m, "gpipe", (False, False)), INSIDE)
    simulated = step.timeline().step_time
    if rounds == 1:
        assert price == pytest.approx(simulated, rel=SAME)
    assert simulated <= price * (1 + SAME)


class Block(nn.Module):
    """Two products after each other that tensor parallelism splits with one all-reduce: its output is replicated."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


@cache
def blocks_on_meshes(cluster: str, nodes: int, network: str | None, width: int, m: int) -> CostGraph:
    with torch.device("meta"):
        model = nn.Sequential(*(Block(2048) for _ in range(3))).train()
        x = torch.empty(8, 512, 2048)
    example = example_ahead(model, (x,), {}, batch_dim=None)
    costs = estimate_costs(example, Cluster.preset(cluster, nodes=nodes, inter_node=network))
    found = Meshes(costs, mesh_program_of(example, "none")).of(width, [m])
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.parametrize("network", [None, "Ethernet25"])
@pytest.mark.parametrize(("width", "nodes"), [(4, 2), (2, 1), (8, 4)])
def test_meshes_have_one_price_with_what_they_send(network: str | None, width: int, nodes: int) -> None:
    """One micro-batch of one sample, which tensor parallelism has to split."""
    costs = blocks_on_meshes("4xH100", nodes, network, width, 8)
    searching = Searching(costs, OPTIONS)
    problem = searching.problem(8, "1f1b", searching.full)
    found, n = Costs(problem, problem.counts), len(searching.atoms.nodes)
    configurations = [c for c in costs.configurations if isinstance(c, MeshConfiguration)]
    groups, cuts = meshes_of(costs), problem.space.cuts
    scattered = 0
    for kind, one in enumerate(problem.kinds):
        assert one.name in {c.name for c in configurations}
        for cut in (n // 3, n // 2):
            middle = next(i for i, row in enumerate(cuts) if row.tolist() == [a < cut for a in range(n)])
            lane, tables = one.lane(1), problem.tables(kind)
            at = found.pair(middle, -1)
            arriving = [each[at] for each in tables.arriving(lane.across)]
            priced = sum(lane.latency + n / 8 * lane.seconds_per_byte for n in arriving if n)
            halves = (tuple(range(cut)), tuple(range(cut, n)))
            plan = Arrangement(halves, (groups[:1], groups[1:2]), 8, "1f1b", (False, False), (one.name,) * 2)
            step = predicted_step(costs, searching.atoms, plan, INSIDE)
            (transfer,) = step.transfers
            assert transfer.forward[0] + transfer.backward[0] == pytest.approx(priced)
            assert found.terms_of(Mode(kind, False), 1).time[at] >= priced
            values = [v for v in (problem.kinds[kind].space or problem.space).values if v.producer < cut]
            scattered += lane.across and any(v.copies > 1 and max(v.consumers) >= cut for v in values)
            written = as_plan(costs, searching.atoms, plan, step, step.timeline())
            loaded = step_of_plan(type(written).from_json(written.to_json()))
            assert loaded is not None
            assert loaded.timeline().step_time == pytest.approx(written.predicted_step_time)
    if width == 4:  # a mesh that is a node
        assert scattered


# -- what scattering and cards do --------------------------------------------------------------------------------------


@given(clusters, st.sampled_from([(2, 4), (8, 1), (1, 8), (4, 2), (8, 8), (3, 2)]), values)
def test_scattering_is_never_slower_than_sending_whole_values(
    cluster: Cluster, widths: tuple[int, int], value: Sent
) -> None:
    v, w = widths
    assume(v + w <= len(cluster.devices))
    source, target = (group(cluster, 0, v),), (group(cluster, v, w),)
    whole = sent(cluster, source, target, Sent(value.nbytes))
    assert sent(cluster, source, target, value) <= whole * (1 + 1e-12)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), values)
def test_more_cards_never_make_a_send_slower(v: int, w: int, replicas: int, value: Sent) -> None:
    seconds = []
    for cards in (1, 2, 4, 8, 16):
        cluster = Cluster.preset("8xH100", nodes=8, cards=cards)
        seconds.append(sent(cluster, stage(cluster, 0, v, replicas), stage(cluster, 32, w, replicas), value))
    assert all(b <= a * (1 + 1e-12) for a, b in itertools.pairwise(seconds))
    # Of one card, n devices get no more than one of them.
    cluster = Cluster.preset("8xH100", nodes=8, cards=1)
    narrow = sent(cluster, stage(cluster, 0, 1, 1), stage(cluster, 32, 1, 1), Sent(value.nbytes))
    wide = sent(cluster, stage(cluster, 0, v, 1), stage(cluster, 32, v, 1), Sent(value.nbytes))
    assert wide == pytest.approx(v * (narrow - cluster.inter_node.latency) + cluster.inter_node.latency)


def test_a_replicated_value_crosses_the_network_once_where_the_mesh_can_gather_it() -> None:
    nbytes = 64e6
    cluster = Cluster.preset("8xH100", nodes=4, inter_node="Ethernet100")
    names = [d.name for d in cluster.devices[:8]]
    gather = cluster.seconds("all_gather", nbytes, names)
    value, network = Sent(nbytes, 8, gather), cluster.inter_node
    eight, other, one = stage(cluster, 0, 8, 1), stage(cluster, 8, 8, 1), stage(cluster, 8, 1, 1)
    once = network.latency + nbytes / network.bandwidth
    assert sent(cluster, eight, other, value) == pytest.approx(once + gather)
    assert sent(cluster, one, eight, value) == pytest.approx(once + gather)  # the lone device sends each its part
    assert sent(cluster, eight, one, Sent(nbytes)) == pytest.approx(once)
    assert sent(cluster, eight, other, Sent(nbytes)) == pytest.approx(network.latency + 8 * nbytes / network.bandwidth)
    assert sent(cluster, eight, other, value._replace(gather=1e3)) == sent(cluster, eight, other, Sent(nbytes))


def test_a_stage_that_several_stages_read_sends_to_all_of_them_over_one_card() -> None:
    cluster = Cluster.preset("2xT4", nodes=3)
    source, near, far = (stage(cluster, first, 1, 1) for first in (0, 2, 4))
    seconds = pass_seconds(cluster, source, {1: near, 2: far}, {1: [Sent(1e6)], 2: [Sent(3e6)]}, 4)
    network = cluster.inter_node
    assert seconds[1] == pytest.approx(network.latency + 2e6 / network.bandwidth)
    assert seconds[2] == pytest.approx(network.latency + 4e6 / network.bandwidth)


def test_replicas_that_do_not_divide_each_other_send_to_whoever_is_next() -> None:
    cluster = Cluster.preset("4xT4", nodes=2)
    two, three = stage(cluster, 0, 1, 2), stage(cluster, 4, 1, 3)
    network = cluster.inter_node
    both = network.latency + 2 * 1e6 / network.bandwidth
    assert sent(cluster, two, three, Sent(1e6)) == pytest.approx(both)
    assert math.isclose(sent(cluster, three, two, Sent(1e6)), network.latency + 3 * 1e6 / network.bandwidth)


def test_devices_gather_what_they_hold_alike_inside_their_node() -> None:
    cluster, m, nbytes = Cluster.preset("4xH100", nodes=2), 4, 64e6
    names = [device.name for device in cluster.devices]
    over, inside = Mesh((2, 4), ("data", "model"), tuple(names)), Mesh((2, 2), ("data", "model"), tuple(names[:4]))

    def gather(of: list[str], beside: int) -> float:
        return m * cluster.seconds("all_gather", nbytes / m, of, beside)

    across, node = Scattering(over, cluster, m), Scattering(inside, cluster, m)
    assert across.of((REPLICATE, REPLICATE), nbytes) == Sent(nbytes, 4, gather(names[:4], 1))
    assert across.of((0, REPLICATE), nbytes) == Sent(nbytes, 4, gather(names[:4], 1))
    assert across.of((REPLICATE, 0), nbytes) == Sent(nbytes), "the lines along the first axis cross the network"
    assert across.of((0, PARTIAL), nbytes) == Sent(nbytes), "terms of a sum are not the same"
    assert node.of((REPLICATE, REPLICATE), nbytes) == Sent(nbytes, 4, gather(names[:4], 1))
    assert node.of((REPLICATE, 0), nbytes) == Sent(nbytes, 2, gather([names[0], names[2]], 2))
    assert node.of((0, REPLICATE), nbytes) == Sent(nbytes, 2, gather(names[:2], 2))
    assert across.of((REPLICATE, REPLICATE), 0.0) == Sent(0.0)


@given(clusters, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_copies_of_the_pipeline_share_cards_like_replicas(
    cluster: Cluster, width: int, copies: int, replicas: int
) -> None:
    costs = line_of([0.1], [4], cluster)
    kind = kind_of_pool(costs, costs.groups, math.inf, "none", width)
    assert kind.of_one_copy(copies, 1).lane(replicas) == kind.lane(replicas * copies)
    assert kind.lane(replicas).seconds_per_byte >= kind.seconds_per_byte
