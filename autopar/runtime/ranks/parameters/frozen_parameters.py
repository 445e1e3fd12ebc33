"""Which parameters are frozen, the same on all ranks that hold them, so that none of them waits for a gradient of one.

Every rank sends one bit a parameter with each call: whether it holds the parameter frozen. Ranks that do not hold it
send 0.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from autopar.runtime.ranks.parameters.holders import Holding

_BITS = 62  # of a number: torch's integers have 64, and a sign


class FrozenParameters:
    """Of one rank, once the parameters are placed."""

    def __init__(
        self,
        names: Mapping[int, str],
        holdings: Mapping[int, Mapping[int, Holding]],
        own: Mapping[int, torch.Tensor],
        frozen: Collection[int],
    ) -> None:
        """`names`, `holdings` and `own` (this rank's parameters): by id of the one that the model was built with.
        `names` has all parameters, in an order that is the same on all ranks. `frozen`: the ids of those that are
        frozen now, on all ranks."""
        self.first_names = dict(names)
        self._names = list(names.values())
        self._holders = [frozenset(holdings[key]) if key in holdings else None for key in names]  # None: every rank
        self._own = [(1 << place, own[key]) for place, key in enumerate(names) if key in own]
        self._masks: dict[int, int] = {}  # by rank, of the parameters that it holds
        self.keys: frozenset[int] = frozenset()  # ids of this rank's parameters that were frozen at the last call
        self.names: frozenset[str] = frozenset()  # of all ranks' parameters
        self._mask = 0  # of the same
        self._take_over(sum(1 << place for place, key in enumerate(names) if key in frozen))

    def numbers(self) -> list[int]:
        """This rank's bits; as many numbers on all ranks."""
        mask = 0
        for bit, parameter in self._own:
            if not parameter.requires_grad:
                mask |= bit
        low = (1 << _BITS) - 1
        return [mask >> start & low for start in range(0, len(self._names), _BITS)]

    def agree(self, everyone: Sequence[Sequence[int]]) -> str:
        """Take over what all ranks have sent. Returns what is wrong where ranks differ, "" where they do not."""
        masks = [sum(number << (place * _BITS) for place, number in enumerate(theirs)) for theirs in everyone]
        frozen = 0
        for mask in masks:
            frozen |= mask
        for rank, mask in enumerate(masks):
            if differing := (frozen ^ mask) & self._held(rank):
                place = differing.bit_length() - 1
                where = next(other for other, theirs in enumerate(masks) if theirs >> place & 1)
                return (
                    f"ranks differ in whether '{self._names[place]}' is trained: frozen on rank {where}, not on rank "
                    f"{rank}; call requires_grad_() alike on every rank"
                )
        if frozen != self._mask:
            self._take_over(frozen)
        return ""

    def _take_over(self, mask: int) -> None:
        self._mask = mask
        self.keys = frozenset(id(p) for bit, p in self._own if mask & bit)
        self.names = frozenset(name for place, name in enumerate(self._names) if mask >> place & 1)

    def _held(self, rank: int) -> int:
        """The bits of the parameters that a rank holds."""
        if rank not in self._masks:
            self._masks[rank] = sum(
                1 << place for place, ranks in enumerate(self._holders) if ranks is None or rank in ranks
            )
        return self._masks[rank]
