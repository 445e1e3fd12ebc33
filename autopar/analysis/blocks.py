"""The blocks of a program: what each call of a layer that the model repeats computes, if it may run again.

    embed -> [ layer 0 ] -> [ layer 1 ] -> ... -> norm -> head       a stage that recomputes keeps what arrows carry

What lies outside of layers is no block: of an embedding hardly anything is kept, and making logits again would take
longer than any layer for the bytes that it saves.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property

from torch import fx

from autopar.analysis.buffer_writes import unrepeatable_nodes
from autopar.analysis.kept_products import Kept, kept_products
from autopar.analysis.operators import compute_nodes, written_arguments
from autopar.capture.module_hooks import is_hook_point
from autopar.capture.program import Program
from autopar.capture.uncaptured import uncaptured

_FEWEST = 2  # operators of a block: a single one keeps its operands, which are what enters the block


class Blocks:
    """The blocks of a program, and which parts of them may run again.

    `storages`: node name -> keys of its memory (`Batching.storages`).
    """

    def __init__(self, program: Program, storages: Mapping[str, frozenset[int]]) -> None:
        self._program, self._storages = program, storages
        self._order = {node: place for place, node in enumerate(program.graph.nodes)}

    @cached_property
    def layers(self) -> tuple[frozenset[fx.Node], ...]:
        """The operators of every call of a layer, in the order of their first operators."""
        paths, found = set(self._program.layers), defaultdict[str, set[fx.Node]](set)
        for node in compute_nodes(self._program.graph) if paths else ():
            for call, (path, *_) in (node.meta.get("nn_module_stack") or {}).items():
                if re.sub(r"@\d+$", "", str(path)) in paths:  # export numbers the second call of a module
                    found[f"{call} {path}"].add(node)
                    break
        return tuple(
            frozenset(of) for of in sorted(found.values(), key=lambda of: min(map(self._order.__getitem__, of)))
        )

    @cached_property
    def all(self) -> tuple[frozenset[fx.Node], ...]:
        """Those of the layers' calls that may run again."""
        return tuple(layer for layer in self.layers if self.runs_again(layer))

    @cached_property
    def of(self) -> Mapping[fx.Node, int]:
        """Operator -> number of its block, among `all`."""
        return {node: number for number, block in enumerate(self.all) for node in block}

    @cached_property
    def kept(self) -> frozenset[fx.Node]:
        """Those of their operators whose results are kept where the rest runs again (`kept_of`)."""
        return frozenset(node for layer in self.all for node in self.kept_of(layer))

    def kept_of(self, layer: Iterable[fx.Node]) -> dict[fx.Node, Kept]:
        """The operators of a layer that keep every second product and attention, by kind."""
        written = frozenset(memory for _, of in self._writes for memory in of)
        in_order = sorted(layer, key=self._order.__getitem__)
        return kept_products(in_order, lambda node: not written.isdisjoint(self._memory([node])))

    def runs_again(self, part: Collection[fx.Node], copied: Collection[fx.Node] = ()) -> bool:
        """Whether operators of one layer, run again, compute what they have computed, and change nothing else.

        They may not if they have hooks, uncaptured code or a state, if what they read is overwritten after they have
        begun, or if others write between them. `copied`: operands that are copied for them.
        """
        if len(part) < _FEWEST or not self._nothing_special.issuperset(part):
            return False
        inside = set(part)
        first, last = (pick(map(self._order.__getitem__, part)) for pick in (min, max))
        read = {n for node in part for n in node.all_input_nodes if n not in inside and n not in copied}
        entering = self._memory(n for n in read if n.op != "get_attr")
        held = self._memory(n for n in read if n.op == "get_attr")
        span = [n for n in self._nodes[first : last + 1] if n.op not in ("get_attr", "placeholder")]
        between = len(span) > len(inside)
        for writer, written in self._writes:
            own, place = writer in inside, self._order[writer]
            if place > first - own and written & entering:
                return False  # what it reads again is no longer what it was
            if not own and written & held:
                return False
            if between and first <= place <= last:
                return False  # as one call, it might run before or after what it shares memory with
        return not between or _is_convex(inside, span)

    def _memory(self, nodes: Iterable[fx.Node]) -> frozenset[int]:
        return frozenset(key for node in nodes for key in self._storages.get(node.name, ()))

    @cached_property
    def _nodes(self) -> list[fx.Node]:
        return list(self._program.graph.nodes)

    @cached_property
    def _computing(self) -> list[fx.Node]:
        return compute_nodes(self._program.graph)

    @cached_property
    def _writes(self) -> list[tuple[fx.Node, frozenset[int]]]:
        """Operators that overwrite memory, and which."""
        written = ((node, self._memory(written_arguments(node))) for node in self._computing)
        return [(node, memory) for node, memory in written if memory]

    @cached_property
    def _nothing_special(self) -> set[fx.Node]:
        """Operators that by themselves may run again."""
        graph = self._program.graph
        refused = {*unrepeatable_nodes(graph), *written_through_views(graph, self._storages)}
        refused |= {n for n in self._computing if is_hook_point(n) or uncaptured(n) is not None}
        return set(self._computing) - refused


def _is_convex(inside: set[fx.Node], span: Iterable[fx.Node]) -> bool:
    """Whether no operator outside depends on one inside and is needed by another. `span`: from the first one inside to
    the last."""
    after: set[fx.Node] = set()
    for node in span:
        if any(n in after for n in node.all_input_nodes):
            if node in inside:
                return False
            after.add(node)
        elif node not in inside and any(n in inside for n in node.all_input_nodes):
            after.add(node)
    return True


def written_through_views(graph: fx.Graph, storages: Mapping[str, frozenset[int]]) -> list[fx.Node]:
    """Operators that write into a view of a buffer that others read: as unrepeatable as those that write it whole."""

    def memory(nodes: Iterable[fx.Node]) -> frozenset[int]:
        return frozenset(pointer for node in nodes for pointer in storages.get(node.name, ()))

    buffers = memory(node for node in graph.nodes if node.op == "get_attr")
    found = []
    for node in compute_nodes(graph):
        written = buffers & memory(a for a in written_arguments(node) if a.op != "get_attr")
        family = {n for n in graph.nodes if written & storages.get(n.name, frozenset())} if written else set()
        if any(user not in family for n in family for user in n.users):
            found.append(node)
    return found
