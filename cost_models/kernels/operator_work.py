"""What the operators of a torch.fx graph do: FLOPs and bytes of every kernel, forward and backward, without running it.

Every operator is called on meta tensors (sizes without storage), and so is its autograd formula; a dispatch mode sees
the kernels that the two call, with their arguments:

    linear(x, w, b) -> view, t, addmm, view            backward: mm, mm, sum and views
                             |                                   |   |   |
                             one kernel with FLOPs and bytes     one each; views cost nothing

So a gradient that is not required costs nothing, as in a real pass, and every operator of torch is covered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

from cost_models.graphs import get_attribute, may_have_gradient, on_meta, tensors_in
from cost_models.kernels.device_kernels import one_kernel_attention, one_kernel_norms
from cost_models.kernels.kernel import (
    FREE,
    Kernel,
    arguments,
    flops_of,
    formulas,
    kind_of,
    make_kernel,
    small_windows,
)

T = TypeVar("T")


@dataclass(frozen=True)
class OperatorWork:
    """What one node of a graph does in a pass."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]  # summing gradients up included, parameters' as well


def count(
    module: fx.GraphModule, rows: int, *, training: bool = True, inputs: Sequence[Any] | None = None
) -> dict[str, OperatorWork]:
    """The work of every node of a flat graph that computes, at `rows` samples.

    The shapes of the inputs are those of `inputs`; if that is None, those in `meta["val"]` of the placeholders, which
    torch.export writes, with the number of samples for every symbol. Sizes that depend on data come from `meta["val"]`
    of their node in the same way. Without `training` there is no backward.

    Operators on inputs of the same shapes, strides and dtypes are counted once: O(nodes) dictionary look-ups, and
    about a millisecond for each distinct operator.

    Raises:
        ValueError: the graph does not record the shape of an input, or of a result that depends on data.
    """
    if inputs is None:
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        inputs = [_described(node, rows) for node in placeholders]
    walk = _Walk(module, rows)
    with torch.set_grad_enabled(training):
        walk.run(*[on_meta(x) for x in inputs])
    return walk.work


def count_call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> tuple[Any, OperatorWork]:
    """The result of `function(*args, **kwargs)` for tensors on the meta device, and its work, with that of the
    backward if one of the tensors requires a gradient."""
    return _Call(function, args, kwargs or {}).run(None)


class _Walk(fx.Interpreter):
    """Runs a graph on meta tensors, operator by operator: what flows between them carries no autograd graph."""

    def __init__(self, module: fx.GraphModule, rows: int) -> None:
        super().__init__(module)
        self.root = module
        self.rows = rows
        self.work: dict[str, OperatorWork] = {}
        # With the call itself: its key has ids of modules, which another module could get once they are freed.
        self._known: dict[str, tuple[Any, OperatorWork, _Call]] = {}
        self._gradients: set[fx.Node] = set()  # nodes to whose results one gradient flows already

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        if n.op == "get_attr":
            return on_meta(get_attribute(self.root, str(n.target)))
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        function: Any = n.target
        if n.op == "call_module":
            function = on_meta(get_attribute(self.root, str(n.target)))
        elif n.op == "call_method":
            function = getattr(torch.Tensor, str(n.target))
        call = _Call(function, args, kwargs)
        wanted = _indices_read(n)
        signature = repr((call.signature(), wanted, torch.is_grad_enabled()))
        if signature not in self._known:
            self._known[signature] = (*self._look(n, call, wanted), call)
        result, work, _ = self._known[signature]
        self.work[n.name] = OperatorWork(work.forward, work.backward + self._sums(n))
        return result

    def _look(self, node: fx.Node, call: _Call, wanted: set[int] | None) -> tuple[Any, OperatorWork]:
        try:
            return call.run(wanted)
        except (RuntimeError, NotImplementedError):  # the result depends on data, which meta tensors lack
            result = _described(node, self.rows)
            grad = torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors)
            for tensor in tensors_in(result):
                tensor.requires_grad_(grad and may_have_gradient(tensor))
            name = getattr(call.function, "__name__", str(call.function))
            kernel = make_kernel(name, "reduction", call.tensors, tensors_in(result), 0)
            return result, OperatorWork((kernel,), (kernel,) * grad)

    def _sums(self, node: fx.Node) -> tuple[Kernel, ...]:
        """Additions of this operator's gradients to those that other readers of its inputs, or for parameters other
        micro-batches, contribute."""
        kernels = []
        for source in node.all_input_nodes if torch.is_grad_enabled() else ():
            value = self.env[source]
            if isinstance(value, torch.Tensor) and value.requires_grad:
                if source in self._gradients or source.op == "get_attr":
                    kernels.append(make_kernel("add_", "pointwise", [value, value], [value], 0))
                self._gradients.add(source)
        return tuple(kernels)


class _Call:
    """A function with arguments on the meta device."""

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function = function
        self.args, self.kwargs = args, kwargs
        self.tensors = list({id(t): t for t in _leaves((args, kwargs), torch.Tensor)}.values())

    def signature(self) -> Any:
        """What its work depends on, with a stable `repr`."""
        numbers = {id(t): i for i, t in enumerate(self.tensors)}

        def describe(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return numbers[id(value)], tuple(value.shape), value.stride(), value.dtype, value.requires_grad
            return (value, id(value)) if isinstance(value, nn.Module) else value

        return str(self.function), id(self.function), map_aggregate((self.args, self.kwargs), describe)

    def run(self, wanted: set[int] | None) -> tuple[Any, OperatorWork]:
        """The result, cut off from its history, and the work.

        `wanted`: where the result is a tuple, the places of it that are read; gradients come from no others.
        """
        if self.function in _ONE_KERNEL:
            fused = _ONE_KERNEL[self.function](*self.args, **self.kwargs)
            if fused is not None:
                return fused
        leaves = {id(t): t.detach().requires_grad_() for t in self.tensors if t.requires_grad}
        # A leaf cannot be written in place.
        mutable = isinstance(self.function, torch._ops.OpOverload) and self.function._schema.is_mutable
        own = {key: leaf.clone() if mutable and torch.is_grad_enabled() else leaf for key, leaf in leaves.items()}
        args, kwargs = map_aggregate((self.args, self.kwargs), lambda x: own.get(id(x), x))
        with _Kernels() as forward:
            result = self.function(*args, **kwargs)
        modules = _leaves((self.function, args, kwargs), nn.Module)
        sources = [*leaves.values(), *(p for module in modules for p in module.parameters() if p.requires_grad)]
        places = result if wanted is not None else [result]
        read = [r for i, r in enumerate(places) if wanted is None or i in wanted]
        roots = [t for t in tensors_in(read) if t.grad_fn is not None]
        gradients = [torch.empty_like(t) for t in roots]
        backward = _Kernels()
        if roots and sources:
            with backward:
                torch.autograd.grad(roots, sources, gradients, allow_unused=True)
        work = OperatorWork(tuple(forward.kernels), tuple(backward.kernels))
        return map_aggregate(result, _detached), work


class _Kernels(TorchDispatchMode):
    """Collects the kernels that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if any(argument.name == "device" for argument in func._schema.arguments):
            kwargs["device"] = torch.device("meta")  # in place of the one that the model was captured on
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name not in FREE and not func.is_view:
            flops = flops_of(func, args, kwargs, result)
            reads = _leaves((args, kwargs), torch.Tensor)
            if name == "native_layer_norm_backward" and len(tensors_in(result)) > 1:
                # Gradients of weight and bias have a kernel of their own, which reads the input and its gradient once
                # more (torch: aten/src/ATen/native/cuda/layer_norm_kernel.cu, LayerNormBackwardKernelImplInternal).
                reads = [*reads, *reads[:2]]
            given = arguments(func, args, kwargs)
            kernel = make_kernel(name, kind_of(func, name, flops, given), reads, tensors_in(result), flops)
            self.kernels.append(replace(kernel, winograd=small_windows(given)) if "convolution" in name else kernel)
        return result


def _fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, OperatorWork] | None:
    """softmax(q k' / sqrt(d)) v in one kernel that keeps the scores on chip; its backward computes them again,
    a fifth product besides the four of the gradients (Dao et al., FlashAttention, 2022, algorithms 1 and 4).

    None where no such kernel exists.
    """
    if not one_kernel_attention(query, key, attn_mask):
        return None
    batch, heads, length, _ = query.shape
    aten, known = torch.ops.aten, formulas()
    out = query.new_empty((batch, length, heads, value.shape[-1])).transpose(1, 2)  # as its reader wants it
    sums = query.new_empty((batch, heads, length), dtype=torch.float32)  # of the softmax, for the backward
    inputs = [query, key, value, *([attn_mask] if attn_mask is not None else [])]
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    hidden = (1 - 1 / length) / 2 if is_causal and length == key.shape[2] else 0.0
    # Torch 2.11's formulas know no heads that share keys; a key and a value for each give what later ones count.
    every = [x[:, :1].expand(-1, heads, -1, -1) for x in (key, value)]
    flops = known[aten._scaled_dot_product_flash_attention](query, *every)
    forward = make_kernel("attention", "attention", inputs, [out, sums] if grad else [out], flops, hidden)
    if not grad:
        return out, OperatorWork((forward,), ())
    flops = known[aten._scaled_dot_product_flash_attention_backward](out, query, *every)
    reads = [*inputs, out, out, sums]  # the result and its gradient
    backward = make_kernel("attention_backward", "attention_backward", reads, inputs[:3], flops, hidden)
    return out.requires_grad_(), OperatorWork((forward,), (backward,))


def _fused_rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> tuple[torch.Tensor, OperatorWork] | None:
    """x / rms(x) * w in one kernel; its backward reads x again, once more for the gradient of w.

    None where GPUs have none: for a weight of another dtype (torch: aten/src/ATen/native/layer_norm.cpp, rms_norm).
    """
    if not one_kernel_norms(input, weight):
        return None
    weights = [] if weight is None else [weight]
    out = torch.empty_like(input)
    scales = input.new_empty(input.shape[: input.dim() - len(normalized_shape)], dtype=torch.float32)
    forward = make_kernel("rms_norm", "normalization", [input, *weights], [out, scales], 0)
    trained = [t for t in (input, *weights) if t.requires_grad]
    if not (torch.is_grad_enabled() and trained):
        return out, OperatorWork((forward,), ())
    reads = [input, out, scales, *weights]  # `out` has the size of its gradient
    backward = [make_kernel("rms_norm_backward", "normalization_backward", reads, [input], 0)]
    if weight is not None and weight.requires_grad:
        backward.append(make_kernel("rms_norm_weight_backward", "reduction", [input, out, scales], weights, 0))
    return out.requires_grad_(), OperatorWork((forward,), tuple(backward))


def _fused_dropout(input: torch.Tensor, p: float = 0.5, train: bool = True) -> tuple[torch.Tensor, OperatorWork] | None:
    """Draws, keeps its mask of one byte an element, and scales in one kernel (torch: aten/src/ATen/native/Dropout.cpp,
    is_fused_kernel_acceptable, and cuda/Dropout.cu); None where nothing is dropped, or all."""
    if not (train and 0 < p < 1 and input.numel()):
        return None
    out, mask = torch.empty_like(input), torch.empty_like(input, dtype=torch.bool)
    forward = make_kernel("native_dropout", "random", [input], [out, mask], 0)
    if not (torch.is_grad_enabled() and input.requires_grad):
        return out, OperatorWork((forward,), ())
    # `out` and `input` have the sizes of their gradients
    backward = make_kernel("native_dropout_backward", "pointwise", [out, mask], [input], 0)
    return out.requires_grad_(), OperatorWork((forward,), (backward,))


_ONE_KERNEL: Mapping[Any, Any] = {
    torch.ops.aten.dropout.default: _fused_dropout,
    torch.ops.aten.scaled_dot_product_attention.default: _fused_attention,
    torch.ops.aten.rms_norm.default: _fused_rms_norm,
}
"""Operators that torch decomposes on the meta device, and that have one kernel on a GPU."""


def _indices_read(node: fx.Node) -> set[int] | None:
    """The places of a tuple that are read; None where the result is not known to be a tuple."""
    users = list(node.users)
    if users and all(getattr(user.target, "__name__", "") == "getitem" and user.args[0] is node for user in users):
        places = [user.args[1] for user in users]
        if isinstance(node.meta.get("val"), (list, tuple)) and all(isinstance(p, int) for p in places):
            return {int(p) for p in places}  # type: ignore[arg-type]
    return None


def _leaves(value: Any, kind: type[T]) -> list[T]:
    """The values of type `kind` in nested tuples, lists and dictionaries."""
    leaves: list[T] = []
    map_aggregate(value, lambda leaf: leaves.append(leaf) if isinstance(leaf, kind) else None)
    return leaves


def _detached(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _described(node: fx.Node, rows: int) -> Any:
    """The value that `meta["val"]` of a node describes, on the meta device, with numbers for symbols."""
    if "val" not in node.meta:
        raise ValueError(f"the graph does not record the shape of '{node.name}'; pass example `inputs`")

    def evaluate(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            sizes, strides = ([_number(s, rows) for s in sized] for sized in (value.shape, value.stride()))
            return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
        return _number(value, rows) if isinstance(value, (torch.SymInt, torch.SymFloat)) else value

    return map_aggregate(node.meta["val"], evaluate)


def _number(value: Any, rows: int) -> Any:
    """A symbolic size with the number of samples for its symbols. torch has no public access to the expression."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat)):
        return value
    expression = value.node.expr
    number = expression.subs(dict.fromkeys(expression.free_symbols, rows))
    return int(number) if isinstance(value, torch.SymInt) else float(number)
