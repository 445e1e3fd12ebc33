"""Clusters: known devices and networks, files, devices at hand, and what connects any two devices."""

import math
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cost_models import Cluster, Device, DeviceError, DeviceSpec, Group, Link, Network, known_devices, known_networks
from cost_models.clusters import cluster as cluster_module
from cost_models.hardware.device_specs import efficiency_of, host_of
from cost_models.kernels.efficiency_curves import CHANNEL, Efficiency
from cost_models.kernels.launches import host_costs
from cost_models.kernels.roofline import Rates
from cost_models.measuring.calibration import Calibration

GIB = 1 << 30
DATED = re.compile(r".{3,}\b20[012]\d(-\d\d)?\)?", re.DOTALL)

positive = st.floats(1e-3, 1e18)
fractions = st.floats(0.01, 1)
seconds = st.floats(0, 1)
names = st.text(st.characters(exclude_characters="+", exclude_categories=("C", "Z")), min_size=1).map("a {}".format)
device_specs = st.builds(
    DeviceSpec,
    name=names,
    peak_flops=st.fixed_dictionaries({"float32": positive}, optional={"bfloat16": positive, "tf32": positive}),
    memory=positive,
    bandwidth=positive,
    flops_efficiency=fractions,
    bandwidth_efficiency=fractions,
    launch=seconds,
    sources=st.dictionaries(st.text(), st.text(), max_size=2),
)
networks = st.builds(
    Network,
    name=names,
    latency=seconds,
    line_rate=positive | st.just(math.inf),
    efficiency=fractions,
    ramp=seconds,
    in_switch=st.floats(1, 2),
) | st.builds(Network, names, seconds, positive, shared=st.just(True), cards=st.integers(1, 20))


def unlike(value: DeviceSpec | Network) -> str:
    return value.name


@given(
    st.lists(device_specs, min_size=1, max_size=3, unique_by=unlike),
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
    st.integers(1, 5),
    st.lists(networks, min_size=2, max_size=2, unique_by=unlike),
)
def test_a_file_gives_back_the_cluster_it_was_written_from(
    specs: list[DeviceSpec], order: list[int], nodes: int, levels: list[Network]
) -> None:
    inside, across = levels
    cluster = Cluster(tuple(specs[i % len(specs)] for i in order), nodes, inside, across)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "cluster.toml"
        path.write_text(cluster.to_toml(), encoding="utf-8")
        assert Cluster.from_toml(path) == cluster


def test_a_file_may_use_known_devices_and_networks(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('node = "8xH100"\nnodes = 2\ninter_node = "EFA"\n')
    assert Cluster.from_toml(path) == Cluster.preset("8xH100", nodes=2, inter_node="EFA")


def test_everything_wrong_with_a_file_is_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        """
        node = 8
        nodes = 0
        color = "red"
        [devices.mine]
        peak_flops = { bfloat16 = 1e12 }
        memory = -1
        bandwidth = 1e12
        flops_efficiency = 1.5
        bandwidth_efficiency = 0.5
        speed = 3
        [networks.ours]
        latency = "fast"
        line_rate = 0
        shared = 1
        """
    )
    with pytest.raises(DeviceError) as raised:
        Cluster.from_toml(path)
    message = str(raised.value)
    for part in (
        *(
            "node must be",
            "nodes must be",
            "color is no field",
            "devices.mine: peak_flops must be",
            "float32 among them",
        ),
        *("devices.mine: memory must be", "flops_efficiency must be", "launch is missing", "speed is no field"),
        *("networks.ours: latency must be", "line_rate must be", "shared must be", str(path)),
    ):
        assert part in message
    assert "bandwidth must be" not in message  # it is right


@pytest.mark.parametrize(
    "text", ["node = ", "node = 'A'\nnode = 'B'", "devices = 3\nnode = 'L4'", "networks.a = 1\nnode = 'L4'"]
)
def test_a_file_that_is_no_cluster_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(DeviceError, match=str(path)):
        Cluster.from_toml(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("devices = 3", "devices must be a table of tables by name, got 3"),
        ("networks = [1]", "networks must be a table of tables by name, got [1]"),
        ("[devices]\nmine = 3", "devices must be a table of tables by name, got {'mine': 3}"),
    ],
)
def test_tables_that_are_none_are_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(f"node = '2xH100'\n{text}")
    with pytest.raises(DeviceError, match=f"^{re.escape(f'{path}: {said}')}$"):
        Cluster.from_toml(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(DeviceError, match=f"^{re.escape(str(path))}: it cannot be read: "):
            Cluster.from_toml(path)
    with pytest.raises(DeviceError, match=r"^path must be the name of a toml file, got 3$"):
        Cluster.from_toml(3)  # type: ignore[arg-type]


def test_an_unknown_collective_is_refused_with_the_known_ones() -> None:
    cluster = Cluster.preset("2xH100")
    with pytest.raises(DeviceError, match="unknown collective 'all_reduced'; known are all_reduce, "):
        cluster.seconds("all_reduced", 1e6, cluster.devices)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", known_devices())
def test_every_figure_of_a_known_device_has_a_source_that_ends_with_its_date(name: str) -> None:
    spec = known_devices()[name]
    figures = {"peak_flops", "memory", "bandwidth", "flops_efficiency", "bandwidth_efficiency", "launch"}
    assert set(spec.sources) == figures | ({"host"} if spec.host != 1 else set())
    assert all(DATED.fullmatch(source) for source in spec.sources.values())


@pytest.mark.parametrize("mode", ["eager", "compiled", "cuda-graphs"])
def test_the_hosts_of_older_devices_take_longer_to_launch(mode: str) -> None:
    older, newer = (host_of(known_devices()[name], mode) for name in ("A100-80", "H100"))
    assert older is not None
    assert newer == host_costs(mode)
    assert older == newer.scaled(known_devices()["A100-80"].host)
    assert older.scaled(0.5).kernel <= newer.kernel <= older.kernel


@pytest.mark.parametrize("name", known_networks())
def test_every_figure_of_a_known_network_has_a_source_that_ends_with_its_date(name: str) -> None:
    sources = known_networks()[name].sources
    assert set(sources) == {"latency", "line_rate", "efficiency", "ramp", "in_switch"}
    assert all(DATED.fullmatch(source) for source in sources.values())


# Multiprocessors, FLOP that one computes per clock in 16-bit tensor cores (dense, float32 sums), boost clock in GHz,
# width of the memory bus in bits, Gbit/s per pin: NVIDIA's architecture white papers of Volta (2017), Turing (2018),
# Ampere (2020), Ada (2022) and Hopper (2022), and the data sheets of L4 (2023) and H200 (2024).
ARCHITECTURE = {
    "V100": (80, 1024, 1.53, 4096, 1.752),
    "T4": (40, 1024, 1.59, 256, 10.0),
    "A100-40": (108, 2048, 1.41, 5120, 2.43),
    "A100-80": (108, 2048, 1.41, 5120, 3.186),
    "RTX4090": (128, 512, 2.52, 384, 21.0),
    "L4": (58, 1024, 2.04, 192, 12.5),
    "H100": (132, 4096, 1.83, 5120, 5.234),
    "H200": (132, 4096, 1.83, 6144, 6.25),
}


@pytest.mark.parametrize("name", ARCHITECTURE)
def test_figures_of_gpus_follow_from_their_architecture(name: str) -> None:
    """Peak = multiprocessors x FLOP per clock x clock; bandwidth = bus width x rate of a pin."""
    units, per_clock, clock, bits, per_pin = ARCHITECTURE[name]
    spec = known_devices()[name]
    assert spec.units == units
    assert spec.peak_flops["float16"] == pytest.approx(units * per_clock * clock * 1e9, rel=0.01)
    assert spec.bandwidth == pytest.approx(bits / 8 * per_pin * 1e9, rel=0.01)


# FLOP in float64 that a multiprocessor computes per clock, on tensor cores where they do float64, and the boost clock
# in GHz for them: the same sources; 1.98 GHz follows from the 67 TFLOP/s in float32 of the data sheets of H100, H200.
DOUBLE = {
    "V100": (64, 1.53),
    "T4": (4, 1.59),
    "A100-40": (128, 1.41),
    "A100-80": (128, 1.41),
    "RTX4090": (4, 2.52),
    "L4": (4, 2.04),
    "H100": (256, 1.98),
    "H200": (256, 1.98),
}


@pytest.mark.parametrize("name", DOUBLE)
def test_double_precision_has_the_rate_of_the_data_sheet_and_no_rate_that_single_precision_suggests(name: str) -> None:
    per_clock, clock = DOUBLE[name]
    spec = known_devices()[name]
    peaks = spec.by_dtype()
    assert peaks[torch.float64] == spec.peak_flops["float64"]
    assert peaks[torch.float64] == pytest.approx(spec.units * per_clock * clock * 1e9, rel=0.01)


def test_every_known_device_has_a_rate_in_double_precision_and_none_is_faster_than_in_single() -> None:
    for spec in known_devices().values():
        assert spec.peak_flops["float64"] <= spec.peak_flops["float32"]


# Links (or lanes, or adapters a node shares) x Gbit/s that each carries in one direction: NVIDIA's white papers,
# the PCI Express base specifications (128b/130b encoding), the InfiniBand roadmap, IEEE 802.3, and the clouds' pages.
LINES = {
    "NVLink2": (6, 200),
    "NVLink3": (12, 200),
    "NVLink4": (18, 200),
    "NVLink5": (18, 400),
    "PCIe3": (16, 8 * 128 / 130),
    "PCIe4": (16, 16 * 128 / 130),
    "PCIe5": (16, 32 * 128 / 130),
    "EDR-shared": (4, 100),
    "HDR": (1, 200),
    "NDR": (1, 400),
    "TCPXO": (1, 200),
    "EFA": (1, 400),
    "Ethernet10": (1, 10),
    "Ethernet25": (1, 25),
    "Ethernet100": (1, 100),
}


@pytest.mark.parametrize("name", LINES)
def test_line_rates_of_networks_follow_from_their_standards(name: str) -> None:
    links, gigabits = LINES[name]
    found = known_networks()[name]
    assert found.line_rate * found.cards == pytest.approx(links * gigabits * 1e9 / 8, rel=0.02)


def test_a_node_has_the_cards_that_it_is_said_to_have() -> None:
    own, shared = Cluster.preset("8xA100-80", nodes=2), Cluster.preset("8xA100-80", nodes=2, cards=2)
    assert own.inter_node.reach(8, 8) == 8
    assert [shared.inter_node.card(device, 8) for device in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert (own.cards, shared.cards, Cluster.preset("8xV100", nodes=2, inter_node="Ethernet25").cards) == (8, 2, 1)
    assert {shared.card_of(device) for device in shared.devices[8:12]} == {(1, 0)}
    assert len({own.card_of(device) for device in own.devices}) == 16
    assert "each of 2 cards of a node" in str(shared)
    assert Cluster.preset("8xV100", nodes=2).inter_node.reach(8, 8) == 4
    assert Cluster.preset("8xA100-80", nodes=2, cards=8).seconds("all_reduce", 1 << 30, own.devices) == own.seconds(
        "all_reduce", 1 << 30, own.devices
    )
    with pytest.raises(DeviceError, match="cards must be an integer >= 1, got 0"):
        Cluster.preset("8xH100", nodes=2, cards=0)
    with pytest.raises(DeviceError, match="cards must be 1 where shared is false"):
        replace(own.inter_node, cards=2)


@pytest.mark.parametrize("name", known_devices())
def test_a_node_of_any_known_device_is_faster_inside_than_across(name: str) -> None:
    cluster = Cluster.preset(f"2x{name}", nodes=2)
    assert cluster.intra_node.bandwidth > cluster.inter_node.bandwidth / (2 if cluster.inter_node.shared else 1)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("8xH100", ["H100"] * 8),
        ("RTX4090", ["RTX4090"]),
        ("rtx 4090", ["RTX4090"]),
        ("2 x a100_80 + T4", ["A100-80", "A100-80", "T4"]),
    ],
)
def test_a_preset_is_any_count_of_any_known_devices(text: str, kinds: list[str]) -> None:
    cluster = Cluster.preset(text)
    assert [device.kind for device in cluster.devices] == kinds
    assert [cluster.specs[d.kind].memory for d in cluster.devices] == [d.memory for d in cluster.devices]


def test_an_unknown_device_or_network_is_named_among_the_known_ones() -> None:
    with pytest.raises(DeviceError, match=r"unknown device 'A100'; known are .*A100-40, A100-80, H100"):
        Cluster.preset("8xA100")
    with pytest.raises(DeviceError, match=r"unknown network 'wire'; known are .*NVLink4.*EFA"):
        Cluster.preset("8xH100", inter_node="wire")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"node": 8}, "a node is written as .*, got 8"),
        ({"node": ""}, "a node is written as .*, got ''"),
        ({"node": "8xH100+"}, r"a node is written as .*, got '8xH100\+'"),
        ({"node": "2x"}, "'2x' names no device behind its count"),
        ({"node": "8xH100", "nodes": 1.5}, "nodes must be a whole number of at least 1, got 1.5"),
        ({"node": "8xH100", "nodes": "2"}, "nodes must be a whole number of at least 1, got '2'"),
        ({"node": "8xH100", "nodes": True}, "nodes must be a whole number of at least 1, got True"),
        ({"node": "8xH100", "intra_node": 3}, "intra_node must be a Network or the name of one, got 3"),
    ],
)
def test_what_is_no_cluster_is_refused_by_its_value(how: dict[str, Any], said: str) -> None:
    with pytest.raises(DeviceError, match=said):
        Cluster.preset(**how)


@pytest.mark.parametrize(("node", "nodes"), [("0xH100", 1), ("4xH100+0xT4", 1), ("00x H100+T4", 1), ("8xH100", 0)])
def test_a_cluster_has_at_least_one_device(node: str, nodes: int) -> None:
    with pytest.raises(DeviceError, match="devices"):
        Cluster.preset(node, nodes)


def test_devices_are_named_after_their_place_and_need_no_hardware() -> None:
    cluster = Cluster.preset("2xH100+T4", nodes=2)
    assert [device.name for device in cluster.devices] == [
        *("0.0:H100", "0.1:H100", "0.2:T4"),
        *("1.0:H100", "1.1:H100", "1.2:T4"),
    ]
    assert all(device.torch_device == torch.device("meta") for device in cluster.devices)


def test_links_are_those_of_the_level_between_two_devices() -> None:
    cluster = Cluster.preset("8xH100", nodes=2)
    first, second, far = cluster.devices[0], cluster.devices[1], cluster.devices[8]
    assert cluster.link(first, second) == Link(cluster.intra_node.latency, cluster.intra_node.bandwidth)
    assert cluster.link(first.name, far) == Link(cluster.inter_node.latency, cluster.inter_node.bandwidth)
    assert cluster.link(first, first).seconds(GIB) == 0
    assert [cluster.level(group) for group in ([first], [first, second], [first, second, far])] == [
        *("device", "intra_node", "inter_node"),
    ]
    with pytest.raises(DeviceError, match=r"'2\.0:H100' is no device"):
        cluster.link(first, "2.0:H100")


def test_the_shape_of_a_group_is_how_many_of_its_devices_each_node_has() -> None:
    cluster = Cluster.preset("4xL4", nodes=3)
    group = cluster.group([cluster.devices[i] for i in (0, 1, 2, 4, 5)])
    assert (group.nodes, group.per_node, group.most, group.uneven, group.size) == (2, 2, 3, (2, 3), 5)
    assert cluster.group(cluster.devices[2:6]) == Group(2, 2, cluster.intra_node, cluster.inter_node, devices=4)
    lone = [cluster.devices[i] for i in (0, 4, 5)]
    assert cluster.level(lone) == "inter_node"
    for wrong in ([], [cluster.devices[0]] * 2):
        with pytest.raises(DeviceError, match="a group needs"):
            cluster.group(wrong)


def test_missing_precisions_are_computed_in_single() -> None:
    peaks = known_devices()["V100"].by_dtype()
    assert peaks[torch.bfloat16] == peaks[torch.float32] < peaks[torch.float16]
    own = DeviceSpec("own", {"float32": 2e12}, 1e9, 1e9, 1.0, 1.0, 0.0)
    assert own.by_dtype()[torch.float64] == 1e12
    a100 = known_devices()["A100-80"]
    assert a100.by_dtype(tf32=True)[torch.float32] == a100.peak_flops["tf32"]


def test_kinds_of_one_name_must_agree() -> None:
    spec = known_devices()["L4"]
    other = DeviceSpec(spec.name, spec.peak_flops, 1e9, 1e9, 1.0, 1.0, 0.0)
    network = known_networks()["PCIe4"]
    with pytest.raises(DeviceError, match="both called 'L4'"):
        Cluster((spec, other), 1, network, network)


@pytest.mark.slow
def test_devices_at_hand_are_measured() -> None:
    cluster = Cluster.from_devices(["cpu", "cpu"])
    first, second = cluster.devices
    assert (first.name, first.torch_device) == ("cpu:0", torch.device("cpu"))
    assert cluster.link(first, second) == cluster.measured_links["cpu:0", "cpu:1"]
    spec = cluster.specs[first.kind]
    assert spec.peak_flops["float32"] > 1e8
    assert spec.bandwidth > 1e8
    assert 0 < spec.launch < 1e-2
    # Two workers, one link: a reduce-scatter and an all-gather, each of one step that moves half of the bytes.
    link = cluster.link(first, second)
    expected = 2 * link.latency + 2 * (GIB / 2) / link.bandwidth
    assert cluster.seconds("all_reduce", GIB, cluster.devices) == pytest.approx(expected)


@pytest.mark.slow
def test_calibrated_curves_are_used_and_kept_in_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    curves = Efficiency.default(0.25)
    found = Calibration(Rates({torch.float32: 5e10}, 2e10, 3e-6), curves)
    monkeypatch.setattr(cluster_module, "calibrate", lambda device, cache: found)
    cluster = Cluster.from_devices(["cpu", "cpu"], calibrated=True)
    assert (cluster.node[0].peak_flops["float32"], cluster.node[0].launch) == (5e10, 3e-6)
    assert efficiency_of(cluster.node[0]) == curves
    (tmp_path / "here.toml").write_text(cluster.to_toml())
    read = Cluster.from_toml(tmp_path / "here.toml")
    assert read.node == cluster.node
    assert efficiency_of(read.node[0]) == curves
    assert read.devices[0].torch_device.type == "meta"
    (tmp_path / "here.toml").write_text(cluster.to_toml().replace("best", "bets"))
    with pytest.raises(DeviceError, match=r"curves must be a table of curves"):
        Cluster.from_toml(tmp_path / "here.toml")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "float32"),
    [
        ("", 19.5e12),
        ("torch.set_float32_matmul_precision('highest')", 19.5e12),
        ("torch.set_float32_matmul_precision('high')", 156e12),
        ("torch.backends.cuda.matmul.allow_tf32 = True", 156e12),
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", 156e12),  # torch's older getters then raise
        ("torch.backends.cuda.matmul.fp32_precision = 'ieee'", 19.5e12),
    ],
)
def test_a_data_sheet_gives_the_rates_that_torch_may_use(change: str, float32: float) -> None:
    """The figures are those of NVIDIA's A100 data sheet (2021): 19.5 TFLOP/s in float32, 156 in TF32."""
    script = "import torch; from cost_models import known_devices, rates_of;" + change
    script += "\nprint(rates_of(known_devices()['A100-80']).peak(torch.float32))"
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert float(output) == float32


def test_without_curves_large_kernels_reach_the_efficiencies_of_the_data_sheet() -> None:
    spec = known_devices()["A100-80"]
    assert efficiency_of(spec).compute["matmul"].best == spec.flops_efficiency
    memory = efficiency_of(spec).memory
    assert {curve.best for kind, curve in memory.items() if kind not in CHANNEL} == {spec.bandwidth_efficiency}
    assert all(memory[kind].best < spec.bandwidth_efficiency for kind in CHANNEL)  # they read their inputs twice


def test_measured_links_take_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [Device(f"cuda:{i}", torch.device("cuda", i), "a GPU", GIB, threads=1) for i in range(3)]
    links = {
        (a.name, b.name): Link(1e-6, float(10 + i + 3 * j)) for i, a in enumerate(here) for j, b in enumerate(here)
    }
    spec = DeviceSpec("a GPU", {"float32": 1e12}, GIB, 1e12, 1.0, 1.0, 1e-6)
    monkeypatch.setattr(
        cluster_module, "measure_links", lambda devices: {k: v for k, v in links.items() if k[0] != k[1]}
    )
    monkeypatch.setattr(cluster_module, "measure_spec", lambda device: spec)
    cluster = Cluster.from_devices(here)
    assert cluster.devices == tuple(here)
    for a in here:
        for b in here:
            assert a == b or cluster.link(a, b) == links[a.name, b.name]
    assert cluster.intra_node.bandwidth == min(link.bandwidth for ends, link in links.items() if ends[0] != ends[1])


def test_a_cluster_prints_its_devices_and_networks() -> None:
    text = str(Cluster.preset("8xH100+2xT4", nodes=16))
    for part in ("16 nodes of 8xH100+2xT4: 160 devices", "80 GB", "3350 GB/s", "bfloat16 989", "PCIe3", "shared"):
        assert part in text


def test_problems_of_the_node_and_of_networks_are_listed_together(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('node = "8xH100"\nnodes = "2"\ninter_node = "foo"\n')
    with pytest.raises(DeviceError, match=r"nodes must be an integer >= 1, got '2'; .*foo"):
        Cluster.from_toml(path)


def test_a_cluster_file_may_start_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('node = "2xH100"\n', encoding="utf-8-sig")
    assert [device.kind for device in Cluster.from_toml(tmp_path / "c.toml").devices] == ["H100", "H100"]
