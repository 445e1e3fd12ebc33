"""Program x devices -> CostGraph: a networkx graph with what every operator costs, in seconds and bytes.

The graph says what depends on what and holds facts (module path, source line, bytes); times depend on the device's
kind, on how many of its siblings are busy and on the micro-batch size, and lie in tables beside it.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import networkx as nx
import numpy as np
import torch
from torch import fx

from autopar import _torch
from autopar.batching import Batching
from autopar.capture import Program, module_path, source_line
from autopar.operators import (
    captured_device,
    compute_nodes,
    fused_groups,
    get_attribute,
    on_device,
    operator_keys,
    operator_name,
    replicable_nodes,
    requires_grad_nodes,
    written_arguments,
)
from cost_models import Device, Link, MeasurementCache, measure_links, signature_key
from cost_models.profiler import GraphBytes, GraphTimes, Loss, measure, measure_accumulate, measure_bytes
from cost_models.repeats import ReducedGraph, reduce_graph

log = logging.getLogger(__name__)

# Operators of the same sort that are timed; the rest take their mean. More tell more about noise and cost more time.
SAME_MEASURED = 3

Progress = Callable[[str, float], None]  # (what is being done, fraction done)


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
    splittable = batching.splittable
    jobs = []
    for kind in dict.fromkeys(d.kind for d in devices):
        mine = [d for d in devices if d.kind == kind]
        jobs += [(mine[0], w, r) for w, r in _measurements(mine, batch, splittable, n_microbatches)]
    signature = graph_signature(program) if cache is not None else []
    loss_id = _loss_identity(loss_fn, target)
    inputs_of, loss_of = _examples(program, leaves, loss_fn, target)
    reduced, captured = _reduced(program, batching), captured_device(program)
    measured: list[tuple[Device, GraphTimes]] = []
    for index, (device, workers, rows) in enumerate(jobs):
        what = f"{device.kind}, {rows} samples, {workers} busy"
        progress(f"profiling {what}", index / len(jobs))
        key = signature_key("times", signature, device.kind, workers, rows, training, loss_id)
        found = cache.get(key) if cache is not None else None
        if found is None:
            log.info("profiling %s", what)
            here = replace(reduced, module=on_device(reduced.module, captured, device.torch_device))
            found = _measure(here, inputs_of, loss_of, rows, device, workers, training)
            if cache is not None:
                cache.put(key, found)
        measured.append((device, GraphTimes(rows, workers, *found)))
    progress("measuring memory and links", 1.0)
    rows = min(batch, 4) if splittable else batch
    counted = measure_bytes(program.graph_module, inputs_of(rows), rows, training)
    graph = nx.DiGraph()
    _annotate(graph, program, batching, counted, batch)
    links = _cached_links(devices, cache)
    accumulate = _cached(cache, "accumulate", devices[0].kind, lambda: measure_accumulate(devices[0].torch_device))
    return CostGraph(graph, batch, training, _tables(measured), tuple(devices), links, accumulate)


def _reduced(program: Program, batching: Batching) -> ReducedGraph:
    """The graph to time: every operator that repeats at most `SAME_MEASURED` times."""
    writes = {a for node in program.graph.nodes for a in written_arguments(node)}
    aliases = {s for node in writes for s in batching.storages.get(node.name, ())}
    touched = {n.name for n in program.graph.nodes if batching.storages.get(n.name, frozenset()) & aliases}
    keep = touched | {n.name for n in program.graph.nodes if written_arguments(n)}
    gradients = {n.name for n in requires_grad_nodes(program)}
    return reduce_graph(program.graph_module, batching.shapes, keep, gradients, SAME_MEASURED)


def _measure(
    reduced: ReducedGraph,
    inputs_of: Callable[[int], list[Any]],
    loss_of: Callable[[int], Loss | None],
    rows: int,
    device: Device,
    workers: int,
    training: bool,
) -> list[Any]:
    """[forward by node, backward by node, loss forward, loss backward] in seconds."""

    def inputs(rows: int) -> list[Any]:
        made = [
            shape.make(rows, device.torch_device).requires_grad_(gradient and training)
            for shape, gradient in reduced.stand_ins
        ]
        return [*inputs_of(rows), *made]

    times = measure(
        reduced.module,
        inputs,
        loss_of,
        rows,
        device,
        workers=workers,
        training=training,
        n_outputs=reduced.n_outputs,
    )
    forward, backward = (
        {name: sum(seconds[m] for m in like) / len(like) for name, like in reduced.like.items()}
        for seconds in (times.forward, times.backward)
    )
    return [forward, backward, times.loss_forward, times.loss_backward]


def _measurements(
    devices: Sequence[Device], batch: int, splittable: bool, n_microbatches: int | None
) -> list[tuple[int, int]]:
    """(busy workers, samples) to measure: the whole batch alone, micro-batches with all siblings busy."""
    whole = [(1, batch)]
    if not splittable or batch == 1:
        return whole
    together = len(devices) if devices[0].shares_process_memory else 1
    if n_microbatches is not None:
        sizes = [-(-batch // n_microbatches)]
    else:
        sizes = sorted({max(1, round(batch / part)) for part in (2, 4, 8, 16)}, reverse=True)
    few = [(1, sizes[len(sizes) // 2])] if together > 1 else []
    return whole + few + [(together, size) for size in sizes if (together, size) not in whole + few]


def _examples(
    program: Program, leaves: list[Any], loss_fn: Callable[[Any, Any], torch.Tensor] | None, target: Any
) -> tuple[Callable[[int], list[Any]], Callable[[int], Loss | None]]:
    def inputs_of(rows: int) -> list[Any]:
        return [
            x if i.batch_dim is None else x.detach().narrow(i.batch_dim, 0, rows)
            for x, i in zip(leaves, program.inputs, strict=True)
        ]

    def loss_of(rows: int) -> Loss | None:
        if loss_fn is None:
            return None
        part = _torch.tree_map(
            lambda t: t[:rows] if isinstance(t, torch.Tensor) and t.dim() and t.shape[0] == program.batch_size else t,
            target,
        )
        return lambda outputs: loss_fn(
            _torch.tree_unflatten(list(outputs)[: program.n_outputs], program.out_spec), part
        )

    return inputs_of, loss_of


def _annotate(graph: nx.DiGraph, program: Program, batching: Batching, counted: GraphBytes, batch: int) -> None:
    """One node an operator; attributes:

    key, operator, module, source; position in program order; replicable, grad; bytes for the whole batch: output
    (of its result), gradient (of what flows back), fresh (newly allocated), saved = {storage: bytes};
    parameters = {name: (bytes, trained)}; batched: the bytes grow with the batch. Edges carry the bytes that flow.
    Graph attributes: fused (groups of nodes that stay together), outputs (nodes that the caller reads).
    """
    module = program.graph_module
    keys = operator_keys(program)
    free, grad = replicable_nodes(program), requires_grad_nodes(program)
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


def _tables(measured: list[tuple[Device, GraphTimes]]) -> tuple[CostTable, ...]:
    groups: dict[tuple[str, int], list[GraphTimes]] = {}
    for device, one in measured:
        groups.setdefault((device.kind, one.workers), []).append(one)
    tables = []
    for (kind, workers), group in groups.items():
        times = sorted(group, key=lambda t: t.rows)
        nodes = tuple(times[0].forward)
        tables.append(
            CostTable(
                kind,
                workers,
                nodes,
                tuple(t.rows for t in times),
                np.array([[t.forward[n] for n in nodes] for t in times]),
                np.array([[t.backward[n] for n in nodes] for t in times]),
                np.array([[t.loss_forward, t.loss_backward] for t in times]),
            )
        )
    return tuple(tables)


def _interpolate(rows: tuple[int, ...], values: np.ndarray, at: float) -> np.ndarray:
    if len(rows) == 1:
        return np.asarray(values[0] * (at / rows[0]))
    upper = min(max(int(np.searchsorted(rows, at)), 1), len(rows) - 1)
    low, high = rows[upper - 1], rows[upper]
    weight = (at - low) / (high - low)
    return np.maximum(values[upper - 1] * (1 - weight) + values[upper] * weight, 0.0)


def graph_signature(program: Program) -> list[Any]:
    """What the measured times of a program depend on: operators, how they hang together, shapes and dtypes."""
    lines = []
    for node in program.graph.nodes:
        value = node.meta.get("val")
        shape = [str(s) for s in value.shape] + [str(value.dtype)] if isinstance(value, torch.Tensor) else []
        if node.op == "get_attr":
            tensor = get_attribute(program.graph_module, str(node.target))
            shape = [*map(str, tensor.shape), str(tensor.requires_grad)] if isinstance(tensor, torch.Tensor) else []
        target = node.name if node.op in ("placeholder", "get_attr") else str(node.target)
        lines.append(f"{node.name} {node.op} {target} {node.args} {node.kwargs} {shape}")
    shapes = [f"{i.path} {i.shape and tuple(i.shape)} {i.dtype} {i.batch_dim}" for i in program.inputs]
    text = "\n".join(lines)
    return [hashlib.sha256(text.encode()).hexdigest(), shapes, program.training]


def _loss_identity(loss_fn: Any, target: Any) -> list[str]:
    """What the cost of a loss depends on, as far as it can be told: its code and the shapes of the target."""
    if loss_fn is None:
        return []
    try:
        code = inspect.getsource(loss_fn)
    except (OSError, TypeError):
        code = f"{getattr(loss_fn, '__module__', '')}.{getattr(loss_fn, '__qualname__', type(loss_fn).__qualname__)}"
    shapes = [str(tuple(t.shape)) for t in _torch.tree_leaves(target) if isinstance(t, torch.Tensor)]
    return [code, repr(loss_fn) if isinstance(loss_fn, torch.nn.Module) else "", *shapes]


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
