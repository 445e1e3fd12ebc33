"""Every quantity of a stage as a table over the pairs of cuts around it, by matrix products.

An item is a set A of atoms with a weight w, such as the readers of a value with its bytes. Let count(I) be the number
of atoms of A before cut I. The stage S between the cuts I and J

    has none of A    if and only if  count(I) = count(J)
    has all of A     if and only if  count(I) = 0 and count(J) = |A|

So the items that S touches weigh, in total,

    sum of w - sum over items and numbers q of  w [count(I) = q] [count(J) = q]

which is one matrix product for all pairs of cuts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from autopar.planner.inter_op.memory_formula import Activations
from autopar.planner.inter_op.stage_bytes import Shared, Stepped, Value
from cost_models.memory.optimizer_step import StepShare

_CHUNK = 4096  # columns of a matrix product, to bound its memory

Blocks = frozenset[int]
_Key = TypeVar("_Key")


@dataclass(frozen=True, eq=False)
class Pairs:
    """The pairs of cuts between which a stage may lie, by first cut: all before the first is before the second, and
    more."""

    start: np.ndarray  # [n_pairs] cut
    stop: np.ndarray  # [n_pairs] cut
    flat: np.ndarray  # [n_pairs] start x n_cuts + stop
    number: np.ndarray  # [n_cuts, n_cuts] of the pair; -1 for none

    @classmethod
    def of(cls, follows: np.ndarray) -> Pairs:
        """`follows`: bool [n_cuts, n_cuts]."""
        start, stop = np.nonzero(follows)
        number = np.full(follows.shape, -1, dtype=np.int32)
        number[start, stop] = np.arange(len(start))
        return cls(start, stop, np.flatnonzero(follows), number)

    def take(self, table: np.ndarray) -> np.ndarray:
        """What `table` [n_cuts, n_cuts] has for each pair."""
        return np.asarray(table.reshape(-1)[self.flat])


@dataclass(frozen=True, eq=False)
class Tables:
    """For every pair of cuts what the stage between them has, [n_pairs]. Bytes are those of the whole batch."""

    pairs: Pairs
    received: np.ndarray  # bytes forward
    received_gradient: np.ndarray  # bytes backward
    received_across: np.ndarray  # bytes forward as they count between nodes (`Value.scattered`)
    gradient_across: np.ndarray  # bytes backward, of the same values
    sent: np.ndarray  # bytes forward, of values that another stage reads, each once
    resident: np.ndarray  # bytes
    gradients: np.ndarray  # bytes to reduce once a step
    tied_gradients: np.ndarray  # bytes of those whose parameters another stage has, too
    saved: np.ndarray  # bytes
    transient: np.ndarray  # bytes
    once: np.ndarray  # s once a step
    stepped: StepShare | None  # arrays like the others: what the optimizer does once a step; None: nothing
    rebuilt: np.ndarray  # bytes of `saved` that cores of attention make
    core: np.ndarray  # bytes of these that one core makes at most
    kept: np.ndarray  # bytes that stay where layers run again one by one
    block: np.ndarray  # bytes at work there, see `Activations`
    layered: np.ndarray  # bool: whether there are any such layers
    must_recompute: np.ndarray  # bool
    must_as_one: np.ndarray  # bool: where running layers again does not suffice for that
    may_recompute: np.ndarray  # bool

    def arriving(self, across: bool) -> tuple[np.ndarray, np.ndarray]:
        """Bytes that come in forward and backward. `across`: from another node."""
        return (self.received_across, self.gradient_across) if across else (self.received, self.received_gradient)

    @property
    def activations(self) -> Activations[np.ndarray]:
        return Activations(self.saved, self.received, self.transient, self.rebuilt, self.core, self.kept, self.block)


class CutBlocks:
    """The blocks of atoms that some cuts separate, and the pairs of these cuts: the same for all spaces over them."""

    def __init__(self, cuts: np.ndarray) -> None:
        """`cuts`: bool [n_cuts, n]."""
        over_blocks, self._block_of = _blocks(cuts)
        self.n_blocks = over_blocks.shape[1]
        self.touching = (_TouchingAlongOrder if _is_order(over_blocks) else _Touching)(over_blocks)
        self.pairs = Pairs.of(self.touching.follows)
        self.cuts_as_numbers = cuts.astype(float)  # a product with it sums over the atoms before each cut
        self._known: dict[tuple[int, ...], Blocks] = {}  # spaces have their items at the same atoms

    def of(self, atoms: tuple[int, ...]) -> Blocks:
        """The blocks with any of the atoms."""
        if atoms not in self._known:
            self._known[atoms] = frozenset(int(self._block_of[atom]) for atom in atoms)
        return self._known[atoms]

    def block(self, atom: int) -> int:
        return int(self._block_of[atom])

    def largest(self, weights: np.ndarray) -> np.ndarray:
        """For each pair of cuts the largest of the weights [n] of the atoms between them."""
        of_blocks = np.zeros(self.n_blocks)
        np.maximum.at(of_blocks, self._block_of, weights)
        return self.pairs.take(self.touching.largest(of_blocks))


def tables(
    cuts: CutBlocks,
    *,
    values: Sequence[Value],
    resident: Sequence[Shared],
    gradients: Sequence[Shared],
    saved: Sequence[Shared],
    transient: np.ndarray,
    lane: float = 0.0,
    once: Sequence[Shared] = (),
    stepped: Sequence[Stepped] = (),
    rebuilt: Sequence[Shared] = (),
    core: np.ndarray | None = None,
    kept: Sequence[Shared] = (),
    block: np.ndarray | None = None,
    layered: Iterable[int] = (),
    recomputed: Iterable[int],
    outside: Iterable[int] = (),
    unrepeatable: Iterable[int],
) -> Tables:
    """All tables for `cuts`; the other arguments are the fields of a `Space`.

    O(n_cuts^2 x (items over several blocks of atoms that no cut separates)) operations.
    """
    touching, pairs, nothing = cuts.touching, cuts.pairs, np.zeros_like(transient)

    def weighed(weights: Mapping[Blocks, tuple[float, ...]]) -> list[np.ndarray]:
        return [pairs.take(table) for table in touching.weigh(weights)]

    def shared(items: Sequence[Shared]) -> np.ndarray:
        return weighed(_grouped((cuts.of(item.atoms), (item.nbytes,)) for item in items))[0]

    def any_of(atoms: Iterable[int]) -> np.ndarray:
        blocks = cuts.of(tuple(atoms))
        if not blocks:
            return np.zeros(len(pairs.start), dtype=bool)
        return weighed({frozenset({block}): (1.0,) for block in blocks})[0] > 0.5

    def moved(sent: Sequence[Value]) -> _Traffic:
        return _Traffic(*(pairs.take(table) for table in _traffic(cuts, sent)))

    traffic = across = moved(values)
    if lane and any(value.copies > 1 for value in values):
        across = moved([value.scattered(lane) for value in values])
    return Tables(
        pairs=pairs,
        received=traffic.received,
        received_gradient=traffic.received_gradient,
        received_across=across.received,
        gradient_across=across.received_gradient,
        sent=traffic.sent,
        resident=shared(resident),
        gradients=shared(gradients),
        tied_gradients=pairs.take(_tied(cuts, gradients)),
        saved=shared(saved),
        transient=cuts.largest(transient),
        once=shared(once),
        stepped=StepShare(*weighed(_grouped((cuts.of(s.atoms), s.share) for s in stepped))) if stepped else None,
        rebuilt=shared(rebuilt),
        core=cuts.largest(nothing if core is None else core),
        kept=shared(kept),
        block=cuts.largest(nothing if block is None else block),
        layered=any_of(layered),
        must_recompute=any_of(recomputed),
        must_as_one=any_of(outside),
        may_recompute=~any_of(unrepeatable),
    )


def _tied(cuts: CutBlocks, gradients: Sequence[Shared]) -> np.ndarray:
    """Bytes of the items that a stage has some of the atoms of, but not all."""
    touching = cuts.touching
    several = _grouped((cuts.of(item.atoms), (item.nbytes,)) for item in gradients)
    several = {blocks: weight for blocks, weight in several.items() if len(blocks) > 1}
    if not several:
        return np.zeros(touching.follows.shape)
    # A difference of equal sums may leave a rounding residue; no parameter has less than a byte.
    tied = touching.weigh(several)[0] - touching.contain(several)[0]
    return np.where(tied >= 0.5, tied, 0.0)


class _Traffic(NamedTuple):
    """What stages receive and send, as in `Tables`; at first as tables [n_cuts, n_cuts]."""

    received: np.ndarray
    received_gradient: np.ndarray
    sent: np.ndarray


def _traffic(cuts: CutBlocks, values: Sequence[Value]) -> _Traffic:
    """A stage receives a value where it has a reader and not the producer, and sends one where it has the producer and
    not all readers:

        received = (values whose readers or producer the stage touches) - (values whose producer it has)
        sent     = (values whose producer it has) - (values that lie inside it)
    """
    # Value -> (bytes forward, bytes backward, 1 if it goes forward, 1 if it goes backward).
    weights = _grouped(
        (
            (cuts.block(v.producer), cuts.of(v.consumers) - {cuts.block(v.producer)}),
            (v.nbytes, v.grad_nbytes, float(v.nbytes > 0), float(v.grad_nbytes > 0)),
        )
        for v in values
    )
    weights = {key: weight for key, weight in weights.items() if key[1]}
    family = _grouped((readers | {producer}, weight) for (producer, readers), weight in weights.items())
    alone = _grouped((frozenset({producer}), weight) for (producer, _), weight in weights.items())
    touching = cuts.touching
    shape = touching.follows.shape
    with_any = touching.weigh(family) if family else np.zeros((4, *shape))
    with_producer = touching.weigh(alone or {frozenset({0}): (0.0, 0.0, 0.0, 0.0)})
    inside = touching.contain(family)[[0, 2]] if family else np.zeros((2, *shape))
    # Values are counted, not bytes compared with 0, since sums of fractional bytes may leave a rounding residue.
    forward, backward, n_forward, n_backward = with_any - with_producer
    any_forward, any_backward = n_forward > 0.5, n_backward > 0.5
    n_sent = with_producer[2] - inside[1] > 0.5
    return _Traffic(
        received=np.where(any_forward, forward, 0.0),
        received_gradient=np.where(any_backward, backward, 0.0),
        sent=np.where(n_sent, with_producer[0] - inside[0], 0.0),
    )


def _blocks(cuts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cuts over blocks, [n_cuts, n_blocks], and the block of every atom: atoms that no cut separates are one block."""
    packed = np.ascontiguousarray(np.packbits(cuts, axis=0).T)
    rows = packed.view(np.dtype((np.void, packed.shape[1]))).ravel()
    _, first, block_of = np.unique(rows, return_index=True, return_inverse=True)
    return cuts[:, first], block_of.ravel()


def _grouped(items: Iterable[tuple[_Key, tuple[float, ...]]]) -> dict[_Key, tuple[float, ...]]:
    """Items with the same key as one, their weights added."""
    total: dict[_Key, tuple[float, ...]] = {}
    for key, weights in items:
        before = total.get(key)
        total[key] = weights if before is None else tuple(a + b for a, b in zip(before, weights, strict=True))
    return total


class _Touching:
    """Weights of sets of blocks that stages touch or contain."""

    def __init__(self, cuts: np.ndarray) -> None:
        self._cuts = cuts.astype(np.float32)
        sizes = self._cuts.sum(axis=1)
        inside = self._cuts @ self._cuts.T  # [i, j]: blocks before both cuts; float32 is exact up to 2^24 of them
        self.follows = (inside == sizes[:, None]) & (sizes[:, None] < sizes[None, :])

    def weigh(self, items: Mapping[Blocks, tuple[float, ...]]) -> np.ndarray:
        """[n_weights, n_cuts, n_cuts]: the summed weights of the items that have any block in the stage, each once."""
        n = len(self._cuts)
        n_weights = len(next(iter(items.values()))) if items else 1
        result = np.zeros((n_weights, n, n))
        single = np.zeros((n_weights, self._cuts.shape[1]))
        several: dict[int, tuple[list[np.ndarray], list[tuple[float, ...]]]] = {}
        for blocks, weights in items.items():
            if len(blocks) == 1:
                single[:, next(iter(blocks))] += weights
            elif blocks:
                counts, many = several.setdefault(len(blocks), ([], []))
                counts.append(np.fromiter(blocks, int))
                many.append(weights)
        before = single @ self._cuts.T.astype(float)
        result += before[:, None, :] - before[:, :, None]
        for size, (members, many) in several.items():
            indices, weight = np.stack(members), np.array(many)
            for start in range(0, len(indices), max(1, _CHUNK // (size + 1))):
                part = slice(start, start + max(1, _CHUNK // (size + 1)))
                counts = self._cuts[:, indices[part]].sum(axis=2)  # [n_cuts, items]
                w = weight[part]
                result += w.sum(axis=0)[:, None, None]
                for number in range(size + 1):
                    same = (counts == number).astype(float)
                    for index in range(n_weights):
                        result[index] -= (same * w[:, index]) @ same.T
        return np.maximum(result, 0.0)

    def contain(self, items: Mapping[Blocks, tuple[float, ...]]) -> np.ndarray:
        """[n_weights, n_cuts, n_cuts]: the summed weights of the items whose blocks are all in the stage."""
        n_weights = len(next(iter(items.values())))
        result = np.zeros((n_weights, len(self._cuts), len(self._cuts)))
        sets, weight = list(items), np.array(list(items.values()))
        for start in range(0, len(sets), _CHUNK):
            part = sets[start : start + _CHUNK]
            counts = np.stack([self._cuts[:, list(blocks)].sum(axis=1) for blocks in part], axis=1)
            none, all_ = (counts == 0).astype(float), (counts == [len(b) for b in part]).astype(float)
            for index in range(n_weights):
                result[index] += (none * weight[start : start + _CHUNK, index]) @ all_.T
        return result

    def largest(self, weights: np.ndarray) -> np.ndarray:
        """[n_cuts, n_cuts]: the largest weight [n_blocks] of a block in each stage."""
        result = np.zeros(self.follows.shape)
        reached = np.zeros(len(self._cuts), dtype=np.float32)
        open_ = np.ones(self.follows.shape, dtype=bool)  # pairs without a block yet
        order = np.argsort(-weights, kind="stable")
        # From the largest weight down: a pair has the weight of the first block that tells its two cuts apart.
        for weight, start, stop in _runs(weights[order]):
            reached = reached + self._cuts[:, order[start:stop]].sum(axis=1)
            apart = open_ & (reached[None, :] > reached[:, None])
            result[apart] = weight
            open_ &= ~apart
        return result


def _is_order(cuts: np.ndarray) -> bool:
    """Whether each cut contains the one before it."""
    return not (cuts[:-1] & ~cuts[1:]).any()


class _TouchingAlongOrder(_Touching):
    """The same where each cut contains the one before it, in time that does not grow with items x cuts^2.

    A block is between two neighbouring cuts; its place is the number of the second. The stage from cut I to J touches
    it if I < place <= J. So it touches none of an item's blocks if two neighbours among their places p < q have p <= I
    and J < q, and contains them all if I < first place and last place <= J. Sums over all items below such a corner are
    cumulative sums of a table of corners.
    """

    def __init__(self, cuts: np.ndarray) -> None:
        super().__init__(cuts)
        self._places = len(cuts) - cuts.sum(axis=0)

    def weigh(self, items: Mapping[Blocks, tuple[float, ...]]) -> np.ndarray:
        n = len(self._cuts)
        weights = np.array(list(items.values())) if items else np.zeros((0, 1))
        single, alone = np.zeros((weights.shape[1], n)), np.zeros(len(items), dtype=bool)
        starts, stops, owners = list[int](), list[int](), list[int]()
        for number, blocks in enumerate(items):
            places = sorted(self._places[list(blocks)].tolist()) if blocks else []
            if len(places) == 1:
                single[:, places[0]] += weights[number]
                alone[number] = True
                continue
            starts += [0, *places]
            stops += [*places, n]
            owners += [number] * (len(places) + 1)
        untouched = self._corners(starts, stops, weights[owners])
        untouched = untouched.cumsum(axis=1)[:, :, ::-1].cumsum(axis=2)[:, :, ::-1]
        before = single.cumsum(axis=1)
        result = before[:, None, :] - before[:, :, None] + weights[~alone].sum(axis=0)[:, None, None]
        return np.maximum(result - untouched[:, :n, 1:], 0.0)

    def contain(self, items: Mapping[Blocks, tuple[float, ...]]) -> np.ndarray:
        n, weights = len(self._cuts), np.array(list(items.values()))
        ends = [self._places[list(blocks)] for blocks in items]
        inside = self._corners([int(e.min()) for e in ends], [int(e.max()) for e in ends], weights)
        inside = inside[:, ::-1].cumsum(axis=1)[:, ::-1].cumsum(axis=2)
        return np.asarray(inside[:, 1:, :n])

    def _corners(self, starts: Sequence[int], stops: Sequence[int], weights: np.ndarray) -> np.ndarray:
        """[n_weights, n_cuts + 1, n_cuts + 1] the weights [corners, n_weights] at their corners."""
        side = len(self._cuts) + 1
        at = np.array(starts, dtype=int) * side + np.array(stops, dtype=int)
        sums = [np.bincount(at, weights=column, minlength=side * side) for column in weights.T]
        return np.array(sums).reshape(-1, side, side)

    def largest(self, weights: np.ndarray) -> np.ndarray:
        n = len(self._cuts)
        at_place, result = np.zeros(n), np.zeros((n, n))
        np.maximum.at(at_place, self._places, weights)
        for cut in range(n - 1):
            np.maximum.accumulate(at_place[cut + 1 :], out=result[cut, cut + 1 :])
        return result


def _runs(ordered: np.ndarray) -> Iterable[tuple[float, int, int]]:
    """(value, start, stop) of each run of equal numbers."""
    edges = [0, *(np.flatnonzero(np.diff(ordered)) + 1), len(ordered)]
    for start, stop in itertools.pairwise(edges):
        yield float(ordered[start]), int(start), int(stop)
