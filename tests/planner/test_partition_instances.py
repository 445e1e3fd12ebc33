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
from instance_oracle import least_along_orders, least_load

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


@st.composite
def training_graphs(draw: st.DrawFn) -> dict[str, Any]:
    """Forward nodes with backward nodes that mirror them; most share a colour, and some gradients are summed first."""
    n = draw(st.integers(3, 8))
    tenths = st.integers(0, 60).map(lambda x: x / 10)
    pairs = [(a, b) for a in range(n) for b in range(a + 1, min(n, a + 5))]
    forward = sorted(set(draw(st.lists(st.sampled_from(pairs), min_size=n - 1, max_size=2 * n))))
    readers = {a: [b for x, b in forward if x == a] for a in range(n)}
    summed = {a for a in range(n) if len(readers[a]) > 1 and draw(st.booleans())}
    edges = [*forward, *((b + 100, a + (200 if a in summed else 100)) for a, b in forward)]
    edges += [(a + 200, a + 100) for a in summed]
    edges += [(a, b + 100) for a, b in forward if draw(st.booleans())]  # saved for backward
    uncoloured = {a + 100 for a in range(n) if draw(st.integers(0, 4)) == 0} | {a + 200 for a in summed}
    ids = [*range(n), *(a + 100 for a in reversed(range(n))), *(a + 200 for a in sorted(summed))]
    cost = {i: draw(tenths) / 2 for i in ids}

    def node(i: int) -> dict[str, Any]:
        seconds = draw(tenths)
        colour = {} if i in uncoloured else {"colorClass": i % 100}
        times = {"fpgaLatency": seconds, "cpuLatency": 4 * seconds}
        return {"id": i, "supportedOnFpga": 1, "isBackwardNode": i >= 100, "size": 1.0, **times, **colour}

    return {
        "maxSizePerFPGA": draw(st.sampled_from([6.0, 1e9])),
        "maxFPGAs": draw(st.integers(2, 4)),
        "maxCPUs": draw(st.integers(0, 1)),
        "nodes": [node(i) for i in ids],
        "edges": [{"sourceId": a, "destId": b, "cost": cost[a]} for a, b in edges],
    }


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(training_graphs(), st.integers(2, 6), st.sampled_from([0, 100_000]))
def test_a_training_graph_is_never_split_worse_than_along_one_order(
    instance: dict[str, Any], limit: int, listed: int
) -> None:
    if not any(node["fpgaLatency"] for node in instance["nodes"]):
        return
    along = least_along_orders(instance)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.partition_instances._CUTS", limit)
        patch.setattr("benchmarks.partition_instances._ROUNDS", 0)
        patch.setattr("autopar.planner.inter_op.cut_selection._LISTED", listed)
        if math.isinf(along):
            return
        found = solve_instance(instance)
    assert found is not None
    assert found.solution.objective <= along * (1 + 1e-9)
    best = least_load(instance)
    assert found.bound * (1 - 1e-9) <= best <= found.solution.objective * (1 + 1e-9)
    if found.proven:
        assert found.solution.objective == pytest.approx(best)


def test_the_sum_of_gradients_follows_the_order_of_the_forwards() -> None:
    """Without an order of its own, the sum could go anywhere: 0 is read by 1 and 2, whose gradients meet at 200."""
    node = {"supportedOnFpga": 1, "cpuLatency": 9.0, "fpgaLatency": 1.0, "size": 1.0}
    ids = [0, 1, 2, 102, 101, 100, 200]
    nodes = [{**node, "id": i, "isBackwardNode": i >= 100} for i in ids]
    nodes = [n if n["id"] == 200 else {**n, "colorClass": n["id"] % 100} for n in nodes]
    pairs = [(0, 1), (0, 2), (101, 200), (102, 200), (200, 100)]
    edges = [{"sourceId": a, "destId": b, "cost": 1.0} for a, b in pairs]
    parsed = parse_instance({"maxSizePerFPGA": 1e9, "maxFPGAs": 2, "maxCPUs": 0, "nodes": nodes, "edges": edges})
    assert parsed.graph.n == 4
    assert parsed.graph.edges == {(0, 1), (0, 2), (0, 3), (3, 1), (3, 2)}


@settings(max_examples=examples(40), deadline=None)
@given(instances())
def test_the_largest_load_is_the_least_of_all_convex_splits(instance: dict[str, Any]) -> None:
    if not any(node["fpgaLatency"] or node["cpuLatency"] for node in instance["nodes"]):
        return
    expected = least_load(instance)
    found = solve_instance(instance)
    if math.isinf(expected):
        assert found is None
    else:
        assert found is not None
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
    assert main(["partition_instances", "--instances", str(tmp_path), "--results", str(tmp_path)]) == 0
    assert f"skipped: there is nothing to run in {tmp_path}; give --instances DIR" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_planning_time_is_written_by_case(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main(["planning", "--quick", "--json", str(out), "--results", str(tmp_path)]) == 0
    found = json.loads(out.read_text())
    assert list(found) == ["60_nodes_4_devices_of_two_kinds", "llama_of_4_layers_8_h100"]
    for figures in found.values():
        assert figures["seconds"] > 0
        assert figures["peak_gb"] > 0
