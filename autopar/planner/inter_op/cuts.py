"""Cuts of a graph of atoms: all of a small graph, those along several linear orders, and those near a plan.

A cut of a directed acyclic graph is a set of atoms closed under predecessors. A line of n atoms has n + 1 of them, two
parallel branches of n atoms have (n + 1)^2. So all cuts can be listed only for graphs that are nearly lines. For others
the candidates are the prefixes of several topological orders where few bytes cross. Once a plan is known, more lie
around its cuts: atoms added with all their ancestors, or removed with all their descendants.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import networkx as nx
import numpy as np

from autopar.planner.inter_op.orders import by_number, depth_first, shuffled
from autopar.planner.inter_op.stage_bytes import Value

_CUTS_PER_ORDER = 200  # one more order for each of these in the limit
_ALIKE = 1e-9  # share by which bytes may differ by rounding
_MORE = 1.1  # cuts at the same places of each layer may be this many times as many as there should be
_LEAST_LAYERS = 4  # that a chain repeats
_EQUAL_LAYERS = 0.05  # mean share by which the seconds of equal layers differ at most, as measured

Mask = int  # a set of atoms, bit a for atom a


class CyclicGraph(ValueError):
    """Atoms that depend on each other in a cycle."""

    def __init__(self, atoms: list[int]) -> None:
        super().__init__(f"atoms {atoms} depend on each other in a cycle; no order can run them")
        self.atoms = atoms


@dataclass(frozen=True)
class AtomGraph:
    """The order of atoms and their weights. Atoms are numbered in program order.

    Raises CyclicGraph if no order can run them.
    """

    n: int
    edges: frozenset[tuple[int, int]]  # (atom, atom that runs later)
    weight: np.ndarray = field(repr=False)  # [n] seconds of the atom, or its share of the model's
    values: tuple[Value, ...] = field(repr=False)

    def __post_init__(self) -> None:
        assert len(self.order) == self.n

    @cached_property
    def before(self) -> list[list[int]]:
        return self._neighbours(1, 0)

    @cached_property
    def after(self) -> list[list[int]]:
        return self._neighbours(0, 1)

    @cached_property
    def order(self) -> list[int]:
        """The topological order that is closest to the program's."""
        order = by_number(self.before, self.after)
        if len(order) < self.n:
            raise CyclicGraph(_cycle(self.after, sorted(set(range(self.n)) - set(order))))
        return order

    @cached_property
    def ancestors(self) -> list[Mask]:
        """Each atom and all that must run before it."""
        return self._closure(self.order, self.before)

    @cached_property
    def descendants(self) -> list[Mask]:
        """Each atom and all that must run after it."""
        return self._closure(reversed(self.order), self.after)

    def _neighbours(self, here: int, there: int) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(self.n)]
        for edge in sorted(self.edges):
            found[edge[here]].append(edge[there])
        return found

    def _closure(self, order: Iterable[int], neighbours: list[list[int]]) -> list[Mask]:
        masks = [0] * self.n
        for atom in order:
            mask = 1 << atom
            for other in neighbours[atom]:
                mask |= masks[other]
            masks[atom] = mask
        return masks

    def crossing(self, cuts: np.ndarray) -> np.ndarray:
        """[n_cuts] bytes, forward and backward, of values produced before each cut [n_cuts, n], read after it."""
        return np.asarray(crossing(self.values, cuts)[0].sum(axis=0))


def crossing(values: Iterable[Value], cuts: np.ndarray) -> np.ndarray:
    """[2, 2, n_cuts] bytes, forward and backward, of values that are produced before each cut and read after it, and of
    values that are read before it and produced after it."""
    read = [v for v in values if v.consumers]
    readers = np.zeros((cuts.shape[1], len(read)), dtype=np.float32)
    for column, value in enumerate(read):
        readers[list(value.consumers), column] = 1
    n_read = cuts.astype(np.float32) @ readers
    produced = cuts[:, [v.producer for v in read]]
    nbytes = np.array([[v.nbytes, v.grad_nbytes] for v in read]).reshape(-1, 2)
    crosses = produced & (n_read < readers.sum(axis=0)), ~produced & (n_read > 0)
    return np.array([(c.astype(float) @ nbytes).T for c in crosses])


def all_cuts(graph: AtomGraph, limit: int) -> np.ndarray | None:
    """Every cut of the graph, by size; None if there are more than `limit`."""
    found = every_mask(graph, limit)
    return None if found is None else cut_matrix(found, graph.n)


def every_mask(graph: AtomGraph, limit: int) -> list[Mask] | None:
    """Every cut of the graph, in no order; None if there are more than `limit`.

    A cut without the atom that comes last in a topological order is a cut. So each cut grows out of exactly one other,
    by an atom that comes later than all it has.
    """
    need = [sum(1 << b for b in graph.before[a]) for a in range(graph.n)]
    place = np.argsort(graph.order).tolist()
    found: list[Mask] = [0]
    open_: list[tuple[Mask, list[int]]] = [(0, [a for a in graph.order if not need[a]])]
    while open_:
        cut, ready = open_.pop()
        if len(found) + len(ready) > limit:
            return None
        for at, atom in enumerate(ready):
            larger = cut | 1 << atom
            found.append(larger)
            new = [later for later in graph.after[atom] if not need[later] & ~larger]
            later = ready[at + 1 :] if not new else sorted([*ready[at + 1 :], *new], key=place.__getitem__)
            if later:
                open_.append((larger, later))
    return found


def first_cuts(graph: AtomGraph, limit: int) -> np.ndarray:
    """About `limit` cuts along several orders: evenly spread by weight, where fewest bytes cross."""
    before, after = graph.before, graph.after
    orders = [*_weighted_orders(graph), *shuffled(before, after, limit // _CUTS_PER_ORDER)]
    share = [limit // 2, *[limit // (2 * max(1, len(orders) - 1))] * (len(orders) - 1)]
    chosen: set[Mask] = {0, (1 << graph.n) - 1}
    for order, number in zip(orders, share, strict=True):
        chosen.update(_narrowest(graph, order, max(2, number)))
    return cut_matrix(chosen, graph.n)


def prefixes(order: Sequence[int]) -> np.ndarray:
    """The cuts along a topological order, [n + 1, n]."""
    return line_cuts(len(order))[:, np.argsort(order)]


def cuts_near(graph: AtomGraph, plan: np.ndarray, limit: int) -> np.ndarray:
    """The cuts of a plan [n_stages + 1, n] and about `limit` others around them."""
    inner = [_mask(row) for row in plan[1:-1]]
    chosen: set[Mask] = {_mask(row) for row in plan}
    if inner:
        each = max(2, limit // len(inner))
        stage = graph.weight.sum() / (len(inner) + 1)
        orders = _weighted_orders(graph)[:2]
        for cut in inner:
            around = sorted({*_moved(graph, cut, 4 * each), *_shifted(cut, orders, 2 * each)} - chosen)
            chosen.update(_most_promising(graph, cut, around, each, stage))
    return cut_matrix(chosen, graph.n)


def _weighted_orders(graph: AtomGraph) -> list[list[int]]:
    """The program's order, and branch by branch, lighter ones first, from the front and from the back."""
    before, after = graph.before, graph.after
    return [
        graph.order,
        depth_first(before, after, graph.weight),
        depth_first(after, before, graph.weight)[::-1],
    ]


def _narrowest(graph: AtomGraph, order: Sequence[int], number: int) -> list[Mask]:
    """About `number` prefixes of an order where few bytes cross.

    Of each of `number` stretches of equal weight, the one where the fewest bytes cross. If a stretch has several, as in
    a long chain of layers, which have such a place before and after attention: first the same places of every layer, so
    that stages can be equal; then the first one of each stretch.
    """
    place = np.empty(graph.n, dtype=int)
    place[list(order)] = np.arange(graph.n)
    crossing = np.zeros(graph.n + 2)
    for value in graph.values:
        if value.consumers:
            nbytes = value.nbytes + value.grad_nbytes
            ends = (place[value.producer], max(place[c] for c in value.consumers))
            crossing[min(ends) + 1] += nbytes
            crossing[max(ends) + 1] -= nbytes
    crossing = np.cumsum(crossing)[: graph.n + 1]  # [c]: bytes that cross the prefix of c atoms
    weight = np.append(0.0, np.cumsum(graph.weight[list(order)]))
    total = weight[-1] or 1.0
    stretch = np.minimum((weight * number / total).astype(int), number - 1)
    least = np.full(number, np.inf)
    inner = np.arange(1, graph.n)
    np.minimum.at(least, stretch[inner], crossing[inner])
    equal = inner[crossing[inner] <= least[stretch[inner]] * (1 + _ALIKE)]
    first = {int(stretch[cut]): int(cut) for cut in reversed(equal)}
    wanted = set(first.values())
    if len(equal) > len(first):
        around = np.minimum(least, np.minimum(np.append(least[1:], np.inf), np.append(np.inf, least[:-1])))
        narrow = equal[crossing[equal] <= around[stretch[equal]] * (1 + _ALIKE)]  # in the next stretches, too
        regular = _same_in_each_layer(narrow, weight, len(first))
        others = sorted(wanted - set(regular))
        room = min(len(others), max(0, len(first) - len(regular)))
        wanted = {*regular, *(others[i * len(others) // room] for i in range(room))}
    masks, mask = [], 0
    for count, atom in enumerate(order):
        if count in wanted:
            masks.append(mask)
        mask |= 1 << atom
    return masks


def _same_in_each_layer(places: np.ndarray, weight: np.ndarray, number: int) -> list[int]:
    """At most about `number` of `places`, the same of every layer; none of a graph that repeats no layer.

    Layers are found by their weights: if those between one place and the next repeat after every k places, each layer
    has k of them, and every n-th of all places is the same of every layer, or of every second one, and so on, where n
    divides k or k divides n.
    """
    gaps = np.diff(weight[places])
    repeats = range(1, len(gaps) // _LEAST_LAYERS + 1)
    of_layer = next((k for k in repeats if np.abs(gaps[k:] - gaps[:-k]).mean() <= _EQUAL_LAYERS * gaps.mean()), None)
    if of_layer is None:
        return []
    fewest = math.ceil(len(places) / (_MORE * number))
    several = of_layer * math.ceil(fewest / of_layer)
    step = next((n for n in range(fewest, of_layer) if of_layer % n == 0), several)

    def unevenness(start: int) -> float:
        """Of the pieces, those at both ends of the graph too."""
        return float(np.diff(weight[[0, *places[start::step], -1]]).std())

    return [int(cut) for cut in places[min(range(step), key=unevenness) :: step]]


def _moved(graph: AtomGraph, cut: Mask, number: int) -> list[Mask]:
    """The cut with an atom added and all that must run before it, or removed with all that must run after it."""
    found: dict[Mask, int] = {}
    for atom in range(graph.n):
        inside = cut >> atom & 1
        other = cut & ~graph.descendants[atom] if inside else cut | graph.ancestors[atom]
        found[other] = (other ^ cut).bit_count()
    nearest = sorted(found, key=lambda other: (found[other], other))
    return nearest[:number]


def _shifted(cut: Mask, orders: list[list[int]], number: int) -> Iterator[Mask]:
    """The cut with the next few atoms of each order added one by one, or the last few removed."""
    for order in orders:
        inside = [a for a in order if cut >> a & 1]
        outside = [a for a in order if not cut >> a & 1]
        mask = cut
        for atom in outside[:number]:
            mask |= 1 << atom
            yield mask
        mask = cut
        for atom in reversed(inside[-number:]):
            mask &= ~(1 << atom)
            yield mask


def _most_promising(graph: AtomGraph, cut: Mask, around: list[Mask], number: int, stage: float) -> list[Mask]:
    """`number` of the cuts `around`: half the nearest in weight, half with fewest bytes across, within half a stage."""
    if not around:
        return []
    cuts = cut_rows(around, graph.n)
    distance = np.abs(cuts @ graph.weight - cut_rows([cut], graph.n) @ graph.weight)
    near = np.flatnonzero(distance <= max(stage / 2, 1e-12))
    crossing = graph.crossing(cuts[near])
    by_weight = near[np.argsort(distance[near], kind="stable")[: number // 2]]
    by_crossing = near[np.lexsort((distance[near], crossing))[: number - number // 2]]
    return [around[i] for i in itertools.chain(by_weight, by_crossing)]


def _mask(row: np.ndarray) -> Mask:
    return int.from_bytes(np.packbits(row, bitorder="little").tobytes(), "little")


def cut_rows(masks: Sequence[Mask], n: int) -> np.ndarray:
    width = (n + 7) // 8
    packed = np.frombuffer(b"".join(m.to_bytes(width, "little") for m in masks), dtype=np.uint8)
    return np.unpackbits(packed.reshape(len(masks), width), axis=1, count=n, bitorder="little").astype(bool)


def cut_matrix(masks: Iterable[Mask], n: int) -> np.ndarray:
    """Cuts as rows [n_cuts, n], by size."""
    return cut_rows(sorted(set(masks), key=lambda m: (m.bit_count(), m)), n)


def _cycle(after: list[list[int]], stuck: list[int]) -> list[int]:
    """One cycle among atoms that can never run."""
    inside = set(stuck)
    atom, seen = stuck[0], [stuck[0]]
    # Every stuck atom waits for a stuck one; walking back along those must close a cycle.
    before = {b: a for a in stuck for b in after[a] if b in inside}
    while (atom := before[atom]) not in seen:
        seen.append(atom)
    return sorted(seen[seen.index(atom) :])


def merged_graph(
    n: int, edges: Iterable[tuple[int, int]], weight: np.ndarray, values: Iterable[Value]
) -> tuple[AtomGraph, np.ndarray]:
    """(graph, [n] the new atom of each): a graph in which atoms that depend on each other in a cycle are one atom."""
    whole = nx.DiGraph()
    whole.add_nodes_from(range(n))
    whole.add_edges_from(edges)
    groups = sorted(sorted(group) for group in nx.strongly_connected_components(whole))
    atom_of = np.empty(n, dtype=int)
    for atom, group in enumerate(groups):
        atom_of[group] = atom
    between = frozenset((int(atom_of[a]), int(atom_of[b])) for a, b in whole.edges if atom_of[a] != atom_of[b])
    total = np.zeros(len(groups))
    np.add.at(total, atom_of, weight)
    moved = tuple(
        replace(v, producer=int(atom_of[v.producer]), consumers=tuple(sorted({int(atom_of[c]) for c in v.consumers})))
        for v in values
    )
    return AtomGraph(len(groups), between, total, moved), atom_of


def line_cuts(n: int) -> np.ndarray:
    """All cuts of a line of n atoms."""
    return np.tri(n + 1, n, -1, dtype=bool)
