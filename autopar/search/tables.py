"""Every quantity of a stage as a table over its interval, filled without visiting the intervals one by one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from autopar.search.problem import Problem, Shared


@dataclass(frozen=True)
class Tables:
    """Interval quantities over the b blocks of atoms between allowed cuts.

    Entry [i, j] is for blocks i..j-1; entries with j <= i mean nothing.
    """

    cuts: np.ndarray  # int [b + 1], the first atom of each block, then n
    time: np.ndarray  # [n_kinds, b + 1, b + 1] seconds per micro-batch: forward, backward, incoming transfers
    resident: np.ndarray  # [b + 1, b + 1] bytes
    gradient: np.ndarray  # [b + 1, b + 1] bytes to reduce once a step
    activation: np.ndarray  # [b + 1, b + 1] bytes per in-flight micro-batch: saved storages and received values
    transient: np.ndarray  # [b + 1, b + 1] bytes


def interval_tables(problem: Problem) -> Tables:
    """Tables of `problem` in O(b^2 + atoms named by its values and shared bytes) operations."""
    allowed = problem.cut_allowed.copy()
    allowed[[0, -1]] = True
    cuts = np.flatnonzero(allowed)
    n_blocks = len(cuts) - 1
    block_of = np.repeat(np.arange(n_blocks), np.diff(cuts))

    def shared(items: tuple[Shared, ...]) -> np.ndarray:
        members = ((-1, {int(block_of[atom]) for atom in item.atoms}) for item in items)
        return _once_per_interval(members, n_blocks)(np.array([item.nbytes for item in items]))

    forward = np.array([value.nbytes for value in problem.values])
    backward = np.array([value.grad_nbytes for value in problem.values])
    readers = (
        (int(block_of[value.producer]), {int(block_of[atom]) for atom in value.consumers}) for value in problem.values
    )
    received = _once_per_interval(readers, n_blocks)
    received_bytes = received(forward)
    message_bytes = received_bytes + received(backward)
    # Values are counted, not bytes compared with 0, since sums of fractional bytes may leave a rounding residue.
    messages = np.sign(received(np.sign(forward))) + np.sign(received(np.sign(backward)))

    def time(kind: int) -> np.ndarray:
        before = np.append(0.0, np.cumsum(problem.forward[kind] + problem.backward[kind]))[cuts]
        link = problem.kinds[kind]
        return before[None, :] - before[:, None] + link.latency * messages + link.seconds_per_byte * message_bytes

    return Tables(
        cuts=cuts,
        time=np.stack([time(kind) for kind in range(len(problem.kinds))]),
        resident=shared(problem.resident),
        gradient=shared(problem.gradient_bytes),
        activation=shared(problem.saved) + received_bytes,
        transient=_interval_max(np.maximum.reduceat(problem.transient, cuts[:-1])),
    )


def _once_per_interval(members: Iterable[tuple[int, set[int]]], n_blocks: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return `table(weights)`, [b + 1, b + 1]: the weights of the items that intervals count, each once.

    Item (floor, blocks) counts in [i, j) if floor < i and one of its blocks c1 < c2 < ... beyond the floor lies in
    [i, j). The first that does names one rectangle, so the rectangles of an item never overlap:

                     j:  c1+1     c2+1     n
        i: floor+1 .. c1   ###############       first block is c1
           c1+1 .. c2               ######       first block is c2

    Each is two corners of a difference array, summed over both axes at the end.
    """
    rectangles = []
    for item, (floor, blocks) in enumerate(members):
        firsts = sorted(block for block in blocks if block > floor)
        rectangles += [(item, above + 1, first) for above, first in itertools.pairwise([floor, *firsts])]
    item_of, top, last = np.array(rectangles, dtype=np.intp).reshape(-1, 3).T

    def table(weights: np.ndarray) -> np.ndarray:
        corners = np.zeros((n_blocks + 1, n_blocks + 1))
        np.add.at(corners, (top, last + 1), weights[item_of])
        np.subtract.at(corners, (last + 1, last + 1), weights[item_of])
        return np.maximum(corners.cumsum(axis=0).cumsum(axis=1), 0.0)

    return table


def _interval_max(weights: np.ndarray) -> np.ndarray:
    """Maximum of weights[i:j] >= 0 as a table [b + 1, b + 1], for weights [b]."""
    n_blocks = len(weights)
    table = np.zeros((n_blocks + 1, n_blocks + 1))
    table[:-1, 1:] = np.maximum.accumulate(np.triu(np.broadcast_to(weights, (n_blocks, n_blocks))), axis=1)
    return table
