"""What a loss divides by, as a graph of its own: computed from targets and inputs before the pipeline starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autopar.analysis.operators import is_random
from autopar.analysis.placed_graph import PlacedGraph, placeholders_first
from autopar.capture.cleanup import CrossEntropyArguments
from autopar.capture.program import Program, is_getitem
from cost_models.graphs import get_attribute


@dataclass(frozen=True)
class Count:
    """What a loss divides by, as a graph over leaves that are known before the pipeline starts."""

    graph: PlacedGraph  # (*leaves) -> a tensor with one element
    leaves: tuple[tuple[str, int], ...]  # ("target", flat index) or ("input", flat index of the model's inputs)
    # Whether a mean over nothing turns a zero gradient into zeros, as cross-entropy does. A quotient makes it NaN.
    keeps_zeros: bool = False

    def of(self, inputs: Sequence[Any], targets: Sequence[Any]) -> torch.Tensor:
        """The count of one micro-batch, from its flat model inputs and flat targets, as float64 without dimensions."""
        leaves = [(targets if where == "target" else inputs)[index] for where, index in self.leaves]
        place = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), self.graph.captured)
        with torch.no_grad():
            count: torch.Tensor = self.graph.code(place)(*leaves)
            return count.double().reshape(())


class _Slice:
    """The part of a graph that some of its nodes depend on, copied into a graph of its own."""

    def __init__(self, program: Program, names: Mapping[str, tuple[str, int]]) -> None:
        """`names`: the placeholders that may be read -> the leaves that they are."""
        self.graph = fx.Graph()
        self.leaves: list[tuple[str, int]] = []
        self._module, self._device, self._names = program.graph_module, program.device, names
        self._copies: dict[fx.Node, fx.Node] = {}

    def add(self, root: fx.Node) -> fx.Node | None:
        """The copy of `root` and of all that it depends on; None where that is more than leaves and constants."""
        needed: dict[fx.Node, None] = {}
        stack = [root]
        while stack:
            node = stack.pop()
            if node not in needed:
                needed[node] = None
                stack.extend(node.all_input_nodes)
        if not all(self._is_known(node) for node in needed):
            return None
        for node in self._module.graph.nodes:
            if node in needed and node not in self._copies:
                if node.op == "placeholder":
                    self.leaves.append(self._names[node.name])
                self._copies[node] = self.graph.node_copy(node, self._copies.__getitem__)
                self._copies[node].meta.clear()  # the tracer's tensors
        return self._copies[root]

    def _is_known(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            return node.name in self._names
        if node.op == "get_attr":
            return not isinstance(get_attribute(self._module, str(node.target)), nn.Parameter)
        plain = isinstance(node.target, torch._ops.OpOverload) or is_getitem(node)
        return node.op == "call_function" and plain and not is_random(node, self._module)

    def finish(self, result: fx.Node, *, keeps_zeros: bool = False) -> Count:
        self.graph.output(result)
        placeholders_first(self.graph)
        placed = PlacedGraph(fx.GraphModule(self._module, self.graph), self._device)
        return Count(placed, tuple(self.leaves), keeps_zeros)


def count_of(program: Program, root: fx.Node, names: Mapping[str, tuple[str, int]]) -> Count | None:
    """The number that node `root` computes, as a graph over the leaves `names`; None where it depends on more."""
    part = _Slice(program, names)
    result = part.add(root)
    return None if result is None else part.finish(result)


def counted_targets(
    program: Program, found: CrossEntropyArguments, names: Mapping[str, tuple[str, int]]
) -> Count | None:
    """The number of targets that a cross-entropy averages; with class weights the sum of their weights."""
    part = _Slice(program, names)
    target = part.add(found.target)
    if target is None:
        return None
    counted = part.graph.call_function(torch.ops.aten.ne.Scalar, (target, found.ignore_index))
    if found.weight is not None:
        weight = part.add(found.weight)
        if weight is None:
            return None
        # An ignored target may be no class at all: class 0 stands in for it, and counts nothing.
        classes = part.graph.call_function(torch.ops.aten.mul.Tensor, (target, counted))
        weights = part.graph.call_function(torch.ops.aten.index.Tensor, (weight, [classes]))
        counted = part.graph.call_function(torch.ops.aten.mul.Tensor, (weights, counted))
    total = part.graph.call_function(torch.ops.aten.sum.default, (counted,))
    return part.finish(total, keeps_zeros=found.weight is None)
