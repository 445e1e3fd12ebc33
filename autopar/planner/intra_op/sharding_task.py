"""The graph to choose strategies for, how it runs, and facts about it that do not depend on the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.analysis.node_values import observe
from autopar.analysis.operators import requires_grad_nodes
from autopar.costs.operator_cost import Weight
from autopar.costs.recipe import Recipe
from autopar.costs.shard_costs import ShardCosts
from autopar.planner.inter_op.memory_formula import transient_bytes
from autopar.sharding.local_work import LocalWorks
from autopar.sharding.strategy_costs import OperatorWithRule, Place, WholeSeconds, with_rule
from cost_models import Cluster
from cost_models.kernels.operator_work import OperatorWork, count
from cost_models.memory.graph_bytes import measure_bytes


@dataclass(frozen=True)
class ShardingTask:
    """The graph to choose strategies for, and how it runs."""

    module: fx.GraphModule  # a flat graph with parameters on the meta device
    inputs: Sequence[Any]  # of one micro-batch, on the meta device
    rows: int  # samples in it
    cluster: Cluster
    n_microbatches: int = 1
    training: bool = True
    optimizer: str = "adamw"
    in_flight: int = 1  # micro-batches whose activations are kept at once
    recipe: Recipe | None = None  # how a step is run on devices that are not at hand
    copies: Mapping[str, int] = field(default_factory=dict)  # node -> equal nodes of the model that it represents
    again: Mapping[str, str] = field(default_factory=dict)  # node that a copied layer reads -> what it hands its copy

    scatters: bool = False  # gradients of parameters may lie like the optimizer's state (ZeRO 2)
    shards: ShardCosts | None = None  # where the devices are at hand
    measured: Mapping[str, WholeSeconds] = field(default_factory=dict)  # node -> its measured seconds on one device

    def weight(
        self,
        value: torch.Tensor,
        trained: bool,
        parts: int = 1,
        state_parts: int = 1,
        gradient_parts: int | None = None,
    ) -> Weight:
        """A parameter or buffer that is cut into parts, one on each device."""
        precision = None if self.recipe is None else self.recipe.precision_of(value.dtype)
        nbytes = value.numel() * value.element_size()
        return Weight(
            nbytes,
            trained,
            tuple(value.shape),
            parts,
            state_parts,
            precision=precision,
            gradient_parts=gradient_parts,
            beside=0 if self.shards is None else self.shards.beside(parts, state_parts),
        )

    def gradient_itemsize(self, value: torch.Tensor) -> int:
        """Bytes of an element of a parameter's gradient."""
        precision = None if self.recipe is None else self.recipe.precision_of(value.dtype)
        return value.element_size() if precision is None else precision.gradient


class GraphFacts:
    """What the costs of a task depend on, whatever the mesh: values, work and kept bytes of every node."""

    def __init__(self, task: ShardingTask, local_works: LocalWorks | None = None) -> None:
        """`local_works`: shared with the facts of other micro-batch sizes."""
        self.local_works = local_works or LocalWorks()
        self.values: dict[fx.Node, Any] = observe(task.module, list(task.inputs))
        self.work = count(task.module, task.rows, training=task.training, inputs=list(task.inputs))
        counted = measure_bytes(task.module, list(task.inputs), task.rows, task.training, "cuda")
        kept: set[int] = set()
        self._saved: dict[str, list[tuple[Place, int]]] = {}  # place among the node's inputs or results, bytes
        self._places = counted.places
        self._storages = {name: frozenset(storages) for name, storages in counted.results.items()}
        for name, storages in counted.saved.items():  # what several operators keep counts to the first
            items = zip(storages, counted.places[name], strict=True)
            self._saved[name] = [(place, nbytes) for (key, nbytes), place in items if key not in kept]
            kept |= {key for key, _ in storages}
        self.trained = {node.name for node in requires_grad_nodes(task.module)} if task.training else set[str]()
        self._fresh, self._output = counted.fresh, counted.output
        self._with_rule: dict[fx.Node, OperatorWithRule] = {}
        self._named = {node.name: node for node in task.module.graph.nodes}

    def is_trained(self, node: fx.Node) -> bool:
        """Whether a gradient flows to what a node makes."""
        if node.op == "get_attr":
            value = self.values[node]
            return isinstance(value, torch.Tensor) and value.requires_grad
        return node.name in self.trained

    def node(self, name: str) -> fx.Node:
        return self._named[name]

    def saved(self, node: fx.Node) -> tuple[tuple[Place, int], ...]:
        """What an operator keeps for the backward: (tensor, bytes), by `StrategyCosts.kept`."""
        ruled = self.with_rule(node)
        return tuple((ruled.place(place), nbytes) for place, nbytes in self._saved.get(node.name, ()))

    def transient(self, name: str) -> float:
        """Bytes while an operator runs on one device, see `transient_bytes`."""
        output = self._output[name]
        return transient_bytes(self._fresh[name], output, output if name in self.trained else 0)

    def kept_operands(self, node: fx.Node) -> tuple[tuple[fx.Node, Place], ...]:
        """The operands that an operator keeps for the backward, with their places in its rule.

        Unlike in `saved`, each operator has what several keep.
        """
        places = dict.fromkeys(p for p in self._places.get(node.name, ()) if p is not None and p >= 0)
        return tuple((node.all_input_nodes[place], self.with_rule(node).place(place)) for place in places)

    def viewed(self, node: fx.Node) -> fx.Node | None:
        """The operand that a node returns, or whose view it returns; None if there is none."""
        mine = self._storages.get(node.name, frozenset())
        return next((n for n in node.all_input_nodes if mine & self._storages.get(n.name, frozenset())), None)

    def with_rule(self, node: fx.Node) -> OperatorWithRule:
        if node not in self._with_rule:
            work = self.work.get(node.name, OperatorWork((), ()))
            self._with_rule[node] = with_rule(node, self.values, work)
        return self._with_rule[node]
