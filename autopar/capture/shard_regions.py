"""Where calls with a shard hint begin and end in a captured graph.

While a model is traced, an operator marks the tensors that enter and leave a sharded call. In the graph each mark
becomes borders: one plain `alias` for every tensor whose layout the hint fixes.

    x -> mark "enter 0" -> linear -> relu -> mark "leave 0" -> y         as traced
    x -> alias          -> linear -> relu -> alias          -> y         in_strategy and out_strategy: two borders
    x -> linear -> y                                                     a single operator reads the layout itself

A border is an operator like any other: the search chooses its strategy, the hint constrains it, and the devices run it.
"""

from __future__ import annotations

import inspect
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from autopar.capture import torch_private
from autopar.hints.layout import ShardHint, TensorSplit
from autopar.hints.shard import sharded_calls_through

# -- while a model is captured ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardCall:
    """A call with a shard hint in a captured graph. Nodes are given by name."""

    title: str  # as messages name the call
    path: str | None  # of the module; None for a function
    hint: ShardHint
    inputs: tuple[str | None, ...]  # the borders of its inputs, or the inputs themselves; None if nothing reads one
    outputs: tuple[str | None, ...]  # the borders of its outputs, or the outputs themselves
    operator: str | None  # the only operator inside the call; None if there are several or none
    operators: tuple[str, ...]  # all operators inside the call


@dataclass(frozen=True)
class _Marked:
    """A sharded call while the model is traced."""

    title: str
    path: str | None
    hint: ShardHint


class _Capturing(threading.local):
    calls: list[_Marked] | None = None


_capturing = _Capturing()
_library = torch.library.Library("autopar_shard", "DEF")
_library.define("mark(Tensor[] tensors, str point) -> Tensor[]")
_library.impl("mark", lambda tensors, point: [t.clone() for t in tensors], "CompositeExplicitAutograd")
_MARK = torch.ops.autopar_shard.mark.default
_ALIAS = torch.ops.aten.alias.default
_BORDER = "autopar_border"  # key in the meta of borders


@torch.library.register_fake("autopar_shard::mark", lib=_library)
def _mark_fake(tensors: list[torch.Tensor], point: str) -> list[torch.Tensor]:
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]


@contextmanager
def marked(hinted: Mapping[str, tuple[nn.Module, ShardHint]]) -> Iterator[list[_Marked]]:
    """Inside, calls of these modules (by path) and of sharded functions leave marks in the traced graph."""
    handles: list[Any] = []
    before, _capturing.calls = _capturing.calls, []
    try:
        for path, (module, hint) in hinted.items():
            handles += _watch(path, module, hint, _capturing.calls)
        with sharded_calls_through(_call):
            yield _capturing.calls
    finally:
        _capturing.calls = before
        for handle in handles:
            handle.remove()


def _watch(path: str, module: nn.Module, hint: ShardHint, calls: list[_Marked]) -> list[Any]:
    open_calls: list[int] = []  # a stack of numbers of calls, because a module may call itself
    order = list(inspect.signature(module.forward).parameters)

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        open_calls.append(len(calls))
        calls.append(_Marked(f"module '{path or '(root)'}'", path, hint))
        in_order = sorted(kwargs.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order))
        return _through((args, dict(in_order)), f"enter {open_calls[-1]}")

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        return _through(output, f"leave {open_calls.pop()}")

    return [module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)]


def _call(function: Callable[..., Any], hint: ShardHint, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `function` with marks around it."""
    calls = _capturing.calls
    assert calls is not None, "inside `marked`"
    number = len(calls)
    calls.append(_Marked(f"function '{getattr(function, '__name__', function)}'", None, hint))
    args, kwargs = _through((args, kwargs), f"enter {number}")
    return _through(function(*args, **kwargs), f"leave {number}")


def _through(tree: Any, point: str) -> Any:
    """`tree` with its tensors passed through a mark."""
    leaves, spec = torch_private.tree_flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    for place, new in zip(places, _MARK([leaves[i] for i in places], point), strict=True):
        leaves[place] = new
    return torch_private.tree_unflatten(leaves, spec)


# -- in the captured graph --------------------------------------------------------------------------------------------


@dataclass
class Region:
    """A sharded call in a graph whose marks have been replaced by borders."""

    call: _Marked
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    operators: list[fx.Node] = field(default_factory=list)


def borders(graph: fx.Graph, calls: list[_Marked]) -> list[Region]:
    """Replace all marks by borders, in place.

    Returns the calls in graph order; calls without a mark in the graph come last, without operators.
    """
    opened: dict[str, tuple[Region, int]] = {}
    regions: list[Region] = []
    nodes = list(graph.nodes)
    for position, node in enumerate(nodes):
        if node.target is not _MARK:
            continue
        side, number = str(node.args[1]).split(" ")
        known = calls[int(number)]
        if side == "enter":
            region = Region(known, _border(graph, node, known.hint.inputs), [])
            opened[number] = (region, position)
            regions.append(region)
        elif number in opened:
            region, start = opened.pop(number)
            region.outputs = _border(graph, node, known.hint.outputs)
            region.operators = [n for n in nodes[start:position] if _computes(n)]
        graph.erase_node(node)
    # If a tracer starts again, it makes each call twice, and only the second one has marks: equal calls are one call.
    shown = {region.call for region in regions}
    return regions + [Region(lost, [], []) for lost in dict.fromkeys(calls) if lost not in shown]


def _border(graph: fx.Graph, mark: fx.Node, splits: tuple[TensorSplit | None, ...] | None) -> list[fx.Node]:
    """For every tensor of a mark its border, or the tensor itself if the hint does not fix its layout."""
    tensors: list[fx.Node] = list(mark.args[0])  # type: ignore[arg-type]
    ends = list(tensors)
    for i, value in enumerate(tensors):
        if splits is not None and len(splits) == len(tensors) and splits[i] is not None:
            with graph.inserting_before(mark):
                ends[i] = graph.call_function(_ALIAS, (value,))
            ends[i].meta = {k: mark.meta[k] for k in ("nn_module_stack", "stack_trace") if k in mark.meta}
            ends[i].meta[_BORDER] = True
            if "val" in value.meta:
                ends[i].meta["val"] = value.meta["val"]
    for item in list(mark.users):
        item.replace_all_uses_with(ends[item.args[1]])  # type: ignore[index]
        graph.erase_node(item)
    return ends


def _computes(node: fx.Node) -> bool:
    """Whether a node computes tensors; marks, getitem and the operators that run module hooks do not."""
    hook_point = getattr(node.target, "namespace", "") == "autopar"
    if node.op != "call_function" or node.target in (_MARK, operator.getitem) or hook_point:
        return False
    leaves = torch_private.tree_leaves(node.meta.get("val"))
    return any(isinstance(leaf, torch.Tensor) for leaf in leaves)


def settled(graph: fx.Graph, regions: list[Region], title: Callable[[fx.Node], str]) -> tuple[ShardCall, ...]:
    """The calls as names of nodes, once all other changes of the graph are done.

    Removes the input borders of calls with a single operator: the hint constrains that operator directly.
    `title`: names an operator for messages.
    """
    kept = set(graph.nodes)
    singles = [r.operators[0] if len(r.operators) == 1 and r.operators[0] in kept else None for r in regions]
    instead: dict[fx.Node, fx.Node] = {}
    for region, single in reversed(list(zip(regions, singles, strict=True))):  # inner calls first
        for border in dict.fromkeys(region.inputs):
            if border in kept and _BORDER in border.meta and set(border.users) == {single}:
                (value,) = border.args
                assert isinstance(value, fx.Node)
                border.replace_all_uses_with(value)
                graph.erase_node(border)
                instead[border] = value
                kept.discard(border)

    def name(node: fx.Node) -> str | None:
        while node in instead:
            node = instead[node]
        return node.name if node in kept else None

    settled_calls = []
    for region, single in zip(regions, singles, strict=True):
        call = region.call
        place = next((n for n in region.operators if n in kept), None)
        name_of_call = call.title
        if call.path is None and place is not None:
            name_of_call += f" in {title(place).partition(' in ')[2]}"
        inputs, outputs = tuple(map(name, region.inputs)), tuple(map(name, region.outputs))
        operator_name = None if single is None else single.name
        inside = tuple(n.name for n in region.operators if n in kept)
        settled_calls.append(ShardCall(name_of_call, call.path, call.hint, inputs, outputs, operator_name, inside))
    return tuple(settled_calls)
