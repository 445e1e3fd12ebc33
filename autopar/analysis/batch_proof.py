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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from autopar.analysis.operators import nested_block, written_arguments
from autopar.analysis.rules.calls import OperatorCall, shape_of, size_of
from autopar.analysis.rules.notation import IndexKind, Rule, Size
from autopar.analysis.rules.table import bind, rule_name
from autopar.analysis.rules.views import FILLINGS, LIKE, LIKE_OTHERS, NEW
from autopar.analysis.rules.views import RULES as VIEWS
from autopar.analysis.sample_states import (
    BATCH,
    DIVIDES,
    DIVISIONS,
    IGNORES,
    SELECTS,
    Extent,
    Mean,
    Mixed,
    Split,
    State,
    Sum,
    Unbatched,
    Unproven,
    concatenated,
    follow,
    multiple,
    pieces,
    strided,
    varies,
)
from autopar.analysis.shared_memory import Owners, SharedMemory, returned_arguments
from autopar.capture.cleanup import cross_entropy_arguments
from autopar.capture.module_hooks import is_hook_point
from autopar.capture.node_names import describe
from autopar.capture.program import Program, is_getitem

States = State | tuple["States", ...]  # of a tensor or number, or of each item of a tuple

_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_ARITHMETIC = ("add", "sub", "rsub", "mul", "multiply", "div", "divide", "true_divide")
_WRITES_PART = "writes into a part of a tensor"


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


class Walk:
    """The states of one graph's nodes."""

    def __init__(self, module: fx.GraphModule, symbols: frozenset[sympy.Symbol]) -> None:
        self.module, self.symbols = module, symbols
        self.states: dict[fx.Node, States] = {}
        self.memory = SharedMemory()
        self.written: set[fx.Node] = set()  # placeholders whose memory the graph writes
        self._values: dict[fx.Node, Any] = {}
        self._to_batch = dict.fromkeys(symbols, BATCH)

    def run(self, inputs: Sequence[States], owners: Sequence[Owners] = ()) -> None:
        """Fill `states`. `inputs`: the states of the placeholders, in order; `owners`: of their memory, in a nested
        graph."""
        remaining, remaining_owners = iter(inputs), iter(owners)
        for node in self.module.graph.nodes:
            if node.op == "output":
                continue
            if node.op == "placeholder":
                self.states[node] = next(remaining)
                self.memory.add(node, next(remaining_owners, None))
                continue
            if (block := nested_block(node)) is not None:
                self._nested(node, *block)
                continue
            self.states[node] = Unbatched() if node.op == "get_attr" else self._state(node)
            self.memory.add(node)
            for written in written_arguments(node):
                if not self._is_statistic(node, written):
                    own = written in returned_arguments(node)
                    self._write(node, written, self.states[node] if own else Unproven(node, _WRITES_PART))

    def first(self, node: fx.Node, holds: Callable[[States], bool]) -> fx.Node:
        """Follow operands for which `holds` is true, from `node` upwards: the first node of this chain."""
        while (source := next((n for n in node.all_input_nodes if holds(self.states[n])), None)) is not None:
            node = source
        return node

    def _write(self, node: fx.Node, written: fx.Node, after: States) -> None:
        """Update the states after `node` has written into the memory of `written`, whose state becomes `after`.

        All other values in that memory see the write. If every sample wrote into its own part of `written` alone, they
        keep their states; where `written` holds some of the samples only, as x[0] does, the whole memory mixes them.
        """
        before = self.states[written]
        kept = after == before and not any(isinstance(s, (Mixed, Unproven)) for s in _leaves([before]))
        spoilt = after if isinstance(after, (Mixed, Unproven)) else Unproven(node, _WRITES_PART)
        for other in self.memory.sharing(written):
            if other.op == "placeholder":
                self.written.add(other)
            if other is written or other is node:
                continue
            now = list(_leaves([self.states[other]]))
            # All samples share the memory of an expanded tensor that has no batch dimension.
            folded = isinstance(before, Split) and any(isinstance(s, Unbatched) for s in now)
            if not all(isinstance(s, (Mixed, Unproven)) for s in now) and (not kept or folded):
                self.states[other] = spoilt
        self.states[written] = after

    def _is_statistic(self, node: fx.Node, written: fx.Node) -> bool:
        """Whether `node` is a batch norm that updates its running statistic `written`, a buffer."""
        in_buffers = all(isinstance(owner, str) for owner in self.memory.owners[written])
        return rule_name(node) in ("batch_norm", "instance_norm") and in_buffers

    def _size(self, size: Size) -> Size:
        return size.xreplace(self._to_batch) if isinstance(size, sympy.Basic) else size

    def _value(self, node: fx.Node) -> Any:
        """The fake tensors or numbers that export recorded; computed from these for nodes that were added later."""
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
        unknown: Mixed | Unproven | None = next((s for s in _leaves(reads) if isinstance(s, Unproven)), None)
        unknown = next((s for s in _leaves(reads) if isinstance(s, Mixed) and s.lasting), unknown)
        if is_getitem(node) and isinstance(reads[0], tuple):
            return reads[0][node.args[1]]  # type: ignore[index]
        if is_hook_point(node):  # returns its tensors unchanged, then a handle that links the hooks of one call
            return (*(self.states[n] for n in node.args[0]), Unbatched())  # type: ignore[union-attr, index]
        if isinstance(value, torch.types.py_sym_types):
            size = self._size(size_of(value))
            if isinstance(size, sympy.Basic) and size.free_symbols - {BATCH}:
                return unknown or Unproven(node, "returns a size that depends on values")
            return Extent(size) if varies(size) else Unbatched()
        if isinstance(value, (int, float)):
            return Unbatched()  # a size that export has proven constant
        if unknown is not None:
            return self._mean_of_unknown_number(node) or self._scaled_by_batch(node) or unknown
        results = list(value) if isinstance(value, (tuple, list)) else [value]
        shapes = [tuple(map(self._size, shape)) for r in results if (shape := shape_of(r)) is not None]
        if len(shapes) != len(results):
            return Unproven(node, "returns a value without a shape")
        if any(isinstance(s, sympy.Basic) and s.free_symbols - {BATCH} for shape in shapes for s in shape):
            return Unproven(node, "returns a number of entries that depends on values")
        if all(isinstance(s, Unbatched) for s in _leaves(reads)) and not any(
            varies(s) for shape in shapes for s in shape
        ):
            states: Sequence[State] = [Unbatched()] * len(shapes)
        else:
            states = self._followed(node, shapes)
        return tuple(states) if isinstance(value, (tuple, list)) else states[0]

    def _mean_of_unknown_number(self, node: fx.Node) -> Mixed | None:
        """The state of a mean over as many entries as the values decide, such as those under a mask; None for others.

        A micro-batch's mean has the weight of its own number of entries, which is not that of its samples.
        """
        rule = bind(node, self._value, self._size)  # inputs have the same number of samples
        if rule is None:
            return None
        averaged = [rule.sizes.get(index) for index, kind in rule.kinds.items() if kind is IndexKind.AVERAGED]
        sizes = [self._size(size) for size in averaged if isinstance(size, sympy.Basic)]
        if not any(size.free_symbols - {BATCH} for size in sizes):
            return None
        return Mixed(node, SELECTS)

    def _scaled_by_batch(self, node: fx.Node) -> Mixed | None:
        """The state of arithmetic with entries of samples and one number of the whole batch, which is another one for
        each micro-batch, and of their comparison; None for other operators. In arithmetic, whole numbers may be places
        among the entries."""
        compares = rule_name(node) in _COMPARISONS
        if not compares and rule_name(node) not in _ARITHMETIC:
            return None
        values = [(n, self.states[n], self._value(n)) for n in node.all_input_nodes]
        entries = any(
            isinstance(s, (Split, Unproven)) and shape_of(v) and (compares or v.dtype.is_floating_point)
            for _, s, v in values
        )
        of_batch = any(
            not shape_of(v) and self._follows_samples(n)
            if isinstance(s, Unproven)
            else isinstance(s, (Mean, Sum)) and v.dtype.is_floating_point
            for n, s, v in values
        )
        return Mixed(node, lasting=True) if of_batch and entries else None

    def _follows_samples(self, node: fx.Node) -> bool:
        """Whether what `node` returns depends on samples."""
        pending, seen = [node], set[fx.Node]()
        while pending:
            one = pending.pop()
            if any(isinstance(state, Split) for state in _leaves([self.states[one]])):
                return True
            seen.add(one)
            pending += [source for source in one.all_input_nodes if source not in seen]
        return False

    def _followed(self, node: fx.Node, shapes: list[tuple[Size, ...]]) -> Sequence[State]:
        """The states of the results of an operator: by a special case along the batch dimension, or by its rule."""
        name = rule_name(node)
        rule = bind(node, self._value, self._size)  # inputs have the same number of samples
        if name is None or rule is None:
            return [Unproven(node, "has no rule")] * len(shapes)
        call = OperatorCall(node, self._value, self._size)
        special = _positions(name, call, self._size) or self._along_batch(name, call, rule, shapes)
        if special is not None:
            return special
        # Operators on views may use B as a size; any other use of B makes values depend on it.
        counts = [parameter for parameter, n in call.options if isinstance(self.states[n], Extent)]
        if any(name not in VIEWS or parameter in FILLINGS for parameter in counts):
            return [Unproven(node, "computes with the number of samples")] * len(shapes)
        states = [self._operand(operand, name, place) for place, operand in enumerate(rule.operands)]
        sizes = {index: self._size(size) for index, size in rule.sizes.items()}
        rule = Rule(rule.operands, rule.inputs, rule.outputs, rule.kinds, sizes, rule.linear)
        if any(isinstance(s, tuple) for s in states):
            return [Unproven(node, "has no rule")] * len(shapes)
        return follow(node, name, rule, states, shapes)  # type: ignore[arg-type]

    def _operand(self, operand: Any, name: str, place: int = 0) -> States:
        """The state of operand number `place`; Unbatched if the operator `name` only reads its shape."""
        state = self.states[operand] if isinstance(operand, fx.Node) else Unbatched()
        if name in LIKE and isinstance(state, Split):
            return replace(state, positions=False)
        shape_only = name in (*NEW, *LIKE) or (name in LIKE_OTHERS and place > 0)
        return Unbatched() if shape_only else state

    def _along_batch(
        self, name: str, call: OperatorCall, rule: Rule, shapes: list[tuple[Size, ...]]
    ) -> Sequence[State] | None:
        """The states after concatenating whole batches, or taking such a concatenation apart; None for other calls."""
        if name in ("cat", "concat", "concatenate"):
            rank = len(shapes[0])
            operands = zip(rule.operands, rule.inputs, strict=True)
            states = [self._operand(n, name) for n, dims in operands if len(dims) == rank]
            joined = concatenated(states, int(call["dim"]) % rank)
            return None if joined is None else [joined]
        if name not in ("slice", "narrow", "split", "split_with_sizes", "chunk"):
            return None
        state, dim = self._operand(rule.operands[0], name), call.dim()
        start = self._size(call["start"] or 0) if call.has("start") else 0
        if call.has("step") and call["step"] != 1:
            every = strided(state, dim, shapes[0][dim], start, call["step"])
            return None if every is None else [every]
        return pieces(state, dim, [shape[dim] for shape in shapes], start)

    def _nested(self, node: fx.Node, child: fx.GraphModule, arguments: Sequence[Any]) -> None:
        """Walk through the nested graph that `node` calls: a block of the model under its own grad mode or autocast."""
        nodes = [n if isinstance(n, fx.Node) else None for n in arguments]
        walk = Walk(child, self.symbols)
        walk.run(
            [Unbatched() if n is None else self.states[n] for n in nodes],
            [frozenset() if n is None else self.memory.owners[n] for n in nodes],
        )
        result = child.graph.output_node().args[0]
        of_result = [
            (walk.states[n], walk.memory.owners[n]) if isinstance(n, fx.Node) else (Unbatched(), frozenset())
            for n in (result if isinstance(result, (tuple, list)) else [result])
        ]
        many = isinstance(result, (tuple, list))
        self.states[node] = tuple(s for s, _ in of_result) if many else of_result[0][0]
        self.memory.add(node, tuple(o for _, o in of_result) if many else of_result[0][1])
        for placeholder, argument in zip(child.graph.find_nodes(op="placeholder"), nodes, strict=True):
            if argument is not None and placeholder in walk.written:
                self._write(node, argument, walk.states[placeholder])


def _leaves(states: Iterable[States]) -> Iterable[State]:
    """All states inside nested tuples of states."""
    for state in states:
        if isinstance(state, tuple):
            yield from _leaves(state)
        else:
            yield state


def _positions(name: str, call: OperatorCall, size: Callable[[Size], Size]) -> Sequence[State] | None:
    """The state of arange(B), which contains the samples' positions; None for other calls."""
    if name != "arange" or not varies(size(call.output_shapes[0][0])):
        return None
    counts_on = size(call["end"]) == BATCH and call.get("start", 0) == 0 and call.get("step", 1) == 1
    return [Split(0, positions=True)] if counts_on else None
