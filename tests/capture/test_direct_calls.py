"""Stage code calls operators by other functions than its graph names: they must do the same, bit for bit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn

from autopar.capture.direct_calls import direct_functions, with_direct_calls

aten = torch.ops.aten
NOT_DISPATCHED = {"aten::contiguous", "aten::sym_size"}  # by the bindings, where there is nothing to compute
Operator = Callable[..., Any]


def leaf(*shape: int) -> torch.Tensor:
    """Positive numbers, so that every function has values and derivatives."""
    return (torch.rand(*shape) + 0.5).requires_grad_()


def samples() -> dict[Operator, list[tuple[Any, ...]]]:
    """Arguments for every operator; those of one entry reach different rules of the parsers, and their defaults."""
    x, y, image, mask = leaf(2, 4), leaf(2, 4), leaf(2, 4, 6, 6), torch.tensor([[True, False, True, False]] * 2)
    index, square = torch.tensor([[1, 0], [0, 1]]), leaf(2, 4, 4)
    elementwise = ["neg", "abs", "exp", "log", "sqrt", "rsqrt", "square", "reciprocal", "sin", "cos", "tanh", "sigmoid"]
    elementwise += ["erf", "relu", "silu", "elu", "hardswish", "hardtanh", "leaky_relu", "gelu", "clone", "detach", "t"]
    elementwise += ["sum", "mean", "contiguous"]
    of: dict[Operator, list[tuple[Any, ...]]] = {getattr(aten, name).default: [(x,)] for name in elementwise}
    for name in ("add", "sub", "mul", "div"):
        of[getattr(aten, name).Tensor] = [(x, y), (x, 2), (x, 2.5), (x, leaf(4))]
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        of[getattr(aten, name).Tensor] = [(x, y)]
        of[getattr(aten, name).Scalar] = [(x, 1), (x, 0.7)]
    of[aten.gelu.default].append((x,))
    of |= {
        aten.relu_.default: [(leaf(2, 3).exp(),)],
        aten.silu_.default: [(leaf(2, 3).exp(),)],
        aten.add_.Tensor: [(leaf(2, 3).exp(), leaf(2, 3))],
        aten.mul_.Tensor: [(leaf(2, 3).exp(), leaf(2, 3))],
        aten.pow.Tensor_Scalar: [(x, 2), (x, 0.5)],
        aten.pow.Tensor_Tensor: [(x, y)],
        aten.maximum.default: [(x, y)],
        aten.minimum.default: [(x, y)],
        aten.clamp.default: [(x, 0.6, 0.9), (x, None, 0.9), (x, 0.6)],
        aten.logical_and.default: [(mask, ~mask)],
        aten.logical_or.default: [(mask, ~mask)],
        aten.logical_not.default: [(mask,)],
        aten.bitwise_and.Tensor: [(mask, ~mask)],
        aten.bitwise_or.Tensor: [(mask, ~mask)],
        aten.bitwise_not.default: [(mask,)],
        aten.where.self: [(mask, x, y)],
        aten.masked_fill.Scalar: [(x, mask, 0.0), (x, mask, float("-inf"))],
        aten.masked_fill.Tensor: [(x, mask, torch.tensor(0.25))],
        aten.matmul.default: [(x, leaf(4, 3)), (square, x.unsqueeze(-1))],
        aten.mm.default: [(x, leaf(4, 3))],
        aten.bmm.default: [(square, leaf(2, 4, 3))],
        aten.addmm.default: [(leaf(3), x, leaf(4, 3))],
        aten.baddbmm.default: [(leaf(2, 4, 3), square, leaf(2, 4, 3))],
        aten.linear.default: [(x, leaf(3, 4), leaf(3)), (x, leaf(3, 4))],
        aten.conv1d.default: [(square, leaf(3, 4, 2)), (square, leaf(3, 4, 2), leaf(3), [2], [1])],
        aten.conv2d.default: [(image, leaf(8, 2, 3, 3), None, [2, 2], [1, 1], [1, 1], 2), (image, leaf(3, 4, 3, 3))],
        aten.conv3d.default: [(image.unsqueeze(0), leaf(3, 2, 2, 2, 2))],
        aten.embedding.default: [(leaf(5, 3), index), (leaf(5, 3), index, 1), (leaf(5, 3), index, -1, False, True)],
        aten.dropout.default: [(x, 0.0, True), (x, 0.3, False)],
        aten.softmax.int: [(x, -1), (x, 0, torch.float64)],
        aten.log_softmax.int: [(x, -1)],
        aten.layer_norm.default: [(x, [4], leaf(4), leaf(4), 1e-3), (x, [4])],
        aten.group_norm.default: [(image, 2), (image, 2, leaf(4), leaf(4), 1e-3)],
        aten.batch_norm.default: [
            (image, leaf(4), leaf(4), torch.zeros(4), torch.ones(4), training, 0.1, 1e-5, True)
            for training in (False, True)
        ],
        aten.instance_norm.default: [(image, leaf(4), leaf(4), None, None, True, 0.1, 1e-5, True)],
        aten.rms_norm.default: [(x, [4], leaf(4), 1e-3), (x, [4])],
        aten.scaled_dot_product_attention.default: [
            (image, image, image),
            (image, image, image, leaf(6, 6)),
            (image, image, image, None, 0.0, True),
        ],
        aten.max_pool1d.default: [(square, [2], [1], [1]), (square, [2])],
        aten.max_pool2d.default: [(image, [3, 3], [2, 2], [1, 1]), (image, [3, 3])],
        aten.max_pool3d.default: [(image.unsqueeze(0), [2, 2, 2])],
        aten.avg_pool2d.default: [(image, [2, 2], [1, 1]), (image, [2, 2])],
        aten.avg_pool3d.default: [(image.unsqueeze(0), [2, 2, 2])],
        aten.adaptive_avg_pool2d.default: [(image, [1, 1]), (image, [2, 3])],
        aten.sum.dim_IntList: [(x, [0]), (x, [-1], True)],
        aten.mean.dim: [(x, [0]), (x, [-1], True)],
        aten.cumsum.default: [(x, 1)],
        aten.gather.default: [(x, 1, index)],
        aten.index_select.default: [(x, 1, index[0])],
        aten.reshape.default: [(x, [4, -1]), (x.t(), [8])],
        aten.view.default: [(x, [4, -1])],
        aten.view_as.default: [(x, torch.rand(4, 2))],
        aten.expand.default: [(x, [3, -1, 4])],
        aten.expand_as.default: [(x, torch.rand(3, 2, 4))],
        aten.transpose.int: [(x, 0, 1)],
        aten.permute.default: [(image, [0, 2, 3, 1])],
        aten.unsqueeze.default: [(x, -1)],
        aten.squeeze.dim: [(leaf(2, 1), 1), (x, 1)],
        aten.select.int: [(x, 1, -1)],
        aten.narrow.default: [(x, 1, 1, 2)],
        aten.flatten.using_ints: [(image,), (image, 1), (image, 1, 2)],
        aten.cat.default: [([x, y],), ([x, y], 1)],
        aten.stack.default: [([x, y],), ([x, y], -1)],
        aten.chunk.default: [(x, 2), (x, 2, 1)],
        aten.unbind.int: [(x,), (x, 1)],
        aten.split_with_sizes.default: [(x, [1, 1]), (x, [1, 3], 1)],
        aten.sym_size.int: [(x, 1)],
    }
    return of


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


def outcome(function: Operator, arguments: tuple[Any, ...]) -> tuple[list[str], Any]:
    """What torch dispatches for a call and its backward, and all that comes out of them."""
    copies: dict[int, torch.Tensor] = {}

    def fresh(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(fresh(item) for item in value)
        if isinstance(value, torch.Tensor) and id(value) not in copies:
            own = value.detach().clone(memory_format=torch.preserve_format).requires_grad_(value.requires_grad)
            copies[id(value)] = own if value.is_leaf else own * 1  # operators in place refuse leaves
        return copies[id(value)] if isinstance(value, torch.Tensor) else value

    mine = fresh(arguments)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = function(*mine)
        outputs = list(tensors_in(result))
        torch.autograd.backward([x.sum() for x in outputs if x.requires_grad])
    names = [event.name for event in profile.events() if "::" in event.name or "Backward" in event.name]
    events = [name for name in names if name not in NOT_DISPATCHED]
    read = [x for x in tensors_in(mine) if x.is_leaf]
    views = [(x._base is not None, x.stride(), type(x.grad_fn).__name__, x.dtype) for x in outputs]
    written = [x.detach() for x in tensors_in(mine)]
    numbers = [x.detach() for x in outputs] + [x.grad for x in read if x.grad is not None] + written
    rest = result if isinstance(result, (int, float)) else None
    return events, ([x.to_dense() for x in numbers], views, [x.grad is None for x in read], rest)


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
def test_direct_calls_reach_the_same_operators_with_the_same_results(autocast: bool) -> None:
    torch.manual_seed(0)
    given = samples()
    assert given.keys() == direct_functions().keys()  # also: this version of torch has all of these bindings in C
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for operator, calls in given.items():
            for arguments in calls:
                events, (numbers, *rest) = outcome(operator, arguments)
                direct_events, (direct_numbers, *direct_rest) = outcome(direct_functions()[operator], arguments)
                assert direct_events == events, operator
                assert direct_rest == rest, operator
                for direct, number in zip(direct_numbers, numbers, strict=True):
                    assert torch.equal(direct, number), operator


def test_generated_code_calls_just_these_functions() -> None:
    """The code of a graph calls functions by name, and torch may have another function of that name."""
    for function in direct_functions().values():
        graph = fx.Graph()
        graph.output(graph.call_function(function, (graph.placeholder("x"),), name="y"))
        forward: Any = fx.GraphModule({}, graph).forward
        (line,) = (line for line in inspect.getsource(forward).splitlines() if line.strip().startswith("y = "))
        name = line.partition("=")[2].partition("(")[0].strip()
        assert eval(name, forward.__globals__) is function


class Own(nn.Module):
    """Code of its own, which replaces its tensor."""

    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shift = self.shift + 1
        return x + self.shift


def test_the_code_reads_the_same_tensors_and_modules() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    called = graph.call_module("own", (x,))
    shift, weight = graph.get_attr("own.shift"), graph.get_attr("layer.weight")
    kept = graph.call_function(aten.dropout.default, (called, 0.1, False))
    graph.output((graph.call_function(aten.mul.Tensor, (kept, weight)), shift))
    layer, own = nn.Module(), Own()
    layer.weight = nn.Parameter(torch.rand(4))
    module = fx.GraphModule({"own": own, "own.shift": own.shift, "layer.weight": layer.weight}, graph)
    direct = with_direct_calls(module)
    value = torch.rand(2, 4)
    for step in range(1, 3):
        layer.weight.data.mul_(2)
        product, seen = direct(value)
        assert torch.equal(product, (value + step) * layer.weight)
        assert torch.equal(seen, torch.full((4,), float(step)))
    product.sum().backward()
    assert layer.weight.grad is not None
    assert module.graph.find_nodes(op="call_function", target=aten.dropout.default)  # the original stays as it is
