"""What a stage computes from the sizes of its inputs alone (position numbers, attention masks), taken out of its graph.

```
   stage(x)                                  values(n)                    rest(x, mask)
     n    = size(x, 0)                          mask = ones(n) & ...        y = attention(x, mask)
     mask = ones(n) & ...           =>
     y    = attention(x, mask)                once per n                  for every micro-batch
```
They are the same for all micro-batches of one size, in all steps. Masks that attention does not need are gone before
(`capture.attention_masks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.analysis.operators import bases, is_random, operator_name, written_arguments
from autopar.capture.attention_masks import SIZE_ARITHMETIC
from autopar.capture.module_hooks import is_hook_point
from autopar.capture.uncaptured import uncaptured


@dataclass(frozen=True)
class SizeSplit:
    """The two graphs of a stage."""

    sizes: tuple[tuple[int, int], ...]  # (input of the stage, dimension): what `values` takes, in this order
    values: fx.GraphModule  # numbers -> a tuple of tensors
    rest: fx.GraphModule  # these tensors, then the stage's inputs -> the stage's outputs


def values_of_sizes(module: fx.GraphModule) -> set[fx.Node]:
    """The tensors that `module` computes from sizes and numbers alone.

    Nothing writes them, draws them at random, or hands them to the caller or to code that is not in the graph.
    """
    graph = module.graph
    exposed = {base for node in graph.nodes for read in _exposed(node) for base in bases(read)}
    numbers: set[fx.Node] = set()
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if not all(source in numbers or source in found for source in node.all_input_nodes):
            if _is_size(node):
                numbers.add(node)
        elif node.op == "call_function" and node.target in SIZE_ARITHMETIC:
            numbers.add(node)
        elif _is_pure(node, module) and node not in exposed and isinstance(node.meta.get("val"), torch.Tensor):
            found.add(node)
    return found


def split_by_sizes(module: fx.GraphModule) -> SizeSplit | None:
    """`module` in two; None where it computes nothing from sizes alone."""
    own = values_of_sizes(module)
    kept = [node for node in module.graph.nodes if node in own and any(user not in own for user in node.users)]
    if not kept:
        return None
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    needed = _closure(kept)
    sizes = [node for node in module.graph.nodes if node in needed and _is_size(node)]
    values, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for size in sizes:
        copies[size] = values.placeholder(size.name)
    for node in module.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = values.node_copy(node, copies.__getitem__)
    values.output(tuple(copies[node] for node in kept))
    rest, places = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in kept:
        places[node] = rest.placeholder(node.name)
    for node in module.graph.nodes:
        if node not in own:
            places[node] = rest.node_copy(node, places.__getitem__)
    for node in reversed(rest.nodes):
        if node.target in SIZE_ARITHMETIC and not node.users:
            rest.erase_node(node)  # only the values needed it
    name = type(module).__name__
    return SizeSplit(
        tuple((inputs.index(size.args[0]), int(size.args[1])) for size in sizes),
        fx.GraphModule(module, values, class_name=f"{name}Sizes"),
        fx.GraphModule(module, rest, class_name=name),
    )


def _is_size(node: fx.Node) -> bool:
    """Whether a node is the size of one of the graph's inputs."""
    source = node.args[0] if node.args else None
    return (
        node.target is torch.ops.aten.sym_size.int and isinstance(source, fx.Node) and source.op == "placeholder"
    ) and isinstance(node.args[1], int)


def _is_pure(node: fx.Node, module: fx.GraphModule) -> bool:
    return (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and "empty" not in operator_name(node)  # its memory is not set
        and not written_arguments(node)
        and not is_hook_point(node)
        and not is_random(node, module)
    )


def _exposed(node: fx.Node) -> Iterator[fx.Node]:
    """What a node writes, returns to the caller, or gives to code that may write it."""
    opaque = node.op == "call_module" or uncaptured(node) is not None or not _is_functional(node.target)
    if node.op == "output" or (opaque and node.op not in ("placeholder", "get_attr")):
        yield from node.all_input_nodes
    else:
        yield from written_arguments(node)


def _is_functional(target: Callable[..., Any] | str) -> bool:
    return isinstance(target, torch._ops.OpOverload) or getattr(target, "__module__", "") in ("_operator", "math")


def _closure(nodes: list[fx.Node]) -> set[fx.Node]:
    """`nodes` and all that they are computed from, up to sizes."""
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += [] if _is_size(node) else node.all_input_nodes
    return found
