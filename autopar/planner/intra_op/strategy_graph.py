"""The choice of strategies as variables and edges: operators, parameters and inputs of one graph on one mesh.

The options of a variable are strategies of an operator, or placements of a parameter or an input. An edge lies between
what makes a tensor and what reads it. It costs the redistribution of the tensor and that of its gradient:

    linear --- [y: columns] -- redistribution -- [x: rows] --- gelu            R(out, in) + R(dual(in), dual(out))

A tensor with several readers is moved once for those that read it in the same placements. A variable in between holds
the placements in which they share it.

    norm --- redistribution --- shared --.-- queries
                                         |-- keys
                                         `-- values

A parameter is stored in one layout, its optimizer's state in the same or a finer one (ZeRO: Rajbhandari et al., 2020).
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx

from autopar.planner.inter_op.memory_formula import resident_bytes
from autopar.planner.intra_op.elimination.choices import Edge
from autopar.planner.intra_op.redistribution_prices import RedistributionPrices
from autopar.planner.intra_op.redistributions import (
    OUTPUT,
    ParameterTables,
    ProducedTensor,
    Reader,
    SharedStored,
    TensorUse,
    finer,
    needed_once,
)
from autopar.planner.intra_op.sharding_task import GraphFacts, ShardingTask
from autopar.sharding.layouts import DUAL, REPLICATE, Placements, layouts, parts
from autopar.sharding.mesh import Mesh
from autopar.sharding.stage_sharding import Stored
from autopar.sharding.strategy_costs import Place, StrategyCosts, StrategyCostTable, WholeSeconds
from cost_models.graphs import get_attribute, may_have_gradient, storage_key, tensors_in
from cost_models.hardware.device_specs import efficiency_of, rates_of
from cost_models.kernels.operator_work import OperatorWork
from cost_models.memory.optimizer_step import Implementation


@dataclass(frozen=True, eq=False)
class OptionCosts:
    """Costs of a variable's options. Equal variables share one object, so that the search recognises them quickly."""

    seconds: np.ndarray  # [options] of a micro-batch, with its part of `once`
    nbytes: np.ndarray  # [options] on each device
    once: np.ndarray | None = None  # [options] s once a step; None: nothing
    resident: bool = False  # the bytes are held all the time, not for each micro-batch
    temporaries: np.ndarray | None = None  # [options] bytes beside them while the optimizer steps; None: nothing

    def times(self, copies: int) -> OptionCosts:
        once = None if self.once is None else self.once * copies
        temporaries = None if self.temporaries is None else self.temporaries * copies
        return replace(
            self, seconds=self.seconds * copies, nbytes=self.nbytes * copies, once=once, temporaries=temporaries
        )

    @cached_property
    def kinds(self) -> np.ndarray:
        """[options, 3] bytes held all the time, for each micro-batch in flight, and while the optimizer steps."""
        nothing = np.zeros_like(self.nbytes)
        stepping = nothing if self.temporaries is None else self.temporaries
        held = (self.nbytes, nothing) if self.resident else (nothing, self.nbytes)
        return np.stack([*held, stepping], axis=1)


class OperatorChoice(NamedTuple):
    """An operator, or a border of a sharded call, as a variable."""

    variable: int
    costs: StrategyCosts  # its options are `costs.strategies`


class StoredChoice(NamedTuple):
    """A parameter or an input as a variable."""

    variable: int
    options: tuple[Stored, ...]
    tables: ParameterTables
    times: int  # copies of a folded layer
    readers: list[tuple[str, str]]  # (node that is read, operator)
    stepping: np.ndarray  # [options] s once a step: the optimizer's kernels go through one copy


class PricedUse(NamedTuple):
    """An edge with what it is about."""

    edge: Edge
    use: TensorUse
    once: np.ndarray | None  # [labels of out, labels of into] s once a step; the edge has a part of them


class StrategyGraph:
    """The variables and edges of one task on one mesh."""

    def __init__(self, task: ShardingTask, mesh: Mesh, facts: GraphFacts | None = None) -> None:
        self.task, self.mesh = task, mesh
        self.facts = facts or GraphFacts(task)
        device_kinds = {device.name: device.kind for device in task.cluster.devices}
        spec = task.cluster.specs[device_kinds[mesh.devices[0]]]
        self.table = StrategyCostTable(
            mesh,
            task.cluster,
            rates_of(spec, None if task.recipe is None else task.recipe.host(spec)),
            efficiency_of(spec),
            training=task.training,
            trained=self.facts.is_trained,
            works=self.facts.local_works,
            measured=self._measured(),
            turns=1 if task.shards is None else task.shards.turns(mesh.devices),
        )
        self._optimizer = _optimizer_of(task, device_kinds[mesh.devices[0]])
        self._prices = RedistributionPrices(task, mesh)
        self.variables: list[OptionCosts] = []
        self.uses: list[PricedUse] = []
        self.options: dict[str, OperatorChoice] = {}  # by node
        self.stored: dict[str, StoredChoice] = {}  # by name
        self._produced: dict[fx.Node, list[ProducedTensor]] = {}  # every tensor that a node makes
        self._readers: dict[tuple[fx.Node, int, bool], list[Reader]] = {}
        self._named = {node.name: node for node in task.module.graph.nodes}
        # Equal parts of the graph share what is computed of them.
        self._labels: dict[int, np.ndarray] = {}
        self._no_costs: dict[int, OptionCosts] = {}
        self._stored_costs: dict[tuple[Any, ...], tuple[tuple[Stored, ...], OptionCosts, np.ndarray]] = {}
        self._operator_costs: dict[tuple[StrategyCosts, tuple[tuple[Place, int], ...]], OptionCosts] = {}
        self._copied: dict[tuple[OptionCosts, int], OptionCosts] = {}
        self._build()

    def _measured(self) -> dict[str, WholeSeconds]:
        """By signature: equal operators count with their mean."""
        found: dict[str, list[tuple[WholeSeconds, int]]] = defaultdict(list)
        for node in self.task.module.graph.nodes:
            if node.name in self.task.measured:
                copies = self.task.copies.get(node.name, 1)
                found[self.facts.with_rule(node).signature].append((self.task.measured[node.name], copies))
        return {
            signature: WholeSeconds(
                sum(one.forward * copies for one, copies in some) / sum(copies for _, copies in some),
                sum(one.backward * copies for one, copies in some) / sum(copies for _, copies in some),
            )
            for signature, some in found.items()
        }

    @property
    def seconds(self) -> list[np.ndarray]:
        """[options] of every variable."""
        return [variable.seconds for variable in self.variables]

    @property
    def nbytes(self) -> list[np.ndarray]:
        """[options] of every variable."""
        return [variable.nbytes for variable in self.variables]

    @property
    def stored_options(self) -> dict[str, tuple[int, tuple[Stored, ...]]]:
        """(variable, its options) of every parameter and input."""
        return {name: (one.variable, one.options) for name, one in self.stored.items()}

    @property
    def edges(self) -> list[Edge]:
        return [priced.edge for priced in self.uses]

    def _build(self) -> None:
        by_storage: dict[int, ProducedTensor] = {}
        for node in self.task.module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._add_stored(node, by_storage)
            elif node.op != "output" and tensors_in(self.facts.values[node]):
                self._add_operator(node)
        self._add_outputs()
        for (node, times, _), readers in self._readers.items():
            self._connect(node, readers, times)

    # -- variables --------------------------------------------------------------------------------------------------

    def _add_variable(self, costs: OptionCosts, copies: int = 1) -> int:
        if copies > 1 and (costs, copies) not in self._copied:
            self._copied[costs, copies] = costs.times(copies)
        self.variables.append(costs if copies == 1 else self._copied[costs, copies])
        return len(self.variables) - 1

    def _add_stored(self, node: fx.Node, by_storage: dict[int, ProducedTensor]) -> None:
        """An input, in any layout at no cost, or a parameter."""
        value = get_attribute(self.task.module, str(node.target)) if node.op == "get_attr" else self.facts.values[node]
        if not isinstance(value, torch.Tensor):
            return
        storage = storage_key(value)
        if node.op == "get_attr" and storage in by_storage:
            self._produced[node] = [by_storage[storage]]  # tied: one tensor
            return
        trained = node.op == "get_attr" and self.task.training and value.requires_grad
        shared = trained and self._n_readers[storage] > 1
        key = (tuple(value.shape), value.dtype, trained, node.op, shared)
        if key not in self._stored_costs:
            self._stored_costs[key] = self._stored_options(value, trained, node.op, shared)
        options, costs, stepping = self._stored_costs[key]
        name, labels = str(node.target), self._labels_of(len(options))
        copies = self.task.copies.get(node.name, 1)
        variable = self._add_variable(costs, copies)
        produced = ProducedTensor(variable, labels, options, "parameter" if trained else "input", name)
        self._produced[node] = [produced]
        self.stored[name] = StoredChoice(
            variable, options, self._prices.parameter_tables_of(value), copies, [], stepping
        )
        by_storage[storage] = produced

    @cached_property
    def _n_readers(self) -> Mapping[int, int]:
        """By storage: how many operators read a parameter, by whatever name."""
        found: dict[int, int] = defaultdict(int)
        for node in self.task.module.graph.nodes:
            value = get_attribute(self.task.module, str(node.target)) if node.op == "get_attr" else None
            if isinstance(value, torch.Tensor):
                found[storage_key(value)] += len(node.users)
        return found

    def _stored_options(
        self, value: torch.Tensor, trained: bool, op: str, shared: bool
    ) -> tuple[tuple[Stored, ...], OptionCosts, np.ndarray]:
        """The options, their costs, and what the optimizer's kernels take of these once a step."""
        every = layouts(value.shape, self.mesh.shape, partial=False)
        pairs = [(a, b) for a in every for b in (every if trained else [a]) if finer(b, a)]
        options = [Stored(*pair) for pair in pairs]
        if self.task.scatters:
            options += [Stored(*pair, scattered=True) for pair in pairs if pair[0] != pair[1]]
        if shared:
            options = [SharedStored(*pair, gradient=gradient) for pair in pairs for gradient in _gradients(pair[0])]
        held = [self._held(value, trained, one) if op == "get_attr" else 0.0 for one in options]
        tables = self._prices.parameter_tables_of(value)
        once = np.array(
            [sum(tables.once_of(n).between(n.before, n.after) for n in needed_once(one)) for one in options],
            dtype=float,
        )
        stepping, temporaries = np.array([self._stepping(value, one) if trained else (0.0, 0.0) for one in options]).T
        once += stepping
        each = once / self.task.n_microbatches
        per_step = once if shared or stepping.any() else None
        beside = temporaries if temporaries.any() else None
        costs = OptionCosts(each, np.array(held), per_step, resident=True, temporaries=beside)
        return tuple(options), costs, stepping

    def _stepping(self, value: torch.Tensor, one: Stored) -> tuple[float, float]:
        """Seconds once a step in which the optimizer's kernels go through a trained parameter, and bytes of its
        temporaries on each device.

        Its launches do not depend on how the parameter lies.
        """
        if self._optimizer is None:
            return 0.0, 0.0
        implementation, bandwidth = self._optimizer
        cut = (parts(layout, self.mesh.shape) for layout in (one.layout, one.state))
        share = self.task.weight(value, True, *cut).step(self.task.optimizer, implementation)
        return share.nbytes / bandwidth, share.held

    def _held(self, value: torch.Tensor, trained: bool, one: Stored) -> float:
        """Bytes on each device of a parameter or buffer, its gradient and the optimizer's state."""
        gradient = one.state if one.scattered else one.layout
        cut = (parts(layout, self.mesh.shape) for layout in (one.layout, one.state, gradient))
        weight = self.task.weight(value, trained, *cut)
        return resident_bytes(weight, self.task.optimizer, self.task.training).total

    def _add_operator(self, node: fx.Node) -> None:
        values = self.facts.values
        if node.target is operator.getitem:
            source, place = node.args
            assert isinstance(source, fx.Node)
            if not isinstance(values[source], torch.Tensor):
                before = [v for v in values[source][:place] if isinstance(v, torch.Tensor)]
                self._produced[node] = [self._produced[source][len(before)]]
                return
        work = self.facts.work.get(node.name, OperatorWork((), ()))
        ruled = self.facts.with_rule(node)
        costs = self.table.of(ruled, values, work)
        saved = self.facts.saved(node)
        if (costs, saved) not in self._operator_costs:
            nbytes = sum((costs.kept(place) * n for place, n in saved), np.zeros(len(costs.strategies)))
            self._operator_costs[costs, saved] = OptionCosts(costs.seconds, nbytes * self.task.in_flight)
        copies = self.task.copies.get(node.name, 1)
        variable = self._add_variable(self._operator_costs[costs, saved], copies)
        self.options[node.name] = OperatorChoice(variable, costs)
        self._produced[node] = [
            ProducedTensor(variable, labels, known, "activation", node.name)
            for labels, known in zip(costs.output_labels, costs.outputs, strict=True)
        ]
        for place, operand in enumerate(ruled.operands):
            if isinstance(operand, fx.Node) and operand in self._produced:
                reader = Reader(variable, node.name, costs.input_labels[place], costs.inputs[place], copies)
                self._read_by_copies(operand, reader)

    def _read_by_copies(self, operand: fx.Node, reader: Reader) -> None:
        """The first of the equal layers that `reader` represents reads `operand`, the others what the layer before
        them made."""
        handed_on = self.task.again.get(operand.name) if reader.times > 1 else None
        if handed_on is None:
            self._read(operand, reader)
        else:
            self._read(operand, replace(reader, times=1))
            self._read(self._named[handed_on], replace(reader, times=reader.times - 1), between=True)

    def _add_outputs(self) -> None:
        """The graph returns whole tensors: a loss for its backward, others for the caller."""
        (results,) = self.task.module.graph.output_node().args
        whole = (REPLICATE,) * len(self.mesh.shape)
        for node in {n: None for n in results if isinstance(n, fx.Node) and n in self._produced}:  # type: ignore[union-attr]
            if isinstance(self.facts.values[node], torch.Tensor):
                sink = self._add_variable(self._free(1))
                self._read(node, Reader(sink, OUTPUT, self._labels_of(1), ((whole, whole),)))

    def _free(self, n: int) -> OptionCosts:
        """Of a variable with n options that cost nothing."""
        if n not in self._no_costs:
            self._no_costs[n] = OptionCosts(np.zeros(n), np.zeros(n))
        return self._no_costs[n]

    def _labels_of(self, n: int) -> np.ndarray:
        """Of a variable with n options that all have a label of their own."""
        if n not in self._labels:
            self._labels[n] = np.arange(n)
        return self._labels[n]

    # -- edges ------------------------------------------------------------------------------------------------------

    def _read(self, tensor: fx.Node, reader: Reader, *, between: bool = False) -> None:
        """`between`: a copy of a layer reads what the copy before it made. A tensor is moved for its readers as often
        as it is made: once for all copies of a layer that read what was made outside."""
        times = min(reader.times, self.task.copies.get(tensor.name, 1))
        self._readers.setdefault((tensor, times, between), []).append(reader)

    def _connect(self, tensor: fx.Node, readers: Sequence[Reader], times: int) -> None:
        """Readers that need the same placements share one redistribution, forward and backward: their gradients are
        added up before they move. A variable of the shared placements lies between the maker and its readers."""
        (produced,) = self._produced[tensor]
        via = None
        if len(readers) > 1 and produced.origin == "activation":
            pairs = tuple(dict.fromkeys([*produced.layouts, *(pair for reader in readers for pair in reader.layouts)]))
            labels = self._labels_of(len(pairs))
            variable = self._add_variable(self._free(len(pairs)))
            via = self._add_edge(tensor, produced, Reader(variable, readers[0].name, labels, pairs, times), shared=True)
            produced = ProducedTensor(variable, labels, pairs, produced.origin, produced.name)
        for reader in readers:
            self._add_edge(tensor, produced, reader, via)

    def _add_edge(
        self,
        tensor: fx.Node,
        produced: ProducedTensor,
        reader: Reader,
        via: TensorUse | None = None,
        *,
        shared: bool = False,
    ) -> TensorUse:
        value = self.facts.values[tensor]
        item = str(tensor.target) if tensor.op in ("placeholder", "get_attr") else tensor.name
        frozen = tensor.op == "get_attr" and produced.origin == "input"
        use = TensorUse(
            produced.name,
            item,
            reader.name,
            produced.layouts,
            reader.layouts,
            self._prices.table_of(value),
            self._prices.parameter_tables_of(value) if produced.origin == "parameter" else None,
            produced.origin,
            may_have_gradient(value) and (reader.name if frozen else tensor.name) in self.facts.trained,
            reader.times,
            value.numel() * value.element_size(),
            tensor.op == "get_attr",
            shared,
            via,
        )
        if produced.origin == "parameter":
            self.stored[produced.name].readers.append((item, reader.name))
        seconds, once = self._prices.seconds_of(use, value, reader.times)
        edge = Edge(produced.variable, reader.variable, produced.labels, reader.labels, seconds)
        self.uses.append(PricedUse(edge, use, once))
        return use


def _optimizer_of(task: ShardingTask, kind: str) -> tuple[Implementation, float] | None:
    """How the optimizer of devices of a kind steps, and its bytes/s; None where its step is not priced."""
    if task.recipe is None or not task.training or task.optimizer == "none":
        return None
    rates = task.recipe.optimizer_rates(task.cluster, kind, task.optimizer)
    return task.recipe.implementation(task.cluster), rates.bandwidth


def _gradients(layout: Placements) -> Iterator[Placements]:
    """The placements of gradients that are computed for a parameter that is read in `layout`."""
    yield from itertools.product(*((code,) if code >= 0 else (REPLICATE, DUAL[REPLICATE]) for code in layout))
