"""The sizes that tensor parallelism cuts: rows and columns of matrices, heads of attentions.

They depend on the model alone, not on a mesh, so that sizes that a degree does not divide are found beside degrees
that contradict each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import fx

from autopar.analysis.rules.notation import IndexKind, Rule
from autopar.errors.names import few
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
    representatives: Mapping[str, str] = field(default_factory=dict)  # of equal layers, see `Folded`

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
        """What is wrong with a tensor degree: matrices and attentions without a size that it divides. Equal ones share
        a line, and many lines are cut short."""
        names: dict[str, dict[str, None]] = {}  # what is wrong -> with which
        for name, wrong, sizes in self._cut(tensor):
            if not any(size % tensor == 0 for size in sizes):
                every = (name, *self._represented.get(name, ()))
                names.setdefault(wrong, {}).update(dict.fromkeys(self.keys.get(one, one) for one in every))
        problems = [f"{few(list(alike))} {wrong}" for wrong, alike in names.items()]
        more = [f"and {len(problems) - _MOST_NAMED} more like these"] if len(problems) > _MOST_NAMED else []
        return (*problems[:_MOST_NAMED], *more)

    def _cut(self, n: int) -> Iterator[tuple[str, str, Sequence[int]]]:
        """(node or parameter, what is wrong if the degree `n` divides none of its sizes, the sizes) of all to cut."""
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
                yield name, f"of shape {shape} cannot be cut over tensor={n}: no size is a multiple of it", sizes
            rule = self.facts.with_rule(node).rule
            if rule is None or matrices or not is_product(node):
                continue
            heads = list(self.heads(node.name, rule).values())
            if heads:
                counts = " x ".join(map(str, heads))
                yield node.name, f"of {counts} heads cannot be shared evenly by tensor={n} devices", heads

    @cached_property
    def _represented(self) -> Mapping[str, Sequence[str]]:
        """Kept node or parameter -> the equal ones that are left out of the graph."""
        found: dict[str, list[str]] = {}
        for name, kept in self.representatives.items():
            found.setdefault(kept, []).append(name)
        return found

    def _matrix(self, node: fx.Node) -> torch.nn.Parameter | None:
        value = get_attribute(self.task.module, str(node.target)) if node.op == "get_attr" else None
        return value if isinstance(value, torch.nn.Parameter) and value.dim() > 1 else None


def is_product(node: fx.Node) -> bool:
    """Whether a node may be a product of an attention."""
    return str(node.target).removeprefix("aten.").partition(".")[0] in _PRODUCTS
