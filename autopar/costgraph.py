"""Program x devices -> CostGraph: a networkx graph with what every operator costs, in seconds and bytes.

The graph says what depends on what and holds facts (module path, source line, bytes); times depend on the device's
kind, on how many of its siblings are busy and on the micro-batch size, and lie in tables beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import networkx as nx
import numpy as np
import torch
from torch import fx

from autopar.batching import Batching
from autopar.capture import Program, module_path, source_line
from autopar.measuring import Calls, Measuring, Progress, sizes
from autopar.operators import (
    compute_nodes,
    fused_groups,
    get_attribute,
    operator_keys,
    operator_name,
    replicable_nodes,
    requires_grad_nodes,
    unrepeatable_nodes,
    weight_shares,
    write_order,
)
from cost_models import Device, Link, MeasurementCache, measure_links, signature_key
from cost_models.footprint import GraphBytes, measure_bytes
from cost_models.profiler import GraphTimes, measure_accumulate


@dataclass(frozen=True)
class CostTable:
    """Times of all operators on one kind of device with `workers` of its siblings busy, at several batch sizes."""

    kind: str
    workers: int
    nodes: tuple[str, ...]
    rows: tuple[int, ...]  # ascending micro-batch sizes that were measured
    forward: np.ndarray  # [rows, nodes] s
    backward: np.ndarray  # [rows, nodes] s
    loss: np.ndarray  # [rows, 2] s, forward and backward

    def at(self, rows: float) -> tuple[np.ndarray, np.ndarray, tuple[float, float]]:
        """(forward [nodes], backward [nodes], loss) at a micro-batch of `rows` samples.

        Linear between the measured sizes, and beyond them along the nearest two; never below zero.
        """
        forward, backward, loss = (_interpolate(self.rows, a, rows) for a in (self.forward, self.backward, self.loss))
        return forward, backward, (float(loss[0]), float(loss[1]))


@dataclass(frozen=True)
class CostGraph:
    """What a model costs on given devices. Node names are those of the captured graph."""

    graph: nx.DiGraph  # node attributes: see `_annotate`
    batch_size: int
    training: bool
    tables: tuple[CostTable, ...]
    devices: tuple[Device, ...]
    links: dict[tuple[str, str], Link]
    accumulate: float  # s per byte: adding one gradient to another in place

    @cached_property
    def one_link(self) -> Link | None:
        """The link between any two devices, if all are alike."""
        links = {link for (a, b), link in self.links.items() if a != b}
        return links.pop() if len(links) == 1 else None

    def table(self, kind: str, workers: int) -> CostTable:
        """The table for `workers` busy siblings: measured at that number, or else at the nearest above or below."""
        mine = [t for t in self.tables if t.kind == kind]
        return min(mine, key=lambda t: (abs(t.workers - workers), -t.workers))


def build(
    program: Program,
    batching: Batching,
    leaves: list[Any],
    devices: Sequence[Device],
    *,
    training: bool,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    target: Any = None,
    n_microbatches: int | None = None,
    cache: MeasurementCache | None = None,
    progress: Progress = lambda what, done: None,
) -> CostGraph:
    """Measure `program` on every kind of device among `devices` and put the costs on its graph.

    `leaves`: the flat inputs of an example call. `n_microbatches`: measure at that micro-batch size only.
    """
    batch = max(program.batch_size, 1)
    example = Calls(program, leaves, loss_fn, target)
    jobs = []
    for kind in dict.fromkeys(d.kind for d in devices):
        mine = [d for d in devices if d.kind == kind]
        jobs += [(mine[0], workers, rows) for workers, rows in sizes(mine, program, batching, n_microbatches)]
    measured = Measuring(program, batching, example, training, cache).run(jobs, progress)
    progress("measuring memory and links", 1.0)
    rows = min(batch, 4) if batching.splittable else batch
    # Copies: a view of the example would count the storage of its whole batch.
    inputs = [x.clone() if isinstance(x, torch.Tensor) else x for x in example.inputs(rows)]
    counted = measure_bytes(program.graph_module, inputs, rows, training)
    graph = nx.DiGraph()
    _annotate(graph, program, batching, counted, batch)
    links = _cached_links(devices, cache)
    accumulate = _cached(cache, "accumulate", devices[0].kind, lambda: measure_accumulate(devices[0].torch_device))
    return CostGraph(graph, batch, training, _tables(measured), tuple(devices), links, accumulate)


def _annotate(graph: nx.DiGraph, program: Program, batching: Batching, counted: GraphBytes, batch: int) -> None:
    """One node an operator; attributes:

    key, operator, module, source; position in program order; replicable, grad; weight_share (the fraction of its
    backward's time that only gradients of parameters need, see `weight_shares`); repeatable (it may run again for its
    backward); bytes for the whole batch: output (of its result), gradient (of what flows back), fresh (newly
    allocated), saved = {storage: bytes}; parameters = {name: (bytes, trained)};
    batched: the bytes grow with the batch. Edges carry the bytes that flow.
    Graph attributes: fused (groups of nodes that stay together), order (pairs of nodes of which the first must not run
    in a later stage although the second does not read it), outputs (nodes that the caller reads).
    """
    module = program.graph_module
    keys = operator_keys(program)
    free, grad, shares = replicable_nodes(program), requires_grad_nodes(program), weight_shares(program)
    unrepeatable = set(unrepeatable_nodes(program.graph))
    scale = batch / counted.rows
    for position, node in enumerate(compute_nodes(program.graph)):
        # A batch dimension that does not lead may be hidden in a tuple: then the bytes are taken to grow.
        batched = batching.batch_dims.get(node.name) is not None or not isinstance(node.meta.get("val"), torch.Tensor)
        factor = scale if batched else 1.0
        output = counted.output[node.name] * factor
        graph.add_node(
            node.name,
            key=keys[node],
            operator=operator_name(node),
            module=module_path(node),
            source=source_line(node),
            position=position,
            replicable=node in free,
            grad=node in grad,
            weight_share=shares[node],
            repeatable=node not in unrepeatable,
            batched=batched,
            output=output,
            gradient=output if node in grad else 0.0,
            fresh=counted.fresh[node.name] * factor,
            saved={storage: nbytes * scale for storage, nbytes in counted.saved[node.name]},
            parameters=_parameters(module, node),
        )
        for source in node.all_input_nodes:
            if source.name in graph:
                graph.add_edge(source.name, node.name, nbytes=graph.nodes[source.name]["output"])
    graph.graph["fused"] = [{n.name for n in g} for g in fused_groups(program, batching.storages)]
    graph.graph["order"] = [(a.name, b.name) for a, b in write_order(program, batching.storages)]
    output_node = program.graph.output_node()
    graph.graph["outputs"] = [n.name for n in output_node.all_input_nodes if n.name in graph]


def _parameters(module: fx.GraphModule, node: fx.Node) -> dict[str, tuple[int, bool]]:
    found: dict[str, torch.Tensor] = {}
    for source in node.all_input_nodes:
        if source.op == "get_attr":
            value = get_attribute(module, str(source.target))
            if isinstance(value, torch.Tensor):
                found[str(source.target)] = value
    if node.op == "call_module":
        child = module.get_submodule(str(node.target))
        found |= {f"{node.target}.{n}": t for n, t in [*child.named_parameters(), *child.named_buffers()]}
    # A tied tensor has several names; its storage is what a stage holds once.
    return {
        str(t.untyped_storage().data_ptr()): (t.numel() * t.element_size(), t.requires_grad) for t in found.values()
    }


def _tables(measured: Sequence[tuple[Device, GraphTimes]]) -> tuple[CostTable, ...]:
    groups: dict[tuple[str, int], list[GraphTimes]] = {}
    for device, one in measured:
        groups.setdefault((device.kind, one.workers), []).append(one)
    tables = []
    for (kind, workers), group in groups.items():
        times = sorted(group, key=lambda t: t.rows)
        trust = _evened(np.array([t.rows for t in times]), np.array([t.total for t in times]))
        nodes = tuple(times[0].forward)
        tables.append(
            CostTable(
                kind,
                workers,
                nodes,
                tuple(t.rows for t in times),
                trust * np.array([[t.forward[n] for n in nodes] for t in times]),
                trust * np.array([[t.backward[n] for n in nodes] for t in times]),
                trust * np.array([[t.loss_forward, t.loss_backward] for t in times]),
            )
        )
    return tuple(tables)


def _evened(rows: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """[rows, 1] factors that bring the measured totals half-way (geometrically) to the line `a + b rows` through them.

    A search over micro-batch sizes finds the size whose measurement was luckiest; half of a deviation from the line
    is taken for noise, half for the truth. The line is fitted to relative errors.
    """
    if len(rows) < 3:
        return np.ones((len(rows), 1))
    weighted = np.stack([1 / totals, rows / totals], axis=1)
    (a, b), *_ = np.linalg.lstsq(weighted, np.ones(len(rows)), rcond=None)
    line = a + b * rows
    if a < 0 or b <= 0:  # no fixed cost: proportional to the samples
        line = rows * (rows / totals).sum() / ((rows / totals) ** 2).sum()
    return np.asarray(np.sqrt(line / totals))[:, None]


def _interpolate(rows: tuple[int, ...], values: np.ndarray, at: float) -> np.ndarray:
    if len(rows) == 1:
        return np.asarray(values[0] * (at / rows[0]))
    upper = min(max(int(np.searchsorted(rows, at)), 1), len(rows) - 1)
    low, high = rows[upper - 1], rows[upper]
    weight = (at - low) / (high - low)
    return np.maximum(values[upper - 1] * (1 - weight) + values[upper] * weight, 0.0)


def _cached(cache: MeasurementCache | None, what: str, kind: str, measurement: Callable[[], float]) -> float:
    key = signature_key(what, kind)
    found = cache.get(key) if cache is not None else None
    if found is None:
        found = measurement()
        if cache is not None:
            cache.put(key, found)
    return float(found)


def _cached_links(devices: Sequence[Device], cache: MeasurementCache | None) -> dict[tuple[str, str], Link]:
    key = signature_key("links", [(d.name, d.kind) for d in devices])
    found = cache.get(key) if cache is not None else None
    if found is not None:
        return {(a, b): Link(latency, float(bandwidth)) for a, b, latency, bandwidth in found}
    links = measure_links(devices)
    if cache is not None:
        cache.put(key, [(a, b, link.latency, str(link.bandwidth)) for (a, b), link in links.items()])
    return links
