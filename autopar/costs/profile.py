"""What a model costs on each device kind, by operator and by module."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import networkx as nx
import torch

from autopar.analysis.example import (
    Example,
)
from autopar.analysis.operators import on_device
from autopar.capture import torch_private
from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import Calls, CostTable, LossNeedsValues
from autopar.costs.operator_cost import operator_costs
from autopar.costs.whole_batch import WholeBatch
from autopar.errors import InputError
from autopar.errors.names import with_checked_names
from autopar.plan.results import Result
from cost_models import Link
from cost_models.graphs import Loss, on_meta
from cost_models.kernels.launches import overlapped_seconds
from cost_models.memory.step_memory import StepMemory, step_memory


@dataclass(frozen=True)
class Cost:
    """An operator, or a module with all operators inside it. For the whole batch.

    On a device that is not at hand, the seconds are those of kernels; the host launches them meanwhile (see `Pass`).
    """

    name: str  # `module.path/operator#k`, or the module's path ("" for the model itself)
    operators: int
    parameter_bytes: int  # a tied parameter counts once
    activation_bytes: int  # saved for the backward
    output_bytes: int  # of its results; for a module, of those that are read outside it
    forward: Mapping[str, float]  # kind of device -> s
    backward: Mapping[str, float]  # kind of device -> s

    def seconds(self, kind: str) -> float:
        """Forward and backward."""
        return self.forward[kind] + self.backward[kind]


@dataclass(frozen=True)
class Pass:
    """The times of a whole pass: on a device that is not at hand, of its kernels or of their launches, if longer."""

    kind: str
    workers: int  # devices of that kind that are busy at the same time
    rows: int  # samples
    forward: float  # s, loss included
    backward: float  # s, loss included


@dataclass(frozen=True)
class Profile(Result):
    """The costs that a plan is made from; `print(profile)` shows tables.

    `graph`: a networkx.DiGraph of the operators to draw (`networkx.nx_pydot.write_dot`) or to save (`write_graphml`).
    Its nodes have label, module, operator, source, forward and backward (s on the first kind of device),
    parameter_bytes, activation_bytes and output_bytes; its edges nbytes.
    """

    batch_size: int  # samples
    training: bool  # whether there is a backward
    kinds: tuple[str, ...]  # of devices, as offered
    operators: tuple[Cost, ...]  # in program order
    modules: tuple[Cost, ...]  # every module after the one that contains it
    passes: tuple[Pass, ...]
    links: Mapping[tuple[str, str], Link]  # (from, to), names of devices
    memory: StepMemory | None  # of a training step of the whole batch on one device, if requested
    graph: nx.DiGraph = field(repr=False, compare=False)
    # By kind of device, s once a step of the end of the model, or the loss, on the whole batch, forward and backward.
    # None of the other seconds contains it. {}: nothing, as far as is known.
    whole_batch: Mapping[str, float] = field(default_factory=dict)

    @property
    def model(self) -> Cost:
        """The whole model, without the loss."""
        return self.modules[0]

    def __getitem__(self, path: str) -> Cost:
        """A module by its path. KeyError where no operator runs in it."""
        for module in self.modules:
            if module.name == path:
                return module
        raise KeyError(path)

    @with_checked_names
    def slowest(self, count: int | None = None, kind: str | None = None) -> tuple[Cost, ...]:
        """The operators that take most time on a device kind (default: the first), slowest first."""
        chosen = kind or self.kinds[0]
        return tuple(sorted(self.operators, key=lambda cost: -cost.seconds(chosen)))[:count]

    def to_json(self) -> str:
        """Everything in seconds and bytes; the bandwidth is null for a link that passes tensors by reference."""
        data = {
            "batch_size": self.batch_size,
            "training": self.training,
            "devices": self.kinds,
            "modules": [asdict(cost) for cost in self.modules],
            "operators": [asdict(cost) for cost in self.operators],
            "passes": [asdict(one) for one in self.passes],
            "whole_batch": dict(self.whole_batch),
            "links": [
                {
                    "source": source,
                    "target": target,
                    "latency": link.latency,
                    "bandwidth": link.bandwidth if math.isfinite(link.bandwidth) else None,
                }
                for (source, target), link in self.links.items()
            ],
            "memory": None if self.memory is None else asdict(self.memory),
        }
        return json.dumps(data, indent=1, allow_nan=False)


def training_step(example: Example, optimizer: str, device_type: str) -> StepMemory:
    """What a training step of the whole batch has in memory on one device. Raises InputError if nothing trains."""
    if not example.training:
        raise InputError(
            "the memory of a training step is unknown: the model is in evaluation mode, or none of its parameters "
            "requires grad"
        )
    program = example.program
    calls = Calls(
        program, [on_meta(x) for x in example.leaves], example.loss, torch_private.tree_map(on_meta, example.target)
    )
    batch = max(program.batch_size, 1)
    loss, has_tail = calls.loss(batch), example.batching.tail is not None
    if has_tail:
        whole = WholeBatch.of(example)
        loss = None if whole is None or whole.loss_fn is None else whole.on_meta().loss
    module = on_device(program.graph_module, program.device, torch.device("meta"))

    def memory(loss: Loss | None) -> StepMemory:
        without_end = has_tail and loss is None
        inputs = calls.inputs(batch)
        return step_memory(
            module, inputs, loss=loss, all_outputs=without_end, optimizer=optimizer, device_type=device_type
        )

    with torch.device("cpu"):
        try:
            return memory(loss)
        except (LossNeedsValues, RuntimeError):
            if not has_tail:
                raise
            return memory(None)  # the end, or its loss, needs values


def summarize(costs: CostGraph, memory: StepMemory | None = None) -> Profile:
    """The cost graph as a profile: one device of each kind, the whole batch. Raises InputError without operators."""
    if not len(costs.graph):
        raise InputError("the model runs no operators in this call, so there is nothing to profile")
    kinds = tuple(dict.fromkeys(device.kind for device in costs.devices))
    names = list(costs.graph)
    forward: dict[str, dict[str, float]] = {}  # kind -> node -> s
    backward: dict[str, dict[str, float]] = {}
    for kind in kinds:
        table = costs.table(kind, 1)
        f, b, _ = table.at(costs.batch_size)
        forward[kind] = dict(zip(table.nodes, map(float, f), strict=True))
        backward[kind] = dict(zip(table.nodes, map(float, b), strict=True))

    def cost(name: str, inside: Sequence[str]) -> Cost:
        nodes = [costs.operators[n] for n in inside]
        parameters = {p: weight.nbytes for node in nodes for p, weight in node.parameters.items()}
        saved = {storage: nbytes for node in nodes for storage, nbytes in node.saved.items()}
        return Cost(
            name,
            len(inside),
            sum(parameters.values()),
            int(sum(saved.values())),
            int(sum(costs.operators[n].output_bytes for n in _read_outside(costs.graph, inside))),
            {kind: sum(forward[kind][n] for n in inside) for kind in kinds},
            {kind: sum(backward[kind][n] for n in inside) for kind in kinds},
        )

    operators = {name: cost(costs.operators[name].key, [name]) for name in names}
    modules = tuple(cost(path, inside) for path, inside in _by_module(costs.graph).items())
    passes = tuple(
        Pass(t.kind, t.workers, rows, *_pass_seconds(t, float(f.sum() + loss[0]), float(b.sum() + loss[1])))
        for t in costs.tables
        for rows, f, b, loss in zip(t.rows, t.forward, t.backward, t.loss, strict=True)
    )
    graph = _drawable(costs.graph, operators, kinds[0])
    return Profile(
        costs.batch_size,
        costs.training,
        kinds,
        tuple(operators.values()),
        modules,
        passes,
        _links(costs),
        memory,
        graph,
        {kind: one.seconds for kind, one in costs.whole_batch.items()},
    )


def _pass_seconds(table: CostTable, forward: float, backward: float) -> tuple[float, float]:
    """Of whole passes: on a device that is not at hand, the longer of their kernels and their launches."""
    host = table.host
    if host is None:
        return forward, backward
    ahead, behind = float(host.forward.sum()) + host.loss[0], float(host.backward.sum()) + host.loss[1]
    return overlapped_seconds(forward, ahead, host.start), overlapped_seconds(backward, behind, host.start)


def _links(costs: CostGraph) -> dict[tuple[str, str], Link]:
    """All links; for a cluster, one link per level of its network."""
    if costs.cluster is None:
        return dict(costs.links)
    first = costs.devices[0].name
    found: dict[Link, tuple[str, str]] = {}
    for device in costs.devices[1:]:
        found.setdefault(costs.links[first, device.name], (first, device.name))
    return {pair: link for link, pair in found.items()}


def _by_module(graph: nx.DiGraph) -> dict[str, list[str]]:
    """Module -> nodes inside it at any depth. Parents come before children, and siblings in program order."""
    inside: dict[str, list[str]] = defaultdict(list)
    for name, operator in operator_costs(graph).items():
        names = operator.module.split(".") if operator.module else []
        for depth in range(len(names) + 1):
            inside[".".join(names[:depth])].append(name)
    first = {path: place for place, path in enumerate(inside)}

    def place(path: str) -> list[int]:
        names = path.split(".")
        return [first[".".join(names[: depth + 1])] for depth in range(len(names))] if path else []

    return {path: inside[path] for path in sorted(inside, key=place)}


def _read_outside(graph: nx.DiGraph, inside: Sequence[str]) -> list[str]:
    """The nodes whose values other nodes or the caller read."""
    here, outputs = set(inside), set(graph.graph["outputs"])
    return [n for n in inside if n in outputs or any(user not in here for user in graph.successors(n))]


def _drawable(graph: nx.DiGraph, operators: dict[str, Cost], kind: str) -> nx.DiGraph:
    """The graph with strings and numbers only, for file formats that take nothing else."""
    drawn = nx.DiGraph()
    for name, operator in operator_costs(graph).items():
        cost = operators[name]
        drawn.add_node(
            name,
            label=operator.key,
            module=operator.module,
            operator=operator.operator,
            source=operator.source,
            forward=cost.forward[kind],
            backward=cost.backward[kind],
            parameter_bytes=cost.parameter_bytes,
            activation_bytes=cost.activation_bytes,
            output_bytes=cost.output_bytes,
        )
    drawn.add_edges_from((a, b, {"nbytes": float(data["nbytes"])}) for a, b, data in graph.edges(data=True))
    return drawn
