"""What a captured graph goes through before it is a Program: one convention, no checks, every dependence an edge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.capture.rnn import separate_layers

aten = torch.ops.aten

# Checks that export leaves in the graph. They name the capture's device and cost a dispatch each; a wrong input
# is found by our own matching of signatures instead.
_ASSERTS = {"_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range_for_size"}


_CROSS_ENTROPY_DEFAULTS = (None, 1, -100, 0.0)  # weight, reduction (1: mean), ignore_index, label_smoothing


def tidy(module: fx.GraphModule) -> fx.GraphModule:
    """Flat calling convention; no guards, no asserts, no dead code; context wrappers as plain calls.

    A new module, because the one that export makes checks its inputs in a hook.
    """
    graph = module.graph
    graph.set_codegen(fx.graph.CodeGen())
    for node in reversed(graph.nodes):
        guard = node.op == "call_module" and node.target == "_guards_fn"
        packet = getattr(node.target, "overloadpacket", None)
        if guard or (packet is not None and packet.__name__ in _ASSERTS):
            graph.erase_node(node)
        elif node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            node.target = call_with_grad_mode
        elif node.target is torch.ops.higher_order.wrap_with_autocast:
            node.target = call_with_autocast
    for child in module.children():
        if isinstance(child, fx.GraphModule):
            _drop_asserts(child)
    graph.eliminate_dead_code()
    separate_layers(graph)
    _drop_copies_onto_themselves(graph)
    _name_writes(graph)
    for node in graph.nodes:
        if node.target is aten.detach_.default:  # takes history off, and writes no memory
            node.target = aten.detach.default
    _count_elements(graph)
    return fx.GraphModule(module, graph, class_name="Captured")


def _name_writes(graph: fx.Graph) -> None:
    """After `b = relu_(a)` read `b`, not `a`: every later reader then depends on the write by an edge of the graph."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if not _writes_first(node) or not isinstance(node.args[0], fx.Node) or node.args[0].op == "get_attr":
            continue
        for user in list(node.args[0].users):
            if order[user] > order[node]:
                user.replace_input_with(node.args[0], node)


def _drop_copies_onto_themselves(graph: fx.Graph) -> None:
    """After `b = add_(a)` export may write b into a, which it is; autograd would take what it has saved for stale."""
    for node in list(graph.nodes):
        if node.target is not aten.copy_.default or node.users:
            continue
        source = node.args[1]
        while isinstance(source, fx.Node) and _writes_first(source):
            source = source.args[0]
        if source is node.args[0]:
            graph.erase_node(node)


def _writes_first(node: fx.Node) -> bool:
    """Whether a node is its first argument, written to."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.returns or not node.args:
        return False
    alias = schema.returns[0].alias_info
    return alias is not None and alias.is_write


def _drop_asserts(module: fx.GraphModule) -> None:
    for node in reversed(module.graph.nodes):
        packet = getattr(node.target, "overloadpacket", None)
        if packet is not None and packet.__name__ in _ASSERTS:
            module.graph.erase_node(node)
    module.recompile()


def call_with_grad_mode(enabled: bool, function: Callable[..., Any], *args: Any) -> Any:
    """A `with torch.no_grad():` (or enable_grad) block of the model. The caller's own no_grad wins."""
    with torch.set_grad_enabled(enabled and torch.is_grad_enabled()):
        return function(*args)


def call_with_autocast(
    device_type: str, dtype: torch.dtype | None, enabled: bool, cache: bool | None, function: Any, *args: Any
) -> Any:
    """A `with torch.autocast(...):` block of the model."""
    with torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache):
        return function(*args)


def _count_elements(graph: fx.Graph) -> None:
    """Return, beside every output that is a mean cross-entropy, the number of targets that it averages.

    Targets equal to `ignore_index` do not count, so micro-batches weigh by their targets and not by their samples.
    """
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    counts, weighted = [], []
    for index, node in enumerate(results):
        if not isinstance(node, fx.Node) or node.target is not aten.cross_entropy_loss.default:
            continue
        given: list[Any] = list(node.args[1:])
        target, weight, reduction, ignored, *_ = given + list(_CROSS_ENTROPY_DEFAULTS[len(given) - 1 :])
        value = target.meta.get("val") if isinstance(target, fx.Node) else None
        if weight is not None or reduction != 1 or value is None or value.is_floating_point():
            continue
        with graph.inserting_before(output):
            counted = graph.call_function(aten.ne.Scalar, (target, ignored))
            counts.append(graph.call_function(aten.sum.default, (counted,)))
        for new in (counted, counts[-1]):
            new.meta = {k: node.meta[k] for k in ("nn_module_stack", "stack_trace") if k in node.meta}
        weighted.append(index)
    output.args = ((*results, *counts),)
    output.meta["weighted"] = tuple(weighted)
