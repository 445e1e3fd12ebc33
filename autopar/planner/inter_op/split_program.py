"""A program whose operators are split over meshes, by the names that join its graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from autopar.capture.repeated_layers.fold import Folded
from autopar.costs.cost_graph import CostGraph


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
