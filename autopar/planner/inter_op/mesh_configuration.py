"""A stage configuration on a mesh: the strategies that were chosen for all operators, and what they cost a device."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
from torch import fx

from autopar.capture.repeated_layers.fold import Folded
from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import CostTable, HostTimes
from autopar.costs.device_group import StageConfiguration
from autopar.costs.operator_cost import OperatorCost
from autopar.planner.intra_op.explain import Solved
from autopar.planner.intra_op.redistributions import Collective
from autopar.planner.intra_op.sharding_task import GraphFacts, ShardingTask
from autopar.planner.intra_op.solution import StageOperators, exchanges_within, stage_sharding
from autopar.planner.intra_op.strategy_search import Sharding, ShardingProblem
from autopar.sharding.layouts import Placements, parts
from autopar.sharding.stage_sharding import StageSharding
from autopar.sharding.strategy_costs import Place, kept_layout, kept_share


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

    @cached_property
    def operands(self) -> Mapping[str, tuple[str, ...]]:
        """Node -> the nodes that it reads."""
        return {name: tuple(n.name for n in node.all_input_nodes) for name, node in self.nodes.items()}


@dataclass(frozen=True)
class MeshConfiguration(StageConfiguration):
    """A solution of the intra-operator search for all operators; a stage takes those of its own operators."""

    program: SplitProgram = field(repr=False)
    task: ShardingTask = field(repr=False)
    facts: GraphFacts = field(repr=False)
    solution: Sharding = field(repr=False)
    memory: float  # bytes on each device that the strategies had to fit; inf for the fastest ones

    def solved(self) -> Solved:
        """The problem and its solution, to explain the strategies."""
        nodes = {o.key: self.program.folded.kept(node) for node, o in self.program.costs.operators.items()}
        return Solved(ShardingProblem(self.task, self.solution.mesh, self.facts), self.solution, nodes, self.memory)

    def sharding(self, nodes: Sequence[str]) -> StageSharding:
        keys = {name: operator.key for name, operator in self.program.costs.operators.items()}
        mine = [self.program.nodes[name] for name in nodes]
        operators = StageOperators(mine, keys, self.program.folded.kept)
        return stage_sharding(self.task, self.facts, self.solution, operators)


def mesh_configuration(
    name: str,
    kind: str,
    program: SplitProgram,
    task: ShardingTask,
    facts: GraphFacts,
    solution: Sharding,
    *,
    fastest: bool,
) -> MeshConfiguration:
    """The stage configuration of a solution. `fastest`: it was chosen without a price of memory."""
    table = program.costs.table(kind, 1)
    m, rows, kept = task.n_microbatches, task.rows, program.folded.kept
    columns = _with_collectives(solution, program.folded)
    forward, backward, once = (np.array([of.get(kept(n), 0.0) for n in table.nodes]) for of in columns)
    if table.fused is not None:  # a shard's kernels gain by fusion as much as whole ones
        gained = 1 - table.fused
        works = [solution.work.get(kept(n)) for n in table.nodes]
        forward -= gained[0] * [0.0 if work is None else work.forward for work in works]
        backward -= gained[1] * [0.0 if work is None else work.backward for work in works]
    _, _, loss = table.at(rows)
    return MeshConfiguration(
        name,
        kind,
        m,
        CostTable(
            name,
            1,
            table.nodes,
            (rows,),
            forward[None],
            backward[None],
            np.array([loss]),
            once,
            _host(program, task, facts, solution, table),
        ),
        _graph(program, facts, solution, m),
        program,
        task,
        facts,
        solution,
        math.inf if fastest else solution.nbytes,
    )


def _graph(program: SplitProgram, facts: GraphFacts, solution: Sharding, n_microbatches: int) -> nx.DiGraph:
    """The cost graph with the bytes of each device of the mesh.

    Parameters that an operator gathers are there while it runs. A micro-batch gathers as much whatever its size, so the
    bytes "of the whole batch" are `n_microbatches` times as many.
    """
    mesh, kept = solution.mesh.shape, program.folded.kept
    graph: nx.DiGraph = nx.DiGraph(program.costs.graph)
    cut = {n: parts(s.outputs[0], mesh) if s.outputs else 1 for n, s in solution.strategies.items()}
    weights, keeping = _weights(program, solution), _Keeping(program, facts, solution)
    for node, data in graph.nodes(data=True):
        representative = kept(node)
        if representative not in solution.strategies:
            continue
        whole: OperatorCost = data["cost"]
        n_parts = cut[representative]
        gathered = solution.gathered.get(representative, 0.0) * n_microbatches
        # One of equal layers represents the parameters of all, and the first of its names a tied parameter.
        represented = {program.storages.get(p): program.storages.get(kept(p)) for p in program.parameters[node]}
        data["cost"] = replace(
            whole,
            output_bytes=whole.output_bytes / n_parts,
            gradient_bytes=whole.gradient_bytes / n_parts,
            allocated_bytes=whole.allocated_bytes / n_parts + gathered,
            saved=keeping.of(node, representative),
            parameters={
                storage: weight._replace(**weights.get(represented.get(storage), {}))
                for storage, weight in whole.parameters.items()
            },
        )
    return graph


def _weights(program: SplitProgram, solution: Sharding) -> dict[str | None, dict[str, Any]]:
    """By storage: what the solution says of a parameter, as fields of `Weight`."""
    mesh = solution.mesh.shape
    once: dict[str, float] = defaultdict(float)
    for collective in solution.collectives:
        if collective.shared:
            once[collective.tensor] += collective.seconds / collective.times
    return {
        program.storages[name]: {
            "parts": parts(stored.layout, mesh),
            "state_parts": parts(stored.state, mesh),
            "once": once[name],
        }
        for name, stored in solution.stored.items()
        if name in program.storages
    }


class _Keeping:
    """What each device keeps of operators' tensors for the backward. Equal layers keep equal shares."""

    def __init__(self, program: SplitProgram, facts: GraphFacts, solution: Sharding) -> None:
        self._program, self._facts, self._solution = program, facts, solution
        self._known: dict[tuple[str, Place, str | None], tuple[float, Placements | None]] = {}

    def of(self, node: str, representative: str) -> dict[Hashable, float]:
        """Storage on the device -> bytes.

        Operators that keep one tensor in the same layout share its storage; a redistributed copy has its own.
        """
        whole: OperatorCost = self._program.costs.graph.nodes[node]["cost"]
        found: dict[Hashable, float] = {}
        for storage, nbytes in whole.saved.items():
            place, maker = whole.saved_places.get(storage), None
            if place is not None and place >= 0:
                maker = self._program.folded.kept(self._program.operands[node][place])
            key = (representative, place, maker)
            if key not in self._known:
                self._known[key] = self._share(*key)
            share, moved = self._known[key]
            found[storage, share, moved] = nbytes * share
        return found

    def _share(self, representative: str, of_node: Place, maker: str | None) -> tuple[float, Placements | None]:
        """The part of a tensor that is kept, and its layout if that is not the one in which `maker` made it."""
        strategies = self._solution.strategies
        strategy, ruled = strategies[representative], self._facts.with_rule(self._facts.node(representative))
        place = ruled.place(of_node)
        layout, share = kept_layout(strategy, place), kept_share(strategy, place, self._solution.mesh.shape)
        made = strategies[maker].outputs if maker is not None and maker in strategies else ()
        return share, layout if len(made) == 1 and made[0] != layout else None


class _NodeSeconds(NamedTuple):
    """Seconds by node of the folded graph, of one of its copies."""

    forward: dict[str, float]  # per micro-batch
    backward: dict[str, float]  # per micro-batch
    once: dict[str, float]  # per step


def _host(
    program: SplitProgram, task: ShardingTask, facts: GraphFacts, solution: Sharding, table: CostTable
) -> HostTimes | None:
    """Each device of the mesh launches as many kernels as one that is alone (`table`), and its collectives."""
    whole, recipe, cluster = table.host, program.costs.recipe, program.costs.cluster
    host = None if recipe is None or cluster is None else recipe.host(cluster.specs[table.kind])
    if whole is None or host is None:
        return whole
    counts: dict[bool, dict[str, float]] = {False: defaultdict(float), True: defaultdict(float)}  # backward -> node
    for collective in solution.collectives:
        if not collective.once:
            reader = _reader(collective, solution)
            steps = collective.times * sum(step.collective is not None for step in collective.steps)
            counts[collective.backward][reader] += steps / program.folded.copies.get(reader, 1)
    for exchange in exchanges_within(task, facts, solution):
        counts[exchange.backward][exchange.operator] += 1
    forward, backward = (
        np.array([counts[back].get(program.folded.kept(n), 0.0) for n in table.nodes]) for back in (False, True)
    )
    return replace(
        whole,
        forward=whole.forward + forward * (host.operator + host.kernel),
        backward=whole.backward + backward * (host.node + host.kernel),
    )


def _reader(collective: Collective, solution: Sharding) -> str:
    """The node whose time has the collective."""
    return collective.reader if collective.reader in solution.work else collective.tensor


def _with_collectives(found: Sharding, folded: Folded) -> _NodeSeconds:
    """The seconds of each node, with the collectives of what it reads.

    What happens once a step has a column of its own: a mesh does it once, however few of the micro-batches it runs.
    """
    forward = {name: work.forward for name, work in found.work.items()}
    backward = {name: work.backward for name, work in found.work.items()}
    seconds = _NodeSeconds(forward, backward, {})
    for collective in found.collectives:
        if collective.shared:
            continue  # of a parameter with several readers, see `_weights`
        reader = _reader(collective, found)
        into = seconds.once if collective.once else backward if collective.backward else forward
        into[reader] = into.get(reader, 0.0) + collective.seconds / folded.copies.get(reader, 1)
    return seconds
