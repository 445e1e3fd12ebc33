"""One strategy for every operator of a graph on a mesh, so that kernels and collectives take the least time.

Variables are operators, parameters and inputs; options their strategies and layouts. Between what makes a tensor and
what reads it lies a redistribution, forward from the one's layout to the other's, backward the gradient's way back:

    linear --- [y: columns] -- redistribution -- [x: rows] --- gelu            R(out, in) + R(dual(in), dual(out))

What several read is moved once for those that read it in the same layout: they share a variable in between.

    norm --- redistribution --- shared --.-- queries
                                         |-- keys
                                         `-- values

A parameter is stored in one layout, its optimizer's state in the same or a finer one (ZeRO: Rajbhandari et al., 2020).
Read as it is stored, its gradient is summed up over all micro-batches before it is reduced, once a step; stored in
parts and gathered to be read (ZeRO 3, FSDP), it is gathered for every forward and backward, and its gradient scattered.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import fx

from autopar.analysis.node_values import observe
from autopar.analysis.operators import requires_grad_nodes
from autopar.planner.intra_op.constraints import NO_CONSTRAINTS, ShardingConstraints, narrowed
from autopar.planner.intra_op.elimination.choices import Edge, Selection, SelectionProblem, cost
from autopar.planner.intra_op.elimination.solve import select
from autopar.planner.intra_op.redistributions import ProducedTensor, Reader, TensorUse, finer, ways
from autopar.sharding.layouts import REPLICATE, layouts, parts
from autopar.sharding.mesh import Mesh
from autopar.sharding.redistribution import Redistribution, RedistributionStep
from autopar.sharding.stage_sharding import Stored
from autopar.sharding.strategies import Strategy
from autopar.sharding.strategy_costs import Bound, OptionTable, StrategyCosts, bound
from cost_models import Cluster, optimizer_state_bytes
from cost_models.graphs import get_attribute, storage_key, tensors_in
from cost_models.hardware.device_specs import efficiency_of, rates_of
from cost_models.kernels.operator_work import OperatorWork, count
from cost_models.memory.graph_bytes import measure_bytes


@dataclass(frozen=True)
class Collective:
    """One redistribution that a step needs."""

    tensor: str  # node that made it, or parameter
    reader: str  # node that reads it
    backward: bool  # of its gradient
    once: bool  # a step, rather than a micro-batch
    times: int  # that
    moves: tuple[RedistributionStep, ...]
    each: int = 1  # of the times those of one of the equal layers that the reader stands for

    @property
    def seconds(self) -> float:
        """Of all times."""
        return self.times * sum(move.seconds for move in self.moves)


@dataclass(frozen=True)
class Work:
    """What an operator costs as it was chosen, of a micro-batch on each device."""

    forward: float  # s
    backward: float  # s
    share: float  # of its work
    kept: float  # of what it keeps for the backward, and of what it reads and makes, the fraction that a device has


@dataclass(frozen=True)
class Sharding:
    """What was chosen."""

    mesh: Mesh
    strategies: Mapping[str, Strategy]  # by node
    stored: Mapping[str, Stored]  # by parameter's name, or input's
    collectives: tuple[Collective, ...]
    seconds: float  # of one micro-batch, and of what happens once a step its share
    nbytes: float  # on each device: parameters, gradients, optimizer's state, what is kept for the backward
    bound: float  # s: no choice is faster
    proven: bool
    width: int  # of the elimination
    unruled: tuple[str, ...]  # operators that every device does, for want of a rule
    work: Mapping[str, Work]  # by node


@dataclass(frozen=True)
class Task:
    """What to choose strategies for."""

    module: fx.GraphModule  # a flat graph with parameters on the meta device
    inputs: Sequence[Any]  # of one micro-batch, on the meta device
    rows: int  # samples in it
    cluster: Cluster
    n_microbatches: int = 1
    training: bool = True
    optimizer: str = "adamw"
    in_flight: int = 1  # micro-batches whose activations are kept at once
    copies: Mapping[str, int] = field(default_factory=dict)  # node -> equal ones of the model that it stands for
    again: Mapping[str, str] = field(default_factory=dict)  # node that a copied layer reads -> what it hands its copy


def choose(
    task: Task,
    mesh: Mesh,
    *,
    memory: float = float("inf"),
    fixed: Mapping[str, Strategy] | None = None,
    constraints: ShardingConstraints = NO_CONSTRAINTS,
) -> Sharding:
    """The fastest strategies on `mesh` that need at most `memory` bytes on each device.

    `fixed`: strategies that operators must have. `constraints`: layouts that their tensors must have. Raises
    InfeasibleError where nothing fits the memory, PlanError where the constraints leave an operator nothing.
    """
    return ShardingProblem(task, mesh).solve(memory, fixed or {}, constraints)


class Facts:
    """What does not depend on the mesh."""

    def __init__(self, task: Task) -> None:
        self.values: dict[fx.Node, Any] = observe(task.module, list(task.inputs))
        self.work = count(task.module, task.rows, training=task.training, inputs=list(task.inputs))
        counted = measure_bytes(task.module, list(task.inputs), task.rows, task.training, "cuda")
        kept: set[int] = set()
        self.saved: dict[str, int] = {}
        for name, storages in counted.saved.items():  # what several operators keep counts to the first
            self.saved[name] = sum(nbytes for key, nbytes in storages if key not in kept)
            kept |= {key for key, _ in storages}
        self.trained = {node.name for node in requires_grad_nodes(task.module)} if task.training else set[str]()
        self._bound: dict[fx.Node, Bound] = {}

    def bound(self, node: fx.Node) -> Bound:
        """An operator with its rule."""
        if node not in self._bound:
            work = self.work.get(node.name, OperatorWork((), ()))
            self._bound[node] = bound(node, self.values, work)
        return self._bound[node]


class ShardingProblem:
    """The variables and edges of one graph on one mesh. What is alike shares its arrays."""

    def __init__(self, task: Task, mesh: Mesh, facts: Facts | None = None) -> None:
        self.task, self.mesh = task, mesh
        self.facts = facts or Facts(task)
        kinds = {device.name: device.kind for device in task.cluster.devices}
        spec = task.cluster.specs[kinds[mesh.devices[0]]]
        self.table = OptionTable(mesh, task.cluster, rates_of(spec), efficiency_of(spec), training=task.training)
        self.made: dict[Any, list[ProducedTensor]] = {}  # node -> of each of its tensors
        self.names: list[str] = []
        self.seconds: list[np.ndarray] = []
        self.nbytes: list[np.ndarray] = []
        self.edges: list[Edge] = []
        self.links: list[TensorUse] = []
        self.options: dict[str, tuple[int, StrategyCosts]] = {}
        self.stored: dict[str, tuple[int, tuple[Stored, ...]]] = {}
        self._shared: dict[Any, Any] = {}
        self._readers: dict[tuple[fx.Node, int, bool], list[Reader]] = {}
        self._named = {node.name: node for node in task.module.graph.nodes}
        by_storage: dict[int, ProducedTensor] = {}
        for node in task.module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._add_given(node, by_storage)
            elif node.op != "output" and tensors_in(self.facts.values[node]):
                self._add_operator(node)
        self._add_outputs()
        for (node, times, _), readers in self._readers.items():
            self._connect(node, readers, times)

    def priced(self, price: float) -> Sharding:
        """What takes least if every byte on a device costs `price` seconds.

        By duality nothing that needs as few bytes is faster; and it is found as quickly as without a limit.
        """
        both = [
            self._shared_by(("priced", id(s), id(b), price), lambda s=s, b=b: (s + price * b, s, b))[0]
            for s, b in zip(self.seconds, self.nbytes, strict=True)
        ]
        found = select(SelectionProblem(tuple(both), tuple(self.nbytes), tuple(self.edges)), float("inf"))
        whole = SelectionProblem(tuple(self.seconds), tuple(self.nbytes), tuple(self.edges))
        seconds, nbytes = cost(whole, found.options)
        return self._told(replace(found, seconds=seconds, bytes=nbytes, bound=seconds if found.proven else 0.0))

    def solve(
        self, memory: float, fixed: Mapping[str, Strategy], constraints: ShardingConstraints = NO_CONSTRAINTS
    ) -> Sharding:
        kept = {}
        for name, strategy in fixed.items():
            variable, options = self.options[name]
            kept[variable] = options.strategies.index(strategy)
        seconds = narrowed(constraints, self.seconds, self.options, self.stored)
        choices = SelectionProblem(tuple(seconds), tuple(self.nbytes), tuple(self.edges), kept)
        return self._told(select(choices, memory))

    # -- variables --------------------------------------------------------------------------------------------------

    def _variable(self, name: str, seconds: np.ndarray, nbytes: np.ndarray, copies: int = 1) -> int:
        self.names.append(name)
        self.seconds.append(self._times(seconds, copies))
        self.nbytes.append(self._times(nbytes, copies))
        return len(self.names) - 1

    def _times(self, array: np.ndarray, copies: int) -> np.ndarray:
        """What is alike stays one array."""
        return (
            array if copies == 1 else self._shared_by(("times", id(array), copies), lambda: (array * copies, array))[0]
        )

    def _add_given(self, node: fx.Node, by_storage: dict[int, ProducedTensor]) -> None:
        """An input, in any layout at no cost, or a parameter."""
        value = get_attribute(self.task.module, str(node.target)) if node.op == "get_attr" else self.facts.values[node]
        if not isinstance(value, torch.Tensor):
            return
        key = storage_key(value)
        if node.op == "get_attr" and key in by_storage:
            self.made[node] = [by_storage[key]]  # tied: one tensor
            return
        trained = node.op == "get_attr" and self.task.training and value.requires_grad
        layout_of, seconds, nbytes = self._shared_by(
            ("given", tuple(value.shape), value.dtype, trained, node.op), lambda: self._given(value, trained, node.op)
        )
        name = str(node.target)
        variable = self._variable(name, seconds, nbytes, self.task.copies.get(node.name, 1))
        labels = self._shared_by(("labels", len(layout_of)), lambda: np.arange(len(layout_of)))
        made = ProducedTensor(variable, labels, layout_of, "parameter" if trained else "input", name)
        self.made[node] = [made]
        self.stored[name] = (variable, layout_of)
        by_storage[key] = made

    def _given(self, value: torch.Tensor, trained: bool, op: str) -> tuple[tuple[Stored, ...], np.ndarray, np.ndarray]:
        every = layouts(value.shape, self.mesh.shape, partial=False)
        pairs = [(a, b) for a in every for b in (every if trained else [a]) if finer(b, a)]
        nbytes = value.numel() * value.element_size() if op == "get_attr" else 0
        state = optimizer_state_bytes(self.task.optimizer, nbytes, value.shape) if trained else 0
        held = [
            nbytes * (2 if trained else 1) / parts(layout, self.mesh.shape) + state / parts(finer, self.mesh.shape)
            for layout, finer in pairs
        ]
        return tuple(Stored(*pair) for pair in pairs), np.zeros(len(pairs)), np.array(held)

    def _add_operator(self, node: fx.Node) -> None:
        values = self.facts.values
        if node.target is operator.getitem:
            source, place = node.args
            assert isinstance(source, fx.Node)
            if not isinstance(values[source], torch.Tensor):
                before = [v for v in values[source][:place] if isinstance(v, torch.Tensor)]
                self.made[node] = [self.made[source][len(before)]]
                return
        work = self.facts.work.get(node.name, OperatorWork((), ()))
        bound = self.facts.bound(node)
        options, operands = self.table.of(bound, values, work), bound.operands
        saved = self.facts.saved.get(node.name, 0) * self.task.in_flight
        nbytes = self._shared_by(("kept", id(options), saved), lambda: options.kept * saved)
        variable = self._variable(node.name, options.seconds, nbytes, self.task.copies.get(node.name, 1))
        self.options[node.name] = (variable, options)
        self.made[node] = [
            ProducedTensor(variable, labels, known, "activation", node.name)
            for labels, known in zip(options.output_labels, options.outputs, strict=True)
        ]
        copies = self.task.copies.get(node.name, 1)
        for place, operand in enumerate(operands):
            if isinstance(operand, fx.Node) and operand in self.made:
                reader = Reader(variable, node.name, options.input_labels[place], options.inputs[place], copies)
                same = self.task.again.get(operand.name) if copies > 1 else None
                if same is None:
                    self._read(operand, reader)
                else:
                    self._read(operand, replace(reader, times=1))
                    self._read(self._named[same], replace(reader, times=copies - 1), between=True)

    def _add_outputs(self) -> None:
        """Results are wanted whole: a loss for its backward, others by the caller."""
        (results,) = self.task.module.graph.output_node().args
        whole = (REPLICATE,) * len(self.mesh.shape)
        for node in {n: None for n in results if isinstance(n, fx.Node) and n in self.made}:  # type: ignore[union-attr]
            if isinstance(self.facts.values[node], torch.Tensor):
                nothing = self._shared_by("nothing", lambda: np.zeros(1))
                zero = self._shared_by("zero", lambda: np.zeros(1, dtype=int))
                sink = self._variable(f"output {node.name}", nothing, nothing)
                self._read(node, Reader(sink, "output", zero, ((whole, whole),)))

    # -- edges ------------------------------------------------------------------------------------------------------

    def _read(self, tensor: fx.Node, reader: Reader, *, between: bool = False) -> None:
        """`between`: a copy of a layer reads what the copy before it made. A tensor is moved for its readers as often
        as it is made: once for all copies of a layer that read what was made outside."""
        times = min(reader.times, self.task.copies.get(tensor.name, 1))
        self._readers.setdefault((tensor, times, between), []).append(reader)

    def _connect(self, tensor: fx.Node, readers: Sequence[Reader], times: int) -> None:
        """What several want in the same layout is moved once, forward and backward, and so are their gradients, once
        added up: between the maker and its readers stands a variable of the layouts in which they share it."""
        (made,) = self.made[tensor]
        if len(readers) > 1 and made.kind == "activation":
            pairs = tuple(dict.fromkeys([*made.layouts, *(pair for reader in readers for pair in reader.layouts)]))
            nothing, labels = self._shared_by(
                ("sharing", len(pairs)), lambda: (np.zeros(len(pairs)), np.arange(len(pairs)))
            )
            variable = self._variable(f"shared {tensor.name}", nothing, nothing)
            self._add_edge(tensor, made, Reader(variable, readers[0].name, labels, pairs, times))
            made = ProducedTensor(variable, labels, pairs, made.kind, made.name)
        for reader in readers:
            self._add_edge(tensor, made, reader)

    def _add_edge(self, tensor: fx.Node, made: ProducedTensor, reader: Reader) -> None:
        value = self.facts.values[tensor]
        shape, floating = tuple(value.shape), value.is_floating_point()
        gradient = floating and tensor.name in self.facts.trained
        redistribution = self._shared_by(
            ("redistribution", shape, value.element_size(), floating),
            lambda: Redistribution(shape, value.element_size(), self.mesh, self.task.cluster, partial=floating),
        )
        link = TensorUse(
            made.name, reader.name, made.layouts, reader.layouts, redistribution, made.kind, gradient, reader.times
        )
        key = ("edge", shape, value.dtype, made.kind, made.layouts, reader.layouts, gradient)
        seconds = self._times(self._shared_by(key, lambda: self._cost(link)), reader.times)
        self.edges.append(Edge(made.variable, reader.variable, made.labels, reader.labels, seconds))
        self.links.append(link)

    def _cost(self, link: TensorUse) -> np.ndarray:
        """[layouts made, layouts read] seconds of a micro-batch."""
        m = self.task.n_microbatches
        if link.kind == "activation":
            number, seconds = link.redistribution.number, link.redistribution.seconds
            made, layout = (np.array([number[pair[0]] for pair in ends]) for ends in (link.outs, link.ins))
            forward: np.ndarray = seconds[made[:, None], layout]
            if not link.gradient:  # whole numbers, say, of which nothing adds up
                return forward
            wanted, gradient = (np.array([number[pair[1]] for pair in ends]) for ends in (link.outs, link.ins))
            return forward + seconds[gradient, wanted[:, None]]
        found = np.empty((len(link.outs), len(link.ins)))
        for i, out in enumerate(link.outs):
            for j, into in enumerate(link.ins):
                moves = ways(link, out, into, self.task.training)
                found[i, j] = sum(
                    times * link.redistribution.between(a, b) / (m if once else 1) for a, b, _, once, times in moves
                )
        return found

    def _shared_by(self, key: Any, make: Any) -> Any:
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    # -- the answer -------------------------------------------------------------------------------------------------

    def _told(self, found: Selection) -> Sharding:
        option = found.options
        moves = []
        for edge, link in zip(self.edges, self.links, strict=True):
            out = link.outs[edge.out[option[edge.source]]]
            into = link.ins[edge.into[option[edge.target]]]
            for a, b, backward, once, times in ways(link, out, into, self.task.training):
                path = link.redistribution.path(a, b)
                if any(move.collective for move in path):
                    moves.append(Collective(link.tensor, link.reader, backward, once, times * link.times, path, times))
        return Sharding(
            self.mesh,
            {name: options.strategies[option[v]] for name, (v, options) in self.options.items()},
            {name: known[option[v]] for name, (v, known) in self.stored.items()},
            tuple(moves),
            found.seconds,
            found.bytes,
            found.bound,
            found.proven,
            found.width,
            tuple(name for name, (_, options) in self.options.items() if not options.ruled),
            {name: _work(options, option[v]) for name, (v, options) in self.options.items()},
        )


def _work(options: StrategyCosts, chosen: int) -> Work:
    forward = float(options.forward[chosen])
    backward = float(options.seconds[chosen]) - forward
    return Work(forward, backward, options.strategies[chosen].share, float(options.kept[chosen]))
