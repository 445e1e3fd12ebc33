"""The sizes that tensor parallelism cuts: rows and columns of matrices, heads of attentions.

They depend on the model alone, not on a mesh, so that sizes that a degree does not divide are found beside degrees
that contradict each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autopar.analysis.rules.notation import IndexKind, Rule
from autopar.planner.intra_op.sharding_task import GraphFacts, ShardingTask
from cost_models.graphs import get_attribute, tensors_in

_PRODUCTS = {"matmul", "bmm", "baddbmm", "scaled_dot_product_attention"}  # the products of attention
_MOST_NAMED = 6


@dataclass(frozen=True)
class CutSizes:
    """Of the operators of one graph."""

    task: ShardingTask
    facts: GraphFacts
    batch_dims: Mapping[str, int | None]  # node -> the dimension that counts samples
    keys: Mapping[str, str]  # node -> operator key

    def is_matrix(self, node: fx.Node) -> bool:
        """Whether a node is a trained parameter of two dimensions or more."""
        return self._matrix(node) is not None

    def heads(self, name: str, rule: Rule) -> Mapping[str, int]:
        """Indices, with their sizes, that both factors and the product of an attention have, besides the samples."""
        first, second, *_ = ({index for dims in operand for index in dims} for operand in rule.inputs)
        samples = self.batch_dims.get(name)
        own = {index for place, dims in enumerate(rule.outputs[0]) for index in dims if place != samples}
        shared = [index for index in rule.sizes if index in first & second & own]
        return {
            index: int(rule.sizes[index])
            for index in shared
            if rule.kinds[index] is IndexKind.KEPT and rule.sizes[index] > 1
        }

    def not_divided(self, tensor: int) -> tuple[str, ...]:
        """What is wrong with a tensor degree: matrices and attentions without a size that it divides; a few of many."""
        problems = tuple(dict.fromkeys(self._not_divided(tensor))) if tensor > 1 else ()
        more = (f"and {len(problems) - _MOST_NAMED} more like these",) if len(problems) > _MOST_NAMED else ()
        return (*problems[:_MOST_NAMED], *more)

    def _not_divided(self, n: int) -> Iterator[str]:
        for node in self.task.module.graph.nodes:
            if node.op in ("placeholder", "get_attr", "output") or not tensors_in(self.facts.values[node]):
                continue
            matrices = {
                str(source.target): tuple(matrix.shape)
                for source in node.all_input_nodes
                if (matrix := self._matrix(source)) is not None
            }
            for name, shape in matrices.items():
                sizes = shape[:2] if "conv" in str(node.target) else shape  # not the extent of a convolution's kernel
                if all(size % n for size in sizes):
                    yield (
                        f"{name} of shape {shape} cannot be cut over tensor={n}: no size is a multiple of it; "
                        f"give a divisor of one, such as {max(largest_divisor(size, n) for size in sizes)}"
                    )
            rule = self.facts.with_rule(node).rule
            if rule is None or matrices or not is_product(node):
                continue
            heads = list(self.heads(node.name, rule).values())
            if heads and all(size % n for size in heads):
                yield (
                    f"{self.keys.get(node.name, node.name)} has {' x '.join(map(str, heads))} heads, which tensor={n} "
                    f"devices cannot share evenly; give a divisor, such as {largest_divisor(heads[-1], n)}"
                )

    def _matrix(self, node: fx.Node) -> torch.nn.Parameter | None:
        value = get_attribute(self.task.module, str(node.target)) if node.op == "get_attr" else None
        return value if isinstance(value, torch.nn.Parameter) and value.dim() > 1 else None


def is_product(node: fx.Node) -> bool:
    """Whether a node may be a product of an attention."""
    return str(node.target).removeprefix("aten.").partition(".")[0] in _PRODUCTS


def largest_divisor(size: int, most: int) -> int:
    """Of `size`, at most `most`."""
    return max(d for d in range(1, min(size, most) + 1) if size % d == 0)
