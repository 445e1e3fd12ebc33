"""The value of every node when a captured graph runs on a few samples. The model is unchanged.

Buffers are copied, dropout is off, and batch norm uses its running statistics.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from autopar.capture.cleanup import aten
from autopar.capture.program import Program
from autopar.capture.uncaptured import Uncaptured
from cost_models.graphs import storage_key

_BATCH_NORM = {aten.batch_norm.default}
DROPOUT = {
    aten.dropout.default,
    aten.dropout_.default,
    aten.feature_dropout.default,
    aten.feature_dropout_.default,
    aten.alpha_dropout.default,
    aten.alpha_dropout_.default,
    aten.feature_alpha_dropout.default,
    aten.feature_alpha_dropout_.default,
}


# Two ways to compute one value differ by about eps. Values count as different if they differ by more than eps ** 0.65
# of the largest one.
_EXPONENT = 0.65
_HUGE = 1e15  # larger values are infinities in masks


def probe(program: Program, leaves: list[Any], rows: int, *, reverse: bool) -> list[Any]:
    """Flat inputs of `rows` samples that differ from each other, derived from the example's inputs `leaves`.

    A degenerate example (all zeros, equal rows) must not hide a dependence between samples. So floating-point inputs
    are shuffled and their rows scaled differently, and indices of an embedding that are equal in all rows are replaced
    by random ones. `reverse`: reverse the samples; a model that sorts samples changes at least one of both orders.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = {n.name: size for n in program.graph.nodes if n.op == "placeholder" and (size := _table_rows(n))}
    result = []
    for leaf, spec in zip(leaves, program.inputs, strict=True):
        if spec.batch_dim is None:
            result.append(leaf)
            continue
        x = leaf.detach().narrow(spec.batch_dim, 0, rows)
        if x.is_floating_point() and x.numel():
            flat = x.flatten()[torch.randperm(x.numel(), generator=generator).to(x.device)]
            if bool((flat == flat[0]).all()):
                flat = flat + torch.rand(flat.shape, generator=generator).to(flat)
            x = flat.view(x.shape)
            scale = torch.linspace(1, 3, rows, dtype=torch.float64).to(x)
            x = x * scale.view([-1 if d == spec.batch_dim else 1 for d in range(x.dim())])
        elif spec.name in sizes and bool((x == x.narrow(spec.batch_dim, 0, 1)).all()):
            x = torch.randint(sizes[spec.name], x.shape, generator=generator).to(x)
        result.append(x.flip(spec.batch_dim) if reverse else x)
    return result


def _table_rows(node: fx.Node) -> int:
    """Number of rows of the embedding table that `node` indexes; 0 if it indexes none."""
    for user in node.users:
        if user.target is aten.embedding.default and user.args[1] is node:
            return int(user.args[0].meta["val"].shape[0])  # type: ignore[union-attr]
    return 0


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two values are equal up to rounding."""
    if a.shape != b.shape:
        return False
    if not a.is_floating_point() and not a.is_complex():
        return torch.equal(a, b)
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.detach().to(wide), b.detach().to(wide)
    usual = (x.abs() < _HUGE) & (y.abs() < _HUGE)  # also False for NaN
    if not torch.equal(x.isnan(), y.isnan()) or not torch.equal(usual, x.abs() < _HUGE):
        return False
    x, y = x[usual], y[usual]
    if not x.numel():
        return True
    tolerance = torch.finfo(a.dtype).eps ** _EXPONENT
    return bool((x - y).abs().max() <= tolerance * x.abs().max())


def changed_dims(a: Any, b: Any) -> list[int]:
    """The dimensions in which two values of a node have different sizes."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.dim() != b.dim():
        return []
    return [d for d, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if x != y]


def storages_of(value: Any) -> frozenset[int]:
    """Keys of the storages of all tensors in a value."""
    if isinstance(value, torch.Tensor):
        return frozenset((storage_key(value),)) if value.numel() else frozenset()
    if isinstance(value, (tuple, list)):
        return frozenset().union(*map(storages_of, value))
    return frozenset()


def observe(module: fx.GraphModule, leaves: list[Any]) -> dict[fx.Node, Any]:
    """The value of every node. A value that a later node overwrites is shown after the write.

    An exception has the failing node as its attribute `autopar_node`.
    """
    observer = _Observer(module)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        observer.run(*leaves)
    return observer.seen


class _Observer(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.seen: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        try:
            value = super().run_node(n)
        except Exception as error:
            if not hasattr(error, "autopar_node"):
                error.autopar_node = n  # type: ignore[attr-defined]
            raise
        if n.op != "output":
            self.seen[n] = value
        return value

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        trained = isinstance(value, nn.Parameter) or not isinstance(value, torch.Tensor)
        return value if trained else value.clone()

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().placeholder(target, args, kwargs)
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    def call_function(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:  # type: ignore[override]
        if isinstance(target, Uncaptured):
            return target.observed(*args)
        if target in DROPOUT:
            return args[0].clone() if target.__name__.split(".")[0][-1] != "_" else args[0]
        if target in _BATCH_NORM and args[5]:
            return aten.batch_norm.default(*_with_statistics(args), False, *args[6:], **kwargs)
        if target is aten.scaled_dot_product_attention.default and len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        if target in (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input):
            args = (*args[:5], 0.0, *args[6:])  # (input, hx, params, has_biases, num_layers, dropout, ...)
        return super().call_function(target, args, kwargs)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        child = self.fetch_attr(target)
        if child.training and any(m.training for m in child.modules()):
            child = copy.deepcopy(child).eval()
            return child(*args, **kwargs)
        return super().call_module(target, args, kwargs)


def _with_statistics(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """(input, weight, bias, mean, var) of batch norm; mean 0 and variance 1 if it has no running statistics."""
    x, weight, bias, mean, var = args[:5]
    if mean is None:
        mean, var = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
    return x, weight, bias, mean, var
