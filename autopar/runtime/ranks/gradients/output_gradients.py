"""Whether all ranks go back from the same gradients of a call's outputs.

```
   every rank   outputs of the whole batch -> the caller's loss -> their gradients -> backward of its own stages
```
Each rank's stages read the gradients that its own loss made. With another target on one rank, or another loss, the sum
over ranks would be the gradient of neither. Rounding is no difference: a rank on a GPU of another kind may compute the
same loss with other last bits. So ranks compare a norm and a projection of the gradients in float64, not their bits.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from autopar.errors import InputError
from autopar.runtime.ranks.due import Due
from autopar.runtime.ranks.faults.failure import names as names_of
from autopar.runtime.ranks.one_message import on_all_ranks
from autopar.runtime.ranks.world import World

_ROUNDING = 1e-3  # share of a gradient's norm up to which ranks may differ; more in half precision
_BLOCK = 1 << 18  # entries that are looked at together: 2 MiB in float64


class _Digest(NamedTuple):
    """Of one output's gradient."""

    share: float  # of the norm, up to which a difference is rounding; 0: there is no gradient
    norm: float
    # On a fixed direction, about as long as the norm. It depends on where an entry is: the gradients of targets in
    # another order may have the same norm.
    projection: float


_NO_GRADIENT = _Digest(0.0, 0.0, 0.0)


class OutputGradientAgreement:
    """Of one model on ranks that all pass the whole batch."""

    def __init__(self, world: World) -> None:
        self._world, self._due = world, Due()

    def check(self, gradients: Sequence[torch.Tensor | None], executable: object) -> None:
        """At the first backwards of an executable, and now and then: raise InputError on all ranks where their
        gradients of the flat outputs differ. Collective then."""
        if not self._due.now(of=executable):
            return
        own = [number for gradient in gradients for number in _digest(gradient)]
        rows = [list(map(_number, row)) for row in self._world.announced("backward", list(map(_bits, own)))]
        for place in range(len(gradients)):
            found = [_Digest(*row[3 * place : 3 * place + 3]) for row in rows]
            others = [rank for rank, one in enumerate(found) if not _alike(found[0], one)]
            if others:
                raise _refusal(place, others, found)


def _refusal(place: int, others: Sequence[int], found: Sequence[_Digest]) -> InputError:
    """`others`: the ranks whose gradient of output `place` differs from rank 0's."""

    def described(digest: _Digest) -> str:
        return "none" if digest == _NO_GRADIENT else f"norm {digest.norm:.6g}"

    here, there = described(found[0]), described(found[others[0]])
    difference = f"{here} on rank 0, {there} on rank {others[0]}"
    if here == there:
        difference = f"{names_of(others)} from rank 0, with the same {here}"
    return on_all_ranks(
        InputError(
            f"ranks differ in the gradient of the outputs from which backward() starts (output {place} of the model: "
            f"{difference}); compute the same loss from the same targets on every rank, or give parallelize "
            "data='per-rank', and every rank its own samples"
        )
    )


def _alike(one: _Digest, other: _Digest) -> bool:
    """Whether two digests are those of one gradient, but for rounding."""
    if one.share != other.share:
        return False
    if not all(map(math.isfinite, (*one, *other))):  # a loss that overflows does so on all ranks
        return all(map(math.isfinite, one)) == all(map(math.isfinite, other))
    allowed = one.share * max(one.norm, other.norm)
    return abs(one.norm - other.norm) <= allowed and abs(one.projection - other.projection) <= allowed


@torch.no_grad()
def _digest(gradient: torch.Tensor | None) -> _Digest:
    """The host waits for its GPU."""
    if gradient is None:
        return _NO_GRADIENT
    flat = gradient.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    weights = _weights(flat.device)
    sums = torch.zeros(2, dtype=torch.float64, device=flat.device)
    for number, block in enumerate(flat.split(_BLOCK)):
        values = block.double()
        turned = math.cos(number)  # another direction for every block
        sums += torch.stack([values.dot(values), turned * values.dot(weights[: len(values)])])
    square, projection = sums.tolist()
    share = max(_ROUNDING, 4 * torch.finfo(flat.dtype).eps)
    return _Digest(share, math.sqrt(square) if square >= 0 else square, projection)


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """[entries of a block] random numbers of variance 1, the same on all ranks; kept."""
    drawn = torch.rand(_BLOCK, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return ((drawn - 0.5) * math.sqrt(12)).to(device)


def _bits(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _number(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
