"""A stage configuration on a mesh: the strategies that were chosen for all operators, and what they cost a device."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import networkx as nx
import numpy as np
from torch import fx

from autopar.capture.repeated_layers.fold import Folded
from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import CostTable
from autopar.costs.device_group import StageConfiguration
from autopar.costs.operator_cost import OperatorCost
from autopar.planner.intra_op.explain import Solved
from autopar.planner.intra_op.solution import exchanges_within
from autopar.planner.intra_op.strategy_search import Collective, Facts, Sharding, ShardingProblem, Task
from autopar.sharding.layouts import REPLICATE, parts
from autopar.sharding.stage_sharding import Exchange, Repeated, StageSharding, stored_text, strategy_text
from autopar.sharding.strategies import Strategy


@dataclass(frozen=True)
class SplitProgram:
    """A program whose strategies are chosen on its folded graph, with the names that join the two.

    cost graph   layers.1 .. layers.8, node by node
    folded       one layer for all that are equal; `folded.kept` maps a node or parameter to it
    plan         operator keys, `module.path/operator#k`
    """

    costs: CostGraph  # of single devices
    folded: Folded
    nodes: Mapping[str, fx.Node]  # operators of the cost graph
    storages: Mapping[str, str]  # parameter or buffer -> its storage, as in the cost graph

    @cached_property
    def parameters(self) -> Mapping[str, tuple[str, ...]]:
        """Node -> names of the parameters that it reads."""
        return {
            name: tuple(str(n.target) for n in node.all_input_nodes if n.op == "get_attr")
            for name, node in self.nodes.items()
        }


@dataclass(frozen=True)
class MeshConfiguration(StageConfiguration):
    """A solution of the intra-operator search for all operators; a stage takes those of its own operators."""

    program: SplitProgram = field(repr=False)
    task: Task = field(repr=False)
    facts: Facts = field(repr=False)
    solution: Sharding = field(repr=False)
    memory: float  # bytes on each device that the strategies had to fit; inf for the fastest ones
    repeated: Mapping[str, float] = field(repr=False)  # node -> s of work per micro-batch that other devices do, too

    def solved(self) -> Solved:
        """The problem and its solution, to explain the strategies."""
        nodes = {o.key: self.program.folded.kept(node) for node, o in self.program.costs.operators.items()}
        return Solved(ShardingProblem(self.task, self.solution.mesh, self.facts), self.solution, nodes, self.memory)

    def sharding(self, nodes: Sequence[str]) -> StageSharding:
        found, folded, operators = self.solution, self.program.folded, self.program.costs.operators
        texts = {kept: _text(strategy) for kept, strategy in found.strategies.items()}
        names = dict.fromkeys(name for node in nodes for name in self.program.parameters[node])
        stored = {name: found.stored[folded.kept(name)] for name in names if folded.kept(name) in found.stored}
        exchanges = tuple(self._exchanges(nodes))
        share = [1 / self.n_microbatches if exchange.once else 1.0 for exchange in exchanges]
        again = {operators[node].key: self.repeated.get(node, 0.0) for node in nodes}
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

    def _exchanges(self, nodes: Sequence[str]) -> Iterator[Exchange]:
        """The collectives of `nodes`, under the keys and parameter names that plans use."""
        found, folded, operators = self.solution, self.program.folded, self.program.costs.operators
        axes = found.mesh.names
        by_reader: dict[str, list[Collective]] = defaultdict(list)
        for collective in found.collectives:
            by_reader[collective.reader if collective.reader in found.work else collective.tensor].append(collective)
        within: dict[str, list[Exchange]] = defaultdict(list)
        for exchange in exchanges_within(self.task, self.facts, found, {}):
            within[exchange.operator].append(exchange)
        for name in nodes:
            key, kept = operators[name].key, folded.kept(name)
            # The collectives of a result have its own operator as tensor; others have what the operator reads.
            operands = {kept: key}
            for n in self.program.nodes[name].all_input_nodes:
                stored = n.op in ("get_attr", "placeholder")
                operands[folded.kept(str(n.target) if stored else n.name)] = (
                    str(n.target) if stored else operators[n.name].key
                )
            for c in by_reader[kept]:
                for m in c.moves * c.each if c.tensor in operands else ():
                    if m.collective:
                        ends = (key, operands[c.tensor])
                        yield Exchange(
                            m.collective, axes[m.axis], *ends, round(m.nbytes), m.seconds, c.backward, c.once
                        )
            yield from (replace(exchange, operator=key, tensor=key) for exchange in within[kept])


def mesh_configuration(
    name: str, kind: str, program: SplitProgram, task: Task, facts: Facts, solution: Sharding, *, fastest: bool
) -> MeshConfiguration:
    """The stage configuration of a solution. `fastest`: it was chosen without a price of memory."""
    table = program.costs.table(kind, 1)
    m, rows, kept = task.n_microbatches, task.rows, program.folded.kept
    forward, backward = _with_collectives(solution, program.folded, m)
    seconds = np.array([[[of.get(kept(n), 0.0) for n in table.nodes]] for of in (forward, backward)])
    _, _, loss = table.at(rows)
    return MeshConfiguration(
        name,
        kind,
        m,
        CostTable(name, 1, table.nodes, (rows,), seconds[0], seconds[1], np.array([loss])),
        _graph(program, solution),
        program,
        task,
        facts,
        solution,
        math.inf if fastest else solution.nbytes,
        _repeated(program, solution),
    )


def _graph(program: SplitProgram, solution: Sharding) -> nx.DiGraph:
    """The cost graph with the bytes of each device of the mesh."""
    mesh, kept = solution.mesh.shape, program.folded.kept
    graph: nx.DiGraph = nx.DiGraph(program.costs.graph)
    cut = {n: parts(s.outputs[0], mesh) if s.outputs else 1 for n, s in solution.strategies.items()}
    held = {n: (parts(s.layout, mesh), parts(s.state, mesh)) for n, s in solution.stored.items()}
    for node, data in graph.nodes(data=True):
        work = solution.work.get(kept(node))
        if work is None:
            continue
        whole: OperatorCost = data["cost"]
        weights = dict(whole.parameters)
        for parameter in program.parameters[node]:
            storage, stored = program.storages.get(parameter), held.get(kept(parameter))
            if stored is not None and storage in weights:
                weights[storage] = weights[storage]._replace(parts=stored[0], state_parts=stored[1])
        data["cost"] = replace(
            whole,
            output_bytes=whole.output_bytes / cut[kept(node)],
            gradient_bytes=whole.gradient_bytes / cut[kept(node)],
            allocated_bytes=whole.allocated_bytes * work.kept,
            saved={storage: nbytes * work.kept for storage, nbytes in whole.saved.items()},
            parameters=weights,
        )
    return graph


def _repeated(program: SplitProgram, solution: Sharding) -> dict[str, float]:
    """Node -> s of its work per micro-batch that a device does although another one does it, too."""
    works = {node: solution.work.get(program.folded.kept(node)) for node in program.costs.graph}
    return {
        node: (work.forward + work.backward) * (1 - round(1 / work.share) / solution.mesh.size)
        for node, work in works.items()
        if work is not None
    }


def _with_collectives(found: Sharding, folded: Folded, m: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds forward and backward per micro-batch of each node of the folded graph, for one of its copies.

    They include the collectives of what the node reads; a collective that runs once a step counts a share in each of
    the `m` micro-batches.
    """
    forward = {name: work.forward for name, work in found.work.items()}
    backward = {name: work.backward for name, work in found.work.items()}
    for collective in found.collectives:
        reader = collective.reader if collective.reader in found.work else collective.tensor
        share = 1 / (folded.copies.get(reader, 1) * (m if collective.once else 1))
        into = backward if collective.backward or collective.once else forward
        into[reader] = into.get(reader, 0.0) + collective.seconds * share
    return forward, backward


def _text(strategy: Strategy) -> str:
    """The strategy as in a plan; empty where every device runs the whole operator."""
    split = any(code != REPLICATE for layout in (*strategy.inputs, *strategy.outputs) for code in layout)
    return strategy_text(strategy) if split else ""
