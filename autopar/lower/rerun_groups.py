"""Groups of operators that keep nothing they make: each is one call of a stage's code that runs again for its backward.

    q k v -> matmul -> softmax -> dropout -> matmul -> linear       every result is kept for the backward
    q k v -> [ group ]                              -> linear       q, k and v are kept; the group runs twice

Groups are the cores of attention (`analysis.attention`) or the layers of a model (`analysis.blocks`). Nodes carry the
number of their group in `meta[GROUP]`. Of a sharded stage, all devices run their parts in one call, with the
collectives between them and those that bring it what it reads: of a gathered parameter, only the shards are kept.
A group may keep results of some of its operators (`kept_results`).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from autopar.analysis.operators import compute_nodes
from autopar.lower.deferred_batch_norm import collecting_again
from autopar.lower.device_values import GROUP, KEPT, TRANSFER
from autopar.lower.kept_results import contexts, keeping
from autopar.lower.random_operators import draws_numbers, mix_seed, running_seed, seeded
from cost_models.graphs import get_attribute

_APART = 0xC04E  # beside the numbers that `random_operators` mixes in

Context = Callable[[], AbstractContextManager[Any]]


def rerunning(module: fx.GraphModule, written: Collection[str] = (), again: Context = nullcontext) -> fx.GraphModule:
    """The same code over the same tensors, in which each group keeps only its operands. The module itself if it has no
    groups.

    `written`: buffers that its operators overwrite; a second run leaves them as the first one did. `again`: the context
    of second runs.
    """
    members: dict[int, list[fx.Node]] = defaultdict(list)
    for node in compute_nodes(module.graph):
        if node.meta.get(GROUP) is not None:
            members[node.meta[GROUP]].append(node)
    group_of = {node: number for number, group in members.items() for node in _closed(group)}
    _add_transfers(module.graph, group_of)
    return _with_calls(module, group_of, frozenset(written), again) if group_of else module


def _closed(group: list[fx.Node]) -> set[fx.Node]:
    """The group with all that runs between its operators: of a sharded stage, their collectives."""

    def reached(following: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
        found, waiting = set(group), list(group)
        while waiting:
            new = [other for other in following(waiting.pop()) if other not in found]
            found.update(new)
            waiting += new
        return found

    return reached(lambda node: node.users) & reached(lambda node: node.all_input_nodes)


def _add_transfers(graph: fx.Graph, group_of: dict[fx.Node, int]) -> None:
    """Give each group the transfers of a sharded stage that only its operators read."""
    for node in reversed(list(graph.nodes)):
        readers = {group_of.get(user) for user in node.users}
        if node not in group_of and TRANSFER in node.meta and len(readers) == 1:
            (reader,) = readers
            if reader is not None:
                group_of[node] = reader


def _with_calls(
    module: fx.GraphModule, group_of: Mapping[fx.Node, int], written: frozenset[str], again: Context
) -> fx.GraphModule:
    """Every group as one call, where its last operator was; what reads a group's results earlier, after the call."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    members: dict[int, list[fx.Node]] = defaultdict(list)
    for node in module.graph.nodes:
        if node in group_of:
            members[group_of[node]].append(node)

    def emit(group: list[fx.Node]) -> None:
        if group[0] not in group_of:
            copies[group[0]] = graph.node_copy(group[0], copies.__getitem__)
            return
        body, inputs, outputs = _body(group)
        name = f"rerun_{group_of[group[0]]}"
        inner = fx.GraphModule(module, body)
        module.add_module(name, _Rerun(inner, group_of[group[0]], _buffers(inner, written), again))
        call = graph.call_module(name, tuple(copies[x] for x in inputs))
        copies.update({x: graph.call_function(operator.getitem, (call, i)) for i, x in enumerate(outputs)})

    pending: list[list[fx.Node]] = []
    for node in module.graph.nodes:
        if node in group_of and node is not members[group_of[node]][-1]:
            continue
        pending.append(members[group_of[node]] if node in group_of else [node])
        while ready := next((one for one in pending if _reads(one, group_of) <= copies.keys()), None):
            emit(ready)
            pending.remove(ready)
    if pending:  # two groups read of each other: leave one of them as it is
        stuck = next(group_of[group[0]] for group in pending if group[0] in group_of)
        others = {node: number for node, number in group_of.items() if number != stuck}
        return _with_calls(module, others, written, again)
    return fx.GraphModule(module, graph)


def _reads(group: Sequence[fx.Node], group_of: Mapping[fx.Node, int]) -> set[fx.Node]:
    """What must be there before a group, or an operator outside of all groups, runs."""
    needed = {source for node in group for source in node.all_input_nodes} - set(group)
    return {n for n in needed if n.op != "get_attr"} if group[0] in group_of else needed


def _body(group: Sequence[fx.Node]) -> tuple[fx.Graph, list[fx.Node], list[fx.Node]]:
    """A graph of these operators, what they read, and those of their results that others read."""
    inside = set(group)
    read = list(dict.fromkeys(source for node in group for source in node.all_input_nodes if source not in inside))
    inputs = [node for node in read if node.op != "get_attr"]
    outputs = [node for node in group if any(user not in inside for user in node.users)]
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node in (*(n for n in read if n.op == "get_attr"), *group):
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if KEPT in node.meta and node.op == "call_function":
            copies[node].target = keeping(node.target, node.meta[KEPT])
    graph.output(tuple(copies[node] for node in outputs))
    return graph, inputs, outputs


def _buffers(inner: fx.GraphModule, written: frozenset[str]) -> tuple[str, ...]:
    """Those of the `written` buffers that a group reads by itself or in modules that it calls."""
    read = {str(node.target) for node in inner.graph.nodes if node.op == "get_attr"}
    for node in inner.graph.nodes:
        if node.op == "call_module":
            read |= {f"{node.target}.{name}" for name, _ in inner.get_submodule(str(node.target)).named_buffers()}
    return tuple(sorted(read & written))


class _Rerun(nn.Module):
    """Keeps its inputs, and runs again with the same random numbers for the backward."""

    def __init__(self, inner: fx.GraphModule, number: int, written: tuple[str, ...], again: Context) -> None:
        super().__init__()
        self.inner, self.number, self.written, self.again = inner, number, written, again
        self.random = draws_numbers(inner.graph)
        self.contexts = contexts if any(KEPT in node.meta for node in inner.graph.nodes) else noop_context_fn

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        seed, collecting = running_seed(), collecting_again()
        has_run = False

        def run(*values: Any) -> Any:
            """Autograd calls this outside of the stage's forward, whose seed it sets."""
            nonlocal has_run
            with ExitStack() as contexts:
                if seed is not None:
                    contexts.enter_context(seeded(mix_seed(seed, _APART, self.number)))
                if has_run:
                    contexts.enter_context(self.again())
                    contexts.enter_context(collecting())
                has_run = True
                return self.inner.forward(*values)

        # Setting the global generators would disturb another thread that draws from them.
        by_hand = seed is None and self.random
        outputs: tuple[Any, ...] = checkpoint(
            run, *inputs, use_reentrant=False, preserve_rng_state=by_hand, context_fn=self._around
        )
        return outputs

    def _around(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Around the first run, and around the second one, which leaves the buffers that it writes as they were."""
        first, second = self.contexts()
        buffers = [get_attribute(self.inner, name) for name in self.written]
        return first, _Unchanged(buffers, second) if buffers else second


class _Unchanged(AbstractContextManager[None]):
    """Afterwards, the buffers are as they were before. `inner`, entered within, does not see their copies: a selective
    checkpoint counts kernels."""

    def __init__(self, buffers: Sequence[torch.Tensor], inner: AbstractContextManager[Any]) -> None:
        self._buffers, self._inner = buffers, inner

    def __enter__(self) -> None:
        self._before = [buffer.detach().clone() for buffer in self._buffers]
        self._inner.__enter__()

    def __exit__(self, *raised: Any) -> bool | None:
        handled = self._inner.__exit__(*raised)
        for buffer, old in zip(self._buffers, self._before, strict=True):
            buffer.data.copy_(old)  # `.data`: autograd saved the buffer and must not see its version change
        return handled
