"""Cost graphs over meshes: the device groups of a size, and the stage configurations that the search picks from.

The partition search places stages on device groups. Here every `size` neighbouring devices are one group. For each
shape of their mesh and each micro-batch size, the intra-operator search chooses strategies for all operators, the
fastest ones and others that need less memory (`frontier`); each solution is a stage configuration:

    8 devices, size 4     groups [0 1 2 3] [4 5 6 7]     mesh (4): each operator split by tensors or by samples
                                                         mesh (2, 2): both; parameters whole or sharded (ZeRO)

So one search chooses stages, replicas, mesh shapes, strategies, sharded parameters, recomputation, schedule and
micro-batches together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.analysis.example import Example
from autopar.analysis.operators import captured_device, on_device
from autopar.capture.repeated_layers.fold import Folded, fold
from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import Calls
from autopar.planner.inter_op.mesh_configuration import MeshConfiguration, SplitProgram, mesh_configuration
from autopar.planner.intra_op.frontier import frontier
from autopar.planner.intra_op.sharding_task import GraphFacts, ShardingTask
from autopar.planner.intra_op.strategy_search import Sharding, ShardingProblem
from autopar.sharding.local_work import LocalWorks
from autopar.sharding.mesh import Mesh, make_mesh
from cost_models import Cluster, Device
from cost_models.graphs import get_attribute, on_meta, private_copy, storage_key

log = logging.getLogger(__name__)

_FIRST_LOOK = 2  # solutions of every shape and micro-batch size in the first look at a mesh size
_CLOSER_LOOK = 4  # where the shapes are given


@dataclass(frozen=True)
class Subject:
    """The program whose operators are split over meshes."""

    module: fx.GraphModule  # with parameters on the meta device
    inputs: Callable[[int], Sequence[Any]]  # n samples -> flat inputs on the meta device
    storages: Mapping[str, str]  # parameter or buffer -> its storage, as in the cost graph
    optimizer: str = "adamw"

    def program(self, costs: CostGraph, folded: Folded) -> SplitProgram:
        """The program whose strategies are chosen on `folded`."""
        nodes = {n.name: n for n in self.module.graph.nodes if n.name in costs.graph}
        return SplitProgram(costs, folded, nodes, self.storages)

    def task(self, costs: CostGraph, folded: Folded, n_microbatches: int) -> ShardingTask:
        """The choice of strategies on `folded` for one of `n_microbatches`, which divide the batch."""
        assert costs.cluster is not None, "strategies are priced on the links and collectives of a cluster"
        rows = costs.batch_size // n_microbatches
        return ShardingTask(
            folded.module,
            self.inputs(rows),
            rows,
            costs.cluster,
            n_microbatches=n_microbatches,
            training=costs.training,
            optimizer=self.optimizer,
            recipe=costs.recipe,
            copies=folded.copies,
            again=folded.again,
        )


def subject_of(example: Example, optimizer: str) -> Subject:
    """The program of an example call, on the meta device."""
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


class Meshes:
    """Cost graphs of one program over meshes of a cluster's devices."""

    def __init__(self, costs: CostGraph, subject: Subject, memory_limit: float | None = None) -> None:
        """`costs`: of single devices of a cluster. `memory_limit`: bytes usable on each, if less than its memory."""
        assert costs.cluster is not None, "meshes need the links and collectives of a cluster"
        self._costs, self._subject = costs, subject
        self._cluster: Cluster = costs.cluster
        self._limit = memory_limit or float("inf")
        self._folded = fold(subject.module)
        self._facts: dict[int, GraphFacts] = {}
        self._works = LocalWorks()
        self._program = subject.program(costs, self._folded)

    def sizes(self) -> list[int]:
        """Numbers of devices per mesh: a node halved any number of times, or doubled up to all nodes."""
        per_kind = [self._per_node(kind) for kind in dict.fromkeys(d.kind for d in self._costs.devices)]
        most = max(count * self._cluster.nodes for count in per_kind)
        found = {most}
        for count in per_kind:
            found |= {count >> shift for shift in range(count.bit_length()) if count % (1 << shift) == 0}
            found |= {count << shift for shift in range(self._cluster.nodes.bit_length()) if count << shift <= most}
        return sorted(size for size in found if size > 1)

    def counts(self, size: int, rounds: Sequence[int]) -> list[int]:
        """Numbers of micro-batches that divide the batch: for each of `rounds` the largest with at most that many
        micro-batches per mesh of `size` devices."""
        batch, n_meshes = self._costs.batch_size, max(1, len(self._costs.devices) // size)
        fitting = [m for m in range(1, batch + 1) if batch % m == 0]
        return sorted({max(m for m in fitting if m <= each * n_meshes) for each in rounds})

    def shapes(self, size: int) -> set[tuple[int, ...]]:
        """All mesh shapes of `size` devices."""
        kinds = dict.fromkeys(d.kind for d in self._costs.devices)
        return {shape for kind in kinds for shape in _shapes(size, self._per_node(kind))}

    def of(self, size: int, counts: Sequence[int], shapes: Collection[tuple[int, ...]] = ()) -> CostGraph | None:
        """The cost graph over meshes of `size` devices; None if no mesh has that size.

        Args:
            counts: numbers of micro-batches; those that do not divide the batch are left out.
            shapes: mesh shapes to look at with many solutions each; default: every shape with few.

        CPU workers form no mesh: they would run their shards one after another.
        """
        meshes: list[tuple[Device, ...]] = []
        configurations: list[MeshConfiguration] = []
        for kind in dict.fromkeys(d.kind for d in self._costs.devices):
            if self._cluster.specs[kind].device_type == "cpu":
                continue
            mine = [d for d in self._costs.devices if d.kind == kind]
            per_node = self._per_node(kind)
            if per_node % size and size % per_node:
                continue
            chunks = [tuple(mine[i : i + size]) for i in range(0, len(mine) - size + 1, size)]
            if chunks:
                meshes += chunks
                configurations += self._configurations(kind, chunks, counts, shapes)
        if not configurations:
            return None
        return replace(
            self._costs,
            devices=tuple(device for mesh in meshes for device in mesh),
            configurations=tuple(configurations),
            meshes=tuple(tuple(device.name for device in mesh) for mesh in meshes),
        )

    def _per_node(self, kind: str) -> int:
        return sum(d.kind == kind for d in self._costs.devices) // self._cluster.nodes

    def _configurations(
        self,
        kind: str,
        chunks: Sequence[tuple[Device, ...]],
        counts: Sequence[int],
        shapes: Collection[tuple[int, ...]],
    ) -> Iterator[MeshConfiguration]:
        batch, size = self._costs.batch_size, len(chunks[0])
        memory = min(self._limit, *(d.memory for d in chunks[0]))
        for m in counts:
            if batch % m:
                continue
            for shape in shapes or _shapes(size, self._per_node(kind)):
                mesh = make_mesh(shape, [d.name for d in chunks[0]], _NAMES[-len(shape) :])
                task = self._subject.task(self._costs, self._folded, m)
                most = _CLOSER_LOOK if shapes else _FIRST_LOOK
                for number, found in enumerate(self._chosen(task, mesh, memory, len(chunks), most)):
                    name = f"{kind} x {'x'.join(map(str, shape))}, {m} micro-batches, {number}"
                    yield mesh_configuration(
                        name, kind, self._program, task, self._facts_of(task), found, fastest=number == 0
                    )

    def _chosen(self, task: ShardingTask, mesh: Mesh, memory: float, n_meshes: int, most: int) -> tuple[Sharding, ...]:
        """The fastest strategies; where `n_meshes` such meshes may lack memory (bytes), also others that need less."""
        return frontier(ShardingProblem(task, mesh, self._facts_of(task)), memory, n_meshes, most)

    def _facts_of(self, task: ShardingTask) -> GraphFacts:
        if task.rows not in self._facts:
            self._facts[task.rows] = GraphFacts(task, self._works)
        return self._facts[task.rows]


_NAMES = ("data", "model")  # mesh axes, named by their usual use


def _shapes(size: int, per_node: int) -> list[tuple[int, ...]]:
    """Mesh shapes: one axis within a node, or two axes with the last one within a node."""
    found: list[tuple[int, ...]] = [(size,)] if size <= per_node else []
    inside = min(size, per_node)
    found += [(size // last, last) for last in (inside, inside // 2) if 1 < last < size and size % last == 0]
    return found
