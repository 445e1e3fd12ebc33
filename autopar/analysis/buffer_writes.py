"""Buffers that a model writes: once per call, but once per micro-batch where its batch is split."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autopar.analysis.operators import bases, nested_block, written_arguments
from autopar.capture.cleanup import aten
from autopar.capture.node_names import describe
from autopar.capture.program import Program
from autopar.capture.uncaptured import uncaptured, uncaptured_in


def written_buffer(program: Program) -> str:
    """The obstacle if the model writes a buffer other than batch norm's, which it would write once per micro-batch."""
    for opaque in uncaptured_in(program.graph_module):
        if opaque.effects.stateful:
            return f"uncaptured {opaque.place} changes {opaque.effects.stateful}, once for every batch"
    for node, written in _writes(program.graph_module):
        buffer = next((base for base in bases(written) if base.op == "get_attr"), None)
        if buffer is not None:
            return f"{describe(node)} writes buffer '{buffer.target}', once for every batch"
    return ""


def _writes(module: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Pairs of an operator and what it writes in place, except in batch norms; those in nested graphs included."""
    for node in module.graph.nodes:
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        if node.target is aten.batch_norm.default or (
            stack and "BatchNorm" in str(stack[-1][1]) and uncaptured(node) is None
        ):
            continue
        yield from ((node, written) for written in written_arguments(node))
        if (block := nested_block(node)) is not None:
            graph, arguments = block
            outside = dict(zip(graph.graph.find_nodes(op="placeholder"), arguments, strict=True))
            for inner, written in _writes(graph):
                given = (outside.get(base, base) for base in bases(written))
                yield from ((inner, base) for base in given if isinstance(base, fx.Node))
