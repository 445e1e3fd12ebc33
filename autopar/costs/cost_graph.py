"""Program x devices -> CostGraph: a networkx graph with what every operator costs, in seconds and bytes.

The graph holds dependencies and facts (module path, source line, bytes). Seconds depend on the device kind, on the
number of busy devices and on the micro-batch size; they lie in cost tables.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import networkx as nx
import torch
from torch import fx

from autopar.analysis.attention import attention_cores
from autopar.analysis.batching import Batching
from autopar.analysis.blocks import Blocks
from autopar.analysis.buffer_writes import unrepeatable_nodes
from autopar.analysis.operators import (
    compute_nodes,
    fused_groups,
    operator_keys,
    operator_name,
    replicable_nodes,
    requires_grad_nodes,
    weight_shares,
    write_order,
)
from autopar.capture.node_names import module_path, source_line
from autopar.capture.program import Program
from autopar.costs.compiled import CompiledRatio
from autopar.costs.cost_table import CostSource, CostTable, OnWholeBatch, Progress
from autopar.costs.device_group import DeviceGroup, StageConfiguration
from autopar.costs.operator_cost import OperatorCost, Weight, operator_costs
from autopar.costs.python_overhead import NOT_MEASURED, PythonOverhead
from autopar.costs.rank_costs import RankCosts
from autopar.costs.recipe import USUAL, Recipe
from autopar.costs.shard_costs import ShardCosts
from autopar.costs.step_rehearsal import StepRehearsal
from cost_models import Cluster, Device, Link
from cost_models.collectives.overlap import OVERLAP_AT_HAND, Overlap
from cost_models.graphs import get_attribute, storage_key
from cost_models.memory.graph_bytes import GraphBytes


@dataclass(frozen=True)
class CostGraph:
    """What a model costs on given devices. Node names are those of the captured graph."""

    graph: nx.DiGraph  # node attribute `cost`: an OperatorCost; edge attribute `nbytes`; others: see `_annotate`
    batch_size: int  # samples
    training: bool
    tables: tuple[CostTable, ...]  # of single devices
    devices: tuple[Device, ...]
    links: Mapping[tuple[str, str], Link]  # (from, to), names of devices
    accumulate: float  # s per byte: adding one gradient to another in place
    cluster: Cluster | None = None  # over whose networks replicas reduce their gradients; None: within one process
    configurations: tuple[StageConfiguration, ...] = ()  # of meshes of any width; the search picks one for each stage
    alone: bool = True  # stages may run on single devices, too
    cores: int | None = None  # CPU cores of a machine, which its devices share; None: every device has its own hardware
    recipe: Recipe | None = None  # how a step is run on devices that are not at hand; None: measured
    notes: tuple[str, ...] = ()  # what a plan has to say about the seconds
    python: PythonOverhead = NOT_MEASURED
    shards: ShardCosts | None = None  # of meshes of devices at hand; None: no mesh is priced there
    ranks: RankCosts | None = None  # of one process a device; None: workers of one process, or a planned cluster
    # By device kind, for stages that run compiled on single devices; `tables` are those of captured stages.
    compiled: Mapping[str, CompiledRatio] = field(default_factory=dict)
    # By device kind, what the caller does once a step on the whole batch (`whole_batch.py`); {}: nothing.
    whole_batch: Mapping[str, OnWholeBatch] = field(default_factory=dict)
    # Tells what a plan's devices hold; None: only the formula of the search does.
    rehearsal: StepRehearsal | None = field(default=None, repr=False, compare=False)

    @property
    def mesh_cluster(self) -> Cluster | None:
        """The devices whose links and collectives price meshes; None: no mesh is priced."""
        return self.cluster if self.shards is None else self.shards.cluster

    @property
    def overlap(self) -> Overlap:
        """What runs behind computing."""
        if self.recipe is not None:
            return self.recipe.overlap
        return replace(OVERLAP_AT_HAND, sends=self.ranks is None or not self.ranks.exchanges)

    @property
    def least_on_whole_batch(self) -> float:
        """Seconds once a step on the whole batch, at least."""
        return min((one.seconds for one in self.whole_batch.values()), default=0.0)

    @cached_property
    def operators(self) -> Mapping[str, OperatorCost]:
        """By node name, in program order."""
        return operator_costs(self.graph)

    @cached_property
    def shares(self) -> Mapping[str, float]:
        """By node name, the share of the model's forward and backward that it takes with the most samples measured or
        estimated at first, on the kind of devices where that is largest: whatever the order of the kinds."""
        of_kind = {table.kind: table for table in reversed(self.tables)}
        found = dict.fromkeys(self.operators, 0.0)
        for table in of_kind.values():
            seconds = table.forward[-1] + table.backward[-1]
            whole = max(float(seconds.sum()), sys.float_info.min)
            for name, share in zip(table.nodes, (seconds / whole).tolist(), strict=True):
                found[name] = max(found[name], share)
        return found

    @cached_property
    def groups(self) -> tuple[DeviceGroup, ...]:
        """Every device alone."""
        return tuple(self.group((device.name,)) for device in self.devices)

    def group(self, names: tuple[str, ...]) -> DeviceGroup:
        """The devices of these names as one: a mesh, or a device alone."""
        devices = [self._device_of[name] for name in names]
        return DeviceGroup(names, devices[0].kind, min(device.memory for device in devices))

    @cached_property
    def one_link(self) -> Link | None:
        """The link between any two groups, if all are alike."""
        links = self.links_among(self.groups)
        return links.pop() if len(links) == 1 else None

    def links_among(self, groups: Sequence[DeviceGroup]) -> set[Link]:
        """The different links between any two of `groups`."""
        if self.cluster is not None:
            return self.cluster.links_among(self.first_devices(groups))
        names = {group.first for group in groups}
        return {link for (a, b), link in self.links.items() if a != b and a in names and b in names}

    def links_into(self, groups: Sequence[DeviceGroup]) -> set[Link]:
        """The different links from any group into one of `groups`."""
        if self.cluster is not None:
            return self.links_among(self.groups)
        names = {group.first for group in groups}
        return {link for (a, b), link in self.links.items() if a != b and b in names}

    def first_devices(self, groups: Sequence[DeviceGroup]) -> list[Device]:
        return [self._device_of[group.first] for group in groups]

    @cached_property
    def configuration(self) -> Mapping[str, StageConfiguration]:
        """By name."""
        return {one.name: one for one in self.configurations}

    def table(self, name: str, workers: int) -> CostTable:
        """The table of a stage configuration, or of a device kind for `workers` busy siblings: measured at that number,
        or else at the nearest one. Workers beyond the number of cores share them in turns."""
        if name in self.configuration:
            share, table = self.crowding(workers), self.configuration[name].table
            return table.slower(share, workers) if share > 1 else table
        mine = [t for t in self.tables if t.kind == name]
        nearest = min(mine, key=lambda t: (abs(t.workers - workers), -t.workers))
        share = self.crowding(workers) / self.crowding(nearest.workers)
        return nearest.slower(share, workers) if share > 1 else nearest

    def crowding(self, workers: int) -> float:
        """How many of `workers` busy devices share a core, on average; 1 if each has cores of its own."""
        if self.cores is None:
            return 1.0
        threads = max(device.threads for device in self.devices)
        here = workers if self.ranks is None else min(workers, self.ranks.per_machine)
        return max(1.0, here * threads / self.cores)

    @cached_property
    def _device_of(self) -> Mapping[str, Device]:
        return {device.name: device for device in self.devices}


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
    _annotate(graph, program, batching, source.counted(), batch, source.recipe or USUAL)
    links, accumulate, whole_batch = source.links(), source.accumulate(), source.whole_batch()
    return CostGraph(
        graph,
        batch,
        training,
        tables,
        source.devices,
        links,
        accumulate,
        source.cluster,
        cores=source.cores,
        recipe=source.recipe,
        notes=source.notes(),
        whole_batch=whole_batch,
    )


def _annotate(
    graph: nx.DiGraph, program: Program, batching: Batching, counted: GraphBytes, batch: int, recipe: Recipe
) -> None:
    """Add one node per operator, with its `OperatorCost` as the attribute `cost`, and the attributes of the graph.

    Edges carry `nbytes`, the bytes that flow. Attributes of the graph: fused (groups of nodes that stay together),
    order (pairs of nodes; the first must not run in a later stage than the second, although the second does not read
    it), outputs (nodes that the caller reads).
    """
    module = program.graph_module
    keys = operator_keys(program)
    free, grad, shares = replicable_nodes(program), requires_grad_nodes(program.graph_module), weight_shares(program)
    unrepeatable = set(unrepeatable_nodes(program.graph))
    cores = attention_cores(program.graph)
    core_of = {node: number for number, core in enumerate(cores) for node in core}
    blocks = Blocks(program, batching.storages) if program.training else None
    block_of = blocks.of if blocks is not None else {}
    kept = blocks.kept if blocks is not None else frozenset()
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
            parameters=_parameters(module, node, recipe),
            core=core_of.get(node),
            rebuilt=_rebuilt(node, counted, cores[core_of[node]]) if node in core_of else frozenset(),
            block=block_of.get(node),
            kept=node in kept,
            results={storage: nbytes * factor for storage, nbytes in counted.results.get(node.name, {}).items()},
            saved_places=dict(zip(dict(counted.saved[node.name]), counted.places[node.name], strict=True)),
        )
        graph.add_node(node.name, cost=cost)
        for source in node.all_input_nodes:
            if source.name in graph:
                graph.add_edge(source.name, node.name, nbytes=graph.nodes[source.name]["cost"].output_bytes)
    graph.graph["fused"] = [{n.name for n in g} for g in fused_groups(program, batching.storages)]
    graph.graph["order"] = [(a.name, b.name) for a, b in write_order(program, batching.storages)]
    output_node = program.graph.output_node()
    graph.graph["outputs"] = [n.name for n in output_node.all_input_nodes if n.name in graph]


def _rebuilt(node: fx.Node, counted: GraphBytes, core: frozenset[fx.Node]) -> frozenset[int]:
    """Storages that `node` keeps for its backward and that `core` has made.

    A product may keep a copy of an operand in another order of its dimensions. Where the core runs again, the operand
    itself is kept in its place.
    """
    operands, found = node.all_input_nodes, set()
    copied = Counter(counted.output.get(operand.name, 0) for operand in operands if operand not in core)
    for (storage, nbytes), place in zip(counted.saved[node.name], counted.places[node.name], strict=True):
        if place is None and copied[nbytes]:
            copied[nbytes] -= 1
        elif place is None or place < 0 or operands[place] in core:
            found.add(storage)
    return frozenset(found)


def _parameters(module: fx.GraphModule, node: fx.Node, recipe: Recipe) -> dict[str, Weight]:
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
        str(storage_key(t)): Weight(
            t.numel() * t.element_size(), t.requires_grad, tuple(t.shape), precision=recipe.precision_of(t.dtype)
        )
        for t in found.values()
    }
