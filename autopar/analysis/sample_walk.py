"""The states of a graph's nodes (`sample_states`), one node after the other: where each value has its samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from autopar.analysis.operators import KEEP_STATISTICS, written_arguments
from autopar.analysis.rules.calls import OperatorCall, shape_of, size_of
from autopar.analysis.rules.notation import IndexKind, Rule, Size
from autopar.analysis.rules.table import bind, rule_name
from autopar.analysis.rules.views import FILLINGS, LIKE, LIKE_OTHERS, NEW
from autopar.analysis.rules.views import RULES as VIEWS
from autopar.analysis.sample_states import (
    BATCH,
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
    pieces,
    strided,
    varies,
)
from autopar.analysis.shared_memory import Owners, SharedMemory, returned_arguments
from autopar.capture.mode_blocks.calls import nested_block
from autopar.capture.module_hooks import is_hook_point
from autopar.capture.program import is_getitem

States = State | tuple["States", ...]  # of a tensor or number, or of each item of a tuple

_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_ARITHMETIC = ("add", "sub", "rsub", "mul", "multiply", "div", "divide", "true_divide")
_WRITES_PART = "writes into a part of a tensor"


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
        return rule_name(node) in KEEP_STATISTICS and in_buffers

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
            return self._mean_of_unknown_number(node) or self._meets_number_of_batch(node) or unknown
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

    def _meets_number_of_batch(self, node: fx.Node) -> Mixed | None:
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
