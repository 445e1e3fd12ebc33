"""Which values of a graph may share memory, so that a write in place into one changes the others."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from autopar.analysis.rules.table import rule_name
from autopar.capture.module_hooks import is_hook_point
from autopar.capture.program import is_getitem
from autopar.capture.uncaptured import uncaptured

Owners = frozenset[fx.Node | str] | tuple["Owners", ...]  # of a tensor, or of each item of a tuple
_RETURN_THEIR_INPUT = ("dropout", "feature_dropout", "alpha_dropout")  # in evaluation, which their schemas do not say


class SharedMemory:
    """For every node of a graph the owners of the memory that its value may be in.

    An owner is the node that allocates the memory, or the name of a parameter or buffer. Two values may share memory if
    they have an owner in common.
    """

    def __init__(self) -> None:
        self.owners: dict[fx.Node, Owners] = {}

    def add(self, node: fx.Node, owners: Owners | None = None) -> None:
        """Record the owners of the next node, in order: `owners`, where its operator does not say them."""
        self.owners[node] = self._owners(node) if owners is None else owners

    def sharing(self, node: fx.Node) -> list[fx.Node]:
        """The nodes whose values may share memory with that of `node`, itself included."""
        own = _flat(self.owners[node])
        return [other for other, owners in self.owners.items() if own & _flat(owners)]

    def _owners(self, node: fx.Node) -> Owners:
        if node.op == "get_attr":
            return frozenset({str(node.target)})
        if is_hook_point(node):
            return (*(self.owners[n] for n in node.args[0]), frozenset({node}))  # type: ignore[union-attr, index]
        if is_getitem(node):
            of_all = self.owners[node.args[0]]  # type: ignore[index]
            return of_all[node.args[1]] if isinstance(of_all, tuple) else of_all  # type: ignore[index]
        if uncaptured(node) is not None:  # its code may return what it got
            return self._of(node.all_input_nodes) | {node}
        if rule_name(node) in _RETURN_THEIR_INPUT:
            return self._of(node.all_input_nodes[:1])
        return self._of(returned_arguments(node)) or frozenset({node})

    def _of(self, nodes: Iterable[fx.Node]) -> frozenset[fx.Node | str]:
        return frozenset().union(*(_flat(self.owners[n]) for n in nodes))


def returned_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments of an operator that its result may share memory with, the written one included."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    schema = node.target._schema
    if all(result.alias_info is None for result in schema.returns):
        return []
    found: list[fx.Node] = []
    for index, argument in enumerate(schema.arguments):
        value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        if argument.alias_info is not None:
            found += [n for n in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(n, fx.Node)]
    return found


def _flat(owners: Owners) -> frozenset[fx.Node | str]:
    return frozenset().union(*map(_flat, owners)) if isinstance(owners, tuple) else owners
