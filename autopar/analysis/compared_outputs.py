"""How an output is combined, by comparing its values for some samples with those for two parts of them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from autopar.analysis.batch_proof import OutputCombination
from autopar.analysis.node_values import changed_dims, close, in_lockstep, samples_of
from autopar.analysis.operators import operator_name
from autopar.capture.cleanup import aten
from autopar.capture.program import Program

Values = dict[fx.Node, Any]


def divides_by_values(output: fx.Node, dims: dict[str, int | None]) -> fx.Node | None:
    """The operator on the way to `output` whose divisor depends on the values (not only the sizes) of all samples.

    A mean over the unmasked tokens of a batch is one example: it is no mean of the micro-batches' means.
    """
    for node in ancestors(output):
        if operator_name(node) not in ("div", "div_", "true_divide") or len(node.args) < 2:
            continue
        divisor = node.args[1]
        if isinstance(divisor, fx.Node) and dims.get(divisor.name) is None and _depends_on_batch(divisor, dims):
            return node
    return None


def ancestors(node: fx.Node) -> list[fx.Node]:
    """`node` and all nodes that it is computed from, except through sizes of tensors."""
    seen: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in seen and current.target is not aten.sym_size.int:
            seen[current] = None
            stack += current.all_input_nodes
    return list(seen)


def _depends_on_batch(node: fx.Node, dims: dict[str, int | None]) -> bool:
    return any(dims.get(n.name) is not None for n in ancestors(node))


def classify(
    output: Any,
    whole: Values,
    parts: list[Values],
    dims: dict[str, int | None],
    weights: tuple[float, float],
    *,
    is_sum: bool,
) -> OutputCombination:
    """How `output` is combined, found by comparing the whole with the parts.

    weights: of the parts in a mean. is_sum: it was a sum for other samples; zeros and NaN are both sums and means.
    """
    if not isinstance(output, fx.Node):
        return OutputCombination("constant")
    if _counts_values(output):
        return OutputCombination("mixed")
    full, pieces = whole[output], [p[output] for p in parts]
    if not isinstance(full, torch.Tensor):
        if all(p == full for p in pieces):
            return OutputCombination("first")
        return OutputCombination("sum" if type(full) is int and full == sum(pieces) else "mixed")
    dim = dims[output.name]
    if dim is not None:
        joined = torch.cat(pieces, dim)
        return OutputCombination("cat", dim) if close(full, joined) else OutputCombination("mixed")
    if any(p.shape != full.shape for p in pieces):
        return OutputCombination("mixed")
    if not _depends_on_batch(output, dims):
        return OutputCombination("first" if all(close(full, p) for p in pieces) else "mixed")
    summed = full.dtype != torch.bool and close(full, pieces[0] + pieces[1])
    if is_sum or not full.is_floating_point():
        return OutputCombination("sum" if summed and (is_sum or bool(full.any())) else "mixed")
    total = sum(weights) or 1.0
    mean = sum(p * (w / total) for p, w in zip(pieces, weights, strict=True) if w)
    if not isinstance(mean, torch.Tensor) or close(full, mean):
        return OutputCombination("mean")
    return OutputCombination("sum" if summed else "mixed")


def combined_nodes(program: Program, calls: Iterable[list[Any]], rows: int) -> frozenset[fx.Node]:
    """The nodes whose values for some samples are the combination of those for two parts of them, in all `calls`.

    `calls`: flat inputs of `rows` samples. Those that the model does not take show nothing.
    """
    found: set[fx.Node] | None = None
    for samples in calls:
        parts = [samples_of(program, samples, *ends) for ends in ((0, rows), (0, rows - 1), (rows - 1, rows))]
        now: set[fx.Node] = set()
        dims: dict[str, int | None] = {}
        with contextlib.suppress(Exception):
            for node, (whole, *pieces) in in_lockstep(program.graph_module, parts, program.device):
                changed = changed_dims(whole, pieces[0])
                dims[node.name] = changed[0] if len(changed) == 1 else None
                with contextlib.suppress(RuntimeError, TypeError):  # parts that do not fit together
                    values = [{node: piece} for piece in pieces]
                    how = classify(node, {node: whole}, values, dims, (rows - 1.0, 1.0), is_sum=False)
                    now |= {node} if how.combine != "mixed" else set()
            found = now if found is None else found & now
    return frozenset(found or ())


def _counts_values(node: fx.Node) -> bool:
    """Whether a size of the result depends on values (export names such sizes u0, u1, ...)."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and any(re.search(r"\bu\d+", str(size)) for size in value.shape)
