"""The core of each attention in a graph, by dataflow: from the products that make scores to the product with values.

    q --.                                                    v --.
         >-- matmul -- scale, mask -- softmax -- dropout ---------+-- matmul -- context
    k --'    `------------------- the core -------------------------------'

Between the products lie tensors of length x length, which cost many bytes to keep and few operations to make again
(Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, section 5). Where one operator
is the whole attention, the core is that operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx

from autopar.analysis.buffer_writes import unrepeatable_nodes
from autopar.analysis.operators import compute_nodes, operator_name, written_arguments
from autopar.capture.module_hooks import is_hook_point
from autopar.capture.uncaptured import uncaptured

_PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum", "mm"}
_SOFTMAX = {"softmax", "_softmax", "_safe_softmax"}
_FUSED = "scaled_dot_product"  # in the name of an operator that is the whole attention


def attention_cores(graph: fx.Graph) -> tuple[frozenset[fx.Node], ...]:
    """The operators of each core, in the order of their first operators.

    A core is left out if it writes into a tensor, has hooks or uncaptured code, or if an operator outside of it lies
    between two of its own.
    """
    made = _from_inputs(graph)
    cores: list[set[fx.Node]] = []
    for node in compute_nodes(graph):
        name = operator_name(node)
        if _FUSED in name:
            core = {node}
        elif name in _SOFTMAX:
            core = _around(node, made)
        else:
            continue
        for known in [known for known in cores if known & core]:  # two softmaxes with one product
            core |= known
            cores.remove(known)
        if core:
            cores.append(core)
    order = {node: place for place, node in enumerate(graph.nodes)}
    unrepeatable = set(unrepeatable_nodes(graph))
    found = [core for core in cores if _runs_again(core, unrepeatable) and _is_convex(core, order)]
    return tuple(frozenset(core) for core in sorted(found, key=lambda core: min(order[n] for n in core)))


def _from_inputs(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that depend on an input of the graph, rather than on parameters and constants alone."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _around(softmax: fx.Node, made: set[fx.Node]) -> set[fx.Node]:
    """A softmax with what lies between it and the nearest products before and after; empty without either."""

    def is_product(node: fx.Node) -> bool:
        factors = [source for source in node.all_input_nodes if source in made]
        return operator_name(node) in _PRODUCTS and len(factors) > 1

    def ends(node: fx.Node) -> bool:
        """Whether the core cannot go beyond a node: it reads parameters, or the graph begins or ends here."""
        return node.op in ("placeholder", "get_attr", "output") or any(
            source.op == "get_attr" for source in node.all_input_nodes
        )

    before = _between(softmax, lambda n: n.all_input_nodes, is_product, ends)
    after = _between(softmax, lambda n: list(n.users), is_product, ends)
    return {softmax} | before | after if before and after else set()


def _between(
    start: fx.Node,
    following: Callable[[fx.Node], list[fx.Node]],
    is_goal: Callable[[fx.Node], bool],
    ends: Callable[[fx.Node], bool],
) -> set[fx.Node]:
    """Nodes on ways from `start` to the nearest goals, which are included; empty without any goal."""
    reached: dict[fx.Node, list[fx.Node]] = {start: []}  # node -> where it was reached from
    waiting, goals = [start], []
    while waiting:
        node = waiting.pop()
        for other in following(node):
            if other in reached:
                reached[other].append(node)
            elif is_goal(other):
                reached[other] = [node]
                goals.append(other)
            elif not ends(other):
                reached[other] = [node]
                waiting.append(other)
    found: set[fx.Node] = set()
    while goals:
        node = goals.pop()
        if node not in found and node is not start:
            found.add(node)
            goals += reached[node]
    return found


def _runs_again(core: Iterable[fx.Node], unrepeatable: set[fx.Node]) -> bool:
    return not any(
        n in unrepeatable or written_arguments(n) or is_hook_point(n) or uncaptured(n) is not None for n in core
    )


def _is_convex(core: set[fx.Node], order: dict[fx.Node, int]) -> bool:
    """Whether no operator outside of the core depends on one inside and is needed by another."""
    last = max(order[node] for node in core)
    outside: set[fx.Node] = set()
    waiting = [user for node in core for user in node.users if user not in core]
    while waiting:
        node = waiting.pop()
        if node in core:
            return False
        if node not in outside and order[node] < last:
            outside.add(node)
            waiting += node.users
    return True
