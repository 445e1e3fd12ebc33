r"""Equal layers of a captured graph as one: a strategy chosen for one of them holds for all, so search it once.

The first and the last layer of a run may have other neighbours. All layers between them are equal; the folded graph
keeps one of them:

    x -> L0 -> L1 -> L2 -> L3 -> L4 -> head         folded:  x -> L0 -> L1 -> L4 -> head
                                                                      \__/
                                                            3 copies, each reads what the previous one returns
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.capture.node_names import module_path
from autopar.capture.repeated_layers.equality import equal, operators_equal
from cost_models.graphs import get_attribute

_MIN_LAYERS = 4  # shorter runs are not folded: first, last and one between them stay anyway


@dataclass(frozen=True)
class Folded:
    """A graph with runs of equal layers folded. Nodes and parameters are given by name."""

    module: fx.GraphModule
    copies: Mapping[str, int] = field(default_factory=dict)  # kept node -> number of nodes that it represents
    again: Mapping[str, str] = field(default_factory=dict)  # node before the kept layer -> its counterpart in the layer
    representatives: Mapping[str, str] = field(default_factory=dict)  # left-out node or parameter -> the kept one

    def kept(self, name: str) -> str:
        """The node, or parameter, of the folded graph that represents one of the whole graph."""
        return self.representatives.get(name, name)


def fold(module: fx.GraphModule) -> Folded:
    """Fold every run of at least four equal layers (`blocks.0`, `blocks.1`, ... of a model). O(nodes).

    Layers are equal if their operators are, on parameters of equal shapes, and if each reads from the layer before it
    what that layer reads from its own predecessor. A run stays as it is if anything but the next layer reads a value
    from inside it.
    """
    copies: dict[str, int] = {}
    again: dict[str, str] = {}
    instead: dict[fx.Node, fx.Node] = {}  # left-out node -> kept node
    for layers in _numbered_layers(module.graph):
        for run in _runs(module, layers):
            first, middle = run[:2]
            for layer in run[2:-1]:
                instead.update(zip(layer.nodes, middle.nodes, strict=True))
            copies.update({node.name: len(run) - 2 for node in middle.nodes})
            place = {node: i for i, node in enumerate(first.nodes)}
            for node in middle.nodes:
                again.update({n.name: middle.nodes[place[n]].name for n in node.all_input_nodes if n in place})
    if not instead:
        return Folded(module)
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        if node not in instead:
            new[node] = graph.node_copy(node, lambda n: new[instead.get(n, n)])
    names = {old.name: kept.name for old, kept in instead.items()}
    names |= {str(old.target): str(kept.target) for old, kept in instead.items() if old.op == "get_attr"}
    return Folded(fx.GraphModule(module, graph), copies, again, names)


@dataclass(frozen=True)
class _GraphLayer:
    index: int  # in its container
    nodes: list[fx.Node]  # in graph order: equal layers have equal nodes at equal places


def _numbered_layers(graph: fx.Graph) -> list[list[_GraphLayer]]:
    """The items of every outermost numbered container, in order."""
    containers: dict[str, dict[int, list[fx.Node]]] = defaultdict(lambda: defaultdict(list))
    for node in graph.nodes:
        if node.op not in ("placeholder", "output"):
            parts = (str(node.target) if node.op == "get_attr" else module_path(node)).split(".")
            depth = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
            if depth:
                containers[".".join(parts[:depth])][int(parts[depth])].append(node)
    return [[_GraphLayer(i, nodes) for i, nodes in sorted(items.items())] for items in containers.values()]


def _runs(module: fx.GraphModule, layers: Sequence[_GraphLayer]) -> list[list[_GraphLayer]]:
    """The longest runs of equal layers whose values only the next layer reads."""
    runs: list[list[_GraphLayer]] = []
    run = list(layers[:1])
    for before, layer in itertools.pairwise(layers):
        if layer.index == before.index + 1 and _continues(module, run, layer):
            run.append(layer)
        else:
            runs.append(run)
            run = [layer]
    runs.append(run)
    return [r for r in runs if len(r) >= _MIN_LAYERS and not _read_from_outside(r)]


def _continues(module: fx.GraphModule, run: Sequence[_GraphLayer], layer: _GraphLayer) -> bool:
    """Whether `layer` equals the last layer of the run.

        earlier -> before -> layer           an input b of `layer` and its counterpart a in `before` are the same if

    1. b is inside `layer` and a is at the same place inside `before`,
    2. b is inside `before` and a is at the same place inside `earlier`; the first layer of a run has no `earlier`
       and may read anything from outside,
    3. b and a are one node elsewhere in the graph (a mask that all layers read).
    """
    before, earlier = run[-1], run[-2] if len(run) > 1 else None
    if len(layer.nodes) != len(before.nodes):
        return False
    own = {node: i for i, node in enumerate(layer.nodes)}
    place = {node: i for i, node in enumerate(before.nodes)}
    earlier_place = {node: i for i, node in enumerate(earlier.nodes)} if earlier else {}

    def same_input(a: fx.Node, b: fx.Node) -> bool:
        if b in own:  # 1
            return place.get(a) == own[b]
        if b in place:  # 2
            return a not in place and (earlier is None or earlier_place.get(a) == place[b])
        return a is b  # 3

    return all(
        _parameters_equal(module, a, b) if a.op == b.op == "get_attr" else operators_equal(a, b, same_input)
        for a, b in zip(before.nodes, layer.nodes, strict=True)
    )


def _parameters_equal(module: fx.GraphModule, a: fx.Node, b: fx.Node) -> bool:
    x, y = (get_attribute(module, str(node.target)) for node in (a, b))
    if not (isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)):
        return x is y
    # One tensor that several layers share is stored once: its layers cannot be counted as copies.
    return x is not y and equal(x, y)


def _read_from_outside(run: Sequence[_GraphLayer]) -> bool:
    """Whether a node outside reads a value of a layer that would be left out, or of the one that is kept for them."""
    for layer, following in itertools.pairwise(run[1:]):
        near = {*layer.nodes, *following.nodes}
        if any(user not in near for node in layer.nodes for user in node.users):
            return True
    return False
