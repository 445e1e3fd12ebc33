"""The end of a model that needs the whole batch, taken off its graph so that the rest runs in micro-batches.

What relates samples often does so at the very end: a contrastive loss compares all samples, a model adds up means over
different numbers of targets, a mask selects what a mean is over.

```
                 the Program's graph, in micro-batches        the tail, once for the whole batch
   pixels ─────> ... ─────> image features ─┐
   input_ids ──> ... ─────> text features ──┼─ outputs ─────> matmul ─> softmax ─> loss
   logit_scale ───> exp ────────────────────┘                             │
   labels ────────────────────────────────────────────────────────────────┘
```
The tail is ordinary code in the caller's autograd graph, between all forwards and all backwards. It has no work that
belongs into a stage: no parameter of more than one dimension, nothing random, and it writes into copies alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from autopar.analysis.batch_proof import OutputCombination, combination, prove, walk_of
from autopar.analysis.batching import VARIATIONS, Batching, study, study_again
from autopar.analysis.compared_outputs import combined_nodes
from autopar.analysis.node_values import floats_differ, probe
from autopar.analysis.operators import bases, is_random, replicable_nodes, written_arguments
from autopar.analysis.placed_graph import PlacedGraph
from autopar.analysis.sample_states import Mean, Mixed, Unproven
from autopar.analysis.sample_walk import Walk
from autopar.analysis.varied_samples import varied
from autopar.capture.cleanup import aten, cross_entropy_arguments, number_of_targets
from autopar.capture.mode_blocks.calls import nested_block
from autopar.capture.node_names import describe
from autopar.capture.program import Program, is_getitem
from autopar.capture.torch_private import symbols_in
from cost_models.graphs import get_attribute

_SAMPLES = 3  # that are compared with two parts of them
_MOST_DIMENSIONS = 1  # of a parameter that the tail reads: scales and biases; matrices belong into stages


@dataclass(frozen=True)
class Tail:
    """The end of a model: a graph from outputs of a Program's graph, and inputs of the call, to the model's outputs."""

    graph: PlacedGraph  # (*sources) -> tuple of the model's flat outputs
    sources: tuple[tuple[str, int], ...]  # ("output", flat output of the Program's graph) or ("input", flat input)
    returned: tuple[Any, ...]  # the model's flat outputs: nodes of the tail's graph, or constants
    passed_on: tuple[int | None, ...]  # for each of them, the flat output of the Program's graph that it is, if any
    why: str  # the operator that needs the whole batch

    @property
    def reads_inputs(self) -> bool:
        return any(where == "input" for where, _ in self.sources)

    def __call__(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """The model's flat outputs, from those of the Program's graph and the call's flat inputs: whole batches."""
        place, values = self.placed(outputs, inputs)
        return list(self.graph.code(place)(*values))

    def placed(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> tuple[torch.device, list[Any]]:
        """Where the tail runs, which is where the outputs are, and what it reads there."""
        place = next((x.device for x in outputs if isinstance(x, torch.Tensor)), self.graph.captured)
        values = [(outputs if where == "output" else inputs)[index] for where, index in self.sources]
        return place, [x.to(place) if isinstance(x, torch.Tensor) else x for x in values]

    def combinations(self, outputs: Sequence[OutputCombination]) -> list[OutputCombination]:
        """How each flat output of the model is combined. `outputs`: of the Program's graph."""
        return [OutputCombination("mixed") if place is None else outputs[place] for place in self.passed_on]


def returned_nodes(program: Program, tail: Tail | None) -> list[Any]:
    """The model's flat outputs: nodes, or constants."""
    flat = list(program.graph.output_node().args[0])  # type: ignore[arg-type]
    return flat[: program.n_outputs] if tail is None else list(tail.returned)


def studied(program: Program, leaves: list[Any], *, verify: bool = False) -> tuple[Program, Batching]:
    """`program`, less its tail where only that keeps the batch whole, and how its batch may be split.

    `leaves`, `verify`: as for `batching.study`.
    """
    proof = prove(program)
    whole = None if proof.verdict == "refuted" else study(program, leaves, verify=verify, proof=proof)
    tried = proof.verdict != "proven" and program.batch_size > 1 and (whole is None or not whole.splittable)
    if tried and (found := without_tail(program, leaves)) is not None:
        shorter, tail = found
        batching = study(shorter, leaves, verify=verify)
        if batching.splittable:
            return shorter, replace(batching, tail=tail)
    return program, whole or study(program, leaves, verify=verify, proof=proof)


def studied_again(program: Program, other: Batching) -> tuple[Program, Batching] | None:
    """As `studied`, for a program that differs from the one that `other` is of in sizes alone; None without a proof."""
    tail = None
    if other.tail is not None:
        found = without_tail(program, None)
        if found is None:
            return None
        program, tail = found
    batching = study_again(program, other)
    return None if batching is None else (program, replace(batching, tail=tail))


def without_tail(program: Program, leaves: list[Any] | None) -> tuple[Program, Tail] | None:
    """`program` less the operators at its end that need the whole batch, and these as a tail.

    None where nothing needs the whole batch, or where the operators that do are not such an end. `leaves`: flat inputs
    whose values show what the graph does not prove; None: only what it proves counts.
    """
    walk = walk_of(program)
    if isinstance(walk, str):
        return None
    cut = _Cut(program, walk, leaves)
    return cut.apart() if cut.find() else None


class _Cut:
    """One attempt to take off the tail."""

    def __init__(self, program: Program, walk: Walk, leaves: list[Any] | None) -> None:
        self._program, self._walk, self._leaves = program, walk, leaves
        self._module = program.graph_module
        self._flat = list(program.graph.output_node().args[0])  # type: ignore[arg-type]
        self._order = {node: place for place, node in enumerate(program.graph.nodes)}
        self._replicable = replicable_nodes(program)
        self._tail: set[fx.Node] = set()
        self._why = ""

    def find(self) -> bool:
        """Find the operators of the tail: those that need the whole batch, and all that read their results."""
        pending = [node for node in self._returned() if not self._combines(node)]
        culprits = [state for node in pending if isinstance(state := self._state(node), Mixed)]
        if not pending:
            return False
        while pending:
            node = pending.pop()
            if node in self._tail:
                continue
            if not self._may_be_in_tail(node):
                return False
            self._tail.add(node)
            pending += [user for user in node.users if user.op != "output"]
            pending += [n for written in written_arguments(node) for n in self._written_before(node, written)]
            # A value that micro-batches cannot hand over is computed by the tail, too.
            pending += [source for source in node.all_input_nodes if not self._can_be_handed_over(source)]
        first = min(self._tail, key=self._order.__getitem__)
        where, what = (culprits[0].node, culprits[0].why) if culprits else (first, "mixes samples")
        self._why = f"{describe(where)} {what}"
        hinted = {name for call in self._program.shard_calls for name in (*call.inputs, *call.outputs, *call.operators)}
        return not any(node.name in hinted for node in self._tail) and any(
            node not in self._tail and node not in self._replicable and node.op != "output"
            for node in self._program.graph.nodes
        )

    def apart(self) -> tuple[Program, Tail]:
        """The program without the tail, and the tail."""
        head, in_head = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self._program.graph.nodes:
            if node not in self._tail and node.op != "output":
                in_head[node] = head.node_copy(node, in_head.__getitem__)
        outputs, sources = self._handed_over()
        results, weights = self._results_of_head(head, in_head, outputs)
        head.output(tuple(results))
        _drop_unused(head, {in_head[node] for node in in_head if node in self._replicable})
        module = fx.GraphModule(self._module, head, class_name=type(self._module).__name__)
        module.meta = dict(self._module.meta)
        shorter = replace(self._program, graph_module=module, n_outputs=len(outputs), weights=weights)

        tail, in_tail = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in sources:
            in_tail[node] = tail.placeholder(node.name)
            in_tail[node].meta = dict(node.meta)
        for node in self._computed_by_tail():
            if node not in in_tail:
                for written in written_arguments(node):
                    if written not in self._tail:
                        in_tail[written] = tail.call_function(aten.clone.default, (in_tail[written],))
                in_tail[node] = tail.node_copy(node, in_tail.__getitem__)
        flat = self._flat[: self._program.n_outputs]
        returned = tuple(in_tail[x] if isinstance(x, fx.Node) else x for x in flat)
        tail.output(returned)
        passed_on = tuple(outputs.get(x) if isinstance(x, fx.Node) else None for x in flat)
        placed = PlacedGraph(fx.GraphModule(self._module, tail), self._program.device)
        return shorter, Tail(placed, tuple(sources.values()), returned, passed_on, self._why)

    def _handed_over(self) -> tuple[dict[fx.Node, int], dict[fx.Node, tuple[str, int]]]:
        """What the tail starts from: nodes -> flat output of the head, and nodes -> `Tail.sources`."""
        outputs: dict[fx.Node, int] = {}
        sources: dict[fx.Node, tuple[str, int]] = {}
        inputs = {node: place for place, node in enumerate(self._program.graph.find_nodes(op="placeholder"))}
        for node in self._returned():
            if node not in self._tail:
                sources[node] = ("output", outputs.setdefault(node, len(outputs)))
        computed = dict.fromkeys(self._computed_by_tail())
        read = dict.fromkeys(source for node in computed for source in node.all_input_nodes)
        for source in read:
            if source in inputs:
                sources.setdefault(source, ("input", inputs[source]))
            elif source not in computed and source not in sources:
                sources[source] = ("output", outputs.setdefault(source, len(outputs)))
        return outputs, sources

    def _results_of_head(
        self, head: fx.Graph, in_head: dict[fx.Node, fx.Node], outputs: dict[fx.Node, int]
    ) -> tuple[list[fx.Node], dict[int, int]]:
        """The flat outputs of the head, those that count targets last; and `Program.weights`."""
        results, weights = [], {}
        for node in outputs:
            result = in_head[node]
            # A parameter is handed over as a value of its own, so that stages see an operator that reads it.
            results.append(head.call_function(aten.clone.default, (result,)) if node.op == "get_attr" else result)
        counts: list[fx.Node] = []
        for node, place in outputs.items():
            counted = self._counted_targets(node)
            if counted is not None:
                mean, (target, ignore_index) = counted
                weights[place] = len(outputs) + len(counts)
                counts.append(number_of_targets(head, in_head[target], ignore_index, like=mean))
        return [*results, *counts], weights

    def _counted_targets(self, node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, int]] | None:
        """For a mean over targets that are not ignored: its cross-entropy, its targets and what is ignored."""
        state = self._walk.states[node]
        mean = state.counted if isinstance(state, Mean) else node if isinstance(state, Unproven) else None
        if mean is node and any(map(self._size_depends_on_values, node.all_input_nodes)):
            return None
        found = None if mean is None else cross_entropy_arguments(mean)
        if found is not None and found.weight is None:
            assert mean is not None
            return mean, (found.target, found.ignore_index)
        place = self._flat.index(node) if node in self._flat else None
        if isinstance(state, Unproven) and place in self._program.weights:  # a comparison decides
            total = self._flat[self._program.weights[place]]
            return total, total.args[0].args
        return None

    def _returned(self) -> list[fx.Node]:
        return [x for x in self._flat[: self._program.n_outputs] if isinstance(x, fx.Node)]

    def _state(self, node: fx.Node) -> Any:
        return combination(node, self._walk.states[node], self._walk)

    def _combines(self, node: fx.Node) -> bool:
        """Whether the values of `node` for micro-batches make its value for the whole batch, as far as is known: a
        comparison decides about what is not proven."""
        state = self._state(node)
        if isinstance(state, Mixed):
            return self._counted_targets(node) is not None
        if not isinstance(state, Unproven):
            return True
        if self._size_depends_on_values(node):
            return False
        return self._counted_targets(node) is not None or self._without_values or node in self._combined

    @property
    def _without_values(self) -> bool:
        """Whether nothing can be compared. As `study` does, take what is not proven to combine."""
        return self._leaves is not None and any(isinstance(x, torch.Tensor) and x.is_meta for x in self._leaves)

    @cached_property
    def _combined(self) -> frozenset[fx.Node]:
        """The nodes whose values for a few samples are the combination of those for two parts of them."""
        if self._leaves is None:
            return frozenset()
        rows = min(self._program.batch_size, _SAMPLES)
        sources = [probe(self._program, self._leaves, rows, own_floats=own) for own in (False, True)]
        if not floats_differ(self._program, sources[1]):
            del sources[1]  # equal samples would hide that they meet
        variations = [varied(self._program, source, seed) for source in sources for seed in range(VARIATIONS)]
        return combined_nodes(self._program, [*sources, *variations], rows)

    def _size_depends_on_values(self, node: fx.Node) -> bool:
        return bool(symbols_in(node.meta.get("val")) - self._walk.symbols)

    def _can_be_handed_over(self, node: fx.Node) -> bool:
        if node in self._tail or self._is_known(node):
            return True
        if node.op == "get_attr":
            value = get_attribute(self._module, str(node.target))
            return isinstance(value, torch.Tensor)
        value = node.meta.get("val")
        is_value = isinstance(value, (torch.Tensor, *torch.types.py_sym_types))
        return is_value and self._combines(node) and not self._is_written_later(node)

    def _is_written_later(self, node: fx.Node) -> bool:
        """Whether the memory of `node` is overwritten after the operators of the tail would read it."""
        shared = set(self._walk.memory.sharing(node))
        return any(
            self._order[writer] > self._order[node] and writer not in self._tail
            for other in shared
            for writer in other.users
            if other in written_arguments(writer)
        )

    def _is_known(self, node: fx.Node) -> bool:
        """Whether the tail may compute `node` from the inputs of the call."""
        if node.op == "placeholder":
            return node in self._replicable  # no operator writes into it
        if node.op == "get_attr":
            return isinstance(get_attribute(self._module, str(node.target)), fx.GraphModule)  # of a block of operators
        if node not in self._replicable:
            return False
        return all(self._is_known(source) for source in node.all_input_nodes)

    def _may_be_in_tail(self, node: fx.Node) -> bool:
        block = nested_block(node)
        if block is not None and any(written_arguments(inner) for inner in block[0].graph.nodes):
            return False
        inside = [node] if block is None else [n for n in block[0].graph.nodes if n.op not in ("placeholder", "output")]
        module = self._module if block is None else block[0]
        if not all(_is_plain(inner, module) for inner in inside):
            return False
        return not any(self._is_matrix(source) for source in node.all_input_nodes)

    def _written_before(self, writer: fx.Node, written: fx.Node) -> list[fx.Node]:
        """What is in the memory that `writer` overwrites, and must therefore be computed by the tail, too. Nothing,
        where it may overwrite a copy of `written`: no other value from before is there."""
        before = [n for n in self._walk.memory.sharing(written) if self._order[n] < self._order[writer]]
        is_alone = written.op == "call_function" and before == [written] and written not in self._returned()
        return [] if is_alone else before

    def _is_matrix(self, node: fx.Node) -> bool:
        """Whether `node` is a parameter with more dimensions than a tail reads, or a view of one."""
        owner = bases(node)[-1]
        value = get_attribute(self._module, str(owner.target)) if owner.op == "get_attr" else None
        return isinstance(value, nn.Parameter) and value.dim() > _MOST_DIMENSIONS

    def _computed_by_tail(self) -> list[fx.Node]:
        """The operators of the tail in program order, with those on the call's inputs that they read."""
        needed: set[fx.Node] = set()
        pending = list(self._tail)
        while pending:
            node = pending.pop()
            if node not in needed:
                needed.add(node)
                pending += [s for s in node.all_input_nodes if s.op != "placeholder" and self._is_known(s)]
        return sorted(needed, key=self._order.__getitem__)


def _is_plain(node: fx.Node, module: fx.GraphModule) -> bool:
    """Whether `node` is an operator of torch, or computes with sizes, and draws nothing."""
    value = node.meta.get("val")
    is_operator = isinstance(node.target, torch._ops.OpOverload) or is_getitem(node) or nested_block(node) is not None
    is_operator = is_operator or isinstance(value, torch.types.py_sym_types)
    return node.op == "call_function" and is_operator and not is_random(node, module)


def _drop_unused(graph: fx.Graph, free: Iterable[fx.Node]) -> None:
    """Remove nodes of `free` (masks, sizes, constants) that nothing reads any more; placeholders stay."""
    removable = set(free)
    for node in reversed(list(graph.nodes)):
        if node in removable and not node.users and node.op != "placeholder":
            graph.erase_node(node)
