"""A program whose operators are split over meshes, by the names that join its graphs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from torch import fx

from autopar.capture.repeated_layers.fold import Folded
from autopar.costs.cost_graph import CostGraph
from autopar.sharding.strategy_costs import Place


class First(NamedTuple):
    """The first of the copies of a node: it may read what the others do not."""

    node: str


@dataclass(frozen=True)
class Representation:
    """Nodes of a whole graph by the nodes of its folded graph."""

    kept: tuple[str, ...]  # for each node the one that represents it
    places: Mapping[str | First, np.ndarray]  # of the copies of a node of the folded graph; of the first of them

    @classmethod
    def of(cls, nodes: Sequence[str], folded: Folded) -> Representation:
        kept = tuple(map(folded.kept, nodes))
        places: dict[str | First, list[int]] = defaultdict(list)
        for place, (node, representative) in enumerate(zip(nodes, kept, strict=True)):
            places[representative].append(place)
            places[First(node)].append(place)
        return cls(kept, {key: np.array(found) for key, found in places.items()})


class SavedPlace(NamedTuple):
    """The position, in the folded graph, of a tensor that is kept for the backward."""

    operator: str  # that keeps it
    place: Place  # among the operator's tensors; None: not known
    maker: str | None  # the operator whose result it is


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
    def kept(self) -> Mapping[str, str]:
        """Node of the cost graph -> the node of the folded graph that represents it."""
        return {node: self.folded.kept(node) for node in self.costs.operators}

    @cached_property
    def saved_places(self) -> Mapping[str, Sequence[SavedPlace]]:
        """Node -> the positions of the tensors in its `saved`, in the same order."""
        return {
            node: [self._saved_place(node, whole.saved_places.get(storage)) for storage in whole.saved]
            for node, whole in self.costs.operators.items()
        }

    def _saved_place(self, node: str, place: Place) -> SavedPlace:
        read = self.operands[node][place] if place is not None and place >= 0 else None
        return SavedPlace(self.kept[node], place, None if read is None else self.folded.kept(read))

    @cached_property
    def parameters(self) -> Mapping[str, tuple[str, ...]]:
        """Node -> names of the parameters that it reads."""
        return {
            name: tuple(str(n.target) for n in node.all_input_nodes if n.op == "get_attr")
            for name, node in self.nodes.items()
        }

    @cached_property
    def represented(self) -> Mapping[str, Mapping[str | None, str | None]]:
        """Node -> for the storage of each parameter that it reads, that of the parameter that represents it.

        One of equal layers represents the parameters of all, and the first of its names a tied parameter.
        """
        kept = self.folded.kept
        return {
            node: {self.storages.get(name): self.storages.get(kept(name)) for name in names}
            for node, names in self.parameters.items()
        }

    def representation(self, nodes: tuple[str, ...]) -> Representation:
        """Of these nodes of the cost graph."""
        if nodes not in self._representations:
            self._representations[nodes] = Representation.of(nodes, self.folded)
        return self._representations[nodes]

    @cached_property
    def _representations(self) -> dict[tuple[str, ...], Representation]:
        """Few: all cost tables of a program have the same nodes."""
        return {}

    @cached_property
    def operands(self) -> Mapping[str, tuple[str, ...]]:
        """Node -> the nodes that it reads."""
        return {name: tuple(n.name for n in node.all_input_nodes) for name, node in self.nodes.items()}
