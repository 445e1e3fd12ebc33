"""Collectives: the formulas against a published table, against each other, and against what processes measure."""

import csv
import itertools
import math
import multiprocessing
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from cost_models import (
    COLLECTIVES,
    Cluster,
    Collective,
    Group,
    MeasuredCollectives,
    Network,
    collective_seconds,
    known_networks,
    measure_collectives,
)

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
COLUMNS = {
    "A100x8": Cluster.preset("8xA100-80"),
    "H200x8": Cluster.preset("8xH200"),
    "H100x16": Cluster.preset("8xH100", nodes=2, inter_node="TCPXO"),
    "B200x8": Cluster.preset("8xB200"),
    "B200x32": Cluster.preset("8xB200", nodes=4, inter_node="EFA"),
}

collectives = st.sampled_from(COLLECTIVES)
sizes = st.integers(1, 1 << 36)
latencies = st.floats(1e-7, 1e-3)
bandwidths = st.floats(1e8, 1e12)
ramps = st.floats(0, 5)
gains = st.floats(1, 2)
networks = st.builds(Network, st.just("a network"), latencies, bandwidths, ramp=ramps, in_switch=gains) | st.builds(
    Network,
    st.just("a network"),
    latencies,
    bandwidths,
    ramp=ramps,
    in_switch=gains,
    shared=st.just(True),
    cards=st.just(1) | st.integers(1, 70),
)
counts = st.integers(1, 64)


def published() -> list[tuple[int, str, float]]:
    """(bytes, column, bus bandwidth in bytes/s) of the table."""
    lines = files("cost_models").joinpath("data", "allreduce_busbw.csv").read_text().splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return [
        (int(row["size"][:-1]) * UNITS[row["size"][-1]], column, float(row[column]) * 1e9)
        for row in rows
        for column in COLUMNS
        if row[column]
    ]


def bus_bandwidth(collective: Collective, nbytes: int, cluster: Cluster) -> float:
    """Bytes that each device sends over the seconds, as nccl-tests defines it."""
    n = len(cluster.devices)
    factor = (2 if collective == "all_reduce" else 1) * (n - 1) / n
    return factor * nbytes / cluster.seconds(collective, nbytes, cluster.devices)


@pytest.mark.parametrize("column", COLUMNS)
def test_the_fit_to_the_published_table_is_within_a_fifth(column: str) -> None:
    """These rows were fitted to, so this bounds the error of the formula's shape, not that of a prediction."""
    errors = [
        abs(bus_bandwidth("all_reduce", nbytes, COLUMNS[column]) / truth - 1)
        for nbytes, name, truth in published()
        if name == column and UNITS["K"] * 256 <= nbytes <= UNITS["G"] * 4
    ]
    assert len(errors) == 8
    assert sum(errors) / len(errors) < 0.2


def test_rows_that_were_held_out_are_predicted_within_a_factor_of_two() -> None:
    """32K and 16G lie outside of the sizes that the networks' constants were fitted to."""
    held_out = [row for row in published() if row[0] in (32 << 10, 16 << 30)]
    assert len(held_out) == 9
    for nbytes, column, truth in held_out:
        ratio = bus_bandwidth("all_reduce", nbytes, COLUMNS[column]) / truth
        outlier = (nbytes, column) == (32 << 10, "B200x32")  # see the header of the table
        assert outlier or 0.5 < ratio < 2, (nbytes, column)


@pytest.mark.parametrize(("collective", "truth"), [("all_gather", 361.4e9), ("reduce_scatter", 362.9e9)])
def test_what_the_switch_does_not_compute_runs_at_the_speed_of_the_links(collective: Collective, truth: float) -> None:
    assert bus_bandwidth(collective, 16 << 30, COLUMNS["H200x8"]) == pytest.approx(truth, rel=0.05)


@given(collectives, sizes, st.floats(1, 100), counts, counts, networks, networks)
def test_costs_grow_with_bytes(
    collective: Collective, nbytes: int, factor: float, per_node: int, nodes: int, inside: Network, across: Network
) -> None:
    group = Group(per_node, nodes, inside, across)
    less, more = (collective_seconds(collective, size, group) for size in (nbytes, nbytes * factor))
    assert less <= more * (1 + 1e-12)


@given(collectives, sizes, counts, st.integers(1, 8), networks)
def test_costs_grow_with_the_group_within_a_node(
    collective: Collective, nbytes: int, n: int, extra: int, inside: Network
) -> None:
    less, more = (collective_seconds(collective, nbytes, Group(size, 1, inside)) for size in (n, n + extra))
    assert less <= more * (1 + 1e-12)


@given(collectives, sizes, counts, st.integers(2, 64), st.integers(1, 8), networks, networks)
def test_costs_grow_with_the_nodes(
    collective: Collective, nbytes: int, per_node: int, nodes: int, extra: int, inside: Network, across: Network
) -> None:
    groups = [Group(per_node, m, inside, across) for m in (nodes, nodes + extra)]
    less, more = (collective_seconds(collective, nbytes, group) for group in groups)
    assert less <= more * (1 + 1e-12)


uneven_counts = st.lists(counts, min_size=1, max_size=6)


@given(
    st.sampled_from([c for c in COLLECTIVES if c != "send_recv"]),
    sizes,
    uneven_counts,
    networks,
    st.floats(1, 100),
    st.floats(1, 100),
    ramps,
)
def test_a_group_inside_a_node_is_never_slower_than_one_across_slower_links(
    collective: Collective,
    nbytes: int,
    per_node: list[int],
    inside: Network,
    later: float,
    slower: float,
    ramp: float,
) -> None:
    inside = replace(inside, shared=False, cards=1)
    across = replace(
        inside,
        latency=inside.latency * later,
        line_rate=inside.line_rate / slower,
        ramp=inside.ramp + ramp,
        in_switch=1.0,
    )
    within = collective_seconds(collective, nbytes, Group(sum(per_node), 1, inside))
    assert within <= collective_seconds(collective, nbytes, Group.of(per_node, inside, across)) * (1 + 1e-12)


@given(collectives, uneven_counts, latencies)
def test_a_ring_of_n_devices_has_n_minus_one_steps_however_they_are_spread(
    collective: Collective, per_node: list[int], latency: float
) -> None:
    n, network = sum(per_node), Network("a network", latency, math.inf)
    rounds = 2 if collective == "all_reduce" else 1
    steps = min(1, n - 1) if collective == "send_recv" else rounds * (n - 1)
    found = collective_seconds(collective, 1, Group.of(per_node, network, network))
    assert found == pytest.approx(steps * latency)


@given(sizes, uneven_counts, networks, networks, st.integers(1, 4))
def test_an_all_reduce_costs_what_a_reduce_scatter_and_an_all_gather_cost(
    nbytes: int, per_node: list[int], inside: Network, across: Network, concurrent: int
) -> None:
    """Also across nodes, even and uneven, latencies and ramps included; only a switch that reduces makes it cheaper."""
    group = Group.of(per_node, replace(inside, in_switch=1.0), replace(across, in_switch=1.0))
    parts = [collective_seconds(c, nbytes, group, concurrent) for c in ("reduce_scatter", "all_gather")]
    assert collective_seconds("all_reduce", nbytes, group, concurrent) == pytest.approx(sum(parts))
    helped = Group.of(per_node, inside, across)
    assert collective_seconds("all_reduce", nbytes, helped, concurrent) <= sum(parts) * (1 + 1e-12)


def ring_all_gather(n: int) -> tuple[int, int]:
    """Oracle: steps until every device has every part, and parts that each has sent: it passes on what came last."""
    held, last, steps = [{i} for i in range(n)], list(range(n)), 0
    while any(len(parts) < n for parts in held):
        last = [last[i - 1] for i in range(n)]
        for parts, part in zip(held, last, strict=True):
            parts.add(part)
        steps += 1
    return steps, steps


def pairwise_all_to_all(n: int) -> tuple[int, int]:
    """Oracle: in step k device i sends its part for device i + k to it."""
    wanted = [{(source, target) for source in range(n)} for target in range(n)]
    held, steps = [{(i, i)} for i in range(n)], 0
    while held != wanted:
        steps += 1
        for source in range(n):
            held[(source + steps) % n].add((source, (source + steps) % n))
    return steps, steps


@given(st.integers(2, 24), sizes, latencies, bandwidths)
def test_without_a_ramp_steps_and_bytes_are_those_of_the_algorithm(
    n: int, nbytes: int, latency: float, bandwidth: float
) -> None:
    group = Group(n, 1, Network("a network", latency, bandwidth))

    def expected(steps: int, parts: int) -> float:
        return steps * latency + parts / n * nbytes / bandwidth

    ring, exchange = ring_all_gather(n), pairwise_all_to_all(n)
    for collective in ("all_gather", "reduce_scatter"):
        assert collective_seconds(collective, nbytes, group) == pytest.approx(expected(*ring))
    assert collective_seconds("all_reduce", nbytes, group) == pytest.approx(2 * expected(*ring))
    assert collective_seconds("all_to_all", nbytes, group) == pytest.approx(expected(*exchange))
    assert collective_seconds("broadcast", nbytes, group) == pytest.approx((n - 1) * latency + nbytes / bandwidth)
    assert collective_seconds("send_recv", nbytes, group) == pytest.approx(latency + nbytes / bandwidth)


@given(collectives, sizes, uneven_counts, networks, networks, st.floats(1, 100))
def test_more_bandwidth_never_costs_more(
    collective: Collective, nbytes: int, per_node: list[int], inside: Network, across: Network, faster: float
) -> None:
    slow, quick_inside, quick_across = (
        collective_seconds(
            collective,
            nbytes,
            Group.of(
                per_node,
                replace(inside, line_rate=inside.line_rate * a),
                replace(across, line_rate=across.line_rate * b),
            ),
        )
        for a, b in ((1, 1), (faster, 1), (1, faster))
    )
    assert 0 <= max(quick_inside, quick_across) <= slow * (1 + 1e-12)


# -- groups with different numbers of devices in their nodes ----------------------------------------------------------


@given(
    st.sampled_from(["all_gather", "reduce_scatter", "all_to_all"]),
    st.lists(counts, min_size=2, max_size=6),
    st.booleans(),
)
def test_the_bytes_between_uneven_nodes_are_those_of_the_node_that_takes_longest(
    collective: Collective, per_node: list[int], shared: bool
) -> None:
    """Oracle: each part of the tensor, one by one, goes into the nodes that lack it, over the adapters of the node."""
    across = Network("a network", 0.0, 1.0, shared=shared)
    inside = Network("free", 0.0, 1e30)
    node_of = [node for node, count in enumerate(per_node) for _ in range(count)]
    n = len(node_of)
    longest = 0.0
    for node, count in enumerate(per_node):
        arriving = sum(source != node for source in node_of)  # parts of 1 / n
        if collective == "all_to_all":
            arriving *= count  # another one for each of the node's devices
        longest = max(longest, arriving / n / (1 if shared else count))
    found = collective_seconds(collective, 1, Group.of(per_node, inside, across))
    assert found == pytest.approx(longest)


@given(collectives, sizes, st.integers(1, 16), st.integers(1, 16), networks, networks)
def test_an_uneven_group_costs_no_less_than_the_even_group_of_its_emptiest_node(
    collective: Collective, nbytes: int, fewest: int, more: int, inside: Network, across: Network
) -> None:
    even = Group(fewest, 2, inside, across)
    uneven = Group.of([fewest, fewest + more], inside, across)
    assert uneven.size == 2 * fewest + more
    less, most = (collective_seconds(collective, nbytes, group) for group in (even, uneven))
    assert less <= most * (1 + 1e-12)


@given(collectives, sizes, counts, st.integers(2, 5), networks, networks)
def test_equal_counts_make_an_even_group(
    collective: Collective, nbytes: int, per_node: int, nodes: int, inside: Network, across: Network
) -> None:
    assert Group.of([per_node] * nodes, inside, across) == Group(per_node, nodes, inside, across)


@given(collectives, sizes, counts, st.integers(1, 5), networks, networks, latencies, latencies)
def test_a_collective_starts_once_however_many_steps_and_bytes_it_has(
    collective: Collective,
    nbytes: int,
    per_node: int,
    nodes: int,
    inside: Network,
    across: Network,
    start: float,
    other: float,
) -> None:
    late = replace(inside, start=start), replace(across, start=other)
    early, later = (
        collective_seconds(collective, nbytes, Group(per_node, nodes, *both)) for both in ((inside, across), late)
    )
    within = per_node > 1 and not (collective == "send_recv" and nodes > 1)
    waited = max(start * within, other * (nodes > 1))
    assert later == pytest.approx(early + waited, rel=1e-9)


def test_one_device_too_many_for_a_node_costs_more_than_a_full_second_node() -> None:
    """The ninth device fetches 8/9 of the tensor through one adapter; eight fetch a half through eight."""
    cluster = Cluster.preset("8xH100", nodes=2)
    nine, sixteen, two = (
        cluster.seconds("all_gather", 1 << 30, [cluster.devices[i] for i in chosen])
        for chosen in (range(9), range(16), (0, 8))
    )
    assert nine > 4 * sixteen
    assert 1.5 * two < nine < 2 * two


@pytest.mark.parametrize("counts", [(2, 1), (1, 2, 3), (3, 4)])
def test_uneven_counts_belong_to_the_nodes_of_the_group(counts: tuple[int, ...]) -> None:
    pcie = known_networks()["PCIe4"]
    with pytest.raises(ValueError, match="ascending"):
        Group(1, 2, pcie, pcie, counts)


def test_what_even_processes_measured_is_not_used_for_an_uneven_group() -> None:
    plain = Cluster.preset("4xL4", nodes=2)
    pair = MeasuredCollectives(2, 1, (10, 1000), {"all_reduce": (3.0, 5.0)})
    three = MeasuredCollectives(2, 1, (10, 1000), {"all_reduce": (4.0, 7.0)}, (1, 2))
    cluster = replace(plain, measured_collectives=(pair, three))
    assert cluster.seconds("all_reduce", 1000, cluster.devices[3:5]) == 5
    assert cluster.seconds("all_reduce", 1000, cluster.devices[2:5]) == 7
    four = cluster.devices[1:5]
    assert cluster.seconds("all_reduce", 1000, four) == plain.seconds("all_reduce", 1000, four)


# -- switches that reduce ---------------------------------------------------------------------------------------------


@given(sizes, networks)
def test_a_switch_does_not_help_two_devices(nbytes: int, network: Network) -> None:
    pair, plain = (Group(2, 1, one) for one in (network, replace(network, in_switch=1.0)))
    assert collective_seconds("all_reduce", nbytes, pair) == collective_seconds("all_reduce", nbytes, plain)


@given(st.integers(3, 64), sizes, bandwidths, gains)
def test_no_switch_is_faster_than_sending_the_tensor_once(n: int, nbytes: int, bandwidth: float, gain: float) -> None:
    group = Group(n, 1, Network("a network", 0.0, bandwidth, in_switch=gain))
    assert collective_seconds("all_reduce", nbytes, group) >= nbytes / bandwidth * (1 - 1e-12)


@given(collectives, sizes, networks)
def test_a_group_of_one_costs_nothing(collective: Collective, nbytes: int, network: Network) -> None:
    assert collective_seconds(collective, nbytes, Group(1, 1, network, network)) == 0


def test_groups_at_the_same_time_divide_shared_networks_alone() -> None:
    for name, divided in (("Ethernet25", True), ("NDR", False)):
        group = Group(1, 2, None, known_networks()[name])
        alone, crowded = (collective_seconds("all_reduce", 1 << 30, group, concurrent) for concurrent in (1, 8))
        assert crowded == pytest.approx(8 * alone, rel=0.01) if divided else crowded == alone


def test_every_device_with_an_adapter_of_its_own_adds_bandwidth_between_nodes() -> None:
    network = replace(known_networks()["NDR"], latency=0.0)
    one, eight = (
        collective_seconds("all_gather", 1 << 30, Group(g, 2, known_networks()["NVLink5"], network)) for g in (1, 8)
    )
    assert one > 4 * eight


@pytest.mark.parametrize(
    ("collective", "nbytes", "concurrent"), [("all_reduced", 1, 1), ("all_reduce", -1, 1), ("all_reduce", 1, 0)]
)
def test_impossible_questions_are_errors(collective: Collective, nbytes: int, concurrent: int) -> None:
    with pytest.raises(ValueError):
        collective_seconds(collective, nbytes, Group(2, 1, known_networks()["PCIe4"]), concurrent)


@pytest.mark.parametrize("shape", [(0, 1), (1, 0), (2, 1), (1, 2)])
def test_a_group_needs_devices_and_networks_between_them(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError):
        Group(*shape)


MEASURED = MeasuredCollectives(1, 2, (10, 100, 1000), {"all_reduce": (3.0, 2.0, 5.0)})


@pytest.mark.parametrize(("nbytes", "seconds"), [(0, 3), (10, 3), (55, 3), (100, 3), (550, 4), (1000, 5), (3000, 15)])
def test_measured_times_are_joined_by_lines_and_never_shrink(nbytes: int, seconds: float) -> None:
    assert MEASURED.seconds("all_reduce", nbytes) == pytest.approx(seconds)


def test_measured_times_replace_the_formula_for_groups_of_their_shape() -> None:
    plain = Cluster.preset("4xL4", nodes=2)
    cluster = replace(plain, measured_collectives=(MEASURED,))
    pair, apart, three = (cluster.devices[:2], cluster.devices[3:5], cluster.devices[:3])
    assert cluster.seconds("all_reduce", 1000, pair) == 5
    assert cluster.seconds("all_gather", 1000, pair) == plain.seconds("all_gather", 1000, pair)
    for group in (apart, three):
        assert cluster.seconds("all_reduce", 1000, group) == plain.seconds("all_reduce", 1000, group)


@pytest.mark.parametrize(("sizes", "times"), [((), ()), ((2, 1), (1.0, 1.0)), ((1, 2), (1.0,)), ((1, 2), (1.0, 0.0))])
def test_measured_times_belong_to_ascending_sizes(sizes: tuple[int, ...], times: tuple[float, ...]) -> None:
    with pytest.raises(ValueError):
        MeasuredCollectives(1, 2, sizes, {"all_reduce": times})


def test_measuring_needs_processes() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        measure_collectives()


def _measure(rank: int, rendezvous: str, results: "multiprocessing.Queue[MeasuredCollectives]") -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    results.put(measure_collectives(sizes=(1000, 8 << 20)))
    dist.destroy_process_group()


@pytest.mark.slow
def test_processes_measure_every_collective_and_agree(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[MeasuredCollectives] = context.Queue()
    processes = [context.Process(target=_measure, args=(i, str(tmp_path / "rendezvous"), results)) for i in range(2)]
    for process in processes:
        process.start()
    measured, same = (results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert measured == same
    assert (measured.nodes, measured.per_node, measured.sizes) == (1, 2, (1000, 8 << 20))
    assert set(measured.times) == set(COLLECTIVES)
    for collective in COLLECTIVES:
        assert 0 < measured.seconds(collective, 1000) <= measured.seconds(collective, 8 << 20)
    assert measured.times["all_reduce"][1] > measured.times["all_reduce"][0]  # 8000 times the bytes
    cluster = replace(Cluster.preset("2xcpu"), measured_collectives=(measured,))
    assert cluster.seconds("all_reduce", 1000, cluster.devices) == measured.times["all_reduce"][0]


# -- adapters that devices share ---------------------------------------------------------------------------------------


@given(collectives, sizes, st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), networks, networks)
def test_more_adapters_never_make_a_collective_slower(
    collective: Collective, nbytes: int, per_node: int, concurrent: int, others: int, inside: Network, across: Network
) -> None:
    devices = per_node * concurrent + others
    seconds = [
        collective_seconds(
            collective,
            nbytes,
            Group(per_node, 2, inside, replace(across, shared=True, cards=cards), devices=devices),
            concurrent,
        )
        for cards in range(1, 2 * devices)
    ]
    assert all(more <= fewer * (1 + 1e-12) for fewer, more in itertools.pairwise(seconds))
    own = Group(per_node, 2, inside, replace(across, shared=False, cards=1), devices=devices)
    assert collective_seconds(collective, nbytes, own, concurrent) == pytest.approx(seconds[devices - 1])


@given(st.integers(1, 16), st.integers(1, 20), st.data())
def test_adapters_reached_are_those_of_the_first_devices(devices: int, cards: int, data: st.DataObject) -> None:
    network = Network("a network", 0.0, 1.0, shared=True, cards=cards)
    n = data.draw(st.integers(1, devices))
    if cards <= devices:
        assert network.reach(n, devices) == len({network.card(device, devices) for device in range(n)})
        assert len({network.card(device, devices) for device in range(devices)}) == cards
    assert network.reach(devices, devices) == cards


def test_groups_side_by_side_share_the_adapters_of_their_devices() -> None:
    """Data-parallel groups of the eight ranks of a node: four adapters for all of them, or one each."""
    across, inside = Network("a network", 0.0, 1.0, shared=True, cards=4), Network("free", 0.0, 1e30)

    def seconds(per_node: int, concurrent: int) -> float:
        return collective_seconds("all_gather", 2.0, Group(per_node, 2, inside, across, devices=8), concurrent)

    assert seconds(1, 8) == pytest.approx(2.0)  # half an adapter each
    assert seconds(1, 2) == pytest.approx(2.0)  # both at the first adapter
    assert seconds(1, 1) == pytest.approx(1.0)
    assert seconds(8, 1) == pytest.approx(0.25)
    assert seconds(3, 1) == pytest.approx(0.5)
