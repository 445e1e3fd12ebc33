"""All uses of torch's private API for backwards, each in one function, with the reason why no public API does it.

`tests/capture/test_torch_private_autograd.py` covers each of them, so a torch upgrade that changes one fails a test.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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


def weight_gradients(
    node: Node, gradients: Sequence[torch.Tensor | None], wanted: Collection[int]
) -> dict[int, torch.Tensor] | None:
    """By number of the node's edge, what a product or layer norm sends along `wanted`, as autograd computes it, from
    what the node has saved; None for other nodes and complex numbers, and where an edge leads to an activation.

    `gradients`: of the node's outputs. Autograd itself would visit the whole graph behind the node for these edges,
    2 us for each node, however few of them it needs.
    """
    name, (gradient, *_) = node.name(), gradients
    saved: Any = node  # its attributes _saved_... are documented, but their names are those of torch's derivatives.yaml
    if gradient is None or gradient.is_complex() or gradient.layout != torch.strided:
        return None
    if name == "MmBackward0" and set(wanted) == {1}:
        return {1: _second_factor(gradient, saved._saved_self, saved, 1)}
    if name == "AddmmBackward0" and set(wanted) <= {0, 2}:
        found = {}
        if 0 in wanted:  # the engine adds up what was expanded
            found[0] = gradient if saved._saved_beta == 1 else gradient * saved._saved_beta
        if 2 in wanted:
            found[2] = _second_factor(gradient, saved._saved_mat1, saved, saved._saved_alpha)
        return found
    if name == "NativeLayerNormBackward0" and set(wanted) <= {1, 2}:
        shape, mean, rstd = saved._saved_normalized_shape, saved._saved_result1, saved._saved_result2
        inputs = saved._saved_input, shape, mean, rstd, saved._saved_weight, saved._saved_bias
        parts = torch.ops.aten.native_layer_norm_backward(gradient, *inputs, [False, 1 in wanted, 2 in wanted])
        return {edge: parts[edge] for edge in wanted}
    return None


def _second_factor(gradient: torch.Tensor, first: torch.Tensor, saved: Any, alpha: Any) -> torch.Tensor:
    """mm_mat2_backward of torch/csrc/autograd/FunctionsManual.cpp: with the strides of the factor."""
    by_column = tuple(saved._saved_mat2_sym_strides) == (1, saved._saved_mat2_sym_sizes[0])
    found = gradient.t().mm(first).t() if by_column else first.t().mm(gradient)
    return found if alpha == 1 else found * alpha
