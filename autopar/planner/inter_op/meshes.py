"""Meshes of devices in the place of devices: what a model costs where several of them do a micro-batch together.

The partition search knows devices and what operators cost on them. Here every `size` devices that follow each other are
one of its devices, and for each shape of their mesh, each size of a micro-batch and several limits of the memory the
best strategies are chosen (`sharding`): ways in which a stage may work, of which the search picks one for each stage.

    8 devices, size 4     [0 1 2 3] [4 5 6 7]       mesh (4): all by tensors, or all by samples, operator by operator
                                                    mesh (2, 4), (2, 2), ..: both; parameters whole or cut (ZeRO)
So stages, replicas, meshes with their shapes, strategies, cut parameters, recomputation, schedule and micro-batches are
chosen together.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import networkx as nx
import numpy as np
import torch
from torch import fx

from autopar.analysis.example import Example
from autopar.analysis.operators import captured_device, on_device
from autopar.capture.folding import Folded, fold
from autopar.costs.cost_graph import CostGraph, Way
from autopar.costs.cost_table import Calls, CostTable
from autopar.costs.operator_cost import OperatorCost
from autopar.planner.intra_op.explain import Solved
from autopar.planner.intra_op.solution import exchanges_within
from autopar.planner.intra_op.strategy_search import Collective, Facts, Sharding, ShardingProblem, Task
from autopar.sharding.layouts import REPLICATE, parts
from autopar.sharding.mesh import Mesh, make_mesh
from autopar.sharding.stage_sharding import Exchange, Repeated, StageSharding, stored_text, strategy_text
from autopar.sharding.strategies import Strategy
from cost_models import Cluster, Device
from cost_models.graphs import get_attribute, on_meta, private_copy, storage_key

log = logging.getLogger(__name__)

# Where a mesh has no room for the model, strategies that need less are worth having: chosen as if all that the fastest
# ones hold cost so many times what they take.
_PRICES = (0.1, 1.0)
_ONE_PRICE = (0.3,)  # at first
_FILLED = 0.5  # of the memory; activations in flight need the rest


@dataclass(frozen=True)
class Subject:
    """The program whose operators are split."""

    module: fx.GraphModule  # with parameters on the meta device
    inputs: Callable[[int], Sequence[Any]]  # flat ones of so many samples, on the meta device
    storages: Mapping[str, str]  # parameter or buffer by name -> as the cost graph calls it
    optimizer: str = "adamw"


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


class Meshes:
    """Cost graphs of one program over meshes of a cluster's devices."""

    def __init__(self, costs: CostGraph, subject: Subject, memory_limit: float | None = None) -> None:
        """`costs`: on single devices. `memory_limit`: bytes on each, if less than they have."""
        assert costs.cluster is not None, "links and collectives are a cluster's"
        self._costs, self._subject = costs, subject
        self._cluster: Cluster = costs.cluster
        self._limit = memory_limit or float("inf")
        self._folded = fold(subject.module)
        self._facts: dict[int, Facts] = {}
        self._nodes = {n.name: n for n in subject.module.graph.nodes if n.name in costs.graph}
        self._reads = {  # names of parameters
            name: tuple(str(n.target) for n in node.all_input_nodes if n.op == "get_attr")
            for name, node in self._nodes.items()
        }

    def sizes(self) -> list[int]:
        """Numbers of devices that meshes may have: they halve a node, or are whole nodes."""
        per_kind = [self._per_node(kind) for kind in dict.fromkeys(d.kind for d in self._costs.devices)]
        most = max(count * self._cluster.nodes for count in per_kind)
        found = {most}
        for count in per_kind:
            found |= {count >> shift for shift in range(count.bit_length()) if count % (1 << shift) == 0}
            found |= {count << shift for shift in range(self._cluster.nodes.bit_length()) if count << shift <= most}
        return sorted(size for size in found if size > 1)

    def counts(self, size: int, rounds: Sequence[int]) -> list[int]:
        """Numbers of micro-batches that divide the batch, near so many for each mesh of `size` devices."""
        batch, n_meshes = self._costs.batch_size, max(1, len(self._costs.devices) // size)
        fitting = [m for m in range(1, batch + 1) if batch % m == 0]
        return sorted({max(m for m in fitting if m <= each * n_meshes) for each in rounds})

    def shapes(self, size: int) -> set[tuple[int, ...]]:
        """Of meshes of so many devices."""
        kinds = dict.fromkeys(d.kind for d in self._costs.devices)
        return {shape for kind in kinds for shape in _shapes(size, self._per_node(kind))}

    def of(self, size: int, counts: Sequence[int], shapes: Collection[tuple[int, ...]] = ()) -> CostGraph | None:
        """The cost graph over meshes of so many devices; None if there are none of them.

        `shapes`: those that are looked at closely; default: all, at first sight.
        `counts`: numbers of micro-batches. Those that do not divide the batch are left out, and so are devices that are
        workers of this process's CPUs: they would do their shards one after another.
        """
        meshes: list[tuple[Device, ...]] = []
        ways: list[Way] = []
        for kind in dict.fromkeys(d.kind for d in self._costs.devices):
            mine = [d for d in self._costs.devices if d.kind == kind and d.torch_device.type != "cpu"]
            per_node = self._per_node(kind)
            if per_node % size and size % per_node:
                continue
            chunks = [tuple(mine[i : i + size]) for i in range(0, len(mine) - size + 1, size)]
            if chunks:
                meshes += chunks
                ways += self._ways(kind, chunks, counts, shapes)
        if not ways:
            return None
        return replace(
            self._costs,
            devices=tuple(replace(mesh[0], memory=min(d.memory for d in mesh)) for mesh in meshes),
            ways=tuple(ways),
            members={mesh[0].name: tuple(d.name for d in mesh) for mesh in meshes},
        )

    def _per_node(self, kind: str) -> int:
        return sum(d.kind == kind for d in self._costs.devices) // self._cluster.nodes

    def _ways(
        self,
        kind: str,
        chunks: Sequence[tuple[Device, ...]],
        counts: Sequence[int],
        shapes: Collection[tuple[int, ...]],
    ) -> Iterator[Way]:
        batch, size = self._costs.batch_size, len(chunks[0])
        memory = min(self._limit, *(d.memory for d in chunks[0]))
        for m in counts:
            if batch % m:
                continue
            for shape in shapes or _shapes(size, self._per_node(kind)):
                mesh = make_mesh(shape, [d.name for d in chunks[0]], _NAMES[-len(shape) :])
                task = self._task(m)
                for number, found in enumerate(self._chosen(task, mesh, memory, _PRICES if shapes else _ONE_PRICE)):
                    name = f"{kind} x {'x'.join(map(str, shape))}, {m} micro-batches, {number}"
                    yield self._way(name, kind, m, task, found, number == 0)

    def _task(self, m: int) -> Task:
        rows = self._costs.batch_size // m
        return Task(
            self._folded.module,
            self._subject.inputs(rows),
            rows,
            self._cluster,
            n_microbatches=m,
            training=self._costs.training,
            optimizer=self._subject.optimizer,
            copies=self._folded.copies,
            again=self._folded.again,
        )

    def _chosen(self, task: Task, mesh: Mesh, memory: float, prices: Sequence[float]) -> Iterator[Sharding]:
        """The fastest strategies, and the fastest of those that need less memory, should `memory` be short."""
        problem = ShardingProblem(task, mesh, self._facts_of(task))
        best = problem.priced(0.0)
        yield best
        needed = best.nbytes
        for price in prices if needed > _FILLED * memory else ():
            found = problem.priced(price * best.seconds / best.nbytes)
            if found.nbytes < needed:
                yield found
                needed = found.nbytes

    def _facts_of(self, task: Task) -> Facts:
        if task.rows not in self._facts:
            self._facts[task.rows] = Facts(task)
        return self._facts[task.rows]

    def _way(self, name: str, kind: str, m: int, task: Task, found: Sharding, fastest: bool) -> Way:
        """`fastest`: it was chosen without a price of memory."""
        folded, mesh = self._folded, found.mesh
        forward, backward = _with_collectives(found, folded, m)
        graph: nx.DiGraph = nx.DiGraph(self._costs.graph)
        table = self._costs.table(kind, 1)
        rows = self._costs.batch_size // m
        cut = {n: parts(s.outputs[0], mesh.shape) if s.outputs else 1 for n, s in found.strategies.items()}
        held = {n: (parts(s.layout, mesh.shape), parts(s.state, mesh.shape)) for n, s in found.stored.items()}
        repeated = {}
        for node, data in graph.nodes(data=True):
            kept = folded.kept(node)
            work = found.work.get(kept)
            if work is None:
                continue
            repeated[node] = (work.forward + work.backward) * (1 - round(1 / work.share) / mesh.size)
            whole: OperatorCost = data["cost"]
            weights = dict(whole.parameters)
            for parameter in self._reads[node]:
                storage, stored = self._subject.storages.get(parameter), held.get(folded.kept(parameter))
                if stored is not None and storage in weights:
                    weights[storage] = weights[storage]._replace(parts=stored[0], state_parts=stored[1])
            data["cost"] = replace(
                whole,
                output_bytes=whole.output_bytes / cut[kept],
                gradient_bytes=whole.gradient_bytes / cut[kept],
                allocated_bytes=whole.allocated_bytes * work.kept,
                saved={storage: nbytes * work.kept for storage, nbytes in whole.saved.items()},
                parameters=weights,
            )
        seconds = np.array([[[of.get(folded.kept(n), 0.0) for n in table.nodes]] for of in (forward, backward)])
        _, _, loss = table.at(rows)

        def solved() -> Solved:
            problem = ShardingProblem(task, mesh, self._facts_of(task))
            kept = {operator.key: folded.kept(node) for node, operator in self._costs.operators.items()}
            return Solved(problem, found, kept, math.inf if fastest else found.nbytes)

        return Way(
            name,
            kind,
            m,
            lambda nodes: self._sharding(nodes, task, found, repeated),
            CostTable(name, 1, table.nodes, (rows,), seconds[0], seconds[1], np.array([loss])),
            graph,
            solved,
        )

    def _sharding(
        self, nodes: Sequence[str], task: Task, found: Sharding, repeated: Mapping[str, float]
    ) -> StageSharding:
        """What was found, of the operators `nodes`, which make a stage."""
        folded, operators = self._folded, self._costs.operators
        texts = {kept: _text(strategy) for kept, strategy in found.strategies.items()}
        names = dict.fromkeys(name for node in nodes for name in self._reads[node])
        stored = {name: found.stored[folded.kept(name)] for name in names if folded.kept(name) in found.stored}
        exchanges = tuple(self._exchanges(nodes, task, found))
        share = [1 / task.n_microbatches if exchange.once else 1.0 for exchange in exchanges]
        again = {operators[node].key: repeated.get(node, 0.0) for node in nodes}
        return StageSharding(
            found.mesh.shape,
            found.mesh.names,
            tuple((operators[n].key, text) for n in nodes if (text := texts.get(folded.kept(n)))),
            tuple(
                (name, stored_text(one))
                for name, one in stored.items()
                if any(code != REPLICATE for code in (*one.layout, *one.state))
            ),
            exchanges,
            round(math.fsum(e.nbytes * part for e, part in zip(exchanges, share, strict=True))),
            math.fsum(e.seconds * part for e, part in zip(exchanges, share, strict=True)),
            math.fsum(again.values()),
            tuple(Repeated(key, seconds) for key, seconds in again.items() if seconds > 0),
        )

    def _exchanges(self, nodes: Sequence[str], task: Task, found: Sharding) -> Iterator[Exchange]:
        """The collectives of operators by the names that plans have."""
        folded, axes, operators = self._folded, found.mesh.names, self._costs.operators
        by_reader: dict[str, list[Collective]] = defaultdict(list)
        for collective in found.collectives:
            by_reader[collective.reader if collective.reader in found.work else collective.tensor].append(collective)
        within: dict[str, list[Exchange]] = defaultdict(list)
        for exchange in exchanges_within(task, self._facts_of(task), found, {}):
            within[exchange.operator].append(exchange)
        for name in nodes:
            key, kept = operators[name].key, folded.kept(name)
            operands = {kept: key}  # of what is returned
            for n in self._nodes[name].all_input_nodes:
                given = n.op in ("get_attr", "placeholder")
                told = str(n.target) if given else operators[n.name].key
                operands[folded.kept(str(n.target) if given else n.name)] = told
            for c in by_reader[kept]:
                for m in c.moves * c.each if c.tensor in operands else ():
                    if m.collective:
                        ends = (key, operands[c.tensor])
                        yield Exchange(
                            m.collective, axes[m.axis], *ends, round(m.nbytes), m.seconds, c.backward, c.once
                        )
            yield from (replace(exchange, operator=key, tensor=key) for exchange in within[kept])


def _text(strategy: Strategy) -> str:
    """Empty where every device does everything."""
    split = any(code != REPLICATE for layout in (*strategy.inputs, *strategy.outputs) for code in layout)
    return strategy_text(strategy) if split else ""


_NAMES = ("data", "model")  # axes of a mesh, by what they mostly come to be used for


def _shapes(size: int, per_node: int) -> list[tuple[int, ...]]:
    """Of meshes: one axis within a node; two whose last one lies within a node."""
    found: list[tuple[int, ...]] = [(size,)] if size <= per_node else []
    inside = min(size, per_node)
    found += [(size // last, last) for last in (inside, inside // 2) if 1 < last < size and size % last == 0]
    return found


def _with_collectives(found: Sharding, folded: Folded, m: int) -> tuple[dict[str, float], dict[str, float]]:
    """By node of the folded graph, of one of its copies: s forward and backward with the collectives of what it reads.
    What happens once a step has its share in every micro-batch."""
    forward = {name: work.forward for name, work in found.work.items()}
    backward = {name: work.backward for name, work in found.work.items()}
    for collective in found.collectives:
        reader = collective.reader if collective.reader in found.work else collective.tensor
        share = 1 / (folded.copies.get(reader, 1) * (m if collective.once else 1))
        into = backward if collective.backward or collective.once else forward
        into[reader] = into.get(reader, 0.0) + collective.seconds * share
    return forward, backward
