"""The value of every node when a captured graph runs on a few samples. The model is unchanged.

Buffers are copied, dropout is off, and batch norm uses its running statistics. `observe` keeps all values. `look` keeps
their sizes, and only the values that are requested, so that it takes the memory of a forward pass without gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autopar.capture.cleanup import aten
from autopar.capture.module_state import set_torch_states, torch_generators_restored, torch_states
from autopar.capture.program import Program
from autopar.capture.uncaptured import Uncaptured
from cost_models.graphs import StorageNumbers, on_meta, storage_key
from cost_models.memory.meta_results import MetaResults

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


def probe(
    program: Program, leaves: list[Any], rows: int, *, reverse: bool = False, own_floats: bool = False
) -> list[Any]:
    """Flat inputs of `rows` samples that differ from each other, derived from the example's inputs `leaves`.

    A degenerate example (all zeros, equal rows) must not hide a dependence between samples. So floating-point inputs
    are shuffled and their rows scaled differently, and indices of an embedding that are equal in all rows are replaced
    by random ones. `reverse`: reverse the samples; a model that sorts samples changes at least one of both orders.
    `own_floats`: leave floating-point inputs as they are, for a model that does not take others (some may be indices).
    """
    generator = torch.Generator().manual_seed(0)
    sizes = {n.name: size for n in program.graph.nodes if n.op == "placeholder" and (size := _table_rows(n))}
    result = []
    for leaf, spec in zip(leaves, program.inputs, strict=True):
        if spec.batch_dim is None:
            result.append(leaf)
            continue
        x = leaf.detach().narrow(spec.batch_dim, 0, rows)
        if x.is_floating_point() and x.numel() and not own_floats:
            flat = x.flatten()[torch.randperm(x.numel(), generator=generator).to(x.device)]
            if bool((flat == flat[0]).all()):
                flat = flat + torch.rand(flat.shape, generator=generator, device="cpu").to(flat)
            x = flat.view(x.shape)
            scale = torch.linspace(1, 3, rows, dtype=torch.float64, device="cpu").to(x)
            x = x * scale.view([-1 if d == spec.batch_dim else 1 for d in range(x.dim())])
        elif spec.name in sizes and bool((x == x.narrow(spec.batch_dim, 0, 1)).all()):
            x = torch.randint(sizes[spec.name], x.shape, generator=generator, device="cpu").to(x)
        result.append(x.flip(spec.batch_dim) if reverse else x)
    return result


def floats_differ(program: Program, samples: Sequence[Any]) -> bool:
    """Whether no floating-point input is the same in all samples."""
    dims = [spec.batch_dim for spec in program.inputs]
    batched = [(x, dim) for x, dim in zip(samples, dims, strict=True) if dim is not None and x.is_floating_point()]
    return all(bool((x != x.narrow(dim, 0, 1)).any()) for x, dim in batched if x.numel())


def samples_of(program: Program, leaves: list[Any], start: int, stop: int) -> list[Any]:
    """The flat inputs for samples `start` to `stop`."""
    return [
        x if i.batch_dim is None else x.narrow(i.batch_dim, start, stop - start)
        for x, i in zip(leaves, program.inputs, strict=True)
    ]


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


def storages_of(value: Any, key: Callable[[torch.Tensor], int] = storage_key) -> frozenset[int]:
    """Keys of the storages of all tensors in a value."""
    if isinstance(value, torch.Tensor):
        return frozenset((key(value),)) if value.numel() else frozenset()
    if isinstance(value, (tuple, list)):
        return frozenset().union(*(storages_of(item, key) for item in value))
    return frozenset()


def observe(module: fx.GraphModule, leaves: list[Any], device: torch.device | None = None) -> dict[fx.Node, Any]:
    """The value of every node. A value that a later node overwrites is shown after the write.

    `device`: of all values; tensors from elsewhere are copied to it (default: they stay, and must be on one device).
    An exception has the failing node as its attribute `autopar_node`.
    """
    observer = _Observer(module, device)
    with torch.no_grad(), torch_generators_restored():
        observer.run(*leaves)
    return observer.seen


@dataclass(frozen=True)
class Look:
    """What one run on a few samples looked like."""

    values: dict[fx.Node, Any]  # of every node; tensors on the meta device, with their sizes, strides and dtypes
    storages: dict[str, frozenset[int]]  # node name -> numbers of the storages that its tensors live in
    kept: dict[fx.Node, Any]  # the values themselves of the requested nodes


def look(
    module: fx.GraphModule, leaves: list[Any], keep: Collection[fx.Node] = (), device: torch.device | None = None
) -> Look:
    """Run the graph and free every value after its last use, except those of `keep`. `device`: as for `observe`, and
    raises like it."""
    wanted, numbers = set(keep), StorageNumbers()
    found = Look({}, {}, {})
    for node, value in _steps(module, leaves, device):
        found.values[node] = tuple(map(on_meta, value)) if isinstance(value, (tuple, list)) else on_meta(value)
        found.storages[node.name] = storages_of(value, numbers.of)
        if node in wanted:
            found.kept[node] = value
    return found


def in_lockstep(
    module: fx.GraphModule, calls: Sequence[list[Any]], device: torch.device | None = None
) -> Iterator[tuple[fx.Node, list[Any]]]:
    """Every node with its values in several runs, one per call, that go on node by node; values are freed as in
    `look`."""
    for steps in zip(*(_steps(module, leaves, device) for leaves in calls), strict=True):
        yield steps[0][0], [value for _, value in steps]


def _steps(module: fx.GraphModule, leaves: list[Any], device: torch.device | None) -> Iterator[tuple[fx.Node, Any]]:
    """Every node but the output with its value, which is freed after its last use. Each run draws the same random
    numbers, whatever happens between its steps."""
    observer = _Observer(module, device, free=True)
    observer.args_iter = iter(leaves)
    random = torch_states()
    for node in module.graph.nodes:
        if node.op == "output":
            return
        with torch.no_grad(), torch_generators_restored():
            set_torch_states(random)
            value = observer.run_node(node)
            random = torch_states()
        observer.seen.clear()
        if node.users:
            observer.env[node] = value
        yield node, value
        del value
        for last in observer.user_to_last_uses.get(node, []):
            del observer.env[last]


class _Observer(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, device: torch.device | None, *, free: bool = False) -> None:
        """`device`: of all values; None: where they are. `free`: know the last use of every value."""
        super().__init__(module, garbage_collect_values=free)
        self.seen: dict[fx.Node, Any] = {}
        self._device = device
        self._results = MetaResults()
        self._moved: dict[int, torch.Tensor] = {}  # copies of parameters from other devices, by id: tied ones share one

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
        if not isinstance(value, torch.Tensor):
            return value
        if not isinstance(value, nn.Parameter):
            return self._here(value, copy=True)
        if id(value) not in self._moved:
            self._moved[id(value)] = self._here(value)
        return self._moved[id(value)]

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().placeholder(target, args, kwargs)
        return self._here(value.detach(), copy=True) if isinstance(value, torch.Tensor) else value

    def _here(self, value: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
        """A model may be spread over devices, and its inputs elsewhere. What has no values stays."""
        device = value.device if self._device is None or value.is_meta else self._device
        return value.to(device, copy=copy)

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
        return self._results.of(target, args, kwargs)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        child = self.fetch_attr(target)
        if child.training and any(m.training for m in child.modules()):
            child = copy.deepcopy(child).eval()
        elif self._device in (None, *(t.device for t in [*child.parameters(), *child.buffers()])):
            return super().call_module(target, args, kwargs)
        else:
            child = copy.deepcopy(child)
        return child.to(self._device)(*args, **kwargs)


def _with_statistics(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """(input, weight, bias, mean, var) of batch norm; mean 0 and variance 1 if it has no running statistics."""
    x, weight, bias, mean, var = args[:5]
    if mean is None:
        mean, var = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
    return x, weight, bias, mean, var
