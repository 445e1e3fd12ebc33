"""Equal layers of a model, traced once. For planning, which needs a model's graph but none of its values.

1. While the model is traced, only the first of several equal layers is traced into. Each call of another one becomes a
   single node, `again`; two `border` nodes mark where the first layer begins and ends.
2. Afterwards each `again` node is replaced by a copy of the nodes between the borders, over the layer's own parameters,
   and the borders are removed.

    1.  x -> border -> norm, linear, .. -> border -> again 'layers.1' -> again 'layers.2' -> head
                       `--- layers.0 ---'
    2.  x -> norm, linear, .. -> norm, linear, .. -> norm, linear, .. -> head
             `--- layers.0 ---'  `--- layers.1 ---'  `--- layers.2 ---'

Layers are equal if their classes, all sizes and all attributes are (`equality`); a number that is the layer's place in
its list (`layer_idx`) may differ. A layer that is called with other shapes or constants than the first one is traced
like any other module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autopar.capture import torch_private
from autopar.capture.buffer_assignments import HeldBuffers
from autopar.capture.module_hooks import has_hooks
from autopar.capture.module_state import named_tensors
from autopar.capture.repeated_layers.equality import PLAIN_TYPES, equal, tensor_signature
from autopar.hints.shard import hinted_modules
from cost_models.graphs import get_attribute

_library = torch.library.Library("autopar_repeated", "DEF")
_library.define("border(Tensor[] tensors, str point) -> Tensor[]")
_library.define("again(Tensor[] tensors, str first, str path) -> Tensor[]")
_BORDER = torch.ops.autopar_repeated.border.default
_AGAIN = torch.ops.autopar_repeated.again.default


@dataclass
class _FirstLayer:
    """The first of several equal layers, and its call."""

    path: str
    signature: list[Any] | None = None  # of the arguments; None before the call
    result: Any = None


_first_layers: dict[str, _FirstLayer] = {}  # by path, while a model is traced


@torch.library.register_fake("autopar_repeated::border", lib=_library)
def _border(tensors: list[torch.Tensor], point: str) -> list[torch.Tensor]:
    return [torch.empty_like(t) for t in tensors]


@torch.library.register_fake("autopar_repeated::again", lib=_library)
def _again(tensors: list[torch.Tensor], first: str, path: str) -> list[torch.Tensor]:
    return [torch.empty_like(t) for t in _tensors(_first_layers[first].result)]


# -- while the model is traced ----------------------------------------------------------------------------------------


@contextmanager
def equal_layers_traced_once(model: nn.Module) -> Iterator[None]:
    """Inside, tracing `model` traces one of equal layers; `copy_traced_layers` then completes the graph."""
    changed: list[tuple[nn.Module, Any]] = []
    try:
        for paths in _equal_layers(model):
            first = _first_layers[paths[0]] = _FirstLayer(paths[0])
            for path in paths:
                layer = model.get_submodule(path)
                changed.append((layer, vars(layer).get("forward")))
                wrap = _between_borders if path == first.path else _as_one_node
                layer.forward = wrap(layer, first, path)
        yield
    finally:
        for layer, own in changed:
            if own is None:
                del layer.forward
            else:
                layer.forward = own
        _first_layers.clear()


def forget_traced_layers() -> None:
    """Must be called before a model is traced again: the nodes of its first layers belonged to the graph before."""
    for first in _first_layers.values():
        first.signature = first.result = None


def _between_borders(layer: nn.Module, first: _FirstLayer, path: str) -> Callable[..., Any]:
    """The forward of the first layer: traced, with borders around its first call."""
    forward = layer.forward

    def traced(*args: Any, **kwargs: Any) -> Any:
        signature = _call_signature((args, kwargs))
        if first.signature is not None or signature is None:
            return forward(*args, **kwargs)
        args, kwargs = _with_tensors((args, kwargs), _BORDER(_tensors((args, kwargs)), f"enter {path}"))
        held = HeldBuffers(layer.named_modules())
        result = forward(*args, **kwargs)
        # The graph writes what a layer assigned to its buffers at its end, not between the borders.
        if _call_signature(result) is None or held.assigned():
            return result
        first.signature, first.result = signature, result
        return _with_tensors(result, _BORDER(_tensors(result), f"leave {path}"))

    return traced


def _as_one_node(layer: nn.Module, first: _FirstLayer, path: str) -> Callable[..., Any]:
    """The forward of another layer: one node, if it is called like the first layer was."""
    forward = layer.forward

    def skipped(*args: Any, **kwargs: Any) -> Any:
        signature = _call_signature((args, kwargs))
        if signature is None or signature != first.signature:
            return forward(*args, **kwargs)
        return _with_tensors(first.result, _AGAIN(_tensors((args, kwargs)), first.path, path))

    return skipped


def _call_signature(tree: Any) -> list[Any] | None:
    """What the work of a call depends on; None without tensors, or with objects that may remember earlier calls."""
    leaves, spec = torch_private.tree_flatten(tree)
    signature: list[Any] = [spec]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            signature.append(tensor_signature(leaf))
        elif isinstance(leaf, (*PLAIN_TYPES, torch.SymInt)):
            signature.append((type(leaf), str(leaf)))
        else:
            return None
    return signature if any(isinstance(leaf, torch.Tensor) for leaf in leaves) else None


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch_private.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _with_tensors(tree: Any, tensors: list[torch.Tensor]) -> Any:
    """`tree` with its tensors replaced, in order."""
    new = iter(tensors)
    return torch_private.tree_map(lambda leaf: next(new) if isinstance(leaf, torch.Tensor) else leaf, tree)


def _equal_layers(model: nn.Module) -> list[list[str]]:
    """Paths of equal layers of one list, at least two each. Lists inside such layers are not examined."""
    groups: list[list[str]] = []
    for name, module in model.named_modules():
        inside = any(_within(name, path) for group in groups for path in group)
        if inside or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        by_first: list[list[tuple[int, str, nn.Module]]] = []  # (place in the list, path, layer)
        for place, (key, layer) in enumerate(module.named_children()):
            if not _may_be_skipped(layer):
                continue
            entry = (place, f"{name}.{key}" if name else key, layer)
            same = next((group for group in by_first if _layers_equal(group[0], entry)), None)
            if same is not None:
                same.append(entry)
            else:
                by_first.append([entry])
        groups += [[path for _, path, _ in group] for group in by_first if len(group) > 1]
    return groups


def _may_be_skipped(layer: nn.Module) -> bool:
    """Hooks and shard hints need a layer to be traced; a layer without parameters costs little to trace."""
    has_parameters = any(True for _ in layer.parameters())
    return has_parameters and not any(map(has_hooks, layer.modules())) and not hinted_modules(layer)


def _layers_equal(a: tuple[int, str, nn.Module], b: tuple[int, str, nn.Module]) -> bool:
    places = a[0], b[0]

    def own_places(x: Any, y: Any) -> bool | None:
        return True if type(x) is int and type(y) is int and (x, y) == places else None

    return equal(a[2], b[2], own_places) and _shared_names(a[2]) == _shared_names(b[2])


def _shared_names(layer: nn.Module) -> list[str]:
    """For every name of a parameter or buffer in the layer, the first name of the same tensor."""
    first = _names_inside(layer)
    return [first[id(tensor)] for tensor in named_tensors(layer).values()]


# -- afterwards, in the graph -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TracedLayer:
    """The first of equal layers, in the graph."""

    path: str
    inside: list[fx.Node]  # its nodes, between the borders
    names: Mapping[int, str]  # of its tensors in the layer, by id
    enter: fx.Node
    leave: fx.Node


def copy_traced_layers(module: fx.GraphModule, model: nn.Module) -> None:
    """Replace each `again` node in the module's graph by a copy of the first layer's nodes. Does not recompile the
    module. O(nodes)."""
    graph = module.graph
    borders = {str(n.args[1]): n for n in graph.nodes if n.target is _BORDER}
    skipped = [n for n in graph.nodes if n.target is _AGAIN]
    firsts = {}
    for path in {str(n.args[1]) for n in skipped}:
        enter, leave = borders[f"enter {path}"], borders[f"leave {path}"]
        names = _names_inside(model.get_submodule(path))
        firsts[path] = _TracedLayer(path, _nodes_between(graph, enter, leave), names, enter, leave)
    tensors = {id(get_attribute(module, str(n.target))): n for n in graph.find_nodes(op="get_attr")}
    for node in skipped:
        _copy_layer(module, model, node, firsts[str(node.args[1])], tensors)
    for border in borders.values():
        for item in list(border.users):
            item.replace_all_uses_with(border.args[0][item.args[1]])
            graph.erase_node(item)
        graph.erase_node(border)
    graph.lint()


def _copy_layer(
    module: fx.GraphModule, model: nn.Module, node: fx.Node, first: _TracedLayer, tensors: dict[int, fx.Node]
) -> None:
    """Replace the `again` node `node` by copies of the first layer's nodes.

    `tensors`: the graph's nodes of parameters and buffers, by id of the tensor. Those of this layer are added.
    """
    graph = module.graph
    inputs: Any = node.args[0]
    path = str(node.args[2])
    # The copies of the first layer's inputs are this layer's inputs.
    copies: dict[fx.Node, Any] = {item: inputs[item.args[1]] for item in first.enter.users}

    def copied(old: fx.Node) -> Any:
        # The graph may name a shared tensor after another layer that has it, too. A constant that tracing found in the
        # code has no counterpart in `model`; all layers share it.
        name = first.names.get(id(get_attribute(module, str(old.target)))) if old.op == "get_attr" else None
        if name is not None and old not in copies:
            own = get_attribute(model, f"{path}.{name}")
            if id(own) not in tensors:
                tensors[id(own)] = _attribute(module, own, f"{path}.{name}")
                tensors[id(own)].meta = dict(old.meta)
            copies[old] = tensors[id(own)]
        return copies.get(old, old)

    with graph.inserting_before(node):
        for old in first.inside:
            copies[old] = graph.node_copy(old, copied)
            copies[old].meta = _moved_meta(old.meta, first.path, path)
    results: Any = first.leave.args[0]
    for item in list(node.users):
        item.replace_all_uses_with(copied(results[item.args[1]]))
        graph.erase_node(item)
    graph.erase_node(node)


def _nodes_between(graph: fx.Graph, enter: fx.Node, leave: fx.Node) -> list[fx.Node]:
    """The calls between two borders, in order, except those that unpack the results of `enter`."""
    nodes = list(graph.nodes)
    between = nodes[nodes.index(enter) + 1 : nodes.index(leave)]
    return [n for n in between if n.op.startswith("call") and n not in enter.users]


def _within(path: str, layer: str) -> bool:
    return path == layer or path.startswith(layer + ".")


def _names_inside(layer: nn.Module) -> dict[int, str]:
    """By id of each parameter and buffer, its first name in the layer."""
    found: dict[int, str] = {}
    for name, tensor in named_tensors(layer).items():
        found.setdefault(id(tensor), name)
    return found


def _attribute(module: fx.GraphModule, value: torch.Tensor, target: str) -> fx.Node:
    """A new node for a parameter or buffer of the model, at the beginning of the graph."""
    *names, last = target.split(".")
    owner: nn.Module = module
    for name in names:
        if not hasattr(owner, name):
            setattr(owner, name, nn.Module())
        owner = getattr(owner, name)
    if not hasattr(owner, last):
        if isinstance(value, nn.Parameter):
            owner.register_parameter(last, value)
        else:
            owner.register_buffer(last, value)
    *_, before = module.graph.find_nodes(op="placeholder")
    with module.graph.inserting_after(before):
        return module.graph.get_attr(target)


def _moved_meta(meta: dict[str, Any], first: str, path: str) -> dict[str, Any]:
    """`meta` of a node of the first layer for its copy in the layer at `path`."""
    stack = {
        key: (path + entry[0][len(first) :] if _within(str(entry[0]), first) else entry[0], *entry[1:])
        for key, entry in (meta.get("nn_module_stack") or {}).items()
    }
    return {**meta, "nn_module_stack": stack}
