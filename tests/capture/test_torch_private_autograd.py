"""What autopar asks of torch's autograd engine is what torch's own backward does."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn.functional import layer_norm, linear

from autopar.capture import torch_private_autograd
from autopar.capture.torch_private_autograd import weight_gradients


def test_this_file_tests_every_function_of_the_module() -> None:
    here = inspect.getsource(sys.modules[__name__])
    own = [n for n, f in vars(torch_private_autograd).items() if inspect.isfunction(f) and not n.startswith("_")]
    assert len(own) == 4
    assert [name for name in own if f"{name}(" not in here] == []


def test_a_backward_by_the_engine_is_torchs_backward() -> None:
    x = torch.randn(3, requires_grad=True)
    for keep in (True, False):
        y, z = x.square(), 3 * x
        roots, gradients = [y, z], [torch.randn(3), torch.randn(3)]
        torch.autograd.backward(roots, gradients, retain_graph=True)
        wanted, x.grad = x.grad, None
        torch_private_autograd.run_backward(roots, gradients, keep)
        found, x.grad = x.grad, None
        assert wanted is not None
        assert found is not None
        assert torch.equal(found, wanted)
        if not keep:
            with pytest.raises(RuntimeError, match="second time"):
                torch_private_autograd.run_backward(roots, gradients, keep)


def test_gradients_of_some_tensors_are_those_of_torch() -> None:
    x, unused = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    y, gradient = x.sin(), torch.randn(3)
    wanted = torch.autograd.grad([y], [x, unused], [gradient], retain_graph=True, allow_unused=True)
    for keep in (True, False):
        found = torch_private_autograd.run_gradients([y], [x, unused], [gradient], keep)
        assert found[0] is not None
        assert torch.equal(found[0], wanted[0])
        assert found[1] is wanted[1] is None
    with pytest.raises(RuntimeError, match="second time"):
        torch_private_autograd.run_gradients([y], [x], [gradient], False)
    assert x.grad is None


def test_a_backward_of_what_needs_no_gradient_is_refused_as_torch_does() -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch_private_autograd.run_backward([torch.ones(1)], [torch.ones(1)], False)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 2 * gradients[0]


def test_the_backward_of_an_autograd_function_is_told_from_those_of_operators() -> None:
    x = torch.randn(3, requires_grad=True)
    nodes = [get_gradient_edge(y).node for y in (Twice.apply(x), x.sin(), x.square().sum())]
    assert [torch_private_autograd.is_function(node) for node in nodes] == [True, False, False]


def leaf(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def by_row(*shape: int) -> torch.Tensor:
    return leaf(*shape).square()


def by_column(rows: int, columns: int) -> torch.Tensor:
    return leaf(columns, rows).square().t()


# Each call's node, and the numbers of those of its edges that lead to parameters.
CALLS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str, list[int]]] = {
    "linear": (lambda x: linear(x[0], by_row(5, 6), leaf(5)), "AddmmBackward0", [0, 2]),
    "linear of a batch": (lambda x: linear(x, by_row(5, 6), leaf(5)), "AddmmBackward0", [0, 2]),
    "linear without bias": (lambda x: linear(x, by_row(5, 6)), "MmBackward0", [1]),
    "mm by row": (lambda x: x[0] @ by_row(6, 5), "MmBackward0", [1]),
    "mm by column": (lambda x: x[0] @ by_column(6, 5), "MmBackward0", [1]),
    "mm in half the rows": (lambda x: x[0].t()[:, ::2] @ by_row(2, 5), "MmBackward0", [1]),
    "addmm": (lambda x: torch.addmm(leaf(5), x[0], by_row(6, 5)), "AddmmBackward0", [0, 2]),
    "addmm with factors": (
        lambda x: torch.addmm(leaf(3, 5), x[0], by_column(6, 5), beta=0.5, alpha=3.0),
        "AddmmBackward0",
        [0, 2],
    ),
    "bias alone": (lambda x: torch.addmm(leaf(5), x[0], torch.randn(6, 5)), "AddmmBackward0", [0]),
    "layer norm": (lambda x: layer_norm(x, [6], leaf(6), leaf(6)), "NativeLayerNormBackward0", [1, 2]),
    "layer norm of planes": (
        lambda x: layer_norm(x, [3, 6], leaf(3, 6), leaf(3, 6)),
        "NativeLayerNormBackward0",
        [1, 2],
    ),
    "layer norm without bias": (lambda x: layer_norm(x, [6], leaf(6)), "NativeLayerNormBackward0", [1]),
}


def node_in(output: torch.Tensor, name: str) -> Node:
    """The node of this name behind an output."""
    waiting = [get_gradient_edge(output).node]
    while waiting:
        node = waiting.pop()
        if node.name() == name:
            return node
        waiting += [child for child, _ in node.next_functions if child is not None]
    raise AssertionError(f"no {name}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("call", "name", "numbers"), CALLS.values(), ids=CALLS.keys())
def test_gradients_of_weights_are_those_of_autograd_bit_for_bit(
    call: Callable[[torch.Tensor], torch.Tensor], name: str, numbers: list[int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        output = call(torch.randn(2, 3, 6, requires_grad=True))
    finally:
        torch.set_default_dtype(before)
    node = node_in(output, name)
    edges = [GradientEdge(*node.next_functions[number]) for number in numbers]
    arrived: list[tuple[torch.Tensor, ...]] = []
    handle = node.register_prehook(arrived.append)
    wanted = torch.autograd.grad([output], edges, [torch.randn_like(output)], retain_graph=True)
    handle.remove()
    compute = weight_gradients(node, numbers)
    assert compute is not None
    found = compute(arrived[0][0])
    for number, edge, expected in zip(numbers, edges, wanted, strict=True):
        (summed,) = torch_private_autograd.run_gradients([edge], [edge], [found[number]], True)  # what was expanded
        assert summed is not None
        assert summed.dtype == expected.dtype
        assert summed.stride() == expected.stride()
        assert torch.equal(summed, expected)


def test_gradients_of_activations_and_of_other_operators_are_left_to_autograd() -> None:
    x, weight = torch.randn(3, 6, requires_grad=True), leaf(6, 5)
    product = node_in(x @ weight, "MmBackward0")
    assert weight_gradients(product, [0]) is None
    both = torch.randn(3, 6, dtype=torch.complex64, requires_grad=True) @ nn.Parameter(torch.ones(6, 5) * 1j)
    assert weight_gradients(node_in(both, "MmBackward0"), [1]) is None
    sine = x.sin().grad_fn
    assert sine is not None
    assert weight_gradients(sine, [0]) is None
