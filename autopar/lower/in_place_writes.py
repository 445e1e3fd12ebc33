"""In-place operators of a stage that is to be sharded.

A value that moves between devices becomes another tensor, which does not see later writes to the first one. So `relu_`
becomes `relu` if no reader can notice: no tensor that shares the memory and existed before the write is read after it.
Otherwise all tensors of that memory stay unsplit, the same on every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autopar.analysis.operators import KEEP_STATISTICS, operator_name, written_arguments


def without_writes(graph: fx.Graph, storages: Mapping[str, frozenset[int]]) -> set[fx.Node]:
    """Make operators functional where that changes no result. Returns the nodes of the memory where it would.

    `storages`: keys of the memory of every value, by name.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    writers = [n for n in order if operator_name_of(n) not in KEEP_STATISTICS and written_arguments(n)]
    kept: set[fx.Node] = set()
    for group in _by_memory(writers, storages):
        memory = frozenset().union(*(_memory(w, storages) for w in group))
        family = {n for n in order if storages.get(n.name, frozenset()) & memory}
        family |= {a for w in group for a in (w, *written_arguments(w))}
        found = {writer: functional(writer) for writer in group}
        if None in found.values() or any(_seen_after(w, family, order) for w in group):
            kept |= family
        else:
            for writer, target in found.items():
                writer.target = target
    return kept


def operator_name_of(node: fx.Node) -> str:
    return operator_name(node) if node.op == "call_function" else ""


def functional(node: fx.Node) -> Any:
    """The operator that returns what `node` writes; None where there is none that gives the same in all cases."""
    target = node.target
    written = written_arguments(node)
    if not isinstance(target, torch._ops.OpOverload) or len(written) != 1 or written[0] is not node.args[0]:
        return None
    name = operator_name(node)
    packet = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") and not name.endswith("__") else None
    found = getattr(packet, target._overloadname, None)
    types = {v.dtype for n in node.all_input_nodes if isinstance(v := n.meta.get("val"), torch.Tensor)}
    own = node.meta.get("val")
    if found is None or not isinstance(own, torch.Tensor) or written[0].op == "get_attr":
        return None
    if [a.name for a in found._schema.arguments] != [a.name for a in target._schema.arguments]:
        return None
    # In place the type stays; a new tensor's may be wider, and its shape may be that of the other operand.
    numbers = [a for a in node.args[1:] if isinstance(a, (float, complex))]
    wider = len(types) > 1 or (bool(numbers) and not own.is_floating_point() and not own.is_complex())
    return None if wider and name not in ("masked_fill_", "index_put_", "copy_", "fill_") else found


def _seen_after(writer: fx.Node, family: set[fx.Node], order: Mapping[fx.Node, int]) -> bool:
    """Whether a tensor that existed before the write is read after it."""
    now = order[writer]
    if any(n.op == "get_attr" for n in family):
        return True
    return any(order[user] > now for n in family if order[n] < now for user in n.users)


def _by_memory(writers: list[fx.Node], storages: Mapping[str, frozenset[int]]) -> list[list[fx.Node]]:
    """Writers that share memory together."""
    groups: list[tuple[set[Any], list[fx.Node]]] = []
    for writer in writers:
        memory: set[Any] = set(_memory(writer, storages)) | {a.name for a in written_arguments(writer)}
        inside = [writer]
        apart = []
        for other, members in groups:
            if other & memory:
                memory, inside = memory | other, members + inside
            else:
                apart.append((other, members))
        groups = [*apart, (memory, inside)]
    return [members for _, members in groups]


def _memory(writer: fx.Node, storages: Mapping[str, frozenset[int]]) -> frozenset[int]:
    return frozenset().union(*(storages.get(n.name, frozenset()) for n in (writer, *written_arguments(writer))))
