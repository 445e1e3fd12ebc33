"""The public partitioning graphs, by their own definition of a load."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_oracle import closed_sets

from benchmarks.__main__ import main
from benchmarks.partition_instances import parse_instance, solve_instance


@st.composite
def instances(draw: st.DrawFn) -> dict[str, Any]:
    """A small training graph: forward nodes with a backward node of the same colour each."""
    n = draw(st.integers(1, 5))
    whole = st.integers(0, 9).map(float)
    training = draw(st.booleans())
    nodes, edges = [], []
    for i in range(n):
        for backward in (0, 1) if training else (0,):
            nodes.append(
                {
                    "id": i + 100 * backward,
                    "supportedOnFpga": 1,
                    "cpuLatency": 3 * draw(whole),
                    "fpgaLatency": draw(whole),
                    "isBackwardNode": backward,
                    "colorClass": i if training else None,
                    "size": draw(whole),
                }
            )
    for source in range(n):
        cost = draw(whole)
        for target in draw(st.lists(st.integers(source + 1, n - 1), max_size=2, unique=True)) if source < n - 1 else []:
            edges.append({"sourceId": source, "destId": target, "cost": cost})
            if training:
                back = {"sourceId": 100 + target, "destId": 100 + source}
                edges.append({**back, "cost": next((e["cost"] for e in edges if e["sourceId"] == 100 + target), cost)})
    return {
        "maxSizePerFPGA": draw(st.sampled_from([10.0, 1e9])),
        "maxFPGAs": draw(st.integers(1, 3)),
        "maxCPUs": draw(st.integers(0, 1)),
        "nodes": nodes,
        "edges": edges,
    }


def load(instance: dict[str, Any], inside: frozenset[Any], on_cpu: bool) -> float:
    """Seconds of the nodes `inside` on one device."""
    nodes = {node["id"]: node for node in instance["nodes"]}
    if on_cpu:
        return float(sum(nodes[i]["cpuLatency"] for i in inside))
    if sum(nodes[i]["size"] for i in inside) > instance["maxSizePerFPGA"]:
        return math.inf
    crossing = {
        e["sourceId"]: e["cost"] for e in instance["edges"] if (e["sourceId"] in inside) != (e["destId"] in inside)
    }
    return float(sum(nodes[i]["fpgaLatency"] for i in inside) + sum(crossing.values()))


def least_load(instance: dict[str, Any]) -> float:
    """Over all chains of cuts of the forward nodes and all choices of devices."""
    forward = [node["id"] for node in instance["nodes"] if not node["isBackwardNode"]]
    edges = {(e["sourceId"], e["destId"]) for e in instance["edges"] if e["sourceId"] < 100 and e["destId"] < 100}
    cuts = closed_sets(len(forward), edges)

    def whole(atoms: frozenset[int]) -> frozenset[int]:
        ids = {node["id"] for node in instance["nodes"]}
        return frozenset(i for a in atoms for i in (a, a + 100) if i in ids)

    def best(done: frozenset[int], accelerators: int, cpus: int) -> float:
        if len(done) == len(forward):
            return 0.0
        found = math.inf
        for cut in cuts:
            if done < cut:
                inside = whole(cut - done)
                if accelerators:
                    found = min(found, max(load(instance, inside, False), best(cut, accelerators - 1, cpus)))
                if cpus:
                    found = min(found, max(load(instance, inside, True), best(cut, accelerators, cpus - 1)))
        return found

    return best(frozenset(), instance["maxFPGAs"], instance["maxCPUs"])


@settings(max_examples=examples(40), deadline=None)
@given(instances())
def test_the_largest_load_is_the_least_of_all_convex_splits(instance: dict[str, Any]) -> None:
    if not any(node["fpgaLatency"] or node["cpuLatency"] for node in instance["nodes"]):
        return
    expected = least_load(instance)
    if math.isinf(expected):
        with pytest.raises(ValueError, match="no split fits the memory"):
            solve_instance(instance)
    else:
        found = solve_instance(instance)
        assert found.complete
        assert found.solution.objective == pytest.approx(expected)


def test_nodes_of_a_colour_are_one_atom() -> None:
    node = {"supportedOnFpga": 1, "cpuLatency": 2.0, "fpgaLatency": 1.0, "isBackwardNode": 0, "size": 5.0}
    nodes = [{**node, "id": i, "colorClass": i // 2} for i in range(4)]
    edges = [{"sourceId": i, "destId": i + 1, "cost": 1.0} for i in range(3)]
    parsed = parse_instance({"maxSizePerFPGA": 1e9, "maxFPGAs": 2, "maxCPUs": 0, "nodes": nodes, "edges": edges})
    assert parsed.graph.n == 2
    assert parsed.sizes.tolist() == [10.0, 10.0]
    assert [kind.name for kind in parsed.kinds] == ["accelerator"]


def test_a_folder_of_instances_is_solved_and_written_by_name(tmp_path: Path) -> None:
    node = {"supportedOnFpga": 1, "cpuLatency": 20.0, "fpgaLatency": 2.0, "isBackwardNode": 0, "size": 5.0}
    nodes = [{**node, "id": i, "colorClass": None} for i in range(4)]
    edges = [{"sourceId": i, "destId": i + 1, "cost": 0.5} for i in range(3)]
    instance = {"maxSizePerFPGA": 1e9, "maxFPGAs": 2, "maxCPUs": 1, "nodes": nodes, "edges": edges}
    (tmp_path / "Graphs").mkdir()
    (tmp_path / "Graphs" / "line.json").write_text(json.dumps(instance))
    out = tmp_path / "out.json"
    arguments = ["partition_instances", "--instances", str(tmp_path), "--json", str(out), "--results", str(tmp_path)]
    assert main(arguments) == 0
    data = json.loads(out.read_text())
    assert list(data) == ["Graphs/line"]
    assert data["Graphs/line"]["objective"] == 4.5


def test_without_instances_the_benchmark_is_skipped_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["partition_instances", "--instances", str(tmp_path / "nowhere")]) == 0
    assert "skipped: no instances in" in capsys.readouterr().out
    assert main(["partition_instances"]) == 0


@pytest.mark.slow
def test_planning_time_is_written_by_case(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main(["planning", "--quick", "--json", str(out), "--results", str(tmp_path)]) == 0
    found = json.loads(out.read_text())
    assert list(found) == ["60_nodes_4_devices_of_two_kinds", "llama_of_4_layers_8_h100"]
    for figures in found.values():
        assert figures["seconds"] > 0
        assert figures["peak_gb"] > 0
