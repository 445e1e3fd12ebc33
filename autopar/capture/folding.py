"""Equal layers of a graph as one: what is chosen for one of them is chosen for all, and searched for once.

The first and the last layer of a run may have other neighbours; all between them are alike and share a copy:

    x -> L0 -> L1 -> L2 -> L3 -> L4 -> head         folded:  x -> L0 -> L1 -> L4 -> head
                                                                     \\__/ 3 times: what L1 hands on is what L1 reads
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.capture.program import module_path
from cost_models.graphs import get_attribute

_WORTH = 4  # layers: fewer are not folded


@dataclass(frozen=True)
class Folded:
    """A graph with runs of equal layers folded."""

    module: fx.GraphModule
    copies: Mapping[str, int] = field(default_factory=dict)  # node -> nodes of the whole graph that it stands for
    again: Mapping[str, str] = field(default_factory=dict)  # node before a run -> what a copy hands to the next one
    stands_for: Mapping[str, str] = field(default_factory=dict)  # left-out node, or parameter -> the one kept

    def kept(self, name: str) -> str:
        """The node, or parameter, of the folded graph that stands for one of the whole graph."""
        return self.stands_for.get(name, name)


def fold(module: fx.GraphModule) -> Folded:
    """Fold every run of at least four equal layers (`blocks.0`, `blocks.1`, ... of a model). O(nodes).

    Layers are equal if their operators are, on parameters of equal shapes, and each reads of the one before it what
    that reads of its own predecessor. Layers whose values are read otherwise (by all that follow, say) are left alone.
    """
    copies: dict[str, int] = {}
    again: dict[str, str] = {}
    instead: dict[fx.Node, fx.Node] = {}
    for layers in _layers(module.graph):
        for run in _runs(module, layers):
            first, middle, *_, last = run
            for layer in run[2:-1]:
                instead.update(zip(layer.nodes, middle.nodes, strict=True))
            for node in middle.nodes:
                copies[node.name] = len(run) - 2
            place = {node: i for i, node in enumerate(first.nodes)}
            for node in middle.nodes:
                again.update({n.name: middle.nodes[place[n]].name for n in node.all_input_nodes if n in place})
            del last
    if not instead:
        return Folded(module)
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()

    def moved(node: fx.Node) -> fx.Node:
        return new[instead.get(node, node)]

    for node in module.graph.nodes:
        if node not in instead:
            new[node] = graph.node_copy(node, moved)
    names = {old.name: kept.name for old, kept in instead.items()}
    names |= {str(old.target): str(kept.target) for old, kept in instead.items() if old.op == "get_attr"}
    return Folded(fx.GraphModule(module, graph), copies, again, names)


@dataclass(frozen=True)
class _Layer:
    index: int
    nodes: list[fx.Node]  # parameters first where they are read, operators in their order


def _layers(graph: fx.Graph) -> list[list[_Layer]]:
    """The items of every outermost numbered container, in order."""
    found: dict[str, dict[int, list[fx.Node]]] = defaultdict(lambda: defaultdict(list))
    for node in graph.nodes:
        if node.op not in ("placeholder", "output"):
            parts = (str(node.target) if node.op == "get_attr" else module_path(node)).split(".")
            depth = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
            if depth:
                found[".".join(parts[:depth])][int(parts[depth])].append(node)
    return [[_Layer(i, nodes) for i, nodes in sorted(items.items())] for items in found.values()]


def _runs(module: fx.GraphModule, layers: Sequence[_Layer]) -> list[list[_Layer]]:
    """Longest runs of equal layers that nobody else looks into."""
    runs: list[list[_Layer]] = []
    run = list(layers[:1])
    for before, layer in itertools.pairwise(layers):
        if layer.index == before.index + 1 and _alike(module, run, layer):
            run.append(layer)
        else:
            runs.append(run)
            run = [layer]
    runs.append(run)
    return [r for r in runs if len(r) >= _WORTH and not _looked_into(r)]


def _alike(module: fx.GraphModule, run: Sequence[_Layer], layer: _Layer) -> bool:
    """Whether `layer` goes on as the run does."""
    before = run[-1]
    if len(layer.nodes) != len(before.nodes):
        return False
    earlier = run[-2] if len(run) > 1 else None
    place = {node: i for i, node in enumerate(before.nodes)}
    own = {node: i for i, node in enumerate(layer.nodes)}
    further = {node: i for i, node in enumerate(earlier.nodes)} if earlier else {}

    def same(a: Any, b: Any) -> bool:
        """An argument of the layer before and the one of this layer."""
        if isinstance(a, fx.Node) and isinstance(b, fx.Node):
            if b in own:
                return place.get(a) == own[b]
            if b in place:  # made by the layer before
                return a not in place and (earlier is None or further.get(a) == place[b])
            return a is b
        if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
            return len(a) == len(b) and all(map(same, a, b))
        return type(a) is type(b) and bool(a == b)

    for a, b in zip(before.nodes, layer.nodes, strict=True):
        if a.op != b.op or (a.op == "get_attr" and not _equal(module, a, b)):
            return False
        if a.op != "get_attr" and not (a.target == b.target and same(a.args, b.args)):
            return False
        if a.kwargs.keys() != b.kwargs.keys() or not all(same(a.kwargs[k], b.kwargs[k]) for k in a.kwargs):
            return False
    return True


def _equal(module: fx.GraphModule, a: fx.Node, b: fx.Node) -> bool:
    x, y = (get_attribute(module, str(n.target)) for n in (a, b))
    if not (isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)):
        return x is y
    return x is not y and x.shape == y.shape and x.dtype == y.dtype and x.requires_grad == y.requires_grad


def _looked_into(run: Sequence[_Layer]) -> bool:
    """Whether a layer that would be left out, or the one kept for it, is read by another than the next one."""
    for layer, following in itertools.pairwise(run[1:]):
        near = {*layer.nodes, *following.nodes}
        if any(user not in near for node in layer.nodes for user in node.users):
            return True
    return False
