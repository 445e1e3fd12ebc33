"""A stage configuration on a mesh: the strategies that were chosen for all operators, and what they cost a device."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch import fx

from autopar.capture.repeated_layers.fold import Folded
from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import CostTable, HostTimes, OverlappedTimes
from autopar.costs.device_group import StageConfiguration
from autopar.costs.gradient_reduction import BUCKET
from autopar.costs.operator_cost import OperatorCost
from autopar.costs.sends import Sent
from autopar.planner.inter_op.scattering import Scattering
from autopar.planner.intra_op.explain import Solved
from autopar.planner.intra_op.redistributions import Collective
from autopar.planner.intra_op.sharding_task import GraphFacts, ShardingTask
from autopar.planner.intra_op.solution import StageOperators, exchanges_within, stage_sharding
from autopar.planner.intra_op.strategy_search import Sharding, ShardingProblem
from autopar.sharding.layouts import Placements, parts
from autopar.sharding.stage_sharding import StageSharding, Stored
from autopar.sharding.strategy_costs import Place, kept_layout, kept_share
from cost_models import Cluster
from cost_models.collectives.overlap import CONTENTION, Overlap


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

    @property
    def width(self) -> int:
        return self.solution.mesh.size

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
    overlap = program.costs.overlap
    seconds = _with_collectives(solution, program.folded, overlap)
    represented = [kept(n) for n in table.nodes]
    columns = _columns(seconds._asdict(), table.nodes, represented)
    forward, backward = columns["forward"], columns["backward"]
    if program.costs.shards is not None:  # what the first device does for all, such as taking an item of a list
        alone = np.array([n not in solution.work for n in represented])
        forward, backward = (of + alone * whole for of, whole in zip((forward, backward), table.at(rows), strict=False))
    if table.fused is not None:  # a shard's kernels gain by fusion as much as whole ones
        gained = 1 - table.fused
        works = [solution.work.get(n) for n in represented]
        forward -= gained[0] * [0.0 if work is None else work.forward for work in works]
        backward -= gained[1] * [0.0 if work is None else work.backward for work in works]
    _, _, loss = table.at(rows)
    shares = np.array([program.costs.operators[n].weight_share for n in table.nodes])
    weight = shares * (backward - columns["added_backward"]) + columns["added_weight"]
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
            columns["once"],
            _host(program, task, facts, solution, table),
            _overlapped(solution, overlap, columns),
            weight=np.maximum(weight, 0.0),
        ),
        _operators(program, facts, solution, kind, task.cluster, m),
        program,
        task,
        facts,
        solution,
        math.inf if fastest else solution.nbytes,
    )


def _operators(
    program: SplitProgram, facts: GraphFacts, solution: Sharding, kind: str, cluster: Cluster, n_microbatches: int
) -> dict[str, OperatorCost]:
    """The costs of all operators, with the bytes of each device of the mesh.

    Parameters that an operator gathers are there while it runs. A micro-batch gathers as much whatever its size, so the
    bytes "of the whole batch" are `n_microbatches` times as many.
    """
    mesh, kept = solution.mesh.shape, program.folded.kept
    found: dict[str, OperatorCost] = {}
    cut = {n: parts(s.outputs[0], mesh) if s.outputs else 1 for n, s in solution.strategies.items()}
    weights, keeping = _weights(program, solution, kind), _Keeping(program, facts, solution)
    scattering = Scattering(solution.mesh, cluster, n_microbatches)
    for node, whole in program.costs.operators.items():
        representative = kept(node)
        if representative not in solution.strategies:
            found[node] = whole
            continue
        n_parts, made = cut[representative], solution.strategies[representative].outputs
        sent = scattering.of(made[0], whole.output_bytes / n_parts) if made else Sent(whole.output_bytes)
        gathered = solution.gathered.get(representative, 0.0) * n_microbatches
        # One of equal layers represents the parameters of all, and the first of its names a tied parameter.
        represented = {program.storages.get(p): program.storages.get(kept(p)) for p in program.parameters[node]}
        own = keeping.of(node, representative)
        found[node] = whole.with_bytes(
            output_bytes=whole.output_bytes / n_parts,
            gradient_bytes=whole.gradient_bytes / n_parts,
            allocated_bytes=whole.allocated_bytes / n_parts + gathered,
            saved=own,
            results={(storage, 1 / n_parts, None): nbytes / n_parts for storage, nbytes in whole.results.items()},
            rebuilt=frozenset(key for key in own if isinstance(key, tuple) and key[0] in whole.rebuilt),
            copies=sent.copies,
            gather=sent.gather,
            parameters={
                storage: weight._replace(**weights.get(represented.get(storage), {}))
                for storage, weight in whole.parameters.items()
            },
        )
    return found


def _weights(program: SplitProgram, solution: Sharding, kind: str) -> dict[str | None, dict[str, Any]]:
    """By storage: what the solution says of a parameter on devices of a kind, as fields of `Weight`."""
    shards = program.costs.shards
    whole = shards is not None and shards.holds_whole_parameters(kind)  # the first device, which has most
    mesh = solution.mesh.shape
    once: dict[str, float] = defaultdict(float)
    for collective in solution.collectives:
        if collective.shared:
            once[collective.tensor] += collective.seconds / collective.times
    return {
        program.storages[name]: ({} if whole else _stored_parts(stored, mesh)) | {"once": once[name]}
        for name, stored in solution.stored.items()
        if name in program.storages
    }


def _stored_parts(stored: Stored, mesh: Sequence[int]) -> dict[str, int]:
    """As fields of `Weight`."""
    return {
        "parts": parts(stored.layout, mesh),
        "state_parts": parts(stored.state, mesh),
        "gradient_parts": parts(stored.state if stored.scattered else stored.layout, mesh),
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
        whole: OperatorCost = self._program.costs.operators[node]
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


class _First(NamedTuple):
    """The first of the copies of a node: it may read what the others do not."""

    node: str


_ByNode = dict[str | _First, float]  # of each copy of a node of the folded graph; what the first has besides


def _columns(seconds: Mapping[str, _ByNode], nodes: Sequence[str], represented: Sequence[str]) -> dict[str, np.ndarray]:
    """Each as an array over the `nodes` of the whole graph. `represented`: for each of them the node of the folded
    graph."""
    places: dict[str | _First, list[int]] = defaultdict(list)
    for place, (node, kept) in enumerate(zip(nodes, represented, strict=True)):
        places[kept].append(place)
        places[_First(node)].append(place)
    columns = {name: np.zeros(len(nodes)) for name in seconds}
    for name, by_node in seconds.items():
        for key, taken in by_node.items():
            if taken and key in places:
                columns[name][places[key]] += taken
    return columns


def _add(of: _ByNode, collective: Collective, reader: str, amount: float, folded: Folded) -> None:
    """Add what a collective takes, all its times, to the copies of its reader that need it.

    What the first copy of a layer reads comes from the layer before it, what the others read from a copy:

        L0 -> L1 -> L1' -> L1'' -> L4       times: 1 for L0 -> L1, 2 for L1 -> L1', 3 for what is within L1
    """
    copies = folded.copies.get(reader, 1)
    if collective.times >= copies:
        of[reader] = of.get(reader, 0.0) + amount / copies
    elif folded.copies.get(collective.tensor, 1) == 1:
        of[_First(reader)] = of.get(_First(reader), 0.0) + amount
    else:
        each = amount / (copies - 1)
        of[reader] = of.get(reader, 0.0) + each
        of[_First(reader)] = of.get(_First(reader), 0.0) - each


class _NodeSeconds(NamedTuple):
    """Seconds by node of the folded graph."""

    forward: _ByNode  # per micro-batch
    backward: _ByNode  # per micro-batch
    once: _ByNode  # per step, behind no kernels
    # Of collectives alone:
    network_forward: _ByNode  # all of a micro-batch
    network_backward: _ByNode
    hidden_forward: _ByNode  # those behind kernels
    hidden_backward: _ByNode
    network_weight: _ByNode  # of `network_backward`, those of parameters' gradients
    added_backward: _ByNode  # all of `backward`, with what they slow down
    added_weight: _ByNode  # of those, of parameters' gradients
    gradients: _ByNode  # per step, behind kernels
    parameters: _ByNode


def _host(
    program: SplitProgram, task: ShardingTask, facts: GraphFacts, solution: Sharding, table: CostTable
) -> HostTimes | None:
    """Each device of the mesh launches as many kernels as one that is alone (`table`), and its collectives."""
    if program.costs.shards is not None:
        return _host_at_hand(program, facts, solution, table, program.costs.shards.launch_seconds(table.kind))
    whole, recipe, cluster = table.host, program.costs.recipe, program.costs.cluster
    host = None if recipe is None or cluster is None else recipe.host(cluster.specs[table.kind])
    if whole is None or host is None:
        return whole
    counts: dict[bool, _ByNode] = {False: {}, True: {}}  # backward -> node
    for collective in solution.collectives:
        if not collective.once:
            reader = _reader(collective, solution)
            launched = (
                min(1.0, step.nbytes / BUCKET) if collective.in_buckets else 1.0
                for step in collective.steps
                if step.collective is not None
            )
            _add(counts[collective.backward], collective, reader, collective.times * sum(launched), program.folded)
    for exchange in exchanges_within(task, facts, solution):
        of, operator = counts[exchange.backward], exchange.operator
        of[operator] = of.get(operator, 0.0) + 1
    represented = [program.folded.kept(n) for n in table.nodes]
    extra = _columns({"forward": counts[False], "backward": counts[True]}, table.nodes, represented)
    forward, backward = extra["forward"], extra["backward"]
    return replace(
        whole,
        forward=whole.forward + forward * (host.operator + host.kernel),
        backward=whole.backward + backward * (host.node + host.kernel),
    )


def _host_at_hand(
    program: SplitProgram, facts: GraphFacts, solution: Sharding, table: CostTable, launch: float
) -> HostTimes | None:
    """One thread launches the kernels of all devices of the mesh; measured seconds contain those of one device."""
    if not launch:
        return None
    work = [facts.work.get(program.folded.kept(node)) for node in table.nodes]
    forward, backward = (
        np.array([0.0 if one is None else solution.mesh.size * launch * len(getattr(one, which)) for one in work])
        for which in ("forward", "backward")
    )
    return HostTimes(forward, backward, (0.0, 0.0))


def _reader(collective: Collective, solution: Sharding) -> str:
    """The node whose time has the collective."""
    return collective.reader if collective.reader in solution.work else collective.tensor


def _with_collectives(found: Sharding, folded: Folded, overlap: Overlap) -> _NodeSeconds:
    """The seconds of each node, with the collectives of what it reads.

    What happens once a step has columns of its own: a mesh does it once, however few of the micro-batches it runs.
    Collectives behind kernels count with what they slow these down.
    """
    forward: _ByNode = {name: work.forward for name, work in found.work.items()}
    backward: _ByNode = {name: work.backward for name, work in found.work.items()}
    seconds = _NodeSeconds(forward, backward, {}, {}, {}, {}, {}, {}, {}, {}, {}, {})
    for collective in found.collectives:
        if collective.shared:
            continue  # of a parameter with several readers, see `_weights`
        reader, back, taken = _reader(collective, found), collective.backward, collective.seconds
        is_behind = _is_behind(collective, overlap)
        if collective.once:
            behind = seconds.gradients if collective.moves == "gradient" else seconds.parameters
            _add(behind if is_behind else seconds.once, collective, reader, taken, folded)
            continue
        exposed = taken * (CONTENTION if is_behind else 1.0)
        _add(backward if back else forward, collective, reader, exposed, folded)
        _add(seconds.network_backward if back else seconds.network_forward, collective, reader, taken, folded)
        if back:
            _add(seconds.added_backward, collective, reader, exposed, folded)
        if back and collective.moves == "gradient":
            _add(seconds.added_weight, collective, reader, exposed, folded)
            _add(seconds.network_weight, collective, reader, taken, folded)
        if is_behind:
            _add(seconds.hidden_backward if back else seconds.hidden_forward, collective, reader, taken, folded)
    return seconds


def _is_behind(collective: Collective, overlap: Overlap) -> bool:
    """Whether it runs behind kernels. One that several readers of a parameter share waits for all of them."""
    if collective.shared or collective.moves == "activation":
        return False
    return overlap.gradients if collective.moves == "gradient" else overlap.parameters


def _overlapped(found: Sharding, overlap: Overlap, columns: Mapping[str, np.ndarray]) -> OverlappedTimes | None:
    """`columns`: those of `_NodeSeconds`."""
    behind = [one for one in found.collectives if _is_behind(one, overlap)]
    if not behind:
        return None
    steps = [(one.times, step) for one in behind if one.once for step in one.steps if step.collective]
    seconds, nbytes = (
        math.fsum(n * x for n, x in of)
        for of in ([(n, step.seconds) for n, step in steps], [(n, step.nbytes) for n, step in steps])
    )
    return OverlappedTimes(
        (columns["network_forward"], columns["network_backward"]),
        (columns["hidden_forward"], columns["hidden_backward"]),
        columns["gradients"],
        columns["parameters"],
        seconds * BUCKET / nbytes if nbytes else 0.0,
        columns["network_weight"],
    )
