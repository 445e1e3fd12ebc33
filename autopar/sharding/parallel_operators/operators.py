"""Parallel operators: devices split an index that the operator alone needs whole (`{k}` in its rule).

Cut along such an index, the operator on local parts is not the whole operator's part. The devices along the axis
exchange a few numbers within, and then each has its part of the result, or an addend of it where the result lacks the
index:

```
    embedding       {v} d, *i -> *i d          each looks up the rows that it has, zeros for the others      Partial
    cross_entropy   n {c}, n -> n              all-reduced: largest score, sum of exponentials               Partial
    cross_entropy   {~n} c, {~n} ->            the mean; all-reduced: count of the targets that count        Partial
    softmax         a {k} -> a {k}             all-reduced: largest, sum of exponentials; backward a sum     Shard
    batch_norm      {b} c s, c.. -> {b} c s    all-reduced: sums, squared deviations; backward two sums      Shard
    grouped_mm      [n] k, {e} k m, [f] -> ..  each does the rows of the experts that it has                 Partial
```

As everywhere in a sharded graph, gradients are those of single devices: given each device's gradient of its result in
the layout `Strategy.gradient_out`, autograd gives each device's gradient of its operands in `Strategy.gradient_in`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from autopar.analysis.rules.notation import Rule
from autopar.sharding.parallel_operators import layers as special_layers
from autopar.sharding.parallel_operators import losses as special_losses
from autopar.sharding.parallel_operators.group import Call, Exchanged, GroupCall, OperatorGroup
from autopar.sharding.strategies import Strategy
from cost_models import Collective

_Run = Callable[[list[Call], OperatorGroup], list[torch.Tensor]]
_Exchange = Callable[[GroupCall], Exchanged]

_EMBEDDING: tuple[_Run, _Exchange] = special_layers.embedding, special_layers.nothing_exchanged
_GROUPED: tuple[_Run, _Exchange] = special_layers.grouped_product, special_layers.nothing_exchanged
_BATCH_NORM: tuple[_Run, _Exchange] = special_layers.batch_norm, special_layers.batch_norm_exchanged
_SOFTMAX: tuple[_Run, _Exchange] = special_losses.softmax, special_losses.softmax_exchanged
_LOSS: tuple[_Run, _Exchange] = special_losses.cross_entropy, special_losses.cross_entropy_exchanged

SPECIALS: dict[str, tuple[_Run, _Exchange]] = {
    "embedding": _EMBEDDING,
    "batch_norm": _BATCH_NORM,
    **dict.fromkeys(("grouped_mm_fallback", "_grouped_mm"), _GROUPED),
    **dict.fromkeys(("softmax", "log_softmax", "_softmax", "_log_softmax"), _SOFTMAX),
    **dict.fromkeys(("cross_entropy_loss", "nll_loss", "nll_loss2d", "nll_loss_nd"), _LOSS),
}


@dataclass(frozen=True)
class InnerCollective:
    """A collective inside an operator."""

    collective: Collective
    nbytes: float  # as `collective_seconds` counts them
    axis: int  # of the mesh
    backward: bool


def run(name: str, calls: Sequence[Call], *, strategy: Strategy, mesh: Sequence[int]) -> list[torch.Tensor]:
    """The result of one parallel operator on every device.

    `name`: `Strategy.special`. `calls`: of every device, in the order of the mesh (of this shape; the last axis runs
    fastest), with its own parts of the operands, wherever they are. Running statistics among them are written to.
    Raises KeyError for a name that is none.
    """
    return SPECIALS[name][0](list(calls), OperatorGroup(strategy, tuple(mesh)))


def collectives(
    strategy: Strategy, rule: Rule, operands: Sequence[torch.Tensor | None], mesh: Sequence[int]
) -> list[InnerCollective]:
    """The collectives inside an operator. `operands`: those of the rule, whole, on the meta device."""
    if not strategy.special:
        return []
    plan = GroupCall(rule, OperatorGroup(strategy, tuple(mesh)), operands)
    return [
        InnerCollective("all_reduce", nbytes, axis, backward)
        for nbytes, axes, backward in SPECIALS[strategy.special][1](plan)
        for axis in axes
    ]
