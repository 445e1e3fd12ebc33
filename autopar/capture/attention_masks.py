"""Attention is given no more of a mask than the model's code gives it where it is not exported.

    as exported                                       here
    attention(q, k, v, mask)                          attention(q, k, v, is_causal=True)   it hides the future alone
    attention(q, k, v, mask)                          attention(q, k, v)                   it hides nothing
    attention(q, k, v, where(expand(m), bias, ..))    attention(q, k, v, where(m, bias, ..))   one for all samples

transformers' models call attention without such masks where they run, and with them while they are exported: the graph
may be used for lengths at which the answer is another (pytorch/pytorch/issues/108108). Programs have one length, so
masks are computed here and looked at. On GPUs an explicit mask rules out flash attention and doubles the FLOPs of a
causal one: GPT-2 medium in float32 took 11 % longer a step on an H200 (torch 2.11). A mask for every sample takes
memory: 7 % of a T5's.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import fx

aten = torch.ops.aten

Hidden = Literal["nothing", "future"]  # of the keys, for every query

_ATTENTION = aten.scaled_dot_product_attention.default
_BATCHES = (1, 3)  # samples with which a mask is computed: it must not depend on their number
_MOST_ELEMENTS = 1 << 28  # of a mask: 9,000 tokens take some 0.1 s

SIZE_ARITHMETIC = {operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg}
"""What Python computes sizes from sizes with."""


def settle_masks(module: fx.GraphModule, batch_dims: Sequence[int | None]) -> None:
    """Change the graph in place. `batch_dims`: of every flat input, the dimension that counts samples."""
    graph = module.graph
    dims = dict(zip(graph.find_nodes(op="placeholder"), batch_dims, strict=True))
    seen: dict[fx.Node, Hidden | None] = {}
    for node in graph.find_nodes(op="call_function", target=_ATTENTION):
        given: tuple[Any, ...] = node.args
        query, key, value, mask, dropout, causal = given + (None, 0.0, False)[len(given) - 3 :]
        if not isinstance(mask, fx.Node) or causal:
            continue
        if mask not in seen:
            seen[mask] = _hidden(mask, dims)
        hidden = seen[mask]
        if hidden == "nothing" or (hidden == "future" and _square(query, key)):
            node.args = (query, key, value, None, dropout, hidden == "future")
    for mask, hidden in seen.items():
        if hidden is None:
            _share_between_samples(mask)
        else:
            _erase_unused(mask)
    if seen:
        module.recompile()


def _square(query: Any, key: Any) -> bool:
    """Whether there are as many queries as keys, so that `is_causal` means the same from either corner."""
    shapes: list[Sequence[Any]] = [getattr(one.meta.get("val"), "shape", ()) for one in (query, key)]
    return all(len(shape) >= 2 and isinstance(shape[-2], int) for shape in shapes) and shapes[0][-2] == shapes[1][-2]


def _hidden(mask: fx.Node, dims: dict[fx.Node, int | None]) -> Hidden | None:
    """What the mask hides of every sample; None where that is something else, or depends on more than sizes."""
    needed = _needed(mask)
    sizes: Sequence[Any] = getattr(mask.meta.get("val"), "shape", ())[-2:]
    if needed is None or len(sizes) < 2 or not all(isinstance(size, int) for size in sizes):
        return None
    if max(_BATCHES) * sizes[0] * sizes[1] > _MOST_ELEMENTS:
        return None
    values = [_computed(needed, dims, batch) for batch in _BATCHES]
    if any(value is None or value.dtype is not torch.bool for value in values):
        return None
    if all(value.all() for value in values if value is not None):
        return "nothing"
    triangle = torch.ones(sizes, dtype=torch.bool, device="cpu").tril()
    same = all(torch.equal(value, triangle.expand_as(value)) for value in values if value is not None)
    return "future" if same else None


def _share_between_samples(mask: fx.Node) -> None:
    """Let a mask that is made of one repeated for every sample be made of that one alone: attention repeats it."""
    chain = [mask]
    while chain[-1].target is aten.contiguous.default and isinstance(chain[-1].args[0], fx.Node):
        chain.append(chain[-1].args[0])
    choice = chain[-1]
    repeated = choice.args[0] if getattr(choice.target, "overloadpacket", None) is aten.where else None
    if not isinstance(repeated, fx.Node) or repeated.target is not aten.expand.default:
        return
    one = repeated.args[0]
    assert isinstance(one, fx.Node)
    shapes = [_shape(node) for node in (one, *choice.all_input_nodes[1:])]
    whole = _shape(choice)
    if any(not all(isinstance(size, int) for size in shape) for shape in shapes) or len(whole) != len(shapes[0]):
        return
    if (1, *whole[1:]) != tuple(torch.broadcast_shapes(*shapes)) or not all(map(_read_as_masks, chain)):
        return
    choice.replace_input_with(repeated, one)
    for node in chain:
        node.meta["val"] = node.meta["val"][:1]
    _erase_unused(repeated)


def _shape(node: fx.Node) -> tuple[Any, ...]:
    return tuple(getattr(node.meta.get("val"), "shape", ()))


def _read_as_masks(node: fx.Node) -> bool:
    """Whether only attention reads the node, as a mask, or what makes it contiguous for that."""
    return all(
        user.target is aten.contiguous.default
        or (user.target is _ATTENTION and user.args[3:4] == (node,) and node not in user.args[:3])
        for user in node.users
    )


def _erase_unused(mask: fx.Node) -> None:
    """Erase the mask, and all that is computed for it alone from sizes."""
    for node in reversed(_needed(mask) or ()):
        if not node.users:
            node.graph.erase_node(node)


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
    if target in SIZE_ARITHMETIC or target is operator.getitem:
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags and not target._schema.is_mutable


def _computed(needed: Sequence[fx.Node], dims: dict[fx.Node, int | None], batch: int) -> torch.Tensor | None:
    """The mask for `batch` samples; None where it depends on another size that is not known."""
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
