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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from autopar.planner.inter_op.stage_bytes import Shared, Stepped, Value
from cost_models.memory.optimizer_step import StepShare

_CHUNK = 4096  # columns of a matrix product, to bound its memory

Blocks = frozenset[int]
_Key = TypeVar("_Key")


@dataclass(frozen=True)
class Tables:
    """Entry [i, j] belongs to the stage between cuts i and j; it has no meaning where j does not follow i.

    Bytes are those of the whole batch.
    """

    follows: np.ndarray  # bool [n_cuts, n_cuts]: all before cut i is before cut j, and more
    received: np.ndarray  # bytes forward
    received_gradient: np.ndarray  # bytes backward
    messages: np.ndarray  # 0, 1 or 2: directions in which anything is received
    sent: np.ndarray  # bytes forward, of values that another stage reads, each once
    resident: np.ndarray  # bytes
    gradients: np.ndarray  # bytes to reduce once a step
    tied_gradients: np.ndarray  # bytes of those whose parameters another stage has, too
    saved: np.ndarray  # bytes
    transient: np.ndarray  # bytes
    once: np.ndarray  # s once a step
    stepped: StepShare | None  # arrays like the others: what the optimizer does once a step; None: nothing
    must_recompute: np.ndarray  # bool
    may_recompute: np.ndarray  # bool


def tables(
    cuts: np.ndarray,
    *,
    values: Sequence[Value],
    resident: Sequence[Shared],
    gradients: Sequence[Shared],
    saved: Sequence[Shared],
    transient: np.ndarray,
    once: Sequence[Shared] = (),
    stepped: Sequence[Stepped] = (),
    recomputed: Iterable[int],
    unrepeatable: Iterable[int],
) -> Tables:
    """All tables for `cuts`; the other arguments are the fields of a `Space`.

    O(n_cuts^2 x (items over several blocks of atoms that no cut separates)) operations.
    """
    over_blocks, block_of = _blocks(cuts)
    touching = _Touching(over_blocks)
    traffic = _traffic(touching, block_of, values)

    def shared(items: Sequence[Shared]) -> np.ndarray:
        return touching.weigh(_grouped((_block_set(block_of, item.atoms), (item.nbytes,)) for item in items))[0]

    def any_of(atoms: Iterable[int]) -> np.ndarray:
        return touching.weigh({frozenset({block}): (1.0,) for block in _block_set(block_of, atoms)})[0] > 0.5

    return Tables(
        follows=touching.follows,
        received=traffic.received,
        received_gradient=traffic.received_gradient,
        messages=traffic.messages,
        sent=traffic.sent,
        resident=shared(resident),
        gradients=shared(gradients),
        tied_gradients=_tied(touching, block_of, gradients),
        saved=shared(saved),
        transient=touching.largest(_block_maximum(block_of, transient, over_blocks.shape[1])),
        once=shared(once),
        stepped=StepShare(*touching.weigh(_grouped((_block_set(block_of, s.atoms), s.share) for s in stepped)))
        if stepped
        else None,
        must_recompute=any_of(recomputed),
        may_recompute=~any_of(unrepeatable),
    )


def _tied(touching: _Touching, block_of: np.ndarray, gradients: Sequence[Shared]) -> np.ndarray:
    """Bytes of the items that a stage has some of the atoms of, but not all."""
    several = _grouped((_block_set(block_of, item.atoms), (item.nbytes,)) for item in gradients)
    several = {blocks: weight for blocks, weight in several.items() if len(blocks) > 1}
    if not several:
        return np.zeros(touching.follows.shape)
    # A difference of equal sums may leave a rounding residue; no parameter has less than a byte.
    tied = touching.weigh(several)[0] - touching.contain(several)[0]
    return np.where(tied >= 0.5, tied, 0.0)


class _Traffic(NamedTuple):
    """The tables of what stages receive and send, as in `Tables`."""

    received: np.ndarray
    received_gradient: np.ndarray
    messages: np.ndarray
    sent: np.ndarray


def _traffic(touching: _Touching, block_of: np.ndarray, values: Sequence[Value]) -> _Traffic:
    """A stage receives a value where it has a reader and not the producer, and sends one where it has the producer and
    not all readers:

        received = (values whose readers or producer the stage touches) - (values whose producer it has)
        sent     = (values whose producer it has) - (values that lie inside it)
    """
    # Value -> (bytes forward, bytes backward, 1 if it goes forward, 1 if it goes backward).
    weights = _grouped(
        (
            (int(block_of[v.producer]), _block_set(block_of, v.consumers) - {int(block_of[v.producer])}),
            (v.nbytes, v.grad_nbytes, float(v.nbytes > 0), float(v.grad_nbytes > 0)),
        )
        for v in values
    )
    weights = {key: weight for key, weight in weights.items() if key[1]}
    family = _grouped((readers | {producer}, weight) for (producer, readers), weight in weights.items())
    alone = _grouped((frozenset({producer}), weight) for (producer, _), weight in weights.items())
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
        messages=any_forward.astype(float) + any_backward,
        sent=np.where(n_sent, with_producer[0] - inside[0], 0.0),
    )


def _blocks(cuts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cuts over blocks, [n_cuts, n_blocks], and the block of every atom: atoms that no cut separates are one block."""
    packed = np.ascontiguousarray(np.packbits(cuts, axis=0).T)
    rows = packed.view(np.dtype((np.void, packed.shape[1]))).ravel()
    _, first, block_of = np.unique(rows, return_index=True, return_inverse=True)
    return cuts[:, first], block_of.ravel()


def _block_set(block_of: np.ndarray, atoms: Iterable[int]) -> Blocks:
    return frozenset(int(block_of[atom]) for atom in atoms)


def _block_maximum(block_of: np.ndarray, weights: np.ndarray, n_blocks: int) -> np.ndarray:
    largest = np.zeros(n_blocks)
    np.maximum.at(largest, block_of, weights)
    return largest


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

    def weigh(self, items: dict[Blocks, tuple[float, ...]]) -> np.ndarray:
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

    def contain(self, items: dict[Blocks, tuple[float, ...]]) -> np.ndarray:
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


def _runs(ordered: np.ndarray) -> Iterable[tuple[float, int, int]]:
    """(value, start, stop) of each run of equal numbers."""
    edges = [0, *(np.flatnonzero(np.diff(ordered)) + 1), len(ordered)]
    for start, stop in itertools.pairwise(edges):
        yield float(ordered[start]), int(start), int(stop)
