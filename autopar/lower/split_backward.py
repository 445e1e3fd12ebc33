"""A backward in two parts: first the gradients that the previous stage waits for, later those of parameters.

    outputs <- addmm <- relu <- addmm <- inputs        on the path from the outputs to the inputs
                 \\                \\
                  weight           weight               off the path

The input part (1) runs only the path: autograd skips the products that only off-path edges need. Where an edge leaves
the path (a junction), it stores the gradients that flow into that node. The weight part (2) starts from the junctions
and follows only the edges off the path, so that nothing is computed twice.

Three kinds of leaves get their gradients in the input part already, and the weight part only accumulates them:
 - Leaves behind a node that computes all its gradients in one kernel (batch norm, LSTM). Two runs would cost twice.
 - Leaves that several nodes of the path use directly (a bias used at every time step). Started from one of these nodes,
   autograd would also follow the path to the others.
 - Leaves behind the same off-path edge as one of those: the input part computes all that flows through that edge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from autopar.capture import torch_private

# Nodes that compute the gradients of inputs and of weights separately: two products, or two passes over the data.
_SEPARABLE = ("Addmm", "Mm", "Bmm", "Baddbmm", "Linear", "Convolution", "NativeLayerNorm")

GradientRoot = tuple[torch.Tensor, torch.Tensor]  # a tensor and the gradient that flows into it


@dataclass
class WeightPart:
    """The rest of a backward after its input part."""

    roots: list[GradientRoot]  # they do not depend on the inputs: their whole backward is left
    junctions: list[_Junction]
    ready: list[tuple[GradientEdge, torch.Tensor]]  # gradients that the input part has computed

    def run(self, retain_graph: bool) -> None:
        """(2) Accumulate the gradients of all leaves other than the inputs."""
        edges: list[Any] = [tensor for tensor, _ in self.roots]
        gradients = [gradient for _, gradient in self.roots]
        known = list(self.ready)
        for junction in self.junctions:
            known += junction.gradients(retain_graph)
        edges += [edge for edge, _ in known]
        gradients += [gradient for _, gradient in known]
        if edges:
            torch_private.run_backward(edges, gradients, retain_graph)


@dataclass
class _Junction:
    """A node on the path with edges that leave it."""

    node: Node
    off_path: list[GradientEdge]
    # After (1), one entry: for each output of the node, the gradient that flows into it.
    arrived: list[tuple[torch.Tensor | None, ...]] = field(default_factory=list)

    def gradients(self, retain_graph: bool) -> list[tuple[GradientEdge, torch.Tensor]]:
        """The gradients that flow along the edges off the path."""
        if not self.arrived:
            return []
        known = [(GradientEdge(self.node, i), g) for i, g in enumerate(self.arrived[0]) if g is not None]
        if not known:
            return []
        edges, gradients = zip(*known, strict=True)
        flowing = torch_private.run_gradients(edges, self.off_path, gradients, retain_graph)
        return [(edge, gradient) for edge, gradient in zip(self.off_path, flowing, strict=True) if gradient is not None]


def input_part(
    roots: Sequence[GradientRoot], inputs: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor | None], WeightPart]:
    """(1) The gradients of `inputs` (leaves that require one), and the rest of the backward for all other leaves.

    The graph is kept, and the weight part frees it. The weight part runs autograd once per junction, and each run
    visits the whole graph behind it: O(junctions x nodes), 0.1 ms for a junction in front of 500 nodes. Raises
    RuntimeError for a root that requires no gradient.
    """
    if not inputs or not roots:
        return [None] * len(inputs), WeightPart(list(roots), [], [])
    graph = _Graph([get_gradient_edge(tensor).node for tensor, _ in roots], inputs)
    on_path = [root for root in roots if graph.on_path(get_gradient_edge(root[0]).node)]
    rest = [root for root in roots if not graph.on_path(get_gradient_edge(root[0]).node)]
    later, leaves = graph.deferred()
    now = [GradientEdge(leaf, 0) for leaf in leaves]
    handles = [j.node.register_prehook(_remember(j.arrived)) for j in later]
    try:
        wanted: list[Any] = [*inputs, *now]
        computed = (
            torch_private.run_gradients([t for t, _ in on_path], wanted, [g for _, g in on_path], True)
            if on_path
            else [None] * len(wanted)
        )
    finally:
        for handle in handles:
            handle.remove()
    ready = [(edge, g) for edge, g in zip(now, computed[len(inputs) :], strict=True) if g is not None]
    return list(computed[: len(inputs)]), WeightPart(rest, later, ready)


def _remember(arrived: list[tuple[torch.Tensor | None, ...]]) -> Callable[[Any], None]:
    def hook(gradients: tuple[torch.Tensor | None, ...]) -> None:
        arrived.append(gradients)

    return hook


class _Graph:
    """The autograd graph behind some nodes. It refers to the nodes, because torch makes a new Python object for a node
    once the last reference to it is gone."""

    def __init__(self, roots: Sequence[Node], inputs: Sequence[torch.Tensor]) -> None:
        self._ends = {get_gradient_edge(tensor).node for tensor in inputs}
        self._reaches: dict[Node, tuple[bool, bool]] = {}  # reaches an input, reaches another leaf
        self.path: list[Node] = []  # inner nodes that reach an input, children first
        for root in roots:
            self._visit(root)
        children = [{child for child, _ in node.next_functions} for node in self.path]
        self._parents = Counter(child for some in children for child in some)  # how many nodes of the path lead to it

    def on_path(self, node: Node) -> bool:
        return self._reaches[node][0]

    def deferred(self) -> tuple[list[_Junction], list[Node]]:
        """The junctions where the weight part starts, and the leaves whose gradients the input part computes."""
        edges = [(node, edge) for node in self.path for edge in self._leaving(node)]
        leaves_of = [self._leaves(edge.node) for _, edge in edges]
        early: dict[Node, None] = {}  # leaves of the input part; a dict keeps their order
        waiting = [True] * len(edges)
        for index, (node, edge) in enumerate(edges):
            separable = node.name().removesuffix("0").removesuffix("Backward") in _SEPARABLE
            waiting[index] = separable and self._parents[edge.node] == 1
        # An edge with an early leaf is not deferred, and then all its leaves are early. Repeat until nothing changes.
        settled = False
        while not settled:
            settled = True
            for index, leaves in enumerate(leaves_of):
                if waiting[index] and not any(leaf in early for leaf in leaves):
                    continue
                if waiting[index] or any(leaf not in early for leaf in leaves):
                    waiting[index], settled = False, False
                    early.update(leaves)
        junctions: dict[Node, _Junction] = {}
        for (node, edge), waits in zip(edges, waiting, strict=True):
            if waits:
                junctions.setdefault(node, _Junction(node, [])).off_path.append(edge)
        return list(junctions.values()), list(early)

    def _leaves(self, node: Node) -> dict[Node, None]:
        """The leaves that a node off the path reaches."""
        leaves: dict[Node, None] = {}
        seen, stack = set(), [node]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            children = [child for child, _ in node.next_functions if child is not None]
            stack += children
            if not children:
                leaves[node] = None
        return leaves

    def _leaving(self, node: Node) -> list[GradientEdge]:
        """The edges of a node on the path that lead to leaves, none of them an input."""
        edges = []
        for child, index in node.next_functions:
            if child is not None and self._reaches[child] == (False, True):
                edge = GradientEdge(child, index)
                if edge not in edges:
                    edges.append(edge)
        return edges

    def _visit(self, root: Node) -> None:
        """Visit children before parents. Without recursion, because graphs are deeper than Python's stack."""
        stack = [(root, False)]
        while stack:
            node, children_done = stack.pop()
            if node in self._reaches:
                continue
            children = [child for child, _ in node.next_functions if child is not None]
            if not children_done:
                stack.append((node, True))
                stack += [(child, False) for child in reversed(children) if child not in self._reaches]
                continue
            if node in self._ends:
                self._reaches[node] = (True, False)
                continue
            to_input = any(self._reaches[child][0] for child in children)
            to_leaf = not children or any(self._reaches[child][1] for child in children)
            self._reaches[node] = (to_input, to_leaf)
            if to_input:
                self.path.append(node)
