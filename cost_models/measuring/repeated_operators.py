"""Repeated operators of a graph, measured a few times and shared.

Two operators cost the same if they are the same function with the same constants on inputs of the same shapes,
strides and dtypes. A transformer's twelve layers are one layer twelve times; the reduced graph runs the first `limit`
operators of every sort and hands stand-in tensors to those that read one it left out:

    x -> L1 -> L2 -> L3 -> L4 -> head      with limit 2:   x -> L1 -> L2,   stand-in of L4 -> head
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True)
class TensorShape:
    """A tensor as a function of the number of samples: every size is `base + slope * rows`."""

    base: tuple[int, ...]
    slope: tuple[int, ...]
    order: tuple[int, ...]  # dimensions by descending stride
    dtype: torch.dtype

    @classmethod
    def fit(cls, rows: tuple[int, int], tensors: tuple[torch.Tensor, torch.Tensor]) -> TensorShape:
        """The sizes that `tensors` have at `rows` samples each."""
        a, b = tensors
        slope = tuple((x - y) // (rows[0] - rows[1]) for x, y in zip(a.shape, b.shape, strict=True))
        base = tuple(x - s * rows[0] for x, s in zip(a.shape, slope, strict=True))
        order = tuple(sorted(range(a.dim()), key=lambda d: (-a.stride()[d], d)))
        return cls(base, slope, order, a.dtype)

    def make(self, rows: int, device: torch.device) -> torch.Tensor:
        """Random numbers in a tensor of this shape and stride order."""
        sizes = [b + s * rows for b, s in zip(self.base, self.slope, strict=True)]
        tensor = torch.randn([sizes[d] for d in self.order], dtype=self.dtype, device=device)
        back = sorted(range(len(sizes)), key=lambda i: self.order[i])
        return tensor.permute(back)


@dataclass(frozen=True)
class ReducedGraph:
    """`module(*inputs, *stand-ins)` returns the original outputs and then the loose ends."""

    module: fx.GraphModule
    stand_ins: tuple[tuple[TensorShape, bool], ...]  # and whether a gradient flows through it
    n_outputs: int  # of the original graph
    like: dict[str, tuple[str, ...]]  # node of the original graph -> the nodes measured for it


def reduce_graph(
    module: fx.GraphModule,
    shapes: Mapping[str, TensorShape],
    keep: set[str],
    gradients: set[str],
    limit: int,
) -> ReducedGraph:
    """Leave out operators of which `limit` of the same sort come first.

    `shapes`: of nodes whose result is one tensor; others are kept, as are the nodes named in `keep` (those that write
    in place, say). `gradients`: nodes through which a gradient flows.
    """
    sorts: dict[str, list[fx.Node]] = defaultdict(list)
    measured: dict[fx.Node, list[fx.Node]] = {}
    output = module.graph.output_node()
    direct = set(output.all_input_nodes)
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        shape = shapes.get(node.name)
        same = sorts[_signature(module, node, shapes, gradients)]
        skippable = (
            node.op == "call_function"
            and shape is not None
            and shape.dtype.is_floating_point
            and node.name not in keep
            and node not in direct
        )
        if skippable and len(same) >= limit:
            measured[node] = same[:limit]
        else:
            same.append(node)
            measured[node] = [node]
    kept = {n for n, like in measured.items() if like == [n]}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            copies[node] = graph.node_copy(node)
    stand_ins = []
    for node in module.graph.nodes:
        if node in measured and node not in kept and any(user in kept for user in node.users):
            copies[node] = graph.placeholder(f"stand_in_{node.name}")
            stand_ins.append((shapes[node.name], node.name in gradients))
    for node in module.graph.nodes:
        if node in kept or node.op == "get_attr":
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    loose = [
        n
        for n in kept
        if n.name in gradients and n.name in shapes and not any(u in kept or u is output for u in n.users)
    ]
    results: Any = fx.map_arg(output.args[0], lambda n: copies[n])
    graph.output((*results, *(copies[n] for n in loose)))
    like = {n.name: tuple(m.name for m in same) for n, same in measured.items()}
    return ReducedGraph(fx.GraphModule(module, graph), tuple(stand_ins), len(results), like)


def _signature(module: fx.GraphModule, node: fx.Node, shapes: Mapping[str, TensorShape], gradients: set[str]) -> str:
    def describe(value: Any) -> Any:
        if isinstance(value, fx.Node):
            if value.op == "get_attr":
                attribute: Any = module
                for name in str(value.target).split("."):
                    attribute = getattr(attribute, name)
                if isinstance(attribute, torch.Tensor):
                    return (
                        "tensor",
                        tuple(attribute.shape),
                        attribute.stride(),
                        attribute.dtype,
                        attribute.requires_grad,
                    )
                return value.name
            shape = shapes.get(value.name)
            return value.name if shape is None else (shape, value.name in gradients)
        if isinstance(value, (list, tuple)):
            return tuple(describe(v) for v in value)
        return value

    arguments = tuple(describe(a) for a in node.args)
    named = tuple((k, describe(v)) for k, v in sorted(node.kwargs.items()))
    return repr((node.op, str(node.target), arguments, named))
