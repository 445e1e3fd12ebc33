"""Cost graphs over meshes: the stage configurations that the partition search picks from.

The partition search places stages on devices and on meshes of neighbouring devices. For each width of a mesh (its
number of devices), each shape and each micro-batch size, the intra-operator search chooses strategies for all
operators, the fastest ones and others that need less memory (`frontier`); each solution is a stage configuration:

    8 devices     width 1    [0] [1] [2] [3] [4] [5] [6] [7]
                  width 2    [0 1] [2 3] [4 5] [6 7]       mesh (2): each operator split by tensors or by samples
                  width 4    [0 1 2 3] [4 5 6 7]           mesh (4), and mesh (2, 2): both
                  width 8    [0 1 2 3 4 5 6 7]             parameters whole or sharded (ZeRO)

So one search chooses stages, replicas, mesh shapes, strategies, sharded parameters, recomputation, schedule and
micro-batches together.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.analysis.example import Example
from autopar.analysis.operators import on_device
from autopar.capture.repeated_layers.fold import Folded, fold
from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import Calls
from autopar.planner.inter_op.atoms import recomputed_share
from autopar.planner.inter_op.mesh_configuration import MeshConfiguration, mesh_configuration
from autopar.planner.inter_op.mesh_places import mesh_places
from autopar.planner.inter_op.split_program import SplitProgram
from autopar.planner.intra_op.frontier import frontier, with_regathered
from autopar.planner.intra_op.sharding_task import GraphFacts, ShardingTask
from autopar.planner.intra_op.strategy_search import Sharding, ShardingProblem
from autopar.sharding.local_work import LocalWorks
from autopar.sharding.mesh import Mesh, make_mesh
from autopar.sharding.strategy_costs import WholeSeconds
from cost_models import Cluster, Device
from cost_models.graphs import get_attribute, on_meta, private_copy, storage_key

log = logging.getLogger(__name__)

# Of every shape and micro-batch size. More find plans up to 10 % faster where memory is scarce; on eight devices a
# search of 243 cuts takes a third longer with them.
_SOLUTIONS, _MORE_SOLUTIONS = 4, 8
_FEW = 8  # devices up to which there are more solutions; or nodes, or devices of one node: meshes of any number of them


@dataclass(frozen=True)
class MeshProgram:
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
        assert costs.mesh_cluster is not None, "strategies are priced on the links and collectives of a cluster"
        rows = costs.batch_size // n_microbatches
        return ShardingTask(
            folded.module,
            self.inputs(rows),
            rows,
            costs.mesh_cluster,
            n_microbatches=n_microbatches,
            training=costs.training,
            optimizer=self.optimizer,
            recipe=costs.recipe,
            scatters=costs.training and costs.shards is None,
            copies=folded.copies,
            again=folded.again,
            shards=costs.shards,
        )


def mesh_program_of(example: Example, optimizer: str) -> MeshProgram:
    """The program of an example call, on the meta device."""
    program = example.program
    leaves = [on_meta(x) for x in example.leaves]
    calls = Calls(program, leaves)
    meta = torch.device("meta")
    with torch.device("cpu"):
        module = private_copy(on_device(program.graph_module, program.device, meta), meta)
    named = {str(n.target): n for n in program.graph.nodes if n.op == "get_attr"}
    values = {name: get_attribute(program.graph_module, name) for name in named}
    storages = {name: str(storage_key(t)) for name, t in values.items() if isinstance(t, torch.Tensor)}
    return MeshProgram(module, calls.inputs, storages, optimizer)


def as_measured(task: ShardingTask, costs: CostGraph, folded: Folded, kind: str, width: int) -> ShardingTask:
    """`task` with the measured seconds of whole operators for meshes of `width` devices of a kind at hand: the mean of
    the equal ones that a node of the folded graph represents. The task itself for a planned cluster."""
    if costs.shards is None:
        return task
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    table = costs.table(kind, _busy_meshes(costs, kind, width, task.n_microbatches))
    forward, backward, _ = table.at(task.rows)
    for name, *seconds in zip(table.nodes, forward.tolist(), backward.tolist(), strict=True):
        found[folded.kept(name)].append((seconds[0], seconds[1]))
    means = {
        name: WholeSeconds(*(sum(of) / len(some) for of in zip(*some, strict=True))) for name, some in found.items()
    }
    return replace(task, measured=means)


def _busy_meshes(costs: CostGraph, kind: str, width: int, n_microbatches: int) -> int:
    """Meshes that compute at the same time: a single micro-batch is on one after the other."""
    return 1 if n_microbatches == 1 else max(1, sum(device.kind == kind for device in costs.devices) // width)


class Meshes:
    """Cost graphs of one program over meshes of a cluster's devices."""

    def __init__(self, costs: CostGraph, mesh_program: MeshProgram, memory_limit: float | None = None) -> None:
        """`costs`: of single devices of a cluster. `memory_limit`: bytes usable on each, if less than its memory."""
        assert costs.mesh_cluster is not None, "meshes need the links and collectives of a cluster"
        self._costs, self._mesh_program = costs, mesh_program
        self._cluster: Cluster = costs.mesh_cluster
        self._limit = memory_limit or float("inf")
        self._folded = fold(mesh_program.module)
        self._facts: dict[int, GraphFacts] = {}
        self._works = LocalWorks()
        # By kind of devices, shape and number of micro-batches.
        self._found: dict[tuple[str, tuple[int, ...], int], tuple[MeshConfiguration, ...]] = {}
        self._program = mesh_program.program(costs, self._folded)
        self._recomputed = recomputed_share(costs) if costs.training else 0.0

    def widths(self) -> list[int]:
        """Numbers of devices per mesh: a node halved any number of times, or doubled up to all nodes. On few nodes
        also all other numbers of nodes, and within small ones all other numbers of devices, if the model can be cut
        into as many parts (`_useful`): a plan for fewer devices may have such meshes. At hand see `_widths_at_hand`."""
        if self._costs.shards is not None:
            return self._widths_at_hand(self._costs.shards.widest)
        per_kind = [self._per_node(kind) for kind in dict.fromkeys(d.kind for d in self._devices)]
        most = max((count * self._cluster.nodes for count in per_kind), default=0)
        found = {most}
        for count in per_kind:
            found |= {count >> shift for shift in range(count.bit_length()) if count % (1 << shift) == 0}
            found |= {count << shift for shift in range(self._cluster.nodes.bit_length()) if count << shift <= most}
            found |= {width for width in self._other_widths(count) if self._useful(width)}
        return sorted(width for width in found if width > 1)

    def _other_widths(self, per_node: int) -> list[int]:
        """Those beside a node halved and doubled, with `per_node` devices of a kind in each node."""
        nodes = self._cluster.nodes
        if nodes > _FEW:
            return []
        return [*range(2, per_node if per_node <= _FEW else 0), *range(per_node, per_node * nodes, per_node)]

    def _useful(self, width: int) -> bool:
        """Whether each prime factor of `width` divides the batch, or a dimension of the parameters with most bytes."""
        sizes = [tuple(p.shape) for p in self._mesh_program.module.parameters()]
        total = sum(map(math.prod, sizes))
        for prime in _primes(width):
            cut = sum(math.prod(size) for size in sizes if any(n % prime == 0 for n in size))
            if self._costs.batch_size % prime and 2 * cut <= total:
                return False
        return True

    def _widths_at_hand(self, widest: int) -> list[int]:
        """Within a node powers of two, divisors of its devices of a kind, and `widest`. Over several of the largest
        nodes their devices doubled any number of times, and all devices of a kind."""
        found: set[int] = set()
        for kind in {d.kind for d in self._devices}:
            sizes = list(Counter(self._nodes(kind)).values())
            total, most = sum(sizes), max(sizes)
            found |= {1 << shift for shift in range(1, most.bit_length())}
            found |= {width for width in range(2, most + 1) if any(size % width == 0 for size in sizes)}
            found |= {min(widest, most), total, *(most << shift for shift in range(len(sizes).bit_length()))}
        return sorted(width for width in found if 1 < width <= widest and self._kinds(width))

    def turns(self, width: int) -> int:
        """How many devices of a mesh compute one after another, at least."""
        shards = self._costs.shards
        if shards is None:
            return 1
        groups = [[d.name for d in self._places(kind, width)[0]] for kind in self._kinds(width)]
        return min((shards.turns(names) for names in groups), default=width)

    def divides(self, m: int) -> bool:
        """Whether `m` micro-batches have as many samples each, which meshes need."""
        return self._costs.batch_size % m == 0

    def n_shapes(self, width: int) -> int:
        """The usual mesh shapes of all kinds of devices."""
        return sum(len(self._shapes(kind, width)) for kind in self._kinds(width))

    def of(self, width: int, counts: Sequence[int]) -> CostGraph | None:
        """The cost graph over meshes of `width` devices alone; None if there is no such mesh.

        `counts`: numbers of micro-batches; those that do not divide the batch are left out.
        """
        found = tuple(one for m in counts for one in self.configurations(width, m))
        devices = tuple(d for d in self._devices if d.kind in self._kinds(width))
        return replace(self._costs, devices=devices, configurations=found, alone=False) if found else None

    def configurations(
        self, width: int, m: int, *, every_shape: bool = False, only: Container[tuple[int, ...]] | None = None
    ) -> tuple[MeshConfiguration, ...]:
        """Stage configurations of every kind of devices and shape; none if `m` does not divide the batch.

        `every_shape`: of all shapes that stages could have, not of the usual ones alone. `only`: of some of them.
        """
        kinds = self._kinds(width) if self.divides(m) else []
        found: list[MeshConfiguration] = []
        for kind in kinds:
            for shape in self._shapes(kind, width, every=every_shape):
                if only is not None and shape not in only:
                    continue
                if (kind, shape, m) not in self._found:
                    self._found[kind, shape, m] = tuple(self._of_shape(kind, shape, m))
                found += self._found[kind, shape, m]
        return tuple(found)

    @property
    def _devices(self) -> list[Device]:
        """CPU workers of a planned cluster form no mesh: they would run their shards one after another. At hand that is
        priced."""
        if self._costs.shards is not None:
            return list(self._costs.devices)
        return [d for d in self._costs.devices if self._cluster.specs[d.kind].device_type != "cpu"]

    def _kinds(self, width: int) -> list[str]:
        """Device types with meshes of `width`; in planned clusters within a node, or of whole nodes."""
        found = []
        for kind in dict.fromkeys(d.kind for d in self._devices):
            if self._costs.shards is not None:
                found += [kind] if self._places(kind, width) else []
                continue
            per_node = self._per_node(kind)
            whole = width % per_node == 0 and width <= per_node * self._cluster.nodes
            found += [kind] if width <= per_node or whole else []
        return found

    def _shapes(self, kind: str, width: int, *, every: bool = False) -> list[tuple[int, ...]]:
        if self._costs.shards is None:
            return _shapes(width, self._per_node(kind), every=every)
        first = Counter(self._cluster.node_of(device) for device in self._places(kind, width)[0])
        of_nodes = first.values()  # one axis where they differ, too: no shape has as many devices in each
        one_axis = every or max(of_nodes) == 1 or len(set(of_nodes)) > 1
        return _shapes(width, math.gcd(*of_nodes), every=one_axis)

    def _places(self, kind: str, width: int) -> list[list[Device]]:
        """The devices of all meshes of `width`."""
        mine = [d for d in self._devices if d.kind == kind]
        return [[mine[device] for device in place] for place in mesh_places(self._nodes(kind), width)]

    def _nodes(self, kind: str) -> list[int]:
        """The node of each device of a kind."""
        return [self._cluster.node_of(d) for d in self._devices if d.kind == kind]

    def _per_node(self, kind: str) -> int:
        return sum(d.kind == kind for d in self._devices) // self._cluster.nodes

    def _of_shape(self, kind: str, shape: tuple[int, ...], m: int) -> Iterator[MeshConfiguration]:
        width = math.prod(shape)
        places = self._places(kind, width)
        devices, n_meshes = places[0], len(places)
        memory = min(self._limit, *(d.memory for d in devices))
        task = as_measured(
            self._mesh_program.task(self._costs, self._folded, m), self._costs, self._folded, kind, width
        )
        mesh = make_mesh(shape, [d.name for d in devices], _NAMES[-len(shape) :])
        for number, found in enumerate(self._chosen(task, mesh, memory, n_meshes)):
            name = f"{kind} x {'x'.join(map(str, shape))}, {m} micro-batches, {number}"
            yield mesh_configuration(name, kind, self._program, task, self._facts_of(task), found, fastest=number == 0)

    def _chosen(self, task: ShardingTask, mesh: Mesh, memory: float, n_meshes: int) -> tuple[Sharding, ...]:
        """The fastest strategies; where `n_meshes` such meshes may lack memory (bytes), also others that need less."""
        problem = ShardingProblem(task, mesh, self._facts_of(task))
        most = _MORE_SOLUTIONS if len(self._devices) <= _FEW else _SOLUTIONS
        found = frontier(problem, memory, n_meshes, most, self._recomputed)
        return with_regathered(problem, found, memory)

    def _facts_of(self, task: ShardingTask) -> GraphFacts:
        if task.rows not in self._facts:
            self._facts[task.rows] = GraphFacts(task, self._works)
        return self._facts[task.rows]


_NAMES = ("data", "model")  # mesh axes, named by their usual use


def _shapes(size: int, per_node: int, *, every: bool = False) -> list[tuple[int, ...]]:
    """Mesh shapes: one axis within a node, or two axes with the last one within a node.

    The usual ones have all or half of a node's devices on the last axis. `every`: also a quarter, and so on; and one
    axis over several nodes, whose collectives use the cards of all devices at once.
    """
    found: list[tuple[int, ...]] = [(size,)] if every or size <= per_node else []
    inside = min(size, per_node)
    lasts = [inside // parts for parts in range(1, inside + 1 if every else 3) if inside % parts == 0]
    found += [(size // last, last) for last in lasts if 1 < last < size and size % last == 0]
    return found


def _primes(number: int) -> list[int]:
    """Its prime factors."""
    found, factor = [], 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found
