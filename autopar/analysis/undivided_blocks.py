"""Blocks under an autocast or grad mode of forward's own: each is one operator of the graph, however much it holds."""

from __future__ import annotations

from torch import fx

from autopar.analysis.operators import compute_nodes
from autopar.capture.mode_blocks.calls import nested_block
from autopar.capture.mode_blocks.inlined import KEPT
from autopar.capture.node_names import describe
from autopar.capture.program import Program

_MUCH = 0.5  # share of the model's operators from which on a block is worth a note


def undivided_blocks(program: Program) -> tuple[str, ...]:
    """A note on each block that holds much of the model, and what to do about it."""
    sizes = {node: _operators(node) for node in compute_nodes(program.graph)}
    return tuple(
        f"{describe(node)} is one operator, which no stage and no shard divides: a block of {size} of the "
        f"model's {sum(sizes.values())} operators. {_why(node)}"
        for node, size in sizes.items()
        if size > max(1, _MUCH * sum(sizes.values()))
    )


def _operators(node: fx.Node) -> int:
    """How many a node stands for."""
    block = nested_block(node)
    return 1 if block is None else sum(map(_operators, compute_nodes(block[0].graph)))


def _why(node: fx.Node) -> str:
    if KEPT in node.meta:
        return f"It stays whole because {node.meta[KEPT]}"
    return "Take out of it what needs no such block"
