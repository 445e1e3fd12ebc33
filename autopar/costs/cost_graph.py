"""Program x devices -> CostGraph: a networkx graph with what every operator costs, in seconds and bytes.

The graph says what depends on what and holds facts (module path, source line, bytes); times depend on the device's
kind, on how many of its siblings are busy and on the micro-batch size, and lie in tables beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import networkx as nx
import torch
from torch import fx

from autopar.analysis.batching import Batching
from autopar.analysis.operators import (
    compute_nodes,
    fused_groups,
    operator_keys,
    operator_name,
    replicable_nodes,
    requires_grad_nodes,
    unrepeatable_nodes,
    weight_shares,
    write_order,
)
from autopar.capture.program import Program, module_path, source_line
from autopar.costs.cost_table import CostSource, CostTable, Progress
from autopar.costs.operator_cost import OperatorCost, Weight, operator_costs
from autopar.sharding.stage_sharding import StageSharding
from cost_models import Cluster, Device, Link
from cost_models.graphs import get_attribute, storage_key
from cost_models.memory.graph_bytes import GraphBytes


@dataclass(frozen=True)
class Way:
    """How the devices of a mesh do a micro-batch together."""

    name: str
    kind: str  # of the devices
    n_microbatches: int  # of the batch: so large are they
    sharding: Callable[[Sequence[str]], StageSharding]  # of operators, by node, that make a stage
    table: CostTable  # seconds of every operator, collectives included; its kind is `name`
    graph: nx.DiGraph  # like that of the CostGraph, with the bytes of each device
    solved: Callable[[], Any]  # what its strategies were chosen in (`search.sharding_explain.Solved`)


@dataclass(frozen=True)
class CostGraph:
    """What a model costs on given devices. Node names are those of the captured graph."""

    graph: nx.DiGraph  # node attribute `cost`: an OperatorCost; edge attribute `nbytes`; others: see `_annotate`
    batch_size: int
    training: bool
    tables: tuple[CostTable, ...]
    devices: tuple[Device, ...]
    links: Mapping[tuple[str, str], Link]
    accumulate: float  # s per byte: adding one gradient to another in place
    cluster: Cluster | None = None  # over whose networks replicas reduce their gradients; None: within one process
    ways: tuple[Way, ...] = ()  # if given, a device is a mesh, called by its first device, and works in one of these
    members: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of every mesh, in order

    @cached_property
    def operators(self) -> Mapping[str, OperatorCost]:
        """By node name, in program order."""
        return operator_costs(self.graph)

    @cached_property
    def one_link(self) -> Link | None:
        """The link between any two devices, if all are alike."""
        links = self.links_among(self.devices)
        return links.pop() if len(links) == 1 else None

    def links_among(self, devices: Sequence[Device]) -> set[Link]:
        """The different links between any two of `devices`."""
        if self.cluster is not None:
            return self.cluster.links_among(devices)
        names = {device.name for device in devices}
        return {link for (a, b), link in self.links.items() if a != b and a in names and b in names}

    def links_into(self, devices: Sequence[Device]) -> set[Link]:
        """The different links from any device into one of `devices`."""
        if self.cluster is not None:
            return self.cluster.links_among(self.devices)
        names = {device.name for device in devices}
        return {link for (a, b), link in self.links.items() if a != b and b in names}

    def devices_of(self, name: str) -> tuple[str, ...]:
        """The devices of a mesh, or the device of that name."""
        return self.members.get(name, (name,))

    def lines(self, names: Sequence[str]) -> int:
        """Collectives that run at once where such meshes reduce their gradients, each of the n-th device of every one,
        through the networks that a node's devices share."""
        assert self.cluster is not None
        if len({self.cluster.node_of(name) for name in names}) == 1:
            return 1
        first = self.devices_of(names[0])
        return sum(self.cluster.node_of(name) == self.cluster.node_of(first[0]) for name in first)

    @cached_property
    def way(self) -> Mapping[str, Way]:
        """By name."""
        return {way.name: way for way in self.ways}

    @cached_property
    def kind_of(self) -> Mapping[str, str]:
        """By device's name."""
        return {device.name: device.kind for device in self.devices}

    def table(self, kind: str, workers: int) -> CostTable:
        """The table for `workers` busy siblings: measured at that number, or else at the nearest above or below."""
        if kind in self.way:
            return self.way[kind].table
        mine = [t for t in self.tables if t.kind == kind]
        return min(mine, key=lambda t: (abs(t.workers - workers), -t.workers))


def build(
    program: Program,
    batching: Batching,
    source: CostSource,
    *,
    training: bool,
    progress: Progress = lambda what, done: None,
) -> CostGraph:
    """What `program` costs on the devices of `source`, on its graph."""
    batch = max(program.batch_size, 1)
    tables = source.tables(progress)
    progress("memory and links", 1.0)
    graph = nx.DiGraph()
    _annotate(graph, program, batching, source.counted(), batch)
    links, accumulate = source.links(), source.accumulate()
    return CostGraph(graph, batch, training, tables, source.devices, links, accumulate, source.cluster)


def _annotate(graph: nx.DiGraph, program: Program, batching: Batching, counted: GraphBytes, batch: int) -> None:
    """Add one node per operator, with its `OperatorCost` as the attribute `cost`, and the attributes of the graph.

    Edges carry `nbytes`, the bytes that flow. Attributes of the graph: fused (groups of nodes that stay together),
    order (pairs of nodes; the first must not run in a later stage than the second, although the second does not read
    it), outputs (nodes that the caller reads).
    """
    module = program.graph_module
    keys = operator_keys(program)
    free, grad, shares = replicable_nodes(program), requires_grad_nodes(program.graph_module), weight_shares(program)
    unrepeatable = set(unrepeatable_nodes(program.graph))
    scale = batch / counted.rows
    for position, node in enumerate(compute_nodes(program.graph)):
        # The batch may be hidden in a tuple, in a dimension that does not lead: assume then that the bytes grow.
        batched = batching.batch_dims.get(node.name) is not None or not isinstance(node.meta.get("val"), torch.Tensor)
        factor = scale if batched else 1.0
        output = counted.output[node.name] * factor
        cost = OperatorCost(
            key=keys[node],
            operator=operator_name(node),
            module=module_path(node),
            source=source_line(node),
            position=position,
            replicable=node in free,
            repeatable=node not in unrepeatable,
            weight_share=shares[node],
            output_bytes=output,
            gradient_bytes=output if node in grad else 0.0,
            allocated_bytes=counted.fresh[node.name] * factor,
            saved={storage: nbytes * scale for storage, nbytes in counted.saved[node.name]},
            parameters=_parameters(module, node),
        )
        graph.add_node(node.name, cost=cost)
        for source in node.all_input_nodes:
            if source.name in graph:
                graph.add_edge(source.name, node.name, nbytes=graph.nodes[source.name]["cost"].output_bytes)
    graph.graph["fused"] = [{n.name for n in g} for g in fused_groups(program, batching.storages)]
    graph.graph["order"] = [(a.name, b.name) for a, b in write_order(program, batching.storages)]
    output_node = program.graph.output_node()
    graph.graph["outputs"] = [n.name for n in output_node.all_input_nodes if n.name in graph]


def _parameters(module: fx.GraphModule, node: fx.Node) -> dict[str, Weight]:
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
        str(storage_key(t)): Weight(t.numel() * t.element_size(), t.requires_grad, tuple(t.shape))
        for t in found.values()
    }
