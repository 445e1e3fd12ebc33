"""Clean up a traced graph: one calling convention, no checks, and an edge of the graph for every dependence."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.capture.mode_blocks.calls import call_with_autocast, call_with_grad_mode
from autopar.capture.rnn import separate_layers
from cost_models.graphs import Uncompiled

aten = torch.ops.aten

# Checks that export leaves in the graph. They name the capture's device and each costs a dispatch; autopar matches the
# signature of each call instead.
_ASSERTS = {"_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range_for_size"}


_CROSS_ENTROPIES = (
    aten.cross_entropy_loss.default,
    aten.nll_loss.default,
    aten.nll_loss_nd.default,
    aten.nll_loss2d.default,
)
# Sums and multiples of means. What else they are of, the proof decides that a batch may be split.
_ADDITIONS = (
    *(aten.add.Tensor, aten.add.Scalar, aten.add_.Tensor, aten.sub.Tensor, aten.sub.Scalar, aten.neg.default),
    *(aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.clone.default),
    *(aten.to.dtype, aten.to.device, aten._to_copy.default),
)
_CROSS_ENTROPY_DEFAULTS = (None, 1, -100, 0.0)  # weight, reduction (1: mean), ignore_index, label_smoothing


def tidy(module: fx.GraphModule) -> fx.GraphModule:
    """The cleaned graph of `module`, as a new module: the one from export checks its inputs in a hook.

    1. Use the flat calling convention, and remove guards, asserts and dead code.
    2. Turn blocks under no_grad or autocast into plain calls.
    3. Split recurrent operators into layers (`rnn`).
    4. Make every read after an in-place write an edge of the graph.
    5. Return the number of targets beside each mean cross-entropy.
    """
    graph = module.graph
    graph.set_codegen(fx.graph.CodeGen())
    for node in reversed(graph.nodes):
        if node.op == "call_module" and node.target == "_guards_fn":
            graph.erase_node(node)
    _plain_blocks(module)
    graph.eliminate_dead_code()
    separate_layers(graph)
    _drop_copies_onto_themselves(graph)
    _name_writes(graph)
    for node in graph.nodes:
        if node.target is aten.detach_.default:  # changes autograd's history, not the memory
            node.target = aten.detach.default
    _count_elements(graph)
    return Uncompiled(module, graph, class_name="Captured")


def is_assertion(node: fx.Node) -> bool:
    """Whether `node` is a check that export leaves in a graph."""
    packet = getattr(node.target, "overloadpacket", None)
    return packet is not None and packet.__name__ in _ASSERTS


def _name_writes(graph: fx.Graph) -> None:
    """After `b = relu_(a)` or `b = mul(x, y, out=a)` let later readers of `a` read `b`: an edge of the graph then puts
    them after the write."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        for index, written in _overwritten(node):
            readers = [user for user in written.users if order.get(user, -1) > order[node]]
            if written.op == "get_attr" or not readers:
                continue
            result = node
            if len(node.target._schema.returns) > 1:
                with graph.inserting_after(node):
                    result = graph.call_function(operator.getitem, (node, index))
                result.meta = {k: node.meta[k] for k in ("nn_module_stack", "stack_trace") if k in node.meta}
                if "val" in node.meta:
                    result.meta["val"] = node.meta["val"][index]
            for user in readers:
                user.replace_input_with(written, result)


def _drop_copies_onto_themselves(graph: fx.Graph) -> None:
    """Remove `a.copy_(b)` after `b = add_(a)`: it changes nothing, but autograd would call its saved tensors stale."""
    for node in list(graph.nodes):
        if node.target is not aten.copy_.default or node.users:
            continue
        source = node.args[1]
        while isinstance(source, fx.Node) and (written := _overwritten(source)):
            source = written[0][1]
        if source is node.args[0]:
            graph.erase_node(node)


def _overwritten(node: fx.Node) -> list[tuple[int, fx.Node]]:
    """The arguments that a node writes into and returns, each after the index of its result."""
    schema, found = getattr(node.target, "_schema", None), []
    if schema is None:
        return []
    for index, result in enumerate(schema.returns):
        if result.alias_info is None or not result.alias_info.is_write:
            continue
        for place, argument in enumerate(schema.arguments):
            if argument.alias_info is None or argument.alias_info.before_set != result.alias_info.before_set:
                continue
            value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            found += [(index, value)] if isinstance(value, fx.Node) else []
    return found


def _plain_blocks(module: fx.GraphModule) -> None:
    """Remove export's checks, and turn blocks under no_grad or autocast into plain calls; also inside such blocks."""
    for node in reversed(module.graph.nodes):
        if is_assertion(node):
            module.graph.erase_node(node)
        elif node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            node.target = call_with_grad_mode
        elif node.target is torch.ops.higher_order.wrap_with_autocast:
            node.target = call_with_autocast
    for child in module.children():
        if isinstance(child, fx.GraphModule):
            _plain_blocks(child)
            child.recompile()


class CrossEntropyArguments(NamedTuple):
    """The arguments that determine how many targets a mean cross-entropy averages."""

    target: fx.Node  # class numbers
    weight: fx.Node | None  # one weight per class
    ignore_index: int


def cross_entropy_arguments(node: fx.Node) -> CrossEntropyArguments | None:
    """The arguments of a mean cross-entropy (or negative log-likelihood) with class numbers as targets; else None."""
    if node.target not in _CROSS_ENTROPIES or node.kwargs:
        return None
    arguments: list[Any] = list(node.args[1:])
    target, weight, reduction, ignored, *_ = arguments + list(_CROSS_ENTROPY_DEFAULTS[len(arguments) - 1 :])
    value = target.meta.get("val") if isinstance(target, fx.Node) else None
    if reduction != 1 or value is None or value.is_floating_point():
        return None
    return CrossEntropyArguments(target, weight, ignored)


def _count_elements(graph: fx.Graph) -> None:
    """Add one output per output that is a mean cross-entropy, or such means of the same targets added up and scaled:
    the number of targets that it averages.

    Targets equal to `ignore_index` do not count, so the mean over micro-batches weighs them by their numbers of
    targets, not of samples.
    """
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    counts, weighted = [], []
    for index, node in enumerate(results):
        averaged = {(a.target, a.ignore_index): n for n, a in _added_up(node) if a.weight is None}
        if len(averaged) != 1:
            continue
        ((arguments, mean),) = averaged.items()
        with graph.inserting_before(output):
            counts.append(number_of_targets(graph, *arguments, like=mean))
        weighted.append(index)
    output.args = ((*results, *counts),)
    output.meta["weighted"] = tuple(weighted)


def number_of_targets(graph: fx.Graph, target: fx.Node, ignore_index: int, like: fx.Node) -> fx.Node:
    """A new node, of the module and source line of `like`, that counts the targets that are not `ignore_index`."""
    counted = graph.call_function(aten.ne.Scalar, (target, ignore_index))
    total = graph.call_function(aten.sum.default, (counted,))
    for new in (counted, total):
        new.meta = {k: like.meta[k] for k in ("nn_module_stack", "stack_trace") if k in like.meta}
    return total


def _added_up(result: Any) -> Iterator[tuple[fx.Node, CrossEntropyArguments]]:
    """The mean cross-entropies that `result` is, or that it adds up and scales."""
    seen, remaining = set[fx.Node](), [result]
    while remaining:
        node = remaining.pop()
        if not isinstance(node, fx.Node) or node in seen:
            continue
        seen.add(node)
        arguments = cross_entropy_arguments(node)
        if arguments is not None:
            yield node, arguments
        elif node.target in _ADDITIONS:
            remaining += node.all_input_nodes
