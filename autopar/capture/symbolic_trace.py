"""torch.fx.symbolic_trace, for models that torch.export refuses, where its graph loses nothing of them.

It runs the model's code on stand-ins for its inputs and buffers. What the code computes from other tensors runs once,
and becomes a constant; and a graph of its calls shows no modes, no writes through `.data`, and no order of in-place
writes. So it refuses

    torch.randn(6), self.named_parameters()      random numbers, and what is computed from the model's own tensors
    with torch.no_grad(): ...                    operators under a grad mode or autocast that is not the caller's
    h.data, self.count.add_(1), out=h            `.data`, and writes into buffers, inputs, views and given tensors
    h.mul_(2); return h                          in-place writes that are read from what they write, not their result
"""

from __future__ import annotations

import inspect
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture import torch_private
from autopar.capture.buffer_assignments import HeldBuffers
from autopar.capture.node_names import describe
from autopar.capture.repeated_layers.trace_once import forget_traced_layers
from autopar.errors import CaptureError
from cost_models.graphs import storage_key

_TORCH_FILES = os.path.dirname(inspect.getfile(torch)) + os.sep
_LOST = "which torch.fx.symbolic_trace would lose"


def symbolically_traced(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[fx.GraphModule, torch_private.TreeSpec]:
    """The graph of torch.fx.symbolic_trace, and the structure of what it returns; all arguments of this call except
    tensors become constants. Raises CaptureError for what the graph would lose, and whatever the tracer raises."""
    forget_traced_layers()
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    names = {p.name: p for p in inspect.signature(model.forward).parameters.values()}
    constants = {
        name: (bound.arguments.get(name, p.default))
        for name, p in names.items()
        if not isinstance(bound.arguments.get(name), torch.Tensor)
    }
    if any(isinstance(leaf, torch.Tensor) for leaf in torch_private.tree_leaves(constants)):
        raise CaptureError("torch.fx.symbolic_trace does not support tensors inside tuples, lists or dicts")
    tracer, held = _Tracer(), HeldBuffers(model.named_modules())
    with _Unseen(model):
        graph = tracer.trace(model, concrete_args=constants)
    for place in held.assigned():
        raise CaptureError(f"forward assigns to buffer '{place.path}', {_LOST}")
    module = fx.GraphModule(model, graph)
    for node in graph.nodes:
        frames = re.split(r"\n(?=  File )", node.meta.get("stack_trace") or "")
        node.meta["stack_trace"] = "\n".join(frame for frame in frames if f'File "{_TORCH_FILES}' not in frame)
    _refuse_lost_writes(module)
    module.graph.set_codegen(fx.graph.CodeGen())
    for node in module.graph.find_nodes(op="placeholder"):
        if node.target in names:
            continue
        # concrete_args leaves a placeholder `name_1` with asserts; matching of signatures replaces these.
        node.target = node.target.rpartition("_")[0]
        for user in [assertion for compared in node.users for assertion in compared.users] + list(node.users):
            module.graph.erase_node(user)
        if node.target not in bound.arguments:
            module.graph.erase_node(node)
    _order_placeholders(module.graph, [*itertools.islice(names, len(args)), *kwargs])
    flat, out_spec = torch_private.tree_flatten(tracer.returned)
    graph.output_node().args = (tuple(map(tracer.create_arg, flat)),)
    return module, out_spec


def _order_placeholders(graph: fx.Graph, names: Sequence[str]) -> None:
    """Put the placeholders, which come in the order of the signature, into that of the call's flat inputs."""
    placeholders = {str(node.target): node for node in graph.find_nodes(op="placeholder")}
    for node in placeholders.values():
        node.args = ()  # defaults, which would have to come last
    first = next(iter(graph.nodes))
    for name in names:
        if name in placeholders and placeholders[name] is not first:
            first.prepend(placeholders[name])
        elif name in placeholders:
            first = first.next


class _Tracer(fx.Tracer):
    """Keeps what the model returns in its own types: in the graph, dicts and lists become immutable ones. Reads buffers
    where the model does, and refuses operators under a grad mode or autocast of the model's own."""

    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__()
        self._modes = _modes()
        self.record_stack_traces = True
        self.returned: Any = None
        self._depth = 0

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """An operator, which later runs under the modes of the whole graph."""
        if _modes() != self._modes:
            raise CaptureError(f"forward changes the grad mode or autocast, {_LOST}")
        return super().create_node(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        """`a` as an argument of a node. The model's result is the last one that the tracer asks for."""
        if not self._depth:
            self.returned = a
        self._depth += 1
        try:
            return super().create_arg(a)
        finally:
            self._depth -= 1


class _Unseen(TorchDispatchMode):
    """Inside, operators that run on real tensors, and so leave no more than a constant in the graph, are refused where
    another call would give another result: those that draw random numbers, and those on the tensors of `model`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {storage_key(tensor): name for name, tensor in _named_tensors(model)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`, unless it is refused."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise CaptureError(f"forward calls {func} on no input, {_LOST}")
        for leaf in torch_private.tree_leaves((args, kwargs)):
            name = self._names.get(storage_key(leaf)) if isinstance(leaf, torch.Tensor) else None
            if name is not None:
                raise CaptureError(f"forward computes with '{name}', not read as an attribute of its module, {_LOST}")
        return func(*args, **(kwargs or {}))


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _modes() -> tuple[Any, ...]:
    """The modes of this thread that change what operators do."""
    types = ("cpu", "cuda")
    autocast = ((torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


_VIEWS = frozenset(
    {"view", "view_as", "reshape", "t", "T", "mT", "transpose", "permute", "flatten", "unflatten", "ravel", "squeeze"}
    | {"unsqueeze", "expand", "expand_as", "select", "narrow", "detach", "chunk", "split", "tensor_split", "unbind"}
    | {"hsplit", "unfold", "getitem", "getattr", "diagonal", "swapaxes", "swapdims", "movedim", "real", "imag"}
)


def _refuse_lost_writes(module: fx.GraphModule) -> None:
    """Raise CaptureError for a write that other readers would not see, or that is lost."""
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    for node in order:
        if node.target is getattr and node.args[1] == "data":
            raise CaptureError(f"{describe(node)} takes .data of a tensor, {_LOST}")
        if not _writes(node, module):
            continue
        first = node.all_input_nodes[0]
        own = first.op in ("get_attr", "placeholder") or _name(first) in _VIEWS
        # Later rooms know writes of methods and modules, not those of functions.
        unknown = node.op == "call_function"
        if own or unknown or not node.users or any(order[user] > order[node] for user in first.users):
            raise CaptureError(f"{describe(node)} writes in place, {_LOST}")


def _writes(node: fx.Node, module: fx.GraphModule) -> bool:
    """Whether a node overwrites a tensor that it is given."""
    if node.op == "call_module":
        return bool(getattr(module.get_submodule(str(node.target)), "inplace", False))
    name = _name(node)
    in_place = name.endswith("_") and not name.endswith("__")
    return bool(node.all_input_nodes) and (in_place or "out" in node.kwargs or bool(node.kwargs.get("inplace")))


def _name(node: fx.Node) -> str:
    """Of a method or function."""
    if node.op not in ("call_method", "call_function"):
        return ""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
