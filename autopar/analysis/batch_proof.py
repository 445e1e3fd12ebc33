"""The proof that a batch may be split into micro-batches, from the graph alone: nothing is run.

Node by node, the state of every value (where its samples are, see `autopar.rules.samples`) follows from the states of
what the node reads and from its operator's rule. Outputs whose samples lie one behind the other are concatenated, sums
are summed, means averaged. The proof is one for all sizes of the batch, because export has kept it a symbol.

- *proven*: every output of the whole batch is what its micro-batches' give together.
- *refuted*: on the way to an output samples meet. (What they do to each other may still cancel: x - max(x) in a
  softmax.)
- *open*: neither, because an operator has no rule, or moves samples by what it computes, as routing to experts does.

In training, batch norm counts as if it treated samples alone; writes into buffers are not looked at. Both are for the
caller to decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

from autopar.analysis.batch_dims import (
    BATCH,
    Extent,
    Mean,
    Mixed,
    Split,
    State,
    Sum,
    Unbatched,
    Unproven,
    cut,
    follow,
    joined,
    multiple,
    varies,
)
from autopar.analysis.operators import written_arguments
from autopar.analysis.rules.calls import OperatorCall, shape_of, size_of
from autopar.analysis.rules.notation import Rule, Size
from autopar.analysis.rules.table import bind, rule_name
from autopar.analysis.rules.views import FILLINGS, LIKE, LIKE_OTHERS, NEW
from autopar.analysis.rules.views import RULES as VIEWS
from autopar.capture.cleanup import call_with_autocast, call_with_grad_mode
from autopar.capture.module_hooks import is_hook_point
from autopar.capture.program import Program, describe, is_getitem

States = State | tuple["States", ...]


class Combination(NamedTuple):
    """How one flat output of the micro-batches becomes that of the whole batch."""

    combine: str  # "cat", "mean" (weighted by samples, or as Program.weights says), "sum", "first" (the same for all)
    dim: int | None = None  # of a "cat"


@dataclass(frozen=True)
class Proof:
    """Whether the batch of a Program may be split, and how its outputs combine."""

    verdict: str  # "proven", "refuted" or "open"
    node: fx.Node | None  # the operator where samples meet, or where the proof ends; None if proven, or for no operator
    why: str  # in words, with the operator's module and source line
    outputs: tuple[Combination | None, ...]  # per flat output of the graph; None where it does not combine, or is open


def prove(program: Program) -> Proof:
    """Whether micro-batches of any size give what the batch gives.

    Linear in the number of nodes.
    """
    flat = list(program.graph.output_node().args[0])  # type: ignore[arg-type]
    nothing: tuple[Combination | None, ...] = (None,) * len(flat)
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    if any("val" not in n.meta for n in placeholders):
        return Proof("open", None, "sizes are unknown: the model was not captured by torch.export", nothing)
    if not program.any_batch:
        return Proof("open", None, f"the model is made for batches of {program.batch_size} samples", nothing)
    batched = [
        (n, spec.batch_dim) for n, spec in zip(placeholders, program.inputs, strict=True) if spec.batch_dim is not None
    ]
    symbols = {size_of(n.meta["val"].shape[dim]) for n, dim in batched}
    if not all(isinstance(symbol, sympy.Symbol) for symbol in symbols):
        return Proof("open", None, "the model is made for batches of some sizes only", nothing)
    walk = _Walk(program.graph_module, frozenset(symbols))
    given: dict[fx.Node, States] = {n: Split(dim) for n, dim in batched}
    walk.run([given.get(n, Unbatched()) for n in placeholders])
    outputs: list[Combination | None] = []
    refuted: Mixed | None = None
    unknown: Unproven | None = None
    for index, output in enumerate(flat):
        state = walk.states[output] if isinstance(output, fx.Node) else Unbatched()
        found = _combined(program, index, output, state, walk)
        outputs.append(found if isinstance(found, Combination) else None)
        refuted = refuted or (found if isinstance(found, Mixed) else None)
        unknown = unknown or (found if isinstance(found, Unproven) else None)
    culprit = refuted or unknown
    if culprit is None:
        return Proof("proven", None, "no operator relates samples to each other", tuple(outputs))
    verdict = "refuted" if refuted else "open"
    return Proof(verdict, culprit.node, f"{describe(culprit.node)} {culprit.why}", tuple(outputs))


def _combined(
    program: Program, index: int, node: fx.Node, state: States, walk: _Walk
) -> Combination | Mixed | Unproven:
    """How the flat output `node` in this state combines; or what speaks against it."""
    match state:
        case Mixed() | Unproven():
            return state
        case Unbatched():
            return Combination("first")
        case Sum():
            return Combination("sum")
        case Mean(counted):
            if counted is not None and not (counted is node and index in program.weights):
                return Unproven(counted, "weighs by the targets that it does not ignore")
            return Combination("mean")
        case Extent(size):
            return (
                Combination("sum")
                if multiple(size) is not None
                else Mixed(node, "depends on how many samples share a batch")
            )
        case Split(dim, 1, _, False):
            return Combination("cat", dim)
        case Split(_, _, _, True):
            return Mixed(
                walk.first(node, lambda s: isinstance(s, Split) and s.numbers), "numbers the samples of a batch"
            )
        case Split():
            folded = walk.first(node, lambda s: isinstance(s, Split) and s.outer > 1)
            return Mixed(
                folded, "puts the samples into an order in which micro-batches cannot be put behind each other"
            )
    return Unproven(node, "is not one tensor")


class _Walk:
    """The states of one graph's nodes."""

    def __init__(self, module: fx.GraphModule, symbols: frozenset[sympy.Symbol]) -> None:
        self.module, self.symbols = module, symbols
        self.states: dict[fx.Node, States] = {}
        self._values: dict[fx.Node, Any] = {}
        self._roots: dict[fx.Node, fx.Node] = {}  # the node whose memory a view looks at
        self._to_batch = dict.fromkeys(symbols, BATCH)

    def run(self, given: Sequence[States]) -> None:
        """Fill `states`, placeholders being in the states `given`."""
        inputs = iter(given)
        for node in self.module.graph.nodes:
            if node.op == "output":
                continue
            if node.op == "placeholder":
                self.states[node] = next(inputs)
            elif node.op == "get_attr":
                self.states[node] = Unbatched()
            else:
                self.states[node] = self._state(node)
            self._roots[node] = self._roots[node.all_input_nodes[0]] if _is_view(node) else node
            for written in written_arguments(node):
                self._write(node, written)

    def first(self, node: fx.Node, holds: Callable[[States], bool]) -> fx.Node:
        """The node, up the operands of `node`, that first made a value in such a state."""
        while (source := next((n for n in node.all_input_nodes if holds(self.states[n])), None)) is not None:
            node = source
        return node

    def _write(self, node: fx.Node, written: fx.Node) -> None:
        """Through one view of it a tensor was written: what looks at the same memory sees what is there now."""
        new = self.states[node]
        if written.op == "get_attr" or new == self.states[written]:
            return
        for other in self.states:
            if other is not node and other is not written and self._roots[other] is self._roots[written]:
                self.states[other] = (
                    new if isinstance(new, (Mixed, Unproven)) else Unproven(node, "writes into a part of a tensor")
                )

    def _size(self, size: Size) -> Size:
        return size.xreplace(self._to_batch) if isinstance(size, sympy.Basic) else size

    def _value(self, node: fx.Node) -> Any:
        """The fake tensors or numbers that export recorded; for nodes that were added later, computed from these."""
        if "val" in node.meta:
            return node.meta["val"]
        if node not in self._values:
            known = isinstance(node.target, torch._ops.OpOverload)
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._value)
            self._values[node] = node.target(*args, **kwargs) if known else None  # type: ignore[operator]
        return self._values[node]

    def _state(self, node: fx.Node) -> States:
        value = self._value(node)
        reads = [self.states[n] for n in node.all_input_nodes]
        unknown = next((s for s in _leaves(reads) if isinstance(s, Unproven)), None)
        if is_getitem(node) and isinstance(reads[0], tuple):
            return reads[0][node.args[1]]  # type: ignore[index]
        if is_hook_point(node):  # hands on what it gets, and last what links the hooks of one call
            return (*(self.states[n] for n in node.args[0]), Unbatched())  # type: ignore[union-attr, index]
        if isinstance(value, torch.types.py_sym_types):
            size = self._size(size_of(value))
            if isinstance(size, sympy.Basic) and size.free_symbols - {BATCH}:
                return unknown or Unproven(node, "depends on values")
            return Extent(size) if varies(size) else Unbatched()
        if isinstance(value, (int, float)):
            return Unbatched()  # a size that export has found to be constant
        if unknown is not None:
            return unknown
        if node.target in (call_with_grad_mode, call_with_autocast):
            return self._inside(node)
        results = list(value) if isinstance(value, (tuple, list)) else [value]
        shapes = [tuple(map(self._size, shape)) for r in results if (shape := shape_of(r)) is not None]
        if len(shapes) != len(results):
            return Unproven(node, "returns what has no size")
        if any(isinstance(s, sympy.Basic) and s.free_symbols - {BATCH} for shape in shapes for s in shape):
            return Unproven(node, "returns as many entries as values tell")
        if all(isinstance(s, Unbatched) for s in _leaves(reads)) and not any(
            varies(s) for shape in shapes for s in shape
        ):
            states: Sequence[State] = [Unbatched()] * len(shapes)
        else:
            states = self._followed(node, shapes)
        return tuple(states) if isinstance(value, (tuple, list)) else states[0]

    def _followed(self, node: fx.Node, shapes: list[tuple[Size, ...]]) -> Sequence[State]:
        """The states of the results of an operator, by its rule or, along the batch, by what it is known to do."""
        name = rule_name(node)
        rule = bind(node, self._value)
        if name is None or rule is None:
            return [Unproven(node, "has no rule")] * len(shapes)
        call = OperatorCall(node, self._value)
        special = _numbered(name, call, self._size) or self._along_batch(name, call, rule, shapes)
        if special is not None:
            return special
        counts = [parameter for parameter, n in call.options if isinstance(self.states[n], Extent)]
        if any(name not in VIEWS or parameter in FILLINGS for parameter in counts):
            return [Unproven(node, "depends on how many samples there are")] * len(shapes)
        states = [self._operand(operand, name, place) for place, operand in enumerate(rule.operands)]
        sizes = {index: self._size(size) for index, size in rule.sizes.items()}
        rule = Rule(rule.operands, rule.inputs, rule.outputs, rule.kinds, sizes, rule.linear)
        if any(isinstance(s, tuple) for s in states):
            return [Unproven(node, "has no rule")] * len(shapes)
        return follow(node, name, rule, states, shapes)  # type: ignore[arg-type]

    def _operand(self, operand: Any, name: str, place: int = 0) -> States:
        state = self.states[operand] if isinstance(operand, fx.Node) else Unbatched()
        if name in LIKE and isinstance(state, Split):
            return replace(state, numbers=False)
        shape_only = name in (*NEW, *LIKE) or (name in LIKE_OTHERS and place > 0)
        return Unbatched() if shape_only else state

    def _along_batch(
        self, name: str, call: OperatorCall, rule: Rule, shapes: list[tuple[Size, ...]]
    ) -> Sequence[State] | None:
        """The batch put behind another one, or taken apart again."""
        if name in ("cat", "concat", "concatenate"):
            rank = len(shapes[0])
            pieces = zip(rule.operands, rule.inputs, strict=True)
            found = joined([self._operand(n, name) for n, dims in pieces if len(dims) == rank], int(call["dim"]) % rank)
            return None if found is None else [found]
        if name not in ("slice", "narrow", "split", "split_with_sizes", "chunk"):
            return None
        state, dim = self._operand(rule.operands[0], name), call.dim()
        if not isinstance(state, Split) or (call.has("step") and call["step"] != 1):
            return None
        start = self._size(call["start"] or 0) if call.has("start") else 0
        return cut(state, dim, [shape[dim] for shape in shapes], start)

    def _inside(self, node: fx.Node) -> States:
        """A graph in the graph: a block of the model with a grad mode or an autocast of its own."""
        place = 1 if node.target is call_with_grad_mode else 4
        child = self.module.get_submodule(str(node.args[place].target))  # type: ignore[union-attr]
        assert isinstance(child, fx.GraphModule)
        given = [self.states[n] if isinstance(n, fx.Node) else Unbatched() for n in node.args[place + 1 :]]
        walk = _Walk(child, self.symbols)
        walk.run(given)
        for placeholder, state in zip(child.graph.find_nodes(op="placeholder"), given, strict=True):
            if walk.states[placeholder] != state:
                return Unproven(node, "writes into a part of a tensor")
        result = child.graph.output_node().args[0]
        if isinstance(result, (tuple, list)):
            return tuple(walk.states[n] if isinstance(n, fx.Node) else Unbatched() for n in result)
        return walk.states[result] if isinstance(result, fx.Node) else Unbatched()


def _leaves(states: Iterable[States]) -> Iterable[State]:
    for state in states:
        if isinstance(state, tuple):
            yield from _leaves(state)
        else:
            yield state


def _is_view(node: fx.Node) -> bool:
    """Whether the result of `node` may look at the memory of its first operand."""
    if not node.all_input_nodes or not node.args or node.args[0] is not node.all_input_nodes[0]:
        return False
    schema = getattr(node.target, "_schema", None)
    return (
        is_getitem(node)
        or rule_name(node) in ("dropout", "feature_dropout", "alpha_dropout")
        or (schema is not None and any(r.alias_info is not None for r in schema.returns))
    )


def _numbered(name: str, call: OperatorCall, size: Callable[[Size], Size]) -> Sequence[State] | None:
    """arange(B) numbers the samples."""
    if name != "arange" or not varies(size(call.output_shapes[0][0])):
        return None
    counts_on = size(call["end"]) == BATCH and call.get("start", 0) == 0 and call.get("step", 1) == 1
    return [Split(0, numbers=True)] if counts_on else None
