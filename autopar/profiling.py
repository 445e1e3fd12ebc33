"""What a call of a model costs: captured, measured, and rolled up by module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import networkx as nx
import torch
from torch import nn

from autopar import _torch, costgraph
from autopar.costgraph import CostGraph
from autopar.costtable import Calls
from autopar.errors import InputError
from autopar.estimating import Estimated
from autopar.measuring import Measured
from autopar.operators import captured_device, on_device
from autopar.report.profile import Cost, Pass, Profile
from autopar.report.progress import progress_bar
from autopar.runtime.entries import Settings
from autopar.runtime.example import (
    Example,
    examine,
    has_backward,
    under_default_device,
    untouched,
    without_values,
)
from autopar.runtime.passes import LossFunction
from autopar.search.meshes import Subject
from cost_models import Cluster, Device, Link, MeasurementCache
from cost_models.graphs import get_attribute, on_meta, private_copy, storage_key
from cost_models.step_memory import StepMemory, step_memory


def capture_example(
    model: nn.Module,
    devices: Sequence[Device],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loss_fn: LossFunction | None = None,
    target: Any = None,
    settings: Settings,
) -> Example:
    """A call of `model` as a program. The model is unchanged. Raises CaptureError and InputError."""
    types = {device.torch_device.type for device in devices}
    program, batching = examine(model, args, kwargs, settings, types)
    leaves, _ = program.bind(args, kwargs) or ([], 0)
    training = has_backward(model, program, loss_fn)
    loss = under_default_device(loss_fn)
    return Example(model, program, batching, args, kwargs, leaves, training, loss, target)


def example_ahead(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loss_fn: LossFunction | None = None,
    target: Any = None,
    settings: Settings,
) -> Example:
    """The same for devices that are not at hand; parameters need not have values."""
    model, args, kwargs, target = without_values(model, args, kwargs, target)
    return capture_example(model, (), args, kwargs, loss_fn=loss_fn, target=target, settings=settings)


def measure_costs(
    example: Example, devices: Sequence[Device], *, n_microbatches: int | None = None, cache: bool = True
) -> CostGraph:
    """The cost graph of a call, from the cache as far as it is there. The model is unchanged.

    `n_microbatches`: measure that micro-batch size only.
    """
    with _cache(cache) as store, progress_bar() as progress, untouched(example.model), torch.device("cpu"):
        source = Measured(
            example.program,
            example.batching,
            example.leaves,
            devices,
            training=example.training,
            loss_fn=example.loss,
            target=example.target,
            n_microbatches=n_microbatches,
            cache=store,
        )
        return costgraph.build(example.program, example.batching, source, training=example.training, progress=progress)


def estimate_costs(example: Example, cluster: Cluster, *, n_microbatches: int | None = None) -> CostGraph:
    """The same on devices that need not be there, from their data sheets."""
    with progress_bar() as progress, untouched(example.model), torch.device("cpu"):
        source = Estimated(
            example.program,
            example.batching,
            example.leaves,
            cluster,
            training=example.training,
            loss_fn=example.loss,
            target=example.target,
            n_microbatches=n_microbatches,
        )
        return costgraph.build(example.program, example.batching, source, training=example.training, progress=progress)


def subject_of(example: Example, optimizer: str) -> Subject:
    """The program of an example call as what is to be split over meshes."""
    program = example.program
    leaves = [on_meta(x) for x in example.leaves]
    calls = Calls(program, leaves)
    meta = torch.device("meta")
    with torch.device("cpu"):
        module = private_copy(on_device(program.graph_module, captured_device(program), meta), meta)
    named = {str(n.target): n for n in program.graph.nodes if n.op == "get_attr"}
    values = {name: get_attribute(program.graph_module, name) for name in named}
    storages = {name: str(storage_key(t)) for name, t in values.items() if isinstance(t, torch.Tensor)}
    return Subject(module, calls.inputs, storages, optimizer)


def training_step(example: Example, optimizer: str, device_type: str) -> StepMemory:
    """What a training step of the whole batch has in memory on one device. Raises InputError if nothing trains."""
    if not example.training:
        raise InputError("memory of a training step: the model is in evaluation mode, or nothing in it is trained")
    program = example.program
    calls = Calls(program, [on_meta(x) for x in example.leaves], example.loss, _torch.tree_map(on_meta, example.target))
    batch = max(program.batch_size, 1)
    with torch.device("cpu"):
        module = on_device(program.graph_module, captured_device(program), torch.device("meta"))
        loss = calls.loss(batch)
        return step_memory(module, calls.inputs(batch), loss=loss, optimizer=optimizer, device_type=device_type)


def summarize(costs: CostGraph, memory: StepMemory | None = None) -> Profile:
    """The cost graph as a profile: one device of each kind, the whole batch."""
    kinds = tuple(dict.fromkeys(device.kind for device in costs.devices))
    names = list(costs.graph)
    forward: dict[str, dict[str, float]] = {}  # kind -> node -> s
    backward: dict[str, dict[str, float]] = {}
    for kind in kinds:
        table = costs.table(kind, 1)
        f, b, _ = table.at(costs.batch_size)
        forward[kind] = dict(zip(table.nodes, map(float, f), strict=True))
        backward[kind] = dict(zip(table.nodes, map(float, b), strict=True))

    def cost(name: str, inside: Sequence[str]) -> Cost:
        nodes = [costs.graph.nodes[n] for n in inside]
        parameters = {p: weight.nbytes for node in nodes for p, weight in node["parameters"].items()}
        saved = {storage: nbytes for node in nodes for storage, nbytes in node["saved"].items()}
        return Cost(
            name,
            len(inside),
            sum(parameters.values()),
            int(sum(saved.values())),
            int(sum(costs.graph.nodes[n]["output"] for n in _read_outside(costs.graph, inside))),
            {kind: sum(forward[kind][n] for n in inside) for kind in kinds},
            {kind: sum(backward[kind][n] for n in inside) for kind in kinds},
        )

    operators = {name: cost(costs.graph.nodes[name]["key"], [name]) for name in names}
    modules = tuple(cost(path, inside) for path, inside in _by_module(costs.graph).items())
    passes = tuple(
        Pass(t.kind, t.workers, rows, float(f.sum() + loss[0]), float(b.sum() + loss[1]))
        for t in costs.tables
        for rows, f, b, loss in zip(t.rows, t.forward, t.backward, t.loss, strict=True)
    )
    graph = _drawable(costs.graph, operators, kinds[0])
    return Profile(
        costs.batch_size,
        costs.training,
        kinds,
        tuple(operators.values()),
        modules,
        passes,
        _links(costs),
        memory,
        graph,
    )


def _links(costs: CostGraph) -> dict[tuple[str, str], Link]:
    """All links; of a cluster the first of every level."""
    if costs.cluster is None:
        return dict(costs.links)
    first = costs.devices[0].name
    found: dict[Link, tuple[str, str]] = {}
    for device in costs.devices[1:]:
        found.setdefault(costs.links[first, device.name], (first, device.name))
    return {pair: link for link, pair in found.items()}


def _by_module(graph: nx.DiGraph) -> dict[str, list[str]]:
    """Module -> nodes inside it at any depth. Parents come before children, and siblings in program order."""
    inside: dict[str, list[str]] = defaultdict(list)
    for name, data in graph.nodes(data=True):
        names = data["module"].split(".") if data["module"] else []
        for depth in range(len(names) + 1):
            inside[".".join(names[:depth])].append(name)
    first = {path: place for place, path in enumerate(inside)}

    def place(path: str) -> list[int]:
        names = path.split(".")
        return [first[".".join(names[: depth + 1])] for depth in range(len(names))] if path else []

    return {path: inside[path] for path in sorted(inside, key=place)}


def _read_outside(graph: nx.DiGraph, inside: Sequence[str]) -> list[str]:
    """The nodes whose values other nodes or the caller read."""
    here, outputs = set(inside), set(graph.graph["outputs"])
    return [n for n in inside if n in outputs or any(user not in here for user in graph.successors(n))]


def _drawable(graph: nx.DiGraph, operators: dict[str, Cost], kind: str) -> nx.DiGraph:
    """The graph with strings and numbers alone, as file formats want it."""
    drawn = nx.DiGraph()
    for name, data in graph.nodes(data=True):
        cost = operators[name]
        drawn.add_node(
            name,
            label=data["key"],
            module=data["module"],
            operator=data["operator"],
            source=data["source"],
            forward=cost.forward[kind],
            backward=cost.backward[kind],
            parameter_bytes=cost.parameter_bytes,
            activation_bytes=cost.activation_bytes,
            output_bytes=cost.output_bytes,
        )
    drawn.add_edges_from((a, b, {"nbytes": float(data["nbytes"])}) for a, b, data in graph.edges(data=True))
    return drawn


@contextmanager
def _cache(wanted: bool) -> Iterator[MeasurementCache | None]:
    if not wanted:
        yield None
        return
    with MeasurementCache() as store:
        yield store
