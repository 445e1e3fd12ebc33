"""Equal operators of a captured graph are measured a few times and share the result.

Operators cost the same if they are equal (`equality`) and their inputs have the same shapes, strides and dtypes. The
reduced graph runs the first `limit` of equal operators. An operator that reads the result of a left-out one gets a
stand-in tensor instead:

    x -> L1 -> L2 -> L3 -> L4 -> head      with limit 2:   x -> L1 -> L2,   stand-in for L4 -> head
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.capture.repeated_layers.equality import equal, operators_equal
from cost_models.graphs import get_attribute


@dataclass(frozen=True)
class TensorShape:
    """A tensor as a function of the number of samples: every size is `base + slope * rows`."""

    base: tuple[int, ...]
    slope: tuple[int, ...]
    order: tuple[int, ...]  # dimensions by descending stride
    dtype: torch.dtype

    @classmethod
    def fit(cls, rows: tuple[int, int], tensors: tuple[torch.Tensor, torch.Tensor]) -> TensorShape:
        """The shape through two tensors of the same rank: `tensors[i]` is the value for `rows[i]` samples."""
        a, b = tensors
        slope = tuple((x - y) // (rows[0] - rows[1]) for x, y in zip(a.shape, b.shape, strict=True))
        base = tuple(x - s * rows[0] for x, s in zip(a.shape, slope, strict=True))
        order = tuple(sorted(range(a.dim()), key=lambda d: (-a.stride()[d], d)))
        return cls(base, slope, order, a.dtype)

    def make(self, rows: int, device: torch.device) -> torch.Tensor:
        """A tensor for `rows` samples with random values and this stride order."""
        sizes = [b + s * rows for b, s in zip(self.base, self.slope, strict=True)]
        tensor = torch.randn([sizes[d] for d in self.order], dtype=self.dtype, device=device)
        back = sorted(range(len(sizes)), key=lambda i: self.order[i])
        return tensor.permute(back)


@dataclass(frozen=True)
class ReducedGraph:
    """A graph without repeated operators: `module(*inputs, *stand_ins)` returns the outputs of the original graph, then
    the results that only left-out operators read (a backward must start from them, too)."""

    module: fx.GraphModule
    stand_ins: tuple[tuple[TensorShape, bool], ...]  # (shape, whether a gradient flows through it)
    n_outputs: int  # number of outputs of the original graph
    like: dict[str, tuple[str, ...]]  # node of the original graph -> nodes whose mean cost is its cost


def reduce_graph(
    module: fx.GraphModule,
    shapes: Mapping[str, TensorShape],
    keep: set[str],
    gradients: set[str],
    limit: int,
) -> ReducedGraph:
    """Leave out each operator that comes after `limit` equal ones.

    Args:
        module: a flat graph.
        shapes: by node, for nodes whose result is one tensor; operators without a shape are never left out.
        keep: operators that must not be left out, such as those that write in place.
        gradients: nodes whose values require grad.
        limit: number of equal operators that are kept.
    """
    measured = _choose_measured(module, shapes, keep, gradients, limit)
    kept = {node for node, like in measured.items() if like == [node]}
    output = module.graph.output_node()
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.find_nodes(op="placeholder"):
        copies[node] = graph.node_copy(node)
    stand_ins = []
    for node in measured:
        if node not in kept and any(user in kept for user in node.users):
            copies[node] = graph.placeholder(f"stand_in_{node.name}")
            stand_ins.append((shapes[node.name], node.name in gradients))
    for node in module.graph.nodes:
        if node in kept or node.op == "get_attr":
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    unread = [
        node
        for node in kept
        if node.name in gradients and node.name in shapes and not any(u in kept or u is output for u in node.users)
    ]
    results: Any = fx.map_arg(output.args[0], lambda n: copies[n])
    graph.output((*results, *(copies[node] for node in unread)))
    names = {node.name: tuple(n.name for n in like) for node, like in measured.items()}
    return ReducedGraph(fx.GraphModule(module, graph), tuple(stand_ins), len(results), names)


def _choose_measured(
    module: fx.GraphModule, shapes: Mapping[str, TensorShape], keep: set[str], gradients: set[str], limit: int
) -> dict[fx.Node, list[fx.Node]]:
    """For each operator the operators to measure for it: itself, or the first `limit` equal ones."""

    def same_input(a: fx.Node, b: fx.Node) -> bool:
        if "get_attr" in (a.op, b.op):
            x, y = (get_attribute(module, str(n.target)) if n.op == "get_attr" else None for n in (a, b))
            return a is b or (isinstance(x, torch.Tensor) and equal(x, y))
        if a.name in shapes and b.name in shapes:
            return shapes[a.name] == shapes[b.name] and (a.name in gradients) == (b.name in gradients)
        return a is b

    outputs = set(module.graph.output_node().all_input_nodes)
    groups: dict[Any, list[list[fx.Node]]] = defaultdict(list)  # by function: lists of equal operators
    measured: dict[fx.Node, list[fx.Node]] = {}
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        same = next((group for group in groups[node.target] if operators_equal(group[0], node, same_input)), None)
        if same is None:
            same = []
            groups[node.target].append(same)
        shape = shapes.get(node.name)
        may_be_left_out = (
            node.op == "call_function"
            and shape is not None
            and shape.dtype.is_floating_point  # a stand-in has random values, which are no indices
            and node.name not in keep
            and node not in outputs
        )
        if may_be_left_out and len(same) >= limit:
            measured[node] = same[:limit]
        else:
            same.append(node)
            measured[node] = [node]
    return measured
