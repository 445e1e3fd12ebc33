"""Which operators of a graph a compiler joins into one kernel, and what that kernel moves.

torch.compile generates a kernel for a chain of operators over the same elements (PyTorch 2: Ansel et al., 2024,
section 4). What flows between them never reaches memory:

    linear -> add -> layer_norm -> linear -> gelu -> linear         products stay kernels of their own
              |---- kernel ---|              |kernel|

The rules here are plainer than inductor's, and find the kernels that torch 2.13 generates for a GPT block:

1. Pointwise operators, reductions and normalizations are joined with their producers if both go through equally many
   elements. Views between them are free.
2. A group has at most one reduction or normalization, with pointwise operators before and after it.
3. Products, convolutions, attention, pooling and what gathers or scatters by index are never joined, and no kernel may
   need the result of another one that needs its own.

The backward of a group is one kernel, too: it reads what the forward read and computes the rest again, as the compiler
decides for cheap operators. Gradients of parameters are added to those of earlier micro-batches by kernels of autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cost_models.graphs import tensors_in
from cost_models.kernels.kernel import (
    GATHERING,
    MEMORY_KINDS,
    SCATTERING,
    Kernel,
    MemoryKind,
    addressed_bytes,
)
from cost_models.kernels.operator_work import OperatorWork

_REDUCING = ("reduction", "normalization", "batch_norm")
# A group's kernel is of the first of these kinds that it contains.
_JOINED: tuple[MemoryKind, ...] = ("reduction", "normalization", "batch_norm", "transcendental", "pointwise", "random")

Values = Callable[[fx.Node], Any]


def fused_groups(
    nodes: Sequence[fx.Node], work: Callable[[fx.Node], OperatorWork], values: Values
) -> list[tuple[fx.Node, ...]]:
    """The operators that become one kernel each, in order; groups of one included.

    `nodes`: all that compute, in order. `values`: tensors on the meta device, of the same shapes as the results.
    """
    return _Groups(nodes, work, values).found()


@dataclass(frozen=True)
class FusedWork:
    """The kernels of a group."""

    forward: Kernel
    backward: Kernel | None  # None where no gradient flows
    accumulated: tuple[Kernel, ...]  # additions of gradients of parameters to earlier ones, which autograd does


def fused_work(
    group: Sequence[fx.Node],
    work: Callable[[fx.Node], OperatorWork],
    values: Values,
    trained: Callable[[fx.Node], bool],
) -> FusedWork:
    """What the kernels of a group do. `trained`: whether a gradient flows to what a node makes."""
    kinds = {kernel.kind for node in group for kernel in work(node).forward}
    kind = next(kind for kind in _JOINED if kind in kinds)
    inside = set(group)
    entering: dict[fx.Node, int] = {}
    for node in group:
        for operand in node.all_input_nodes:
            if source(operand, values, work) not in inside and isinstance(values(operand), torch.Tensor):
                first = source(operand, values, work)
                entering[first] = max(entering.get(first, 0), addressed_bytes(values(operand)))
    leaving = {node: _bytes(values(node)) for node in group if _read_outside(node, inside, values, work)}
    dtype = next((t.dtype for node in group for t in tensors_in(values(node)) if t.is_floating_point()), torch.float32)
    read, written = sum(entering.values()), sum(leaving.values())
    forward = Kernel("fused", kind, dtype, 0, read, written)
    if not any(trained(node) for node in group):
        return FusedWork(forward, None, ())
    gradients = sum(nbytes for node, nbytes in leaving.items() if trained(node))
    made = sum(nbytes for node, nbytes in entering.items() if trained(node))
    behind = next((known for known in MEMORY_KINDS if known == f"{kind}_backward"), kind)
    backward = Kernel("fused", behind, dtype, 0, read + gradients, made)
    own = [nbytes for node, nbytes in entering.items() if node.op == "get_attr" and trained(node)]
    return FusedWork(forward, backward, tuple(Kernel("add_", "pointwise", dtype, 0, 2 * n, n) for n in own))


def source(node: fx.Node, values: Values, work: Callable[[fx.Node], OperatorWork]) -> fx.Node:
    """What a node is a view or an item of: the node itself if it has kernels, or is no operator."""
    while node.op not in ("placeholder", "get_attr") and not work(node).forward and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _read_outside(node: fx.Node, inside: set[fx.Node], values: Values, work: Callable[[fx.Node], OperatorWork]) -> bool:
    """Whether others than the group read a node's result, or a view of it."""
    waiting = list(node.users)
    while waiting:
        user = waiting.pop()
        if user in inside:
            continue
        if user.op == "output" or work(user).forward:
            return True
        waiting += list(user.users)
    return False


def _bytes(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_in(value))


class _Groups:
    """Groups of operators by number, which are merged along the edges of the graph as long as that makes no cycle."""

    def __init__(self, nodes: Sequence[fx.Node], work: Callable[[fx.Node], OperatorWork], values: Values) -> None:
        self._work, self._values = work, values
        self._nodes = [node for node in nodes if work(node).forward]
        self._group = {node: number for number, node in enumerate(self._nodes)}
        self._members = {number: [node] for number, node in enumerate(self._nodes)}
        self._before: dict[int, set[int]] = {number: set() for number in self._members}
        for node in self._nodes:
            mine = self._group[node]
            self._before[mine] = {self._group[s] for s in self._sources(node)}
        self._size = {node: self._elements(node) for node in self._nodes}

    def found(self) -> list[tuple[fx.Node, ...]]:
        for node in self._nodes:
            for producer in self._sources(node):
                if self._join(producer, node):
                    self._merge(self._group[producer], self._group[node])
        place = {node: i for i, node in enumerate(self._nodes)}
        groups = [tuple(sorted(members, key=place.__getitem__)) for members in self._members.values()]
        return sorted((group for group in groups if self._size[group[0]]), key=lambda group: place[group[0]])

    def _sources(self, node: fx.Node) -> Iterator[fx.Node]:
        """The operators with kernels whose results a node reads, through views."""
        found = (source(operand, self._values, self._work) for operand in node.all_input_nodes)
        return iter(dict.fromkeys(s for s in found if s in self._group))

    def _elements(self, node: fx.Node) -> int:
        """Elements that the kernel of an operator goes through; 0 for one that is never joined."""
        kernels = self._work(node).forward
        if any(k.kind not in _JOINED or k.operator in GATHERING | SCATTERING for k in kernels):
            return 0
        if not isinstance(node.target, torch._ops.OpOverload):
            return 0
        made = max((t.numel() for t in tensors_in(self._values(node))), default=0)
        if not self._reduces(node):
            return made
        return max([made, *(math.prod(t.shape) for n in node.all_input_nodes for t in tensors_in(self._values(n)))])

    def _reduces(self, node: fx.Node) -> bool:
        return any(kernel.kind in _REDUCING for kernel in self._work(node).forward)

    def _join(self, producer: fx.Node, node: fx.Node) -> bool:
        a, b = self._group[producer], self._group[node]
        if a == b or not self._size[node] or self._size[node] != self._size[producer]:
            return False
        if self._made(producer) != self._size[producer]:  # a sum: its readers go through fewer elements
            return False
        if sum(self._reduces(member) for group in (a, b) for member in self._members[group]) > 1:
            return False
        return not self._around(a, b)

    def _made(self, node: fx.Node) -> int:
        return max((t.numel() for t in tensors_in(self._values(node))), default=0)

    def _around(self, a: int, b: int) -> bool:
        """Whether group b needs group a by way of others, or a needs b."""
        return self._needs(self._before[b] - {a}, a) or self._needs(self._before[a], b)

    def _needs(self, first: set[int], goal: int) -> bool:
        seen, waiting = set(first), list(first)
        while waiting:
            group = waiting.pop()
            if group == goal:
                return True
            more = self._before[group] - seen
            seen |= more
            waiting += more
        return False

    def _merge(self, kept: int, gone: int) -> None:
        for node in self._members.pop(gone):
            self._members[kept].append(node)
            self._group[node] = kept
        self._before[kept] = (self._before[kept] | self._before.pop(gone)) - {kept, gone}
        for before in self._before.values():
            if gone in before:
                before.discard(gone)
                before.add(kept)
