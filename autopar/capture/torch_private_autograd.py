"""All uses of torch's private API for backwards, each in one function, with the reason why no public API does it.

`tests/capture/test_torch_private_autograd.py` covers each of them, so a torch upgrade that changes one fails a test.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node


def run_backward(
    roots: Sequence[torch.Tensor | GradientEdge],
    gradients: Sequence[torch.Tensor],
    keep_graph: bool,
    leaves: Sequence[GradientEdge] = (),
) -> None:
    """torch.autograd.backward without its checks of `gradients`, which cost as much as a small operator's backward, and
    without carrying context variables over to autograd's own threads, which workers do not use.

    `gradients`: of the same shapes as `roots`. `leaves`: those to reach, if not all; other operators are left out.
    """
    torch.autograd.Variable._execution_engine.run_backward(
        tuple(roots), tuple(gradients), keep_graph, False, tuple(leaves), allow_unreachable=True, accumulate_grad=True
    )


def run_gradients(
    roots: Sequence[torch.Tensor | GradientEdge],
    inputs: Sequence[torch.Tensor | GradientEdge],
    gradients: Sequence[torch.Tensor],
    keep_graph: bool,
) -> tuple[torch.Tensor | None, ...]:
    """torch.autograd.grad(allow_unused=True), without what `run_backward` leaves out, too."""
    found: tuple[torch.Tensor | None, ...] = torch.autograd.Variable._execution_engine.run_backward(
        tuple(roots), tuple(gradients), keep_graph, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return found


def is_function(node: Node) -> bool:
    """Whether a node is the backward of a torch.autograd.Function written in Python. The class has no public name."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


_Product = Callable[[torch.Tensor], torch.Tensor]
WeightGradients = Callable[[torch.Tensor], dict[int, torch.Tensor]]
"""From the gradient of a node's output, by number of the node's edge, what the node sends along the wanted edges."""


def weight_gradients(node: Node, wanted: Collection[int]) -> WeightGradients | None:
    """How a product or layer norm computes what it sends along `wanted`. None for other nodes and complex numbers, and
    where an edge leads to an activation.

    It is computed as autograd does, from what the node has saved, also after autograd has freed that.

    Autograd itself would visit the whole graph behind the node for these edges, 2 us for each node, however few of them
    it needs.
    """
    name = node.name()
    saved: Any = node  # its attributes _saved_... are documented, but their names are those of torch's derivatives.yaml
    if name == "MmBackward0" and set(wanted) == {1}:
        product = _second_factor(saved._saved_self, saved, 1)
        return None if product is None else partial(_on_edges, {1: product})
    if name == "AddmmBackward0" and set(wanted) <= {0, 2}:
        beta = saved._saved_beta
        if isinstance(beta, complex):
            return None
        parts: dict[int, _Product] = {}
        if 0 in wanted:  # the engine adds up what was expanded
            parts[0] = lambda gradient: gradient if beta == 1 else gradient * beta
        if 2 in wanted:
            of_second = _second_factor(saved._saved_mat1, saved, saved._saved_alpha)
            if of_second is None:
                return None
            parts[2] = of_second
        return partial(_on_edges, parts)
    if name == "NativeLayerNormBackward0" and set(wanted) <= {1, 2}:
        shape, mean, rstd = saved._saved_normalized_shape, saved._saved_result1, saved._saved_result2
        inputs = saved._saved_input, shape, mean, rstd, saved._saved_weight, saved._saved_bias

        def of_layer_norm(gradient: torch.Tensor) -> dict[int, torch.Tensor]:
            found = torch.ops.aten.native_layer_norm_backward(gradient, *inputs, [False, 1 in wanted, 2 in wanted])
            return {edge: found[edge] for edge in wanted}

        return of_layer_norm
    return None


def _on_edges(parts: Mapping[int, _Product], gradient: torch.Tensor) -> dict[int, torch.Tensor]:
    return {edge: part(gradient) for edge, part in parts.items()}


def _second_factor(first: torch.Tensor, saved: Any, alpha: Any) -> _Product | None:
    """mm_mat2_backward of torch/csrc/autograd/FunctionsManual.cpp: with the strides of the factor."""
    if first.is_complex() or first.layout != torch.strided:
        return None
    by_column = tuple(saved._saved_mat2_sym_strides) == (1, saved._saved_mat2_sym_sizes[0])

    def product(gradient: torch.Tensor) -> torch.Tensor:
        found = gradient.t().mm(first).t() if by_column else first.t().mm(gradient)
        return found if alpha == 1 else found * alpha

    return product
