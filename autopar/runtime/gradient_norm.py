"""The norm of all gradients, and clipping by it, over stages, meshes, replicas and tied weights.

```
   rank 0   embed (stage 0)              |g|: 1         counted here
   rank 1   embed (tied, stage 1), head  |g|: 1, 2      embed is stage 0's, head is counted here      sqrt(1 + 4)
```
Every entry of every parameter counts once: on the first stage that holds the parameter, and there on the first rank
along each axis of its mesh over which it is not cut.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from autopar.errors import InputError
from autopar.errors.names import with_checked_names
from autopar.runtime.ranks.faults.failure import names
from autopar.runtime.ranks.faults.watcher import watched
from autopar.runtime.ranks.gradients.apart_gradients import incomplete
from autopar.runtime.ranks.module import RankedModule
from autopar.runtime.ranks.one_message import on_all_ranks
from autopar.runtime.ranks.parameters.own import RankParameters, known_by
from autopar.runtime.ranks.world import World

_TINY = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_WAITING = -1.0  # in the place of a rank's norm: its gradients of accumulate() are not added up yet


class _Clipping(NamedTuple):
    """What a rank clips by, which must be the same on all: every stage is scaled by it."""

    max_norm: float
    norm_type: float
    error_if_nonfinite: bool


@with_checked_names
def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients so that their norm, over all of them as one vector, is at most `max_norm`. Returns the norm
    before, the same on all ranks.

    Like `torch.nn.utils.clip_grad_norm_`, which would take each rank's part of a pipelined module for the whole. Every
    rank calls it, with the parameters that it holds: a pipelined module, some of its parameters (also those that the
    model had before they were placed), or in one process any module or parameters.

    Raises:
        InputError: `max_norm` or `norm_type` is no number, or differs between ranks, `norm_type` is not positive on
            ranks, or gradients of `accumulate()` are not added up yet.
        RuntimeError: `error_if_nonfinite`, and the norm is inf or NaN.
    """
    _check_number("max_norm", max_norm, "1.0")
    if norm_type != "inf":  # torch takes the word, too
        _check_number("norm_type", norm_type, "2.0 or inf")
    if isinstance(parameters, torch.Tensor):
        given = [parameters]
    elif isinstance(parameters, nn.Module):
        given = list(parameters.parameters())
    else:
        given = list(parameters)
    if type(parameters) is RankedModule:
        placed = [parameters.placed_parameters] if parameters.placed_parameters is not None else []
    else:
        placed = known_by(given)
    if not placed:
        return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite, foreach)
    clipping = _Clipping(float(max_norm), float(norm_type), bool(error_if_nonfinite))
    if not clipping.norm_type > 0:
        raise InputError(f"norm_type must be positive for parameters on ranks, got {norm_type!r}")
    for one in placed:
        given = one.present(given)
    models = placed if given else []
    return _clipped(placed[0].world, models, given, clipping, foreach)


@watched("clip_grad_norm_")
@torch.no_grad()
def _clipped(
    world: World,
    placed: Sequence[RankParameters],
    parameters: Sequence[torch.Tensor],
    clipping: _Clipping,
    foreach: bool | None,
) -> torch.Tensor:
    max_norm, p, error_if_nonfinite = clipping
    with_gradient = [(parameter, _local(parameter.grad)) for parameter in parameters if parameter.grad is not None]
    counted = [gradient for parameter, gradient in with_gradient if _counts_here(world, placed, parameter)]
    own = float(torch.nn.utils.get_total_norm(counted, p, foreach=foreach)) if counted else 0.0
    total = _joined(world, _WAITING if any(one.apart.waiting for one in placed) else own, clipping)
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {p} of the gradients is {total}, so it cannot be clipped. To scale the gradients "
            "by it anyway, set error_if_nonfinite=False"
        )
    factor = min(max_norm / (total + _TINY), 1.0) if not math.isnan(total) else math.nan
    for _, gradient in with_gradient:
        gradient.mul_(factor)
    return torch.tensor(total, dtype=torch.float64).to(world.device, torch.get_default_dtype())


def _counts_here(world: World, placed: Sequence[RankParameters], parameter: torch.Tensor) -> bool:
    """Whether this rank's part of a parameter counts here: other ranks may hold the same."""
    if not isinstance(parameter, DTensor) or any(one.is_everywhere(parameter) for one in placed):
        return world.rank == 0  # every rank has it whole
    if not any(one.has(parameter) and one.is_first_holder(parameter) for one in placed):
        return False
    place = parameter.device_mesh.get_coordinate()
    assert place is not None, "this rank is on the mesh of its parameters"
    gradient: Any = parameter.grad
    return all(
        at == 0 or isinstance(placement, Shard) for at, placement in zip(place, gradient.placements, strict=True)
    )


def _joined(world: World, own: float, clipping: _Clipping) -> float:
    """The norm of all ranks' norms. The same sum in the same order on every rank.

    Raises InputError on all ranks where one passes `_WAITING`, or clips by something else.
    """
    sent = struct.pack("4d", own, *clipping)
    rows = world.announced("clip_grad_norm_", struct.unpack("4q", sent))
    found = [struct.unpack("4d", struct.pack("4q", *row)) for row in rows]
    norms = [norm for norm, *_ in found]
    if _WAITING in norms:
        raise on_all_ranks(incomplete("clip_grad_norm_"))
    if difference := _difference([_Clipping(most, p, bool(strict)) for _, most, p, strict in found]):
        raise on_all_ranks(InputError(difference))
    p, largest = clipping.norm_type, max(norms)
    if any(map(math.isnan, norms)):
        return math.nan
    if largest in (0.0, math.inf) or math.isinf(p):
        return largest
    total: float = largest * sum((norm / largest) ** p for norm in norms) ** (1 / p)
    return total


def _difference(clippings: Sequence[_Clipping]) -> str:
    """What ranks clip by that differs from rank 0, in words; "" if nothing does. `clippings`: by rank."""
    for place, name in enumerate(_Clipping._fields):
        values = [repr(one[place]) for one in clippings]  # a NaN equals a NaN
        others = [rank for rank, value in enumerate(values) if value != values[0]]
        if others:
            alike = [rank for rank in others if values[rank] == values[others[0]]]
            return (
                f"clip_grad_norm_: ranks differ in {name}: {values[0]} on rank 0, {values[others[0]]} on "
                f"{names(alike)}; pass the same {name} on every rank, because one norm scales the gradients of all"
            )
    return ""


def _check_number(name: str, value: Any, example: str) -> None:
    """Raise InputError for an argument that is neither a number nor a tensor of one element."""
    if not isinstance(value, Real) and not (isinstance(value, torch.Tensor) and value.numel() == 1):
        raise InputError(f"{name} must be a number, such as {example}, got {value!r}")


def _local(gradient: Any) -> torch.Tensor:
    found: torch.Tensor = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return found
