"""The order in which variables are eliminated, and the elimination itself, for any price of memory.

The search wants the least `sum of seconds + price x sum of bytes`. It eliminates the variables one by one (min-plus
algebra). The tables that contain a variable v are its bucket. Eliminating v replaces them by one table over the other
variables in them, the neighbours of v:

    message(n1, n2, ...) = min over v of  seconds(v) + price x bytes(v) + sum over tables t of the bucket of t(v, n...)

The message joins the buckets of the neighbours. A table without neighbours is a number; the sum of these numbers is the
least value.

    a --- v --- b        eliminate v         a ------- b       width of the step: 2 (a and b), entries of the
     \\         /           ------>            \\       /        joint table: classes of v x of a x of b
      `-- c --'                                 `- c -'

Tables are small because they are indexed by classes of options, not by options. Two options of v are in one class of a
table if the table has the same entries for both. In a step, options that are in one class of every table of the bucket
count as one option, the cheapest of them.

Equal steps (equal tables over neighbours in the same places) are computed once. Equal layers of a model are therefore
eliminated once, provided that the order takes the inside of all of them before their boundaries. The greedy orders do,
because equal variables get equal scores. A chain of equal tables between the boundaries remains.

A table may have at most `entries` entries. Where a message would have more, the bucket is split and each part is
minimised by itself. The result is then a lower bound (R. Dechter, I. Rish, "Mini-buckets", 2003), and the search in
beam.py closes the gap.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, NewType

import numpy as np

from autopar.planner.intra_op.elimination.reduction import Reduced, Token

# Entries of the sums over a joint table held at a time: few enough for the cache.
_CHUNK = 1 << 18


Slot = NewType("Slot", int)  # the number of a table in `Elimination.tables`


class Factor(NamedTuple):
    """A table over classes of the options of its variables."""

    slot: Slot
    scope: tuple[int, ...]  # variables, ascending
    classes: tuple[Token, ...]  # the partition of each


class EliminationStep(NamedTuple):
    """The elimination of one variable."""

    variable: int
    bucket: tuple[Factor, ...]
    messages: tuple[Factor, ...]  # one, unless the bucket was split
    scope: tuple[int, ...]  # the neighbours, ascending
    classes: tuple[Token, ...]  # the partition of each that tells apart what the bucket does


class _LaidOut(NamedTuple):
    """How the table of a factor is laid over a joint table: `tables[slot][entries].transpose(axes).reshape(shape)`."""

    slot: Slot
    entries: tuple[np.ndarray, ...]
    axes: tuple[int, ...]
    shape: tuple[int, ...]  # 1 along variables that it does not have


class EliminationOperation(NamedTuple):
    """What makes one table of others; equal messages share it."""

    slot: Slot  # of the table that it makes
    weight: int | None  # which of the distinct variables to add, if any
    order: np.ndarray  # its options by class
    starts: np.ndarray  # of each class in `order`
    inputs: tuple[_LaidOut, ...]
    shape: tuple[int, ...]  # of the joint table, the variable eliminated first


class Price(NamedTuple):
    """What memory costs."""

    seconds: float  # s per byte; inf: bytes alone count, and seconds only where they are not allowed
    kinds: tuple[float, ...] = ()  # how much a byte of every kind counts, where bytes are [options, kinds]; (): alike


class Elimination(NamedTuple):
    """All tables at one price of memory."""

    price: float  # s per byte; inf: bytes alone count, and seconds only where they are not allowed
    weights: list[np.ndarray]  # of each distinct variable [its options] s (bytes at price inf)
    tables: list[np.ndarray]  # by slot
    value: float  # the least sum, or a lower bound if a bucket was split


class Eliminations(NamedTuple):
    """The same at several prices at once, along the first axis of all arrays."""

    prices: tuple[Price, ...]
    weights: list[np.ndarray]
    tables: list[np.ndarray]  # of edges [1, ...]
    values: list[float]

    def single(self, n: int) -> Elimination:
        tables = [table[n if len(table) > 1 else 0] for table in self.tables]
        return Elimination(self.prices[n].seconds, [w[n] for w in self.weights], tables, self.values[n])


class EliminationOrder(NamedTuple):
    """An order of elimination, ready for any price."""

    reduced: Reduced
    steps: tuple[EliminationStep, ...]  # in the order of elimination
    operations: tuple[EliminationOperation, ...]
    weights: tuple[int, ...]  # of every variable: which of the distinct ones it is
    distinct: tuple[tuple[Token, Token], ...]  # seconds and bytes
    edges: tuple[np.ndarray, ...]  # the tables of the first slots
    exact: bool  # no bucket was split
    width: int
    entries: int  # of all joint tables: what an elimination computes

    def eliminate(self, price: float) -> Elimination:
        """O(entries of the joint tables of the distinct operations)."""
        return self.eliminate_at([Price(price)]).single(0)

    def eliminate_at(self, prices: Sequence[Price]) -> Eliminations:
        """At several prices, all finite or none: small tables take hardly longer than for one."""
        arrays, edges = self.reduced.tokens.arrays, [table[None] for table in self.edges]
        bytes_alone = math.isinf(prices[0].seconds)
        assert all(math.isinf(price.seconds) is bytes_alone for price in prices)
        weights = []
        for seconds, size in self.distinct:
            held = np.stack([counted(arrays[size], price.kinds) for price in prices])
            if bytes_alone:
                weights.append(np.where(np.isinf(arrays[seconds]), np.inf, held))
            else:
                weights.append(arrays[seconds] + np.array([price.seconds for price in prices])[:, None] * held)
        tables = [np.where(np.isinf(table), np.inf, 0.0) for table in edges] if bytes_alone else edges
        for operation in self.operations:
            tables.append(_carried_out(operation, weights, tables))
        ends = [tables[m.slot] for step in self.steps for m in step.messages if not m.scope]
        values = [math.fsum(float(end[n if len(end) > 1 else 0]) for end in ends) for n in range(len(prices))]
        return Eliminations(tuple(prices), weights, tables, values)

    def choose(self, elimination: Elimination) -> list[int]:
        """The option of every variable that attains an exact elimination's value: last eliminated, first chosen."""
        one = Eliminations(
            (Price(elimination.price),),
            [weights[None] for weights in elimination.weights],
            [table[None] for table in elimination.tables],
            [elimination.value],
        )
        return [int(option) for option in self.choose_at(one)[:, 0]]

    def choose_at(self, eliminations: Eliminations) -> np.ndarray:
        """[variables, prices] the same at several prices."""
        arrays = self.reduced.tokens.arrays
        n = len(eliminations.prices)
        each, alone = np.arange(n)[:, None], np.zeros((1, 1), dtype=int)
        chosen = np.full((len(self.weights), n), -1)
        for step in reversed(self.steps):
            total = eliminations.weights[self.weights[step.variable]]
            for factor in step.bucket:
                table = eliminations.tables[factor.slot]
                at = tuple(
                    arrays[token][None, :] if i == step.variable else arrays[token][chosen[i]][:, None]
                    for i, token in zip(factor.scope, factor.classes, strict=True)
                )
                total = total + table[(each if len(table) > 1 else alone, *at)]
            chosen[step.variable] = total.argmin(axis=1)
        return chosen


def counted(size: np.ndarray, kinds: Sequence[float] = ()) -> np.ndarray:
    """[options] bytes; of all kinds alike if `kinds` does not say otherwise."""
    total: np.ndarray
    if size.ndim == 1:
        total = size * kinds[0] if kinds else size
    else:
        total = size @ np.array(kinds) if kinds else size.sum(axis=1)
    return total


def _carried_out(operation: EliminationOperation, weights: list[np.ndarray], tables: list[np.ndarray]) -> np.ndarray:
    """[prices or 1, classes of each neighbour]"""
    n, shape = operation.shape[0], operation.shape[1:]
    terms = []
    if operation.weight is not None:
        least = np.minimum.reduceat(weights[operation.weight][:, operation.order], operation.starts, axis=1)
        terms.append(least.reshape(len(least), n, *(1 for _ in shape)))
    for term in operation.inputs:
        index: tuple[slice | np.ndarray, ...] = (slice(None), *term.entries)
        table = tables[term.slot][index]
        terms.append(table.transpose(0, *(axis + 1 for axis in term.axes)).reshape(len(table), *term.shape))
    rows = max(1, _CHUNK // max(1, max(map(len, terms)) * math.prod(shape)))
    message: np.ndarray | None = None
    for start in range(0, n, rows):
        total = terms[0][:, start : start + rows]
        for addend in terms[1:]:
            total = total + addend[:, start : start + rows]
        least = total.min(axis=1)
        message = least if message is None else np.minimum(message, least)
    assert message is not None  # every variable has an option
    return message if message.shape[1:] == shape else np.broadcast_to(message, (len(message), *shape))


def planned(reduced: Reduced, entries: float) -> EliminationOrder:
    """The order, of several greedy ones, with the fewest entries in its joint tables, none of more than `entries`.

    O(variables x edges of one) for each order tried.
    """
    best: _Order | None = None
    for rule in (_work, _growth, _number):
        order = _Order(reduced, entries, rule)
        order.run(math.inf if best is None or (order.exact and not best.exact) else best.entries)
        if order.finished and (best is None or (order.exact, -order.entries) > (best.exact, -best.entries)):
            best = order
    assert best is not None  # the first one is not limited
    return best.plan()


class _Joint(NamedTuple):
    """The table over a variable and its neighbours that some factors add up to."""

    own: Token  # partition of the variable's options
    scope: tuple[int, ...]
    classes: tuple[Token, ...]
    entries: int


def _work(joint: _Joint, order: _Order, variable: int) -> float:
    return joint.entries


def _growth(joint: _Joint, order: _Order, variable: int) -> float:
    removed = sum(order.size(factor) for factor in order.buckets[variable])
    return joint.entries / order.tokens.size(joint.own) - removed


def _number(joint: _Joint, order: _Order, variable: int) -> float:
    return variable


class _Order:
    """Elimination in symbols: which tables meet in which step."""

    def __init__(self, reduced: Reduced, limit: float, rule: Callable[[_Joint, _Order, int], float]) -> None:
        self.reduced, self.tokens, self.limit, self.rule = reduced, reduced.tokens, limit, rule
        distinct: dict[tuple[Token, Token], int] = {}
        pairs = zip(reduced.seconds, reduced.bytes, strict=True)
        self.weights = tuple(distinct.setdefault(pair, len(distinct)) for pair in pairs)
        self.distinct = tuple(distinct)
        self.trivial = [self.tokens.of(np.zeros(len(options), dtype=np.int64)) for options in reduced.options]
        slots: dict[Token, Slot] = {}
        self.buckets: list[dict[Factor, int]] = [{} for _ in reduced.options]  # how often: equal edges are parallel
        for pair in reduced.pairs:
            slot = slots.setdefault(pair.table, Slot(len(slots)))
            self._add(Factor(slot, (pair.i, pair.j), (pair.rows, pair.columns)))
        self.edges = tuple(self.tokens.arrays[token] for token in slots)
        self.operations: dict[tuple[object, ...], EliminationOperation] = {}
        self.steps: list[EliminationStep] = []
        self.entries, self.width, self.exact, self.finished = 0, 0, True, False

    def run(self, most: float) -> None:
        """All steps, or until they take more than `most` entries."""
        left = set(range(len(self.buckets)))
        scores = {v: self._score(v) for v in left}
        heap = [(score, v) for v, score in scores.items()]
        heapq.heapify(heap)
        while heap:
            score, v = heapq.heappop(heap)
            if v not in left or score != scores[v]:
                continue
            left.remove(v)
            for neighbour in self._eliminate(v):
                scores[neighbour] = self._score(neighbour)
                heapq.heappush(heap, (scores[neighbour], neighbour))
            if self.entries > most:
                return
        self.finished = True

    def size(self, factor: Factor) -> int:
        return math.prod(self.tokens.size(token) for token in factor.classes)

    def plan(self) -> EliminationOrder:
        return EliminationOrder(
            self.reduced,
            tuple(self._depth_first() if self.exact else self.steps),
            tuple(self.operations.values()),
            self.weights,
            self.distinct,
            self.edges,
            self.exact,
            self.width,
            self.entries,
        )

    def _score(self, v: int) -> float:
        return self.rule(self._joint(v, self.buckets[v]), self, v)

    def _add(self, factor: Factor) -> None:
        for i in factor.scope:
            self.buckets[i][factor] = self.buckets[i].get(factor, 0) + 1

    def _joint(self, v: int, factors: dict[Factor, int]) -> _Joint:
        found: dict[int, Token] = {v: self.trivial[v]}
        for factor in factors:
            for i, token in zip(factor.scope, factor.classes, strict=True):
                found[i] = self.tokens.refined(found[i], token) if i in found else token
        own = found.pop(v)
        scope = tuple(sorted(found))
        tokens = tuple(found[i] for i in scope)
        return _Joint(own, scope, tokens, math.prod(self.tokens.size(token) for token in (own, *tokens)))

    def _eliminate(self, v: int) -> tuple[int, ...]:
        """One step; returns the neighbours."""
        bucket = self.buckets[v]
        whole = self._joint(v, bucket)
        for factor in bucket:
            for i in factor.scope:
                if i != v:
                    self.buckets[i].pop(factor, None)
        messages = []
        for n, part in enumerate(self._parts(v, bucket, whole)):
            message = self._message(v, part, with_weight=n == 0)
            self._add(message)
            messages.append(message)
        repeated = tuple(factor for factor, times in bucket.items() for _ in range(times))
        self.steps.append(EliminationStep(v, repeated, tuple(messages), whole.scope, whole.classes))
        self.width = max(self.width, len(whole.scope))
        return whole.scope

    def _parts(self, v: int, bucket: dict[Factor, int], whole: _Joint) -> list[dict[Factor, int]]:
        """The bucket, split where its joint table is too large: the largest first, each where it still fits."""
        if whole.entries <= self.limit:
            return [bucket]
        self.exact = False
        parts: list[dict[Factor, int]] = []
        for factor in sorted(bucket, key=lambda factor: (-self.size(factor), factor)):
            fitting = (p for p in parts if self._joint(v, p | {factor: 1}).entries <= self.limit)
            part = next(fitting, None)
            if part is None:
                part = {}
                parts.append(part)
            part[factor] = bucket[factor]
        return parts

    def _message(self, v: int, part: dict[Factor, int], with_weight: bool) -> Factor:
        joint = self._joint(v, part)
        place = {v: 0} | {i: n + 1 for n, i in enumerate(joint.scope)}
        inputs = tuple(
            sorted(
                (self.size(factor), factor.slot, times, tuple(place[i] for i in factor.scope), factor.classes)
                for factor, times in part.items()
            )
        )
        weight = self.weights[v] if with_weight else None
        key = (weight, joint.own, joint.classes, inputs)
        if key not in self.operations:
            partitions = (joint.own, *joint.classes)
            members = self.tokens.arrays[joint.own]
            order = np.argsort(members, kind="stable")
            terms = [
                self._term(slot, places, tokens, partitions)
                for _, slot, times, places, tokens in inputs
                for _ in range(times)
            ]
            self.operations[key] = EliminationOperation(
                slot=Slot(len(self.edges) + len(self.operations)),
                weight=weight,
                order=order,
                starts=np.flatnonzero(np.diff(members[order], prepend=-1)),
                inputs=tuple(terms),
                shape=tuple(self.tokens.size(token) for token in partitions),
            )
            self.entries += joint.entries
        return Factor(self.operations[key].slot, joint.scope, joint.classes)

    def _term(
        self, slot: Slot, places: tuple[int, ...], tokens: tuple[Token, ...], partitions: tuple[Token, ...]
    ) -> _LaidOut:
        of = self.tokens
        index = np.ix_(*(of.arrays[t][of.first(partitions[place])] for place, t in zip(places, tokens, strict=True)))
        axes = tuple(sorted(range(len(places)), key=lambda axis: places[axis]))
        shape = tuple(of.size(token) if place in places else 1 for place, token in enumerate(partitions))
        return _LaidOut(slot, index, axes, shape)

    def _depth_first(self) -> list[EliminationStep]:
        """The same tables in an order that finishes, going back, what hangs on a neighbour before it goes on.

        A variable's parent is the neighbour that is eliminated next; all its neighbours are ancestors. Any order that
        takes children before parents makes the same tables. Going back, small subtrees come first, so that a search
        has to remember few variables at a time.
        """
        place = {step.variable: n for n, step in enumerate(self.steps)}
        children: dict[int, list[int]] = {}
        below = [1] * len(self.steps)
        for n, step in enumerate(self.steps):  # children come before parents
            parent = min((place[i] for i in step.scope), default=-1)
            children.setdefault(parent, []).append(n)
            if parent >= 0:
                below[parent] += below[n]
        back, stack = [], [-1]
        while stack:
            n = stack.pop()
            if n >= 0:
                back.append(self.steps[n])
            stack += sorted(children.get(n, ()), key=lambda child: (-below[child], -child))
        return back[::-1]
