"""Topological orders of a graph of atoms. Every prefix of one is a cut.

0 --> 1 --> 3 --> 5        by number      0 1 2 3 4 5
 '--> 2 --> 4 --'          depth first    0 1 3 2 4 5
                           breadth first  0 1 2 3 4 5
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

Neighbours = Sequence[Sequence[int]]  # for every atom


def by_number(before: Neighbours, after: Neighbours) -> list[int]:
    """The order that is closest to the numbers of the atoms; without those that wait for each other in a cycle."""
    missing = [len(b) for b in before]
    ready = [a for a in range(len(before)) if not missing[a]]
    heapq.heapify(ready)
    order = []
    while ready:
        order.append(heapq.heappop(ready))
        for later in _become_ready(order[-1], after, missing):
            heapq.heappush(ready, later)
    return order


def depth_first(before: Neighbours, after: Neighbours, weight: np.ndarray | None = None) -> list[int]:
    """Branch by branch: atoms that have just become ready run next, the lighter (or first) ones first."""
    weights = np.zeros(len(before)) if weight is None else weight
    missing = [len(b) for b in before]
    stack = [a for a in reversed(range(len(before))) if not missing[a]]
    order = []
    while stack:
        order.append(stack.pop())
        stack += sorted(_become_ready(order[-1], after, missing), key=lambda a: (-weights[a], -a))
    return order


def breadth_first(before: Neighbours, after: Neighbours) -> list[int]:
    """All branches side by side: atoms run in the order in which they become ready."""
    missing = [len(b) for b in before]
    ready = deque(a for a in range(len(before)) if not missing[a])
    order = []
    while ready:
        order.append(ready.popleft())
        ready.extend(_become_ready(order[-1], after, missing))
    return order


def usual_orders(before: Neighbours, after: Neighbours) -> list[list[int]]:
    """By number, depth first and breadth first; equal ones once."""
    orders = [by_number(before, after), depth_first(before, after), breadth_first(before, after)]
    return [order for i, order in enumerate(orders) if order not in orders[:i]]


def shuffled(before: Neighbours, after: Neighbours, number: int) -> Iterator[list[int]]:
    """Depth-first orders with the branches shuffled; the same orders on every call."""
    random = np.random.default_rng(0)
    for _ in range(number):
        yield depth_first(before, after, random.permutation(len(before)).astype(float))


def _become_ready(atom: int, after: Neighbours, missing: list[int]) -> list[int]:
    """The atoms that wait for `atom` alone. `missing`: predecessors that have not run, counted down here."""
    ready = []
    for later in after[atom]:
        missing[later] -= 1
        if not missing[later]:
            ready.append(later)
    return ready
