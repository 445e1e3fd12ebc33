"""A backward in two parts gives what the whole gives, and computes nothing twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.lower.split_backward import input_part

WIDTH = 4


def layered(depth: int, width: int = 6) -> Callable[[torch.Tensor], torch.Tensor]:
    weights = [torch.randn(width, width, requires_grad=True) for _ in range(depth)]
    bias = torch.randn(width, requires_grad=True)

    def compute(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = torch.addmm(bias, torch.tanh(x), weight.t()) + x @ weight
        return x

    compute.leaves = [*weights, bias]  # type: ignore[attr-defined]
    return compute


@pytest.mark.parametrize("depth", [1, 3])
def test_the_parts_of_a_backward_give_what_the_whole_gives(depth: int) -> None:
    torch.manual_seed(0)
    compute = layered(depth)
    leaves: list[torch.Tensor] = compute.leaves  # type: ignore[attr-defined]
    x = torch.randn(4, 6, requires_grad=True)
    seed = torch.randn(4, 6)
    whole = torch.autograd.grad(compute(x), [x, *leaves], seed)
    apart = leaves[0].sum() * 2.0  # an output that does not depend on the input
    (of_apart,) = torch.autograd.grad(leaves[0].sum() * 2.0, [leaves[0]])
    found, weights = input_part([(compute(x), seed), (apart, torch.ones(()))], [x])
    assert found[0] is not None
    torch.testing.assert_close(found[0], whole[0])
    assert all(leaf.grad is None for leaf in leaves)
    weights.run(retain_graph=False)
    for index, (leaf, expected) in enumerate(zip(leaves, whole[1:], strict=True)):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, expected + (of_apart if index == 0 else 0.0))
    assert x.grad is None


def test_a_stage_without_inputs_that_need_gradients_does_all_in_the_weight_part() -> None:
    weight = torch.randn(3, 3, requires_grad=True)
    output = torch.ones(2, 3) @ weight
    found, weights = input_part([(output, torch.ones(2, 3))], [])
    assert found == []
    weights.run(retain_graph=False)
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, torch.full((3, 3), 2.0))


class Products(TorchDispatchMode):
    """Counts the matrix products of this thread."""

    count = 0
    recorded = False  # for a backward

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        self.recorded |= torch.is_grad_enabled()
        return func(*args, **(kwargs or {}))


class Doubled(torch.autograd.Function):
    """Its backward says when it runs."""

    runs: ClassVar[list[str]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        Doubled.runs.append("backward")
        return 2 * gradients[0]


def test_autograd_functions_run_in_the_input_part_for_they_may_exchange_gradients_with_other_devices() -> None:
    torch.manual_seed(0)
    first, second, apart = (torch.randn(4, 4, requires_grad=True) for _ in range(3))
    x = torch.randn(3, 4, requires_grad=True)

    def outputs() -> list[torch.Tensor]:
        return [torch.tanh(x @ Doubled.apply(first)) @ second, (second + Doubled.apply(apart)).square()]

    seeds = [torch.randn(3, 4), torch.randn(4, 4)]
    wanted = torch.autograd.grad(outputs(), [x, first, second, apart], seeds)
    Doubled.runs.clear()
    found, weights = input_part(list(zip(outputs(), seeds, strict=True)), [x])
    assert len(Doubled.runs) == 2
    assert all(leaf.grad is None for leaf in (first, second, apart))
    weights.run(retain_graph=False)
    assert len(Doubled.runs) == 2
    for gradient, expected in zip([*found, first.grad, second.grad, apart.grad], wanted, strict=True):
        assert gradient is not None
        assert torch.equal(gradient, expected)


def test_no_product_is_computed_in_both_parts() -> None:
    depth = 4
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(depth)))
    x = torch.randn(3, 6, requires_grad=True)
    output = layers(x)
    with Products() as early:
        _, weights = input_part([(output, torch.ones_like(output))], [x])
    with Products() as late:
        weights.run(retain_graph=False)
    assert (early.count, late.count) == (depth, depth)
    assert not late.recorded


# -- any use of parameters ---------------------------------------------------------------------------------------------


class Program:
    """Layers drawn at random over few parameters, which they read as they are, computed from, and both."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        generator = torch.Generator().manual_seed(0)
        numbers = {"generator": generator, "dtype": torch.float64}
        self.matrices = [torch.randn(WIDTH, WIDTH, **numbers).requires_grad_() for _ in range(2)]  # type: ignore[arg-type]
        self.vectors = [torch.randn(WIDTH, **numbers).requires_grad_() for _ in range(2)]  # type: ignore[arg-type]
        self.x = torch.randn(3, WIDTH, **numbers).requires_grad_()  # type: ignore[arg-type]
        one = st.integers(0, 1)
        layer = st.tuples(
            st.sampled_from([*_LAYERS]), st.sampled_from([*_MATRICES]), st.sampled_from([*_VECTORS]), one, one
        )
        self.layers = draw(st.lists(layer, min_size=1, max_size=5))
        self.outputs = draw(st.sets(st.integers(0, len(self.layers) - 1)))  # others than the last one
        self.aside = draw(st.booleans())  # an output that does not depend on the input

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [*self.matrices, *self.vectors]

    def roots(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        x, computed = self.x, dict[tuple[str, int], torch.Tensor]()
        found = []
        for number, (name, of_matrix, of_vector, i, j) in enumerate(self.layers):
            w, v = self.matrices[i], self.vectors[j]
            # A result that several layers read is computed once.
            matrix = computed.setdefault((of_matrix, i), _MATRICES[of_matrix](w))
            x = _LAYERS[name](x, matrix, _VECTORS[of_vector](v, w))
            if number in self.outputs or number == len(self.layers) - 1:
                found.append(x)
        if self.aside:
            found.append(self.matrices[0].tanh())
        return [(x, torch.linspace(-1, 2, x.numel(), dtype=x.dtype).reshape(x.shape)) for x in found]


_MATRICES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "w": lambda w: w,
    "w.t()": lambda w: w.t(),
    "3 w": lambda w: 3 * w,
    "w / norm": lambda w: w / w.norm(),
    "w w": lambda w: w @ w,
}
_VECTORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "v": lambda v, w: v,
    "2 v": lambda v, w: 2 * v,
    "sum of w": lambda v, w: w.sum(0),
    "v + row of w": lambda v, w: v + w[0],
}
_LAYERS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mm": lambda x, w, v: torch.tanh(x) @ w,
    "mm, weight first": lambda x, w, v: (w @ x.t()).t(),
    "addmm": lambda x, w, v: torch.addmm(v, torch.tanh(x), w),
    "convolution": lambda x, w, v: functional.conv1d(x.unsqueeze(-1), w.unsqueeze(-1), v).squeeze(-1),
    "bmm": lambda x, w, v: torch.bmm(w.expand(len(x), -1, -1), torch.tanh(x).unsqueeze(-1)).squeeze(-1),
    "baddbmm": lambda x, w, v: torch.baddbmm(v, x.unsqueeze(1), w.expand(len(x), -1, -1)).squeeze(1),
    "layer norm": lambda x, w, v: functional.layer_norm(x, (WIDTH,), v, w[0]),
    "sum": lambda x, w, v: x * v + x.sin(),
}


@given(st.data(), st.booleans())
@settings(max_examples=examples(150))
def test_parameters_may_be_read_in_any_way(data: st.DataObject, retain: bool) -> None:
    program = Program(data.draw)
    roots = program.roots()
    wanted = torch.autograd.grad(
        [root for root, _ in roots], [program.x, *program.leaves], [g for _, g in roots], allow_unused=True
    )
    found, weights = input_part(program.roots(), [program.x])
    assert all(leaf.grad is None for leaf in program.leaves)
    weights.run(retain_graph=retain)
    for gradient, expected in zip([*found, *(leaf.grad for leaf in program.leaves)], wanted, strict=True):
        if expected is None:
            assert gradient is None
        else:
            assert gradient is not None
            torch.testing.assert_close(gradient, expected)
