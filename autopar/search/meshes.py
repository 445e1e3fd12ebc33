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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import networkx as nx
import numpy as np
from torch import fx

from autopar.costgraph import CostGraph, Way
from autopar.costtable import CostTable
from autopar.folding import Folded, fold
from autopar.search.assigned import exchanges_within
from autopar.search.sharding import Collective, Facts, Sharding, ShardingProblem, Task
from autopar.search.sharding_explain import Solved
from autopar.sharding.assignment import Exchange, Repeated, StageSharding, stored_text, strategy_text
from autopar.sharding.layouts import REPLICATE, parts
from autopar.sharding.mesh import Mesh, make_mesh
from autopar.sharding.strategies import Strategy
from cost_models import Cluster, Device

log = logging.getLogger(__name__)

# Where a mesh has no room for the model, strategies that need less are worth having: chosen as if all that the fastest
# ones hold cost so many times what they take.
_PRICES = (0.1, 1.0)
_FILLED = 0.5  # of the memory; activations in flight need the rest


@dataclass(frozen=True)
class Subject:
    """The program whose operators are split."""

    module: fx.GraphModule  # with parameters on the meta device
    inputs: Callable[[int], Sequence[Any]]  # flat ones of so many samples, on the meta device
    storages: Mapping[str, str]  # parameter or buffer by name -> as the cost graph calls it
    optimizer: str = "adamw"


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

    def of(self, size: int, counts: Sequence[int]) -> CostGraph | None:
        """The cost graph over meshes of so many devices; None if there are none of them.

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
                ways += self._ways(kind, chunks, counts)
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

    def _ways(self, kind: str, chunks: Sequence[tuple[Device, ...]], counts: Sequence[int]) -> Iterator[Way]:
        batch, size = self._costs.batch_size, len(chunks[0])
        memory = min(self._limit, *(d.memory for d in chunks[0]))
        for m in counts:
            if batch % m:
                continue
            for shape in _shapes(size, self._per_node(kind)):
                mesh = make_mesh(shape, [d.name for d in chunks[0]], _NAMES[-len(shape) :])
                task = self._task(m)
                for number, found in enumerate(self._chosen(task, mesh, memory)):
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

    def _chosen(self, task: Task, mesh: Mesh, memory: float) -> Iterator[Sharding]:
        """The fastest strategies, and the fastest of those that need less memory, should `memory` be short."""
        problem = ShardingProblem(task, mesh, self._facts_of(task))
        best = problem.priced(0.0)
        yield best
        needed = best.nbytes
        for price in _PRICES if needed > _FILLED * memory else ():
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
        _, _, loss = table.at(rows)
        seconds = np.zeros((2, 1, len(table.nodes)))
        repeated, reads, strategies = {}, {}, []
        nodes = {node.name: node for node in self._subject.module.graph.nodes}
        texts = {kept: _text(strategy) for kept, strategy in found.strategies.items()}
        for place, node in enumerate(table.nodes):
            kept = folded.kept(node)
            work = found.work.get(kept)
            seconds[:, 0, place] = forward.get(kept, 0.0), backward.get(kept, 0.0)
            data = graph.nodes[node]
            parameters = [n for n in nodes[node].all_input_nodes if n.op == "get_attr"]
            reads[node] = tuple(str(n.target) for n in parameters)
            if work is None:
                continue
            strategy = found.strategies[kept]
            repeated[node] = (work.forward + work.backward) * (1 - round(1 / work.share) / mesh.size)
            if texts[kept]:
                strategies.append((data["key"], texts[kept]))
            cut = parts(strategy.outputs[0], mesh.shape) if strategy.outputs else 1
            graph.nodes[node].update(
                output=data["output"] / cut,
                gradient=data["gradient"] / cut,
                fresh=data["fresh"] * work.kept,
                saved={storage: nbytes * work.kept for storage, nbytes in data["saved"].items()},
                parameters=dict(data["parameters"]),
            )
            for parameter in parameters:
                stored = found.stored.get(folded.kept(str(parameter.target)))
                storage = self._subject.storages.get(str(parameter.target))
                if stored is not None and storage in data["parameters"]:
                    weight = data["parameters"][storage]
                    graph.nodes[node]["parameters"][storage] = weight._replace(
                        parts=parts(stored.layout, mesh.shape), state_parts=parts(stored.state, mesh.shape)
                    )

        def solved() -> Solved:
            problem = ShardingProblem(task, mesh, self._facts_of(task))
            kept = {data["key"]: folded.kept(node) for node, data in graph.nodes(data=True)}
            return Solved(problem, found, kept, math.inf if fastest else found.nbytes)

        names = {str(n.target) for n in nodes.values() if n.op == "get_attr"}
        stored_as = {name: found.stored.get(folded.kept(name)) for name in sorted(names)}
        cut_ones = tuple(
            (name, stored_text(stored))
            for name, stored in stored_as.items()
            if stored is not None and any(code != REPLICATE for code in (*stored.layout, *stored.state))
        )
        return Way(
            name,
            kind,
            m,
            StageSharding(mesh.shape, mesh.names, tuple(strategies), cut_ones),
            CostTable(name, 1, table.nodes, (rows,), seconds[0], seconds[1], np.array([loss])),
            graph,
            repeated,
            reads,
            self._exchanges(task, found, {name: n for name, n in nodes.items() if name in graph}, graph),
            solved,
        )

    def _exchanges(
        self, task: Task, found: Sharding, nodes: Mapping[str, fx.Node], graph: nx.DiGraph
    ) -> Callable[[str], tuple[Exchange, ...]]:
        """What tells the collectives of an operator by the names that plans have."""
        folded, axes = self._folded, found.mesh.names
        by_reader: dict[str, list[Collective]] = defaultdict(list)
        for collective in found.collectives:
            by_reader[collective.reader if collective.reader in found.work else collective.tensor].append(collective)
        within: dict[str, list[Exchange]] = defaultdict(list)
        for exchange in exchanges_within(task, self._facts_of(task), found, {}):
            within[exchange.operator].append(exchange)

        def of(name: str) -> tuple[Exchange, ...]:
            key, kept = graph.nodes[name]["key"], folded.kept(name)
            operands = {kept: key}  # of what is returned
            for n in nodes[name].all_input_nodes:
                given = n.op in ("get_attr", "placeholder")
                operands[folded.kept(str(n.target) if given else n.name)] = (
                    str(n.target) if given else graph.nodes[n.name]["key"]
                )
            between = (
                Exchange(str(m.collective), axes[m.axis], key, operands[c.tensor], int(m.nbytes), m.seconds, *when)
                for c in by_reader[kept]
                if c.tensor in operands
                for when in [(c.backward, c.once)]
                for m in c.moves * c.each
                if m.collective
            )
            return (*between, *(replace(exchange, operator=key, tensor=key) for exchange in within[kept]))

        return of


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


def stage_sharding(costs: CostGraph, way: Way, nodes: Sequence[str]) -> StageSharding:
    """What `way` says of the operators `nodes`, which make a stage."""
    keys = {costs.graph.nodes[node]["key"] for node in nodes}
    names: Mapping[str, None] = dict.fromkeys(name for node in nodes for name in way.reads[node])
    whole = way.sharding
    exchanges = tuple(exchange for node in nodes for exchange in way.exchanges(node))
    share = [1 / way.n_microbatches if exchange.once else 1.0 for exchange in exchanges]
    repeated = {costs.graph.nodes[node]["key"]: way.repeated.get(node, 0.0) for node in nodes}
    return replace(
        whole,
        strategies=tuple(pair for pair in whole.strategies if pair[0] in keys),
        parameters=tuple(pair for pair in whole.parameters if pair[0] in names),
        exchanges=exchanges,
        collective_bytes=round(sum(e.nbytes * part for e, part in zip(exchanges, share, strict=True))),
        collective_time=math.fsum(e.seconds * part for e, part in zip(exchanges, share, strict=True)),
        repeated_time=math.fsum(repeated.values()),
        repeated=tuple(Repeated(key, seconds) for key, seconds in repeated.items() if seconds > 0),
    )
