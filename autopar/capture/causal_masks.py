"""Attention whose mask hides the future and nothing else says so to its kernel, and computes no mask.

    as exported    mask = (arange(16)[:, None] >= arange(16)) & ...;  attention(q, k, v, mask)
    here           attention(q, k, v, is_causal=True)

transformers' models call attention without a mask where they run, and with one while they are exported: the graph may
be used for lengths at which the answer is another (pytorch/pytorch/issues/108108). Programs have one length, so the
mask is computed here and looked at. On GPUs an explicit mask rules out flash attention and doubles its FLOPs: GPT-2
medium in float32 took 11 % longer a step on an H200 (torch 2.11).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_ATTENTION = aten.scaled_dot_product_attention.default
_BATCHES = (1, 3)  # samples with which a mask is computed: it must not depend on their number
_MOST_ELEMENTS = 1 << 28  # of a mask: 9,000 tokens take some 0.1 s
_SIZES_OF_PYTHON = {operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg}


def tell_kernels_of_causal_masks(module: fx.GraphModule, batch_dims: Sequence[int | None]) -> None:
    """Change the graph in place. `batch_dims`: of every flat input, the dimension that counts samples."""
    graph = module.graph
    dims = dict(zip(graph.find_nodes(op="placeholder"), batch_dims, strict=True))
    found: dict[fx.Node, bool] = {}
    for node in graph.find_nodes(op="call_function", target=_ATTENTION):
        given: tuple[Any, ...] = node.args
        query, key, value, mask, dropout, causal = given + (None, 0.0, False)[len(given) - 3 :]
        if isinstance(mask, fx.Node) and not causal:
            if mask not in found:
                found[mask] = _square(query, key) and _hides_the_future_alone(mask, dims)
            if found[mask]:
                node.args = (query, key, value, None, dropout, True)
    for source in (mask for mask, causal in found.items() if causal):
        for node in reversed(_needed(source) or ()):
            if not node.users:
                graph.erase_node(node)
    if any(found.values()):
        module.recompile()


def _square(query: Any, key: Any) -> bool:
    """Whether there are as many queries as keys, so that `is_causal` means the same from either corner."""
    shapes: list[Sequence[Any]] = [getattr(one.meta.get("val"), "shape", ()) for one in (query, key)]
    return all(len(shape) >= 2 and isinstance(shape[-2], int) for shape in shapes) and shapes[0][-2] == shapes[1][-2]


def _hides_the_future_alone(mask: fx.Node, dims: dict[fx.Node, int | None]) -> bool:
    """Whether the mask depends on sizes alone, and is the lower triangle for every sample."""
    needed = _needed(mask)
    sizes: Sequence[Any] = getattr(mask.meta.get("val"), "shape", ())[-2:]
    if needed is None or len(sizes) < 2 or not all(isinstance(size, int) for size in sizes):
        return False
    if sizes[0] != sizes[1] or max(_BATCHES) * sizes[0] * sizes[1] > _MOST_ELEMENTS:
        return False
    for batch in _BATCHES:
        value = _computed(needed, dims, batch)
        if value is None or value.dtype is not torch.bool:
            return False
        triangle = torch.ones(sizes, dtype=torch.bool, device="cpu").tril()
        if not torch.equal(value, triangle.expand_as(value)):
            return False
    return True


def _needed(mask: fx.Node) -> list[fx.Node] | None:
    """What the mask is computed from, in order, up to the sizes of inputs; None where it is computed from values."""
    needed: set[fx.Node] = set()
    stack = [mask]
    while stack:
        node = stack.pop()
        if node in needed:
            continue
        needed.add(node)
        if node.op != "call_function" or not _is_plain(node.target):
            return None
        if not (node.target is aten.sym_size.int and node.args[0].op == "placeholder"):  # type: ignore[union-attr]
            stack += node.all_input_nodes
    return [node for node in mask.graph.nodes if node in needed]


def _is_plain(target: Any) -> bool:
    """Whether an operator's result depends on nothing but its arguments, and changes none of them."""
    if target in _SIZES_OF_PYTHON or target is operator.getitem:
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags and not target._schema.is_mutable


def _computed(needed: Sequence[fx.Node], dims: dict[fx.Node, int | None], batch: int) -> torch.Tensor | None:
    """The mask for so many samples; None where it depends on another size that is not known."""
    values: dict[fx.Node, Any] = {}
    last = {source: node for node in needed for source in node.all_input_nodes}
    with torch.no_grad(), torch.device("cpu"):
        for node in needed:
            size = node.meta.get("val")
            source = node.args[0] if node.target is aten.sym_size.int else None
            if isinstance(source, fx.Node) and source.op == "placeholder":
                if not isinstance(size, int) and dims[source] != node.args[1]:
                    return None
                values[node] = size if isinstance(size, int) else batch
                continue
            args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), lambda one: _here(one, values))
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            for read in node.all_input_nodes:
                if last[read] is node:
                    del values[read]
    result = values[needed[-1]]
    return result if isinstance(result, torch.Tensor) else None


def _here(argument: Any, values: dict[fx.Node, Any]) -> Any:
    """An argument of an operator that runs on the CPU, wherever the model is."""
    if isinstance(argument, fx.Node):
        return values[argument]
    return torch.device("cpu") if isinstance(argument, torch.device) else argument
