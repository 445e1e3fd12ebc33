"""The proof that a batch may be split into micro-batches. It reads the graph alone; nothing is run.

The state of each node's value (where its samples are, see `sample_states`) follows from the states of the node's inputs
and from the operator's rule:

    x: Split(0) --linear--> Split(0) --cross_entropy--> Mean          output: the micro-batches' weighted mean

Outputs that are Split are concatenated, Sums are added and Means averaged. The proof holds for all batch sizes, because
export keeps the batch size a symbol. Its verdict is one of

- *proven*: each output for the whole batch is the combination of the outputs for its micro-batches.
- *refuted*: an operator on the way to an output combines different samples. (Their influence may still cancel out
  later, as x - max(x) does in a softmax.)
- *open*: neither, because an operator has no rule, or because it moves samples to computed places, as the routing to
  experts does.

Batch norm in training counts as if it treated each sample alone, and writes into buffers are ignored: the caller
decides about both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
from torch import fx

from autopar.analysis.rules.calls import size_of
from autopar.analysis.rules.table import rule_name
from autopar.analysis.sample_states import (
    DIVIDES,
    DIVISIONS,
    IGNORES,
    Extent,
    Mean,
    Mixed,
    Split,
    State,
    Sum,
    Unbatched,
    Unproven,
    multiple,
)
from autopar.analysis.sample_walk import States, Walk
from autopar.capture.cleanup import cross_entropy_arguments
from autopar.capture.node_names import describe
from autopar.capture.program import Program


@dataclass(frozen=True)
class OutputCombination:
    """How the values of one flat output for the micro-batches become its value for the whole batch."""

    # "cat", "mean", "sum", "first" (all micro-batches give the same value) or "constant" (no operator computes it);
    # "mixed" where none of these holds.
    combine: str
    batch_dim: int | None = None  # of "cat"
    weight: int | None = None  # of "mean": the flat output with the number of elements averaged; None: samples


@dataclass(frozen=True)
class Proof:
    """Whether the batch of a Program may be split, and how its outputs are combined."""

    verdict: str  # "proven", "refuted" or "open"
    node: fx.Node | None  # the operator that combines samples, or where the proof ends; None without such an operator
    why: str  # the reason for the verdict, with the operator's module and source line
    outputs: tuple[OutputCombination | None, ...]  # one per flat output of the graph; None if refuted or open


def prove(program: Program) -> Proof:
    """Whether micro-batches of any size give the same outputs as the whole batch. O(nodes)."""
    flat = list(program.graph.output_node().args[0])  # type: ignore[arg-type]
    walk = walk_of(program)
    if isinstance(walk, str):
        return Proof("open", None, walk, (None,) * len(flat))
    outputs: list[OutputCombination | None] = []
    refuted: Mixed | None = None
    unknown: Unproven | None = None
    for index, output in enumerate(flat):
        state = walk.states[output] if isinstance(output, fx.Node) else Unbatched()
        count = flat[program.weights[index]] if index in program.weights else None
        result = combination(output, state, walk, count, program.weights.get(index))
        outputs.append(result if isinstance(result, OutputCombination) else None)
        refuted = refuted or (result if isinstance(result, Mixed) else None)
        unknown = unknown or (result if isinstance(result, Unproven) else None)
    culprit = refuted or unknown
    if culprit is None:
        return Proof("proven", None, "no operator relates samples to each other", tuple(outputs))
    verdict = "refuted" if refuted else "open"
    return Proof(verdict, culprit.node, f"{describe(culprit.node)} {culprit.why}", tuple(outputs))


def walk_of(program: Program) -> Walk | str:
    """The states of all nodes of `program`; or why its graph does not show them."""
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    if any("val" not in n.meta for n in placeholders):
        return "sizes are unknown: the model was not captured by torch.export"
    if not program.any_batch:
        return f"the captured model takes batches of {program.batch_size} samples only"
    dims = [spec.batch_dim for spec in program.inputs]
    states: dict[fx.Node, State] = {
        n: Unbatched() if dim is None else Split(dim) for n, dim in zip(placeholders, dims, strict=True)
    }
    return propagate(program, states) or "the captured model takes some batch sizes only"


def propagate(program: Program, states: Mapping[fx.Node, State]) -> Walk | None:
    """The states of all nodes of `program` from those of its placeholders; None where `program` does not run at every
    batch size."""
    symbols = {size_of(n.meta["val"].shape[s.dim]) for n, s in states.items() if isinstance(s, Split)}
    if not all(isinstance(symbol, sympy.Symbol) for symbol in symbols):
        return None
    walk = Walk(program.graph_module, frozenset(symbols))
    walk.run([states[n] for n in program.graph.nodes if n.op == "placeholder"])
    return walk


def combination(
    node: fx.Node, state: States, walk: Walk, count: fx.Node | None = None, weight: int | None = None
) -> OutputCombination | Mixed | Unproven:
    """How the output `node` is combined; or the state that rules it out.

    `count`: of a mean over targets, the output that counts these targets; `weight`: that output's flat index.
    """
    match state:
        case Mixed() | Unproven():
            return state
        case Unbatched():
            return OutputCombination("first")
        case Sum():
            return OutputCombination("sum")
        case Mean(counted):
            if counted is None:
                return OutputCombination("mean")
            if rule_name(counted) in DIVISIONS:
                return Mixed(counted, DIVIDES)
            if not _is_number_of_targets(count, counted):
                return Mixed(counted, IGNORES)
            return OutputCombination("mean", weight=weight)
        case Extent(size):
            return (
                OutputCombination("sum")
                if multiple(size) is not None
                else Mixed(node, "depends on the number of samples in the batch")
            )
        case Split(dim, 1, _, False):
            return OutputCombination("cat", dim)
        case Split(_, _, _, True):
            return Mixed(
                walk.first(node, lambda s: isinstance(s, Split) and s.positions), "numbers the samples of a batch"
            )
        case Split():
            folded = walk.first(node, lambda s: isinstance(s, Split) and s.outer > 1)
            return Mixed(folded, "interleaves the samples, so that micro-batches cannot be concatenated")
    return Unproven(node, "is not one tensor")


def _is_number_of_targets(count: Any, mean: fx.Node) -> bool:
    """Whether the output `count` is the number of targets that the cross-entropy `mean` averages. (See `tidy`.)"""
    arguments = cross_entropy_arguments(mean)
    if count is None or arguments is None or arguments.weight is not None:
        return False
    return bool(count.args[0].args == (arguments.target, arguments.ignore_index))
