"""A stage configuration on a mesh: the strategies that were chosen for all operators, and what they cost a device."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from autopar.capture.repeated_layers.fold import Folded
from autopar.costs.cost_table import CostTable, GatheringTimes, HostTimes, OverlappedTimes
from autopar.costs.device_group import StageConfiguration
from autopar.costs.gradient_reduction import BUCKET
from autopar.planner.inter_op.mesh_bytes import operators_on_mesh
from autopar.planner.inter_op.split_program import First, SplitProgram
from autopar.planner.intra_op.explain import Solved
from autopar.planner.intra_op.redistributions import Collective
from autopar.planner.intra_op.sharding_task import GraphFacts, ShardingTask
from autopar.planner.intra_op.solution import StageOperators, exchanges_within, stage_sharding
from autopar.planner.intra_op.strategy_search import Sharding, ShardingProblem
from autopar.sharding.layouts import parts
from autopar.sharding.stage_sharding import StageSharding
from cost_models.collectives.overlap import CONTENTION, Overlap, exposed_behind


@dataclass(frozen=True)
class MeshConfiguration(StageConfiguration):
    """A solution of the intra-operator search for all operators; a stage takes those of its own operators."""

    program: SplitProgram = field(repr=False)
    task: ShardingTask = field(repr=False)
    facts: GraphFacts = field(repr=False)
    solution: Sharding = field(repr=False)
    memory: float  # bytes on each device that the strategies had to fit; inf for the fastest ones

    @property
    def shape(self) -> tuple[int, ...]:
        return self.solution.mesh.shape

    def solved(self) -> Solved:
        """The problem and its solution, to explain the strategies."""
        nodes = {o.key: self.program.folded.kept(node) for node, o in self.program.costs.operators.items()}
        found = self.solution.keeping or self.solution  # strategies are compared as if gathered tensors were kept
        return Solved(ShardingProblem(self.task, self.solution.mesh, self.facts), found, nodes, self.memory)

    def sharding(self, nodes: Sequence[str], run_again: Container[str] = ()) -> StageSharding:
        keys = {name: operator.key for name, operator in self.program.costs.operators.items()}
        mine = [self.program.nodes[name] for name in nodes]
        operators = StageOperators(mine, keys, self.program.folded.kept)
        return stage_sharding(self.task, self.facts, self.solution, operators, run_again)


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
    shares = {kept(n): operator.weight_share for n, operator in program.costs.operators.items()}
    seconds = _with_collectives(solution, program.folded, overlap, shares)
    columns = _columns(seconds._asdict(), table.nodes, program)
    represented = program.representation(table.nodes).kept
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
    of_weights = np.array([program.costs.operators[n].weight_share for n in table.nodes])
    weight = of_weights * (backward - columns["added_backward"])
    # What exchanges gradients of parameters runs in the input part of a split backward (`lower.split_backward`), and a
    # stage that gathers activations again has a whole one.
    weight = np.where((columns["exchanged"] > 0) | (solution.keeping is not None), 0.0, weight)
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
            gathering=_gathering(program, solution, table, columns),
            collectives=None if overlap.launches else (columns["network_forward"], columns["network_backward"]),
            accumulation=_accumulation(program, solution, table),
        ),
        operators_on_mesh(program, facts, solution, kind, task.cluster, m),
        program,
        task,
        facts,
        solution,
        math.inf if fastest else (solution.keeping or solution).nbytes,
    )


_ByNode = dict[str | First, float]  # of each copy of a node of the folded graph; what the first has besides


def _accumulation(program: SplitProgram, solution: Sharding, table: CostTable) -> np.ndarray | None:
    """[nodes] s, as in `CostTable`: each device adds up the gradients of its parts of parameters, in turns with those
    on the same hardware."""
    shards, mesh = program.costs.shards, solution.mesh
    if table.accumulation is None or shards is None:
        return None
    stored = {program.storages[n]: one for n, one in solution.stored.items() if n in program.storages}
    turns = shards.turns(mesh.devices)

    def share(node: str) -> float:
        """Of the node's parameters that each device has."""
        total = own = 0.0
        for storage, weight in program.costs.operators[node].parameters.items():
            known = stored.get(program.represented[node].get(storage) or storage)
            total += weight.trained * weight.nbytes
            own += weight.trained * weight.nbytes / (1 if known is None else parts(known.layout, mesh.shape))
        return own / total if total else 1.0

    pairs = zip(table.nodes, table.accumulation, strict=True)
    return np.array([seconds * turns * share(node) if seconds else 0.0 for node, seconds in pairs])


def _columns(seconds: Mapping[str, _ByNode], nodes: tuple[str, ...], program: SplitProgram) -> dict[str, np.ndarray]:
    """Each as an array over the `nodes` of the whole graph."""
    places = program.representation(nodes).places
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
        of[First(reader)] = of.get(First(reader), 0.0) + amount
    else:
        each = amount / (copies - 1)
        of[reader] = of.get(reader, 0.0) + each
        of[First(reader)] = of.get(First(reader), 0.0) - each


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
    added_backward: _ByNode  # all of `backward`, with what they slow down
    exchanged: _ByNode  # of those, of parameters' gradients
    gradients: _ByNode  # per step, behind kernels
    parameters: _ByNode
    regathered: _ByNode  # of `backward`, of activations that are gathered again
    network_regathered: _ByNode  # of `network_backward`, the same
    hidden_regathered: _ByNode  # of `hidden_backward`, the same


def _host(
    program: SplitProgram, task: ShardingTask, facts: GraphFacts, solution: Sharding, table: CostTable
) -> HostTimes | None:
    """Each device of the mesh launches as many kernels as one that is alone (`table`), and its collectives."""
    if program.costs.shards is not None:
        return _host_at_hand(program, facts, solution, table, program.costs.shards.launch_seconds(table.kind))
    whole, recipe, cluster = table.host, program.costs.recipe, program.costs.cluster
    host = None if recipe is None or cluster is None else recipe.host(cluster.specs[table.kind])
    if whole is None or host is None or not program.costs.overlap.launches:
        return whole
    counts: dict[bool, _ByNode] = {False: {}, True: {}}  # backward -> node
    for collective in solution.collectives:
        if not collective.once:
            launched = collective.times * _launches(collective)
            _add(counts[collective.backward], collective, _reader(collective, solution), launched, program.folded)
    for exchange in exchanges_within(task, facts, solution):
        of, operator = counts[exchange.backward], exchange.operator
        of[operator] = of.get(operator, 0.0) + 1
    extra = _columns({"forward": counts[False], "backward": counts[True]}, table.nodes, program)
    forward, backward = extra["forward"], extra["backward"]
    return replace(
        whole,
        forward=whole.forward + forward * (host.operator + host.kernel),
        backward=whole.backward + backward * (host.node + host.kernel),
    )


def _launches(collective: Collective) -> float:
    """The collectives of one micro-batch that are launched; one in a bucket counts with its part."""
    steps = (step for step in collective.steps if step.collective is not None)
    return sum(min(1.0, step.nbytes / BUCKET) if collective.in_buckets else 1.0 for step in steps)


def _gathering(
    program: SplitProgram, solution: Sharding, table: CostTable, columns: Mapping[str, np.ndarray]
) -> GatheringTimes | None:
    """`columns`: those of `_NodeSeconds`."""
    if solution.keeping is None:
        return None
    recipe, cluster = program.costs.recipe, program.costs.cluster
    host = None if recipe is None or cluster is None else recipe.host(cluster.specs[table.kind])
    launched = np.zeros(len(table.nodes))
    if host is not None and table.host is not None and program.costs.overlap.launches:
        counts: _ByNode = {}
        for one in solution.collectives:
            if one.regathered_for:
                _add(counts, one, _reader(one, solution), one.times * _launches(one), program.folded)
        launched = _columns({"all": counts}, table.nodes, program)["all"] * (host.node + host.kernel)
    return GatheringTimes(columns["regathered"], launched, columns["network_regathered"], columns["hidden_regathered"])


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


def _with_collectives(
    found: Sharding, folded: Folded, overlap: Overlap, weight_shares: Mapping[str, float]
) -> _NodeSeconds:
    """The seconds of each node, with the collectives of what it reads.

    What happens once a step has columns of its own: a mesh does it once, however few of the micro-batches it runs.
    Collectives behind kernels count with what they slow these down. `weight_shares`: by node, the fraction of its
    backward that computes gradients of parameters.
    """
    forward: _ByNode = {name: work.forward for name, work in found.work.items()}
    backward: _ByNode = {name: work.backward for name, work in found.work.items()}
    seconds = _NodeSeconds(forward, backward, *({} for _ in _NodeSeconds._fields[2:]))
    for collective in found.collectives:
        if collective.shared:
            continue  # of a parameter with several readers, see `_weights`
        reader, back, taken = _reader(collective, found), collective.backward, collective.seconds
        is_behind = _is_behind(collective, overlap)
        if collective.once:
            behind = seconds.gradients if collective.moves == "gradient" else seconds.parameters
            _add(behind if is_behind else seconds.once, collective, reader, taken, folded)
            continue
        exposed, hidden = taken * (CONTENTION if is_behind else 1.0), taken
        if collective.regathered_for:
            if is_behind:
                of_inputs = (
                    found.work[n].backward * (1 - weight_shares.get(n, 0.0)) for n in collective.regathered_for
                )
                exposed = exposed_behind(taken, collective.times * sum(of_inputs))
                hidden = (taken - exposed) / (1 - CONTENTION)
            _add(seconds.regathered, collective, reader, exposed, folded)
            _add(seconds.network_regathered, collective, reader, taken, folded)
            if is_behind:
                _add(seconds.hidden_regathered, collective, reader, hidden, folded)
        _add(backward if back else forward, collective, reader, exposed, folded)
        _add(seconds.network_backward if back else seconds.network_forward, collective, reader, taken, folded)
        if back:
            _add(seconds.added_backward, collective, reader, exposed, folded)
        if back and collective.moves == "gradient":
            _add(seconds.exchanged, collective, reader, taken, folded)
        if is_behind:
            _add(seconds.hidden_backward if back else seconds.hidden_forward, collective, reader, hidden, folded)
    return seconds


def _is_behind(collective: Collective, overlap: Overlap) -> bool:
    """Whether it runs behind kernels. One that several readers of a parameter share waits for all of them."""
    if collective.regathered_for:
        return overlap.gathers
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
    )
