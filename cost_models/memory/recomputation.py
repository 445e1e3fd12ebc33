"""Recomputation: a flat torch.fx graph in which groups of operators run again for their backward."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import fx, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def nodes_inside(graph: fx.Graph, module: str) -> list[str]:
    """The names of the operators that came from the module at a path ("encoder.layer.0"), as torch.export records.

    Raises:
        ValueError: no operator came from it.
    """
    names = []
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        paths = {re.sub(r"@\d+$", "", str(path)) for path, _ in stack.values()}  # export numbers the second call
        if module in paths and node.op not in ("placeholder", "get_attr", "output"):
            names.append(node.name)
    if not names:
        raise ValueError(f"no operator of the graph came from a module {module!r}")
    return names


def recomputing(
    module: fx.GraphModule, groups: Iterable[Collection[str]], contexts: Contexts = noop_context_fn
) -> fx.GraphModule:
    """The same graph over the same parameters, in which each group of operators (names of nodes) is one call that
    keeps only its inputs and runs again for its backward, with other random numbers.

    ```
        a  b1  c  b2  d      ->      a  c  [b1 b2]  d
    ```

    A group runs where its last operator was. `contexts` are entered around its first run and around later ones (see
    `context_fn` of torch.utils.checkpoint.checkpoint).

    Raises:
        ValueError: a name is unknown or in two groups; an operator of no group (c) reads one of a group before
            its last.
    """
    nodes = {node.name: node for node in module.graph.nodes if node.op not in ("placeholder", "get_attr", "output")}
    group_of: dict[fx.Node, int] = {}
    members: list[list[fx.Node]] = []
    for index, names in enumerate(groups):
        for name in names:
            if name not in nodes or nodes[name] in group_of:
                raise ValueError(f"{name!r} is {'in two groups' if name in nodes else 'no operator of the graph'}")
            group_of[nodes[name]] = index
        members.append([node for node in module.graph.nodes if group_of.get(node) == index])
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies:
            raise ValueError(f"'{node.name}' is read before the last operator of its group, which cannot run at once")
        return copies[node]

    for node in module.graph.nodes:
        if node not in group_of:
            copies[node] = graph.node_copy(node, copy_of)
        elif node is members[group_of[node]][-1]:
            group, name = members[group_of[node]], f"recomputed_{group_of[node]}"
            inner, inputs, outputs = _extracted(group)
            module.add_module(name, _Recomputed(fx.GraphModule(module, inner), contexts))
            call = graph.call_module(name, tuple(copy_of(x) for x in inputs))
            copies |= {x: graph.call_function(operator.getitem, (call, place)) for place, x in enumerate(outputs)}
    return fx.GraphModule(module, graph)


def _extracted(group: list[fx.Node]) -> tuple[fx.Graph, list[fx.Node], list[fx.Node]]:
    """A graph of these nodes, the nodes that they read, and those of them that others read. Parameters and buffers are
    no inputs: a buffer may be overwritten before its reader runs again."""
    attributes = [x for x in dict.fromkeys(x for node in group for x in node.all_input_nodes) if x.op == "get_attr"]
    inside = {*group, *attributes}
    inputs = list(dict.fromkeys(x for node in group for x in node.all_input_nodes if x not in inside))
    outputs = [node for node in group if any(user not in inside for user in node.users)]
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node in (*attributes, *group):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return graph, inputs, outputs


class _Recomputed(nn.Module):
    def __init__(self, inner: fx.GraphModule, contexts: Contexts) -> None:
        super().__init__()
        self.inner, self.contexts = inner, contexts

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        outputs: tuple[Any, ...] = checkpoint(
            self.inner, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=self.contexts
        )
        return outputs
