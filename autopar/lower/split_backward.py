"""A backward in two parts: first the gradients that the previous stage waits for, later those of parameters.

    outputs <- addmm <- relu <- addmm <- inputs        on the path from the outputs to the inputs
                 \\                \\
                  weight           weight               off the path

The input part (1) runs only the path: autograd skips the products that only off-path edges need. Where an edge leaves
the path (a junction), it stores the gradients that flow into that node. The weight part (2) starts from the junctions
and follows only the edges off the path, so that nothing is computed twice.

Where the weight part computes the gradients of all junctions itself (products, layer norms), it holds what they have
saved, and the input part frees the rest of the path as it goes, as a whole backward does: activations that no weight
part needs are gone before it, and their memory is used again while it is still in the processor's caches.

Four kinds of leaves get their gradients in the input part already, and the weight part only accumulates them:
 - Leaves behind a node that computes all its gradients in one kernel (batch norm, LSTM). Two runs would cost twice.
 - Leaves behind a node that has other parents than the junction (a bias used at every time step, a weight from which
   the bias is computed, too). Started from the junction, autograd would also follow the path to the other parents, or
   what it stores for the one edge would contain what flows along another one.
 - Leaves behind an autograd Function, which may exchange gradients with other devices. Ranks whose graphs differ in
   other things so have all exchanges in the input part, where autograd runs them against the order of the forward.
 - Leaves behind the same off-path edge as one of those: the input part computes all that flows through that edge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from autopar.capture import torch_private_autograd
from autopar.capture.torch_private_autograd import WeightGradients

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
        with torch.no_grad():  # products of what autograd has saved are no part of another graph
            for junction in self.junctions:
                known += junction.run(retain_graph)
        edges += [edge for edge, _ in known]
        gradients += [gradient for _, gradient in known]
        if edges:
            torch_private_autograd.run_backward(edges, gradients, retain_graph)


@dataclass
class _Junction:
    """A node on the path with edges that leave it, by their number among the node's edges."""

    node: Node
    own: dict[int, GradientEdge] = field(default_factory=dict)  # to leaves that no other edge off the path leads to
    shared: dict[int, GradientEdge] = field(default_factory=dict)  # to leaves that others lead to, too
    own_leaves: list[GradientEdge] = field(default_factory=list)
    # After (1), one entry: for each output of the node, the gradient that flows into it.
    arrived: list[tuple[torch.Tensor | None, ...]] = field(default_factory=list)
    compute: WeightGradients | None = None  # with what the node has saved; None: nothing is held

    def hold(self) -> bool:
        """Hold what the weight part needs of what the node has saved. Returns whether that is known."""
        self.compute = self._weight_gradients()
        return self.compute is not None

    def _weight_gradients(self) -> WeightGradients | None:
        return torch_private_autograd.weight_gradients(self.node, [*self.own, *self.shared])

    def run(self, retain_graph: bool) -> list[tuple[GradientEdge, torch.Tensor]]:
        """Accumulate the gradients of its own leaves while they are in the processor's caches, and return those that
        flow along the shared edges: autograd sums them up before it accumulates."""
        if not self.arrived:
            return []
        compute = self.compute or self._weight_gradients()
        if compute is None:
            return self._by_autograd(retain_graph)
        gradient = self.arrived[0][0]  # of the node's result: products have no other, and others of norms have none
        if gradient is None:
            return []
        flowing = compute(gradient)
        if self.own:
            torch_private_autograd.run_backward(
                list(self.own.values()), [flowing[number] for number in self.own], retain_graph
            )
        return [(edge, flowing[number]) for number, edge in self.shared.items()]

    def _by_autograd(self, retain_graph: bool) -> list[tuple[GradientEdge, torch.Tensor]]:
        known = [(GradientEdge(self.node, i), g) for i, g in enumerate(self.arrived[0]) if g is not None]
        if not known:
            return []
        edges, gradients = zip(*known, strict=True)
        found: Sequence[torch.Tensor | None] = ()
        shared = list(self.shared.values())
        if shared:
            keep = retain_graph or bool(self.own)
            found = torch_private_autograd.run_gradients(edges, shared, gradients, keep)
        if self.own:
            torch_private_autograd.run_backward(edges, gradients, retain_graph, self.own_leaves)
        return [(edge, gradient) for edge, gradient in zip(shared, found, strict=True) if gradient is not None]


def input_part(
    roots: Sequence[GradientRoot], inputs: Sequence[torch.Tensor], keep_graph: bool = False
) -> tuple[list[torch.Tensor | None], WeightPart]:
    """(1) The gradients of `inputs` (leaves that require one), and the rest of the backward for all other leaves.

    The weight part computes the gradients of products and layer norms itself. At other junctions it runs autograd, and
    each run visits the whole graph behind it: O(junctions x nodes), 1 ms for a junction in front of 500 nodes. Where
    there are such, or with `keep_graph`, the graph is kept, and the weight part frees it. Raises RuntimeError for a
    root that requires no gradient.
    """
    if not inputs or not roots:
        return [None] * len(inputs), WeightPart(list(roots), [], [])
    graph = _Graph([get_gradient_edge(tensor).node for tensor, _ in roots], inputs)
    early, rest = list[GradientRoot](), list[GradientRoot]()
    for root in roots:
        (early if graph.is_early(get_gradient_edge(root[0]).node) else rest).append(root)
    early_nodes, rest_nodes = ([get_gradient_edge(tensor).node for tensor, _ in some] for some in (early, rest))
    later, leaves = graph.deferred(early_nodes, rest_nodes)
    now = [GradientEdge(leaf, 0) for leaf in leaves]
    free = not keep_graph and not rest and all(junction.hold() for junction in later)
    handles = [j.node.register_prehook(_remember(j.arrived)) for j in later]
    try:
        wanted: list[Any] = [*inputs, *now]
        computed = (
            torch_private_autograd.run_gradients([t for t, _ in early], wanted, [g for _, g in early], not free)
            if early
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
        self._edges: dict[Node, tuple[tuple[Any, int], ...]] = {}  # of every node to what it depends on
        self._reaches: dict[Node, tuple[bool, bool]] = {}  # reaches an input, reaches another leaf
        self.path: list[Node] = []  # inner nodes that reach an input, children first
        for root in roots:
            self._visit(root)
        children = [{child for child, _ in edges} for edges in self._edges.values()]
        self._parents = Counter(child for some in children for child in some)  # how many nodes lead to it

    def is_early(self, root: Node) -> bool:
        """Whether the backward of a root is part of the input part: it is on the path, or may exchange gradients."""
        return self._reaches[root][0] or self._behind(root)[1]

    def deferred(self, early_roots: Sequence[Node], rest: Sequence[Node]) -> tuple[list[_Junction], list[Node]]:
        """The junctions where the weight part starts, and the leaves whose gradients the input part computes.
        `early_roots`: roots whose backward is in the input part (`is_early`). `rest`: those of the weight part."""
        edges = [(node, number, edge) for node in self.path for number, edge in self._leaving(node)]
        behind = [self._behind(edge.node) for _, _, edge in edges]
        leaves_of = [leaves for leaves, _ in behind]
        early: dict[Node, None] = {}  # leaves of the input part; a dict keeps their order
        for root in early_roots:
            early.update({} if self._reaches[root][0] else self._behind(root)[0])
        waiting = [True] * len(edges)
        for index, ((node, _, edge), (_, may_exchange)) in enumerate(zip(edges, behind, strict=True)):
            separable = node.name().removesuffix("0").removesuffix("Backward") in _SEPARABLE
            waiting[index] = separable and self._parents[edge.node] == 1 and not may_exchange
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
        later = [(*edge, leaves) for edge, leaves, waits in zip(edges, leaves_of, waiting, strict=True) if waits]
        readers = Counter(leaf for *_, leaves in later for leaf in leaves)
        readers.update(leaf for root in rest for leaf in self._behind(root)[0])
        junctions: dict[Node, _Junction] = {}
        for node, number, edge, leaves in later:
            junction = junctions.setdefault(node, _Junction(node))
            if any(readers[leaf] > 1 for leaf in leaves):
                junction.shared[number] = edge
            else:
                junction.own[number] = edge
                junction.own_leaves += [GradientEdge(leaf, 0) for leaf in leaves]
        return list(junctions.values()), list(early)

    def _behind(self, node: Node) -> tuple[dict[Node, None], bool]:
        """The leaves that a node off the path reaches, and whether it reaches them through an autograd Function."""
        leaves: dict[Node, None] = {}
        through_function = False
        seen, stack = set(), [node]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            children = [child for child, _ in self._edges[node]]
            stack += children
            through_function |= torch_private_autograd.is_function(node)
            if not children:
                leaves[node] = None
        return leaves, through_function

    def _leaving(self, node: Node) -> list[tuple[int, GradientEdge]]:
        """The edges of a node on the path that lead to leaves, none of them an input, with their numbers.

        Edges that lead to the same place count as one, which autograd alone knows how to run.
        """
        found = {}
        for number, (child, index) in enumerate(node.next_functions):
            if child is not None and self._reaches[child] == (False, True):
                known = (child, index) in found
                found[child, index] = -1 - number if known else number
        return [(number, GradientEdge(*end)) for end, number in found.items()]

    def _visit(self, root: Node) -> None:
        """Visit children before parents. Without recursion, because graphs are deeper than Python's stack."""
        known, stack = self._edges, [root]
        while stack:
            node = stack[-1]
            if node in self._reaches:
                stack.pop()
                continue
            edges = known.get(node)
            if edges is None:
                known[node] = edges = tuple(edge for edge in node.next_functions if edge[0] is not None)
                waits = [child for child, _ in reversed(edges) if child not in self._reaches]
                if waits and node not in self._ends:
                    stack += waits
                    continue
            stack.pop()
            if node in self._ends:
                self._reaches[node] = (True, False)
                continue
            to_input = any(self._reaches[child][0] for child, _ in edges)
            to_leaf = not edges or any(self._reaches[child][1] for child, _ in edges)
            self._reaches[node] = (to_input, to_leaf)
            if to_input:
                self.path.append(node)
