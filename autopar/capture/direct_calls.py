"""Stage code that calls operators through torch's generated bindings, and reads its tensors from its own attributes.

```
    as captured    torch.ops.aten.linear.default(x, self.encoder.layer.weight, ...)    any operator, by its schema
    directly       torch._C._nn.linear(x, self.tensor_3, ...)                          one operator, by its own parser
```
Both reach the same entry of torch's dispatcher with the same arguments, so that kernels, autograd and autocast are the
same. `torch.ops` matches every call with a schema and boxes its arguments, which takes 1 to 5 us an operator on one
core of a server: a fifth of the forward of a small transformer. The model's own code called the bindings, too.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import fx, nn

from autopar.capture import torch_private
from cost_models.graphs import get_attribute

aten = torch.ops.aten

# Overloads whose binding has the name of the operator, and takes the arguments in the order of the schema.
_OF_TORCH = """
    add.Tensor sub.Tensor mul.Tensor div.Tensor neg abs exp log sqrt rsqrt square reciprocal sin cos tanh sigmoid erf
    relu relu_ pow.Tensor_Scalar pow.Tensor_Tensor maximum minimum clamp
    eq.Scalar eq.Tensor ne.Scalar ne.Tensor lt.Scalar lt.Tensor le.Scalar le.Tensor gt.Scalar gt.Tensor ge.Scalar
    ge.Tensor logical_and logical_or logical_not bitwise_and.Tensor bitwise_or.Tensor bitwise_not where.self
    masked_fill.Scalar masked_fill.Tensor
    matmul mm bmm addmm baddbmm conv1d conv2d conv3d embedding dropout softmax.int log_softmax.int
    layer_norm group_norm batch_norm instance_norm rms_norm max_pool1d max_pool2d max_pool3d
    sum sum.dim_IntList mean mean.dim cumsum gather index_select
    reshape transpose.int permute t unsqueeze squeeze.dim select.int narrow flatten.using_ints cat stack clone detach
    chunk unbind.int split_with_sizes
"""
_OF_FUNCTIONAL = "linear gelu scaled_dot_product_attention avg_pool2d avg_pool3d"
_OF_PRIVATE_NN = "silu silu_ leaky_relu hardswish hardtanh elu adaptive_avg_pool2d"
_OF_TENSOR = "view expand contiguous add_.Tensor mul_.Tensor view_as expand_as"


def with_direct_calls(module: fx.GraphModule) -> fx.GraphModule:
    """The code of `module` over the same tensors, modules and names of values, with direct calls."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    root: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    for number, node in enumerate(list(graph.nodes)):
        if node.op == "get_attr":
            value = get_attribute(module, str(node.target))
            if isinstance(value, torch.Tensor) and not _may_be_replaced(module, str(node.target)):
                node.target = f"tensor_{number}"
                tensors[node.target] = value
            root[str(node.target)] = value
        elif node.op == "call_module":
            root[str(node.target)] = module.get_submodule(str(node.target))
        elif node.op == "call_function" and _returns_its_input(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.op == "call_function":
            node.target = direct_functions().get(node.target, node.target)
    direct = fx.GraphModule(root, graph, class_name=type(module).__name__)
    # `nn.Module.__getattr__` would look them up in Python, hundreds of times for every micro-batch.
    direct.__dict__.update(tensors)
    return direct


@cache
def direct_functions() -> dict[Callable[..., Any], Callable[..., Any]]:
    """For operators, as graphs call them: functions that do the same in less time.

    Only functions in C: one that this version of torch writes in Python may do more than call the operator.
    """
    sources = [
        (_OF_TORCH, lambda name: getattr(torch, name, None)),
        (_OF_FUNCTIONAL, lambda name: getattr(nn.functional, name, None)),
        (_OF_PRIVATE_NN, torch_private.functional_binding),
        (_OF_TENSOR, lambda name: getattr(torch.Tensor, name, None)),
    ]
    found: dict[Callable[..., Any], Callable[..., Any]] = {aten.sym_size.int: torch.Tensor.size}
    for overloads, binding in sources:
        for operator, name in _named(overloads):
            function = binding(name)
            if isinstance(function, (types.BuiltinFunctionType, types.MethodDescriptorType)):
                found[operator] = function
    return found


def _named(overloads: str) -> Iterator[tuple[torch._ops.OpOverload, str]]:
    """The operators of such a list, each with its name."""
    for text in overloads.split():
        name, _, overload = text.partition(".")
        operator = getattr(getattr(aten, name, None), overload or "default", None)
        if operator is not None:
            yield operator, name


def _returns_its_input(node: fx.Node) -> bool:
    """Whether a node only returns its first argument: dropout in evaluation, or of nothing."""
    if node.target is not aten.dropout.default or node.kwargs or len(node.args) != 3:
        return False
    _, p, train = node.args
    return train is False or (isinstance(p, (int, float)) and p == 0)


def _may_be_replaced(module: fx.GraphModule, path: str) -> bool:
    """Whether a tensor belongs to a module with code of its own, which may assign another one."""
    owner: nn.Module = module
    for name in path.split(".")[:-1]:
        owner = getattr(owner, name)
        if type(owner) is not nn.Module:
            return True
    return False
