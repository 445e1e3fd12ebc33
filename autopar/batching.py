"""Which dimension of every tensor counts samples, and whether the batch may be split into micro-batches.

The graph is run on a few samples together and then on two parts of them, with the floating-point inputs shuffled so
that degenerate examples (all zeros, equal rows) cannot hide a dependence. A dimension whose size follows the number
of samples is a batch dimension. Splitting is safe where every output of the parts, put together again, equals the
output of the whole; where it does not, the first operator that differs is named. Nothing of the model is changed:
buffers are copies, dropout is off, and batch norm uses its running statistics (its policy is the caller's choice).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from autopar.capture import Program, describe, module_path
from autopar.tidy import aten
from cost_models.repeats import TensorShape

# Samples looked at together, and in the first part. Uneven parts tell a mean from a sum.
_WHOLE, _FIRST = 3, 2

_BATCH_NORM = {aten.batch_norm.default}
_DROPOUT = {
    aten.dropout.default,
    aten.dropout_.default,
    aten.feature_dropout.default,
    aten.feature_dropout_.default,
    aten.alpha_dropout.default,
    aten.alpha_dropout_.default,
    aten.feature_alpha_dropout.default,
    aten.feature_alpha_dropout_.default,
}


@dataclass(frozen=True)
class Output:
    """How one flat output of the micro-batches becomes that of the whole batch."""

    combine: str  # "cat", "mean" (weighted by samples), "sum", "first" (the same for all), "constant"
    batch_dim: int | None = None
    weight: int | None = None  # of a "mean": the flat output that counts what it averages; None: samples


@dataclass(frozen=True)
class Batching:
    """What a few samples showed about a Program."""

    outputs: tuple[Output, ...]
    obstacle: str  # "" or why the batch cannot be split; names the operator
    batch_norms: tuple[str, ...]  # modules whose statistics are those of each micro-batch
    batch_dims: dict[str, int | None] = field(repr=False)  # node name -> batch dimension
    storages: dict[str, frozenset[int]] = field(repr=False)  # node name -> storages its tensors live in
    shapes: dict[str, TensorShape] = field(repr=False, default_factory=dict)  # node name -> sizes by samples

    @property
    def splittable(self) -> bool:
        return not self.obstacle


def is_training_batch_norm(node: fx.Node, module: fx.GraphModule) -> bool:
    """Whether `node` normalises by the statistics of the batch it gets."""
    if node.target in _BATCH_NORM:
        return bool(node.args[5])
    if node.op == "call_module":
        child = module.get_submodule(str(node.target))
        return isinstance(child, nn.modules.batchnorm._BatchNorm) and (child.training or child.running_mean is None)
    return False


def study(program: Program, leaves: list[Any]) -> Batching:
    """Run `program` on a few of the samples in `leaves` (the flat inputs of a call) and compare whole with parts."""
    module = program.graph_module
    norms = tuple(module_path(n) or n.name for n in module.graph.nodes if is_training_batch_norm(n, module))
    batched = [i.batch_dim for i in program.inputs]
    size = next((x.shape[d] for x, d in zip(leaves, batched, strict=True) if d is not None), 0)
    rows = min(size, _WHOLE)
    first = min(_FIRST, rows - rows // 2)

    def part(source: list[Any], start: int, stop: int) -> list[Any]:
        return [x if d is None else x.narrow(d, start, stop - start) for x, d in zip(source, batched, strict=True)]

    flat = list(module.graph.output_node().args[0])  # type: ignore[arg-type]
    samples = _shuffled(leaves, batched)

    def whole_only(seen: dict[fx.Node, Any], why: str) -> Batching:
        kinds = tuple(Output("first") if isinstance(o, fx.Node) else Output("constant") for o in flat)
        storages = {node.name: _storages(value) for node, value in seen.items()}
        return Batching(kinds, why, norms, dict.fromkeys(storages), storages)

    if rows < 2:
        why = "the batch has one sample" if rows else "no input has a batch dimension"
        return whole_only(_observe(module, leaves), why)
    try:
        whole = _observe(module, part(samples, 0, rows))
        parts = [_observe(module, part(samples, 0, first)), _observe(module, part(samples, first, rows))]
    except Exception as error:  # whatever the model raises at another batch size is the answer
        node = getattr(error, "autopar_node", None)
        where = describe(node) if node is not None else "the model"
        why = f"{where} works only for {size} samples ({str(error).splitlines()[0][:200]})"
        return whole_only(_observe(module, leaves), why)
    storages = {node.name: _storages(value) for node, value in whole.items()}
    shapes = {
        node.name: TensorShape.fit((rows, first), (value, parts[0][node]))
        for node, value in whole.items()
        if isinstance(value, torch.Tensor) and value.dim() == parts[0][node].dim()
    }

    dims: dict[str, int | None] = {}
    obstacle = ""
    for node, value in whole.items():
        changed = _changed_dims(value, parts[0][node])
        dims[node.name] = changed[0] if len(changed) == 1 else None
        if len(changed) > 1 and not obstacle:
            obstacle = f"{describe(node)} relates samples to each other: its output has {len(changed)} batch dimensions"
    kinds = tuple(
        _classify(o, whole, parts, dims, _weights(program, flat, i, parts) or (first, rows - first))
        for i, o in enumerate(flat)
    )
    kinds = tuple(
        replace(kind, weight=program.weights.get(i)) if kind.combine == "mean" else kind for i, kind in enumerate(kinds)
    )
    wrong = next((o for o, kind in zip(flat, kinds, strict=True) if kind.combine == "mixed"), None)
    if wrong is not None and not obstacle:
        culprit = _first_difference(whole, parts, dims) or wrong
        obstacle = f"{describe(culprit)} mixes samples: the output depends on which samples share a batch"
    kinds = tuple(Output("first") if kind.combine == "mixed" else kind for kind in kinds)
    return Batching(kinds, obstacle, norms, dims, storages, shapes)


def _weights(
    program: Program, flat: list[Any], index: int, parts: list[dict[fx.Node, Any]]
) -> tuple[float, float] | None:
    """What each part counts of that which flat output `index` averages, if the graph tells."""
    if index not in program.weights:
        return None
    count = flat[program.weights[index]]
    return float(parts[0][count]), float(parts[1][count])


def _classify(
    output: Any,
    whole: dict[fx.Node, Any],
    parts: list[dict[fx.Node, Any]],
    dims: dict[str, int | None],
    weights: tuple[float, float],
) -> Output:
    """How `output` combines; `weights`: what each part counts in a mean."""
    if not isinstance(output, fx.Node):
        return Output("constant")
    full, pieces = whole[output], [p[output] for p in parts]
    if not isinstance(full, torch.Tensor):
        return Output("first")
    dim = dims[output.name]
    if dim is not None:
        return Output("cat" if _close(full, torch.cat(pieces, dim)) else "mixed", dim)
    if any(p.shape != full.shape for p in pieces):
        return Output("mixed")
    if all(_close(full, p) for p in pieces):
        # A scalar that happens to agree on these samples is still a mean, unless no sample reaches it.
        return Output("mean" if full.is_floating_point() and _depends_on_batch(output, dims) else "first")
    if not full.is_floating_point():
        return Output("sum" if _close(full, pieces[0] + pieces[1]) else "mixed")
    total = sum(weights) or 1.0
    if _close(full, sum(p * (w / total) for p, w in zip(pieces, weights, strict=True) if w)):
        return Output("mean")
    return Output("sum") if _close(full, pieces[0] + pieces[1]) else Output("mixed")


def _depends_on_batch(node: fx.Node, dims: dict[str, int | None]) -> bool:
    seen, stack = set(), [node]
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        if dims.get(current.name) is not None:
            return True
        stack += current.all_input_nodes
    return False


def _first_difference(
    whole: dict[fx.Node, Any], parts: list[dict[fx.Node, Any]], dims: dict[str, int | None]
) -> fx.Node | None:
    for node, value in whole.items():
        dim = dims[node.name]
        if dim is None or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        joined = torch.cat([p[node] for p in parts], dim)
        if joined.shape != value.shape or not _close(value, joined):
            return node
    return None


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if not a.is_floating_point() and not a.is_complex():
        return torch.equal(a, b)
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.detach().to(wide), b.detach().to(wide)
    if not torch.equal(x.isnan(), y.isnan()):
        return False
    x, y = x.nan_to_num(posinf=0, neginf=0), y.nan_to_num(posinf=0, neginf=0)
    tolerance = 3 * torch.finfo(a.dtype).eps ** 0.5
    scale = x.abs().max().item() if x.numel() else 0.0
    return bool((x - y).abs().max().item() <= tolerance * scale) if x.numel() else True


def _changed_dims(a: Any, b: Any) -> list[int]:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.dim() != b.dim():
        return []
    return [d for d, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if x != y]


def _shuffled(leaves: list[Any], dims: list[int | None]) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    result = []
    for leaf, dim in zip(leaves, dims, strict=True):
        if dim is None:
            result.append(leaf)
            continue
        rows = leaf.detach().narrow(dim, 0, min(leaf.shape[dim], _WHOLE))
        if rows.is_floating_point() and rows.numel():
            flat = rows.flatten()[torch.randperm(rows.numel(), generator=generator).to(rows.device)]
            if bool((flat == flat[0]).all()):
                flat = flat + torch.rand(flat.shape, generator=generator).to(flat)
            rows = flat.view(rows.shape)
        result.append(rows)
    return result


def _storages(value: Any) -> frozenset[int]:
    if isinstance(value, torch.Tensor):
        return frozenset((value.untyped_storage().data_ptr(),)) if value.numel() else frozenset()
    if isinstance(value, (tuple, list)):
        return frozenset().union(*map(_storages, value))
    return frozenset()


def _observe(module: fx.GraphModule, leaves: list[Any]) -> dict[fx.Node, Any]:
    """Every node's value. Values that a later node overwrites show what it wrote, in the whole as in the parts."""
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
        if target in _DROPOUT:
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
            import copy

            child = copy.deepcopy(child).eval()
            return child(*args, **kwargs)
        return super().call_module(target, args, kwargs)


def _with_statistics(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """(input, weight, bias, mean, var) of batch norm, with standard statistics where it keeps none."""
    x, weight, bias, mean, var = args[:5]
    if mean is None:
        mean, var = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
    return x, weight, bias, mean, var
