"""The public graphs of "Efficient Algorithms for Device Placement of DNN Graph Operators" (NeurIPS 2020).

Their objective is the largest load: every device works on one thing after the other, transfers included, and the
slowest sets the pace. To the partition search that is a problem whose sum of stages does not count, where a transfer
costs its sender as well as its receiver, and one kind of device (the CPU) pays for no transfer.
"""

from __future__ import annotations

import csv
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autopar.planner.inter_op.cut_selection import PartitionResult, best_partition, most_cuts
from autopar.planner.inter_op.cuts import AtomGraph, merged_graph
from autopar.planner.inter_op.device_kind import DeviceKind
from autopar.planner.inter_op.problem import Problem
from autopar.planner.inter_op.space import Space
from autopar.planner.inter_op.stage_bytes import Shared, Value
from benchmarks.output import Report, Table
from benchmarks.published_runs.tables import TableError, read_each

_CUTS = 800
_ROUNDS = 20
# The files give transfers in seconds and take no memory for what is received: here they are so few bytes, over links
# that are as slow.
_BYTES_PER_SECOND = 1e-9


@dataclass(frozen=True)
class Instance:
    """One graph, nodes of a colour as one atom."""

    graph: AtomGraph
    times: np.ndarray  # [2, n] on an accelerator and on a CPU
    sizes: np.ndarray  # [n] bytes
    kinds: tuple[DeviceKind, ...]

    def problem(self, cuts: np.ndarray) -> Problem:
        resident = tuple(Shared(float(size), (atom,)) for atom, size in enumerate(self.sizes) if size)
        n = self.graph.n
        space = Space(cuts, self.graph.values, resident, (), (), np.zeros(n))
        # Two micro-batches: the one after the first takes as long as the slowest stage.
        times = self.times[: len(self.kinds)]
        return Problem(
            space, times, np.zeros_like(times), 2, "gpipe", self.kinds, max_replicas=1, sum_counts=False, share=1.0
        )


def run_partition_instances(folder: Path | None) -> Report | None:
    """Solve every instance of `folder`; None where there are none. Files that are no instances are skipped.

    Raises:
        TableError: no file is an instance.
    """
    paths = sorted(folder.glob("*/*.json")) if folder is not None else []
    if not paths:
        return None
    assert folder is not None
    published = _published(folder / "optima.csv")
    data: dict[str, Any] = {}
    rows = []
    for name, instance in read_each({f"{path.parent.name}/{path.stem}": path for path in paths}, _read).items():
        best = published.get(name, {})
        known = tuple(best.get(column, "-") for column in ("nodes", "one_device", "linear", "opt_contig"))
        start = time.perf_counter()
        found = solve_instance(instance)
        seconds = time.perf_counter() - start
        if found is None:  # no stages fit the memory of the accelerators
            data[name] = {"objective": None, "bound": None, "seconds": seconds}
            rows.append((name, *known, "nothing fits", "-", f"{seconds:.2f}"))
            continue
        objective = found.solution.objective
        data[name] = {"objective": objective, "bound": found.bound, "seconds": seconds}
        gap = "proven" if found.proven else f"{objective / found.bound - 1:.1%}" if found.bound else "-"
        rows.append((name, *known, f"{objective:.4f}", gap, f"{seconds:.2f}"))
    columns = ("instance", "nodes", "one device", "linear", "opt_contig", "autopar", "gap", "seconds")
    note = (
        "Largest load of a device. opt_contig: the authors' exact program for convex stages; linear: along one order; "
        "gap: to a bound that no convex stages are below."
    )
    title = "Public pipeline-partitioning instances"
    return Report(title, (Table("Largest load", columns, tuple(rows), note),), data, by_case=True)


_OF_INSTANCE = ("nodes", "edges", "maxSizePerFPGA", "maxFPGAs", "maxCPUs")
_OF_ENTRIES = {
    "nodes": ("id", "fpgaLatency", "cpuLatency", "size", "supportedOnFpga", "isBackwardNode"),
    "edges": ("sourceId", "destId", "cost"),
}


def _read(path: Path) -> dict[str, Any]:
    """Raises TableError for what is no instance, with what it lacks."""
    try:
        instance = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TableError(f"{path} is no JSON file: {error}") from error
    lacking = [name for name in _OF_INSTANCE if not isinstance(instance, dict) or name not in instance]
    if lacking:
        raise TableError(f"{path} is no instance: it lacks {', '.join(lacking)}")
    for field, names in _OF_ENTRIES.items():
        for number, entry in enumerate(instance[field] if isinstance(instance[field], list) else [None]):
            lacking = [name for name in names if not isinstance(entry, dict) or name not in entry]
            if lacking:
                raise TableError(f"{path}: {field}[{number}] lacks {', '.join(lacking)}")
    _check_values(path, instance)
    found: dict[str, Any] = instance
    return found


def _check_values(path: Path, instance: dict[str, Any]) -> None:
    """Raises TableError for numbers that make no sense, and edges of nodes that there are not."""
    for name, least in (("maxSizePerFPGA", 0), ("maxFPGAs", 1), ("maxCPUs", 0)):
        whole = name == "maxSizePerFPGA" or (_is_number(instance[name]) and instance[name] == int(instance[name]))
        if not _is_number(instance[name]) or instance[name] < least or not whole:
            raise TableError(f"{path}: {name} must be a number of at least {least}, got {instance[name]!r}")
    numbers = (("nodes", ("fpgaLatency", "cpuLatency", "size")), ("edges", ("cost",)))
    for field, names in numbers:
        for place, entry in enumerate(instance[field]):
            for name in names:
                if not _is_number(entry[name]) or entry[name] < 0:
                    raise TableError(f"{path}: {field}[{place}]: {name} must be a number >= 0, got {entry[name]!r}")
    ids = Counter(node["id"] if isinstance(node["id"], (int, str)) else None for node in instance["nodes"])
    if not ids or None in ids or max(ids.values()) > 1:
        raise TableError(f"{path}: nodes must be there, each with an id of its own")
    for place, edge in enumerate(instance["edges"]):
        for name in ("sourceId", "destId"):
            if not isinstance(edge[name], (int, str)) or edge[name] not in ids:
                raise TableError(f"{path}: edges[{place}]: {name} {edge[name]!r} is the id of no node")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def solve_instance(instance: dict[str, Any]) -> PartitionResult | None:
    """The best convex stages found; None if none fit the memory of the accelerators."""
    parsed = parse_instance(instance)
    counts = [kind.count for kind in parsed.kinds]
    limit = most_cuts(counts, _CUTS)
    return best_partition(parsed.graph, parsed.problem, counts=counts, limit=limit, rounds=_ROUNDS)


def parse_instance(instance: dict[str, Any]) -> Instance:
    """Nodes of one colour become one atom, and so do atoms that wait for each other."""
    nodes = {node["id"]: node for node in instance["nodes"]}
    colour = {
        i: ("colour", node["colorClass"]) if node.get("colorClass") is not None else i for i, node in nodes.items()
    }
    number: dict[Any, int] = {}
    for i in nodes:
        number.setdefault(colour[i], len(number))
    atom = {i: number[colour[i]] for i in nodes}
    readers: dict[Any, set[int]] = defaultdict(set)
    cost: dict[Any, float] = {}
    for edge in instance["edges"]:
        readers[edge["sourceId"]].add(atom[edge["destId"]])
        cost[edge["sourceId"]] = edge["cost"]
    impossible = 10 * sum(node["fpgaLatency"] + node["cpuLatency"] for node in nodes.values())
    times, sizes = np.zeros((2, len(number))), np.zeros(len(number))
    for i, node in nodes.items():
        times[0, atom[i]] += node["fpgaLatency"] if node["supportedOnFpga"] else impossible
        times[1, atom[i]] += node["cpuLatency"]
        sizes[atom[i]] += node["size"]
    values = tuple(
        Value(atom[i], tuple(sorted(readers[i])), cost[i] * _BYTES_PER_SECOND, 0.0) for i in nodes if i in readers
    )
    memory, pace = instance["maxSizePerFPGA"] * (1 + 1e-9) + 1e-6, 1 / _BYTES_PER_SECOND
    accelerators = DeviceKind("accelerator", instance["maxFPGAs"], memory, 0.0, pace, 0.0, pace)
    cpus = DeviceKind("cpu", instance["maxCPUs"], np.inf, 0.0, 0.0, 0.0) if instance["maxCPUs"] else None
    edges = _order(instance["edges"], nodes, atom)
    if sizes.sum() <= memory:
        edges += _joined(times, edges, values)
    graph, atom_of = merged_graph(len(number), edges, times[0], values)
    merged_times, merged_sizes = np.zeros((2, graph.n)), np.zeros(graph.n)
    for merged, each in zip([*merged_times, merged_sizes], [*times, sizes], strict=True):
        np.add.at(merged, atom_of, each)
    return Instance(graph, merged_times, merged_sizes, (accelerators, *([cpus] if cpus else [])))


def _order(edges: Iterable[dict[str, Any]], nodes: dict[Any, Any], atom: dict[Any, int]) -> list[tuple[int, int]]:
    """(atom, atom whose stage is the same or later). Stages follow the forwards; backwards run through them from the
    last to the first.

    Backward nodes come along with the forward node of their colour. Some have none, such as the sum of the gradients of
    all readers of a value; the edges between them and other backward nodes count the other way round:

        forward    a ----> b, c            stages  a   sum   b  c
        backward   a' <-- sum <-- b', c'           a'        b' c'
    """
    backward = {i for i, node in nodes.items() if node["isBackwardNode"]}
    with_forward = {atom[i] for i in nodes if i not in backward}
    order = []
    for edge in edges:
        source, target = edge["sourceId"], edge["destId"]
        pair = atom[source], atom[target]
        if source not in backward and target not in backward:
            order.append(pair)
        elif source in backward and target in backward and not with_forward.issuperset(pair):
            order.append(pair[::-1])
    return order


def _joined(times: np.ndarray, edges: list[tuple[int, int]], values: tuple[Value, ...]) -> list[tuple[int, int]]:
    """Edges that make one atom of each atom that takes no time and the only one that it is linked with.

    With that one in another stage it would only cost a transfer.
    """
    linked: dict[int, set[int]] = defaultdict(set)
    for a, b in [*edges, *((value.producer, reader) for value in values for reader in value.consumers)]:
        if a != b:
            linked[a].add(b)
            linked[b].add(a)
    alone = [(a, b) for a, (b, *others) in sorted((a, tuple(x)) for a, x in linked.items()) if not others]
    return [pair for a, b in alone if not times[:, a].any() for pair in ((a, b), (b, a))]


def _published(path: Path) -> dict[str, dict[str, str]]:
    if not path.exists():
        return {}
    with path.open() as file:
        return {row["instance"]: row for row in csv.DictReader(file)}
