"""Copies of torch.fx graphs over their own tensors, and running a graph node by node."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import fx, nn

Loss = Callable[[tuple[Any, ...]], torch.Tensor]
"""A scalar loss of the flat outputs of a graph."""


def call_function(node: fx.Node, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The result of one node's call: the default of `run_nodes`."""
    return function(*args, **kwargs)


def run_nodes(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    on_node: Callable[[fx.Node, Any], None] = lambda node, value: None,
    call: Callable[[fx.Node, Callable[..., Any], Any, Any], Any] = call_function,
) -> tuple[Any, ...]:
    """Run a flat graph node by node and return its outputs.

    `call(node, function, args, kwargs)` runs each node that computes, and `on_node(node, value)` receives its value.
    Values are freed after their last use, as the compiled program frees them.

    Raises:
        ValueError: the graph has no output node.
    """
    values: dict[fx.Node, Any] = {}
    remaining = {node: len(node.users) for node in module.graph.nodes}
    arguments = iter(inputs)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(arguments)
            continue
        if node.op == "output":
            result = fx.map_arg(node.args[0], lambda n: values[n])
            return tuple(result)
        if node.op == "get_attr":
            values[node] = get_attribute(module, node.target)
            continue
        args = fx.map_arg(node.args, lambda n: values[n])
        kwargs = fx.map_arg(node.kwargs, lambda n: values[n])
        if node.op == "call_module":
            function: Any = module.get_submodule(node.target)
        elif node.op == "call_method":
            function = getattr(type(args[0]), node.target)
        else:
            function = node.target
        value = call(node, function, args, kwargs)
        values[node] = value
        on_node(node, value)
        del args, kwargs, value
        for source in node.all_input_nodes:
            remaining[source] -= 1
        for last in (node, *node.all_input_nodes):
            if not remaining[last]:
                values.pop(last, None)
    raise ValueError("the graph has no output node")


def private_copy(module: fx.GraphModule, device: torch.device, *, gradients: bool = True) -> fx.GraphModule:
    """The graph over leaf tensors of its own that share storage with `module`'s parameters where they already lie on
    `device`, and with each other where those do. With `gradients`, they start as zeros so that every pass accumulates,
    like all micro-batches but the first."""
    replaced: dict[int, Any] = {}
    moved: dict[tuple[Any, ...], torch.Tensor] = {}

    def private(value: Any) -> Any:
        if id(value) in replaced:
            return replaced[id(value)]
        if isinstance(value, nn.Parameter):
            place = storage_key(value), value.storage_offset(), value.shape, value.stride()
            if place not in moved:
                moved[place] = value.detach().to(device)
            new: Any = nn.Parameter(moved[place].detach(), requires_grad=value.requires_grad)
            if new.requires_grad and gradients:
                new.grad = torch.zeros_like(new)
        elif isinstance(value, torch.Tensor):
            new = value.detach().to(device, copy=True)
        else:
            new = value
        replaced[id(value)] = new
        return new

    root: dict[str, Any] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            root[node.target] = private(get_attribute(module, node.target))
        elif node.op == "call_module":
            root[node.target] = private_module(module.get_submodule(node.target), private)
    return _over(root, module)


class Uncompiled(fx.GraphModule):
    """A graph whose Python code is made when it is needed: most copies of graphs are run node by node. (torch makes a
    class of its own for every graph module.)"""

    def recompile(self) -> Any:
        self.__dict__.pop("_code", None)
        type(self).forward = _compiled_first

    def _compile(self) -> None:
        with _COMPILING:
            if "_code" not in self.__dict__:
                super().recompile()

    @property
    def code(self) -> str:
        self._compile()
        return super().code


# Copies share their graph, and torch writes into its nodes while it makes code: two threads at once would mix up names.
_COMPILING = threading.Lock()


def _compiled_first(self: Uncompiled, *args: Any, **kwargs: Any) -> Any:
    """The forward of a graph whose code is not made yet."""
    self._compile()
    return type(self).forward(self, *args, **kwargs)


def _over(root: nn.Module | dict[str, Any], module: fx.GraphModule) -> fx.GraphModule:
    """The graph of `module` over the tensors of `root`. `module` stays the graph's owner: as an owner, the new module
    and its tensors would live as long as the graph."""
    private = Uncompiled(root, module.graph, class_name="Private")
    module.graph.owning_module = module
    return private


def private_module(module: nn.Module, private: Callable[[Any], Any]) -> nn.Module:
    """A copy of a module tree with `private(tensor)` for every parameter and buffer."""
    new = module.__new__(type(module))
    new.__dict__ = dict(module.__dict__)
    new._parameters = {k: None if v is None else private(v) for k, v in module._parameters.items()}
    new._buffers = {k: None if v is None else private(v) for k, v in module._buffers.items()}
    new._modules = {k: None if v is None else private_module(v, private) for k, v in module._modules.items()}
    if isinstance(new, nn.modules.batchnorm._BatchNorm) and new.momentum is None:
        counter = new.num_batches_tracked
        if counter is not None and counter.is_meta:
            new.momentum = 1.0  # the mean over all batches reads their number, which has no value here
    return new


def on_meta(value: Any) -> Any:
    """A tensor of the same sizes and strides without storage; a module over such parameters; other values as is."""
    if isinstance(value, nn.Module):
        copy = private_module(value, on_meta)
        return _over(copy, value) if isinstance(value, fx.GraphModule) else copy
    if not isinstance(value, torch.Tensor):
        return value
    meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, nn.Parameter):
        return nn.Parameter(meta, requires_grad=value.requires_grad)
    return meta.requires_grad_(value.requires_grad)


class _Shaped(Protocol):
    @property
    def shape(self) -> Sequence[int]: ...


_Output = TypeVar("_Output", bound=_Shaped)


def backward_starts(outputs: Sequence[_Output], *, all_outputs: bool) -> list[_Output]:
    """Where a backward without a loss function starts, of the outputs that require gradients: at the scalars, which are
    losses; at all of them if none is a scalar, or with `all_outputs`."""
    scalars = [] if all_outputs else [x for x in outputs if not len(x.shape)]
    return scalars or list(outputs)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a result: itself, or those in a tuple or list."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in tensors_in(item)]
    return []


def may_have_gradient(tensor: torch.Tensor) -> bool:
    """Whether autograd may give the tensor a gradient: floating-point and complex ones, no integers or booleans."""
    return tensor.is_floating_point() or tensor.is_complex()


def storage_key(tensor: torch.Tensor) -> int:
    """What the tensors of one storage have in common, while any of them lives; for those without memory, too, whose
    address is 0. torch has no public identity of a storage."""
    return int(tensor.untyped_storage()._cdata)


class StorageNumbers:
    """A number for every storage. The key of a storage that was freed may become that of a later one; its number does
    not."""

    def __init__(self) -> None:
        self._alive: dict[int, int] = {}  # key of a living storage -> its number
        self._references: list[weakref.ref[Any]] = []

    def of(self, tensor: torch.Tensor) -> int:
        """The number of the tensor's storage."""
        key = storage_key(tensor)
        if key not in self._alive:
            self._alive[key] = len(self._references)
            self._references.append(weakref.ref(tensor.untyped_storage(), partial(self._freed, key)))
        return self._alive[key]

    def _freed(self, key: int, _: Any) -> None:
        self._alive.pop(key, None)


def get_attribute(module: nn.Module, path: str) -> Any:
    """`module.a.b.c` for path `a.b.c`."""
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value


def device_of(values: Sequence[Any]) -> torch.device:
    """Where the first tensor of `values` lies; the CPU if there is none."""
    return next((v.device for v in values if isinstance(v, torch.Tensor)), torch.device("cpu"))
