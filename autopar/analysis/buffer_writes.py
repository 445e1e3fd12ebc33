"""Buffers that a model writes: once per call, but once per micro-batch where its batch is split, and once more where a
stage recomputes."""

from __future__ import annotations

from torch import fx

from autopar.analysis.operators import KEEP_STATISTICS, bases, compute_nodes, operator_name, writes, written_arguments
from autopar.capture.cleanup import aten
from autopar.capture.mode_blocks.calls import nested_block
from autopar.capture.node_names import describe
from autopar.capture.program import Program
from autopar.capture.uncaptured import uncaptured, uncaptured_in


def written_buffer(program: Program) -> str:
    """The obstacle if the model writes a buffer other than batch norm's, which it would write once per micro-batch."""
    for opaque in uncaptured_in(program.graph_module):
        if opaque.effects.stateful:
            return f"uncaptured {opaque.place} changes {opaque.effects.stateful}, once for every batch"
    for node in program.graph.nodes:
        for operator, written in writes(node):
            buffer = next((base for base in bases(written) if base.op == "get_attr"), None)
            if buffer is not None and not _is_of_batch_norm(operator):
                return f"{describe(operator)} writes buffer '{buffer.target}', once for every batch"
    return ""


def _is_of_batch_norm(operator: fx.Node) -> bool:
    """Whether an operator is a batch norm, or counts the batches of one."""
    stack = list((operator.meta.get("nn_module_stack") or {}).values())
    in_module = bool(stack) and "BatchNorm" in str(stack[-1][1]) and uncaptured(operator) is None
    return operator.target is aten.batch_norm.default or in_module


def unrepeatable_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Operators that write a buffer that others read, or keep a state: running them again would change the result.

    Batch norm is not among them: in training nothing reads its running statistics.
    """
    readers: dict[str, set[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            readers.setdefault(str(node.target), set()).update(node.users)
    unrepeatable = []
    for node in compute_nodes(graph):
        of_others = (written for operator, written in writes(node) if operator_name(operator) not in KEEP_STATISTICS)
        written = dict.fromkeys(a for a in of_others if a.op == "get_attr")
        opaque = uncaptured(node)
        own = opaque is not None and (opaque.effects.stateful or written)
        if own or any(readers[str(a.target)] - {node} or _reads_written(node, a) for a in written):
            unrepeatable.append(node)
    return unrepeatable


def _reads_written(node: fx.Node, written: fx.Node) -> bool:
    """Whether what `node` writes into its argument `written` is read within it, or from its result."""
    if (block := nested_block(node)) is None:
        return bool(node.users)
    module, arguments = block
    places = zip(module.graph.find_nodes(op="placeholder"), arguments, strict=True)
    return any(
        len(place.users) > 1 or place not in written_arguments(user) or _reads_written(user, place)
        for place, argument in places
        if argument is written
        for user in place.users
    )
