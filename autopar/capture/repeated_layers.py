"""Layers that repeat, captured once: for planning, where a model's graph is needed but none of its values.

While the model is traced only the first of a run of equal layers is looked into; a call of one of the others is a node
by itself, and is then replaced by a copy of what the first one does, over its own parameters:

    x -> [ layers.0: norm, linear, .. ] -> layers.1 -> layers.2 -> head                           as traced
    x -> [ layers.0: norm, linear, .. ] -> [ layers.1: norm, linear, .. ] -> [ .. ] -> head       afterwards

Layers are equal if their classes, all sizes and all attributes are; a number that is just their place in the list
(`layer_idx`) may differ. A layer that is called with something else than the first one was is traced like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autopar.capture import torch_private
from autopar.capture.module_hooks import has_hooks
from autopar.hints.shard import hinted_modules
from autopar.hints.store import ModuleHints
from cost_models.graphs import get_attribute

_PLAIN = (int, float, str, bytes, bool, type(None), torch.dtype, torch.device)

_library = torch.library.Library("autopar_repeated", "DEF")
_library.define("border(Tensor[] tensors, str point) -> Tensor[]")
_library.define("again(Tensor[] tensors, str first, str path) -> Tensor[]")
_BORDER = torch.ops.autopar_repeated.border.default
_AGAIN = torch.ops.autopar_repeated.again.default


@dataclass
class _First:
    """The first layer of a run of equal ones, and its call."""

    path: str
    signature: list[Any] | None = None  # of what it was called with; None before
    result: Any = None


_tracing: dict[str, _First] = {}  # by path, while a model is traced


@torch.library.register_fake("autopar_repeated::border", lib=_library)
def _border(tensors: list[torch.Tensor], point: str) -> list[torch.Tensor]:
    return [torch.empty_like(t) for t in tensors]


@torch.library.register_fake("autopar_repeated::again", lib=_library)
def _again(tensors: list[torch.Tensor], first: str, path: str) -> list[torch.Tensor]:
    return [torch.empty_like(t) for t in _tensors(_tracing[first].result)]


@contextmanager
def first_of_equals(model: nn.Module) -> Iterator[None]:
    """Inside, tracing `model` looks into one of equal layers; `fill_in` then puts the others into the graph."""
    changed: list[tuple[nn.Module, Any]] = []
    try:
        for paths in _runs(model):
            first = _tracing[paths[0]] = _First(paths[0])
            for path in paths:
                layer = model.get_submodule(path)
                changed.append((layer, vars(layer).get("forward")))
                wrap = _looked_into if path == first.path else _by_itself
                layer.forward = wrap(layer.forward, first, path)
        yield
    finally:
        for layer, own in changed:
            if own is None:
                del layer.forward
            else:
                layer.forward = own
        _tracing.clear()


def _looked_into(forward: Callable[..., Any], first: _First, path: str) -> Callable[..., Any]:
    def traced(*args: Any, **kwargs: Any) -> Any:
        signature = _signature((args, kwargs))
        if first.signature is not None or signature is None:  # called again, or with what cannot be compared
            return forward(*args, **kwargs)
        args, kwargs = _with_tensors((args, kwargs), _BORDER(_tensors((args, kwargs)), f"enter {path}"))
        result = forward(*args, **kwargs)
        if _signature(result) is None:
            return result
        first.signature, first.result = signature, result
        return _with_tensors(result, _BORDER(_tensors(result), f"leave {path}"))

    return traced


def _by_itself(forward: Callable[..., Any], first: _First, path: str) -> Callable[..., Any]:
    def skipped(*args: Any, **kwargs: Any) -> Any:
        signature = _signature((args, kwargs))
        if signature is None or signature != first.signature:
            return forward(*args, **kwargs)
        return _with_tensors(first.result, _AGAIN(_tensors((args, kwargs)), first.path, path))

    return skipped


def _signature(tree: Any) -> list[Any] | None:
    """What a call's work depends on; None without tensors, or with objects that may remember calls."""
    leaves, spec = torch_private.tree_flatten(tree)
    found: list[Any] = [spec]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found.append((str(tuple(leaf.shape)), str(leaf.stride()), leaf.dtype, leaf.device))
        elif isinstance(leaf, (*_PLAIN, torch.SymInt)):
            found.append((type(leaf), str(leaf)))
        else:
            return None
    return found if any(isinstance(leaf, torch.Tensor) for leaf in leaves) else None


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch_private.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _with_tensors(tree: Any, tensors: list[torch.Tensor]) -> Any:
    """`tree` with other tensors, in order."""
    new = iter(tensors)
    return torch_private.tree_map(lambda leaf: next(new) if isinstance(leaf, torch.Tensor) else leaf, tree)


def _runs(model: nn.Module) -> list[list[str]]:
    """Paths of layers of one list that are equal, by list and kind; layers inside such layers are not looked at."""
    runs: list[list[str]] = []
    for name, module in model.named_modules():
        inside = any(name == path or name.startswith(path + ".") for run in runs for path in run)
        if inside or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        kinds: list[list[tuple[int, str, nn.Module]]] = []
        for place, (key, layer) in enumerate(module.named_children()):
            if (
                not any(True for _ in layer.parameters())
                or any(map(has_hooks, layer.modules()))
                or hinted_modules(layer)
            ):
                continue
            same = next((kind for kind in kinds if _equal(kind[0][2], layer, (kind[0][0], place))), None)
            entry = (place, f"{name}.{key}" if name else key, layer)
            if same is not None:
                same.append(entry)
            else:
                kinds.append([entry])
        runs += [[path for _, path, _ in kind] for kind in kinds if len(kind) > 1]
    return runs


def _equal(a: Any, b: Any, places: tuple[int, int]) -> bool:
    """Whether two layers, or attributes of them, compute the same with their parameters; `places` in their list."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (nn.Module, ModuleHints)):
        one, other = vars(a), vars(b)
        return one.keys() == other.keys() and all(_equal(one[key], other[key], places) for key in one)
    if isinstance(a, torch.Tensor):
        same = (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
        return same and a.requires_grad == b.requires_grad
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key], places) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_equal(x, y, places) for x, y in zip(a, b, strict=True))
    if isinstance(a, (*_PLAIN, set, frozenset)):
        return bool(a == b) or (type(a) is int and (a, b) == places)
    bound = getattr(a, "__func__", None)  # a method of the layer itself
    return bound is not None and bound is getattr(b, "__func__", None)


def fill_in(module: fx.GraphModule, model: nn.Module) -> None:
    """Replace every layer that is a node by itself by a copy of the first one's nodes, in place.

    O(nodes).
    """
    graph = module.graph
    borders = {str(n.args[1]): n for n in graph.nodes if n.target is _BORDER}
    firsts = {str(n.args[1]) for n in graph.nodes if n.target is _AGAIN}
    inside = {path: _region(graph, borders[f"enter {path}"], borders[f"leave {path}"]) for path in firsts}
    for node in [n for n in graph.nodes if n.target is _AGAIN]:
        given, first, path = node.args
        enter, leave = borders[f"enter {first}"], borders[f"leave {first}"]
        copies = {item: given[item.args[1]] for item in enter.users}

        def copied(old: fx.Node, copies: dict[fx.Node, Any] = copies, ends: tuple[str, str] = (first, path)) -> Any:
            own = old.op == "get_attr" and str(old.target).startswith(ends[0] + ".")
            if own and old not in copies and _has(model, str(old.target)):  # constants in the code are everybody's
                copies[old] = _attribute(module, model, ends[1] + str(old.target)[len(ends[0]) :])
                copies[old].meta = dict(old.meta)
            return copies.get(old, old)

        with graph.inserting_before(node):
            for old in inside[first]:
                copies[old] = graph.node_copy(old, copied)
                copies[old].meta = _renamed(old.meta, first, path)
        for item in list(node.users):
            item.replace_all_uses_with(copied(leave.args[0][item.args[1]]))
            graph.erase_node(item)
        graph.erase_node(node)
    for border in borders.values():
        for item in list(border.users):
            item.replace_all_uses_with(border.args[0][item.args[1]])
            graph.erase_node(item)
        graph.erase_node(border)
    graph.lint()
    module.recompile()


def _region(graph: fx.Graph, enter: fx.Node, leave: fx.Node) -> list[fx.Node]:
    """The nodes of a layer, in order: those between its borders, but what takes their results apart."""
    nodes = list(graph.nodes)
    between = nodes[nodes.index(enter) + 1 : nodes.index(leave)]
    return [n for n in between if n.op.startswith("call") and n not in enter.users]


def _within(path: str, layer: str) -> bool:
    return path == layer or path.startswith(layer + ".")


def _has(model: nn.Module, target: str) -> bool:
    """Whether it is a tensor of the model, rather than a constant that tracing found in its code."""
    try:
        get_attribute(model, target)
    except AttributeError:
        return False
    return True


def _attribute(module: fx.GraphModule, model: nn.Module, target: str) -> fx.Node:
    """A new node for a parameter or buffer of `model`, at the beginning of the graph."""
    *names, last = target.split(".")
    owner: nn.Module = module
    for name in names:
        if not hasattr(owner, name):
            setattr(owner, name, nn.Module())
        owner = getattr(owner, name)
    if not hasattr(owner, last):
        value = get_attribute(model, target)
        if isinstance(value, nn.Parameter):
            owner.register_parameter(last, value)
        else:
            owner.register_buffer(last, value)
    *_, before = (n for n in module.graph.nodes if n.op == "placeholder")
    with module.graph.inserting_after(before):
        return module.graph.get_attr(target)


def _renamed(meta: dict[str, Any], first: str, path: str) -> dict[str, Any]:
    """`meta` of a node of the first layer for its copy in another one."""
    stack = {
        key: (path + entry[0][len(first) :] if _within(str(entry[0]), first) else entry[0], *entry[1:])
        for key, entry in (meta.get("nn_module_stack") or {}).items()
    }
    return {**meta, "nn_module_stack": stack}
