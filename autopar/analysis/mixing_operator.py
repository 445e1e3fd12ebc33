"""Which operator makes a value depend on the samples that share a batch.

    h --> h[order] --> experts --> [back] --> y        h[order] disagrees with the parts', y agrees again
    h --> mean ---- * --> sum --> loss                 the product does not: it mixes samples
    y --> mean ---'

A value of the whole agrees with those of two parts if it is those put together, their mean or sum, or equal to both.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.analysis.node_values import close, in_lockstep
from autopar.capture.program import Program


def mixing_operator(
    program: Program,
    output: fx.Node,
    calls: Sequence[list[Any]],
    dims: Mapping[str, int | None],
    counts: tuple[int, int],
) -> fx.Node:
    """The operator that mixes samples on the way to `output`: the first that disagrees though all its inputs agree.

    `calls`: the flat inputs of all samples, and of two parts of them. `dims`: the batch dimensions of all nodes, by
    name. `counts`: of all samples, and of those in the first part.
    """
    flat = list(program.graph.output_node().args[0])  # type: ignore[arg-type]
    known = {flat[index] for index in program.weights}  # means over other counts than that of samples
    disagreeing: dict[fx.Node, None] = {}
    for node, (value, *parts) in in_lockstep(program.graph_module, calls, program.device):
        if isinstance(value, (tuple, list)):
            agrees = not any(one in disagreeing for one in node.all_input_nodes)
        else:
            given = node in known or node.op in ("placeholder", "get_attr")
            agrees = given or _agrees(value, parts, dims[node.name], counts)
        if not agrees:
            disagreeing[node] = None
    reached, pending = {output}, [output]
    while pending:
        inputs = [one for one in pending.pop().all_input_nodes if one in disagreeing and one not in reached]
        reached.update(inputs)
        pending += inputs
    first = next((n for n in disagreeing if n in reached and not disagreeing.keys() & set(n.all_input_nodes)), output)
    return first.args[0] if first.target is operator.getitem else first  # type: ignore[return-value]


def _agrees(value: Any, parts: list[Any], dim: int | None, counts: tuple[int, int]) -> bool:
    """Whether the value for all samples follows from those for two parts: put together along `dim`; without one, equal
    to both, their mean or their sum. `counts`: of all samples, and of those in the first part."""
    if not isinstance(value, torch.Tensor):
        return True
    if dim is not None:
        others = {(*one.shape[:dim], *one.shape[dim + 1 :]) for one in (value, *parts)}
        return len(others) == 1 and close(value, torch.cat(parts, dim))
    if any(part.shape != value.shape for part in parts):
        return False
    rows, first = counts
    one, two = parts
    if close(value, one) and close(value, two):
        return True
    if value.is_floating_point() and close(value, one * (first / rows) + two * (1 - first / rows)):
        return True
    return value.dtype != torch.bool and close(value, one + two)
