"""What lies between those that make a tensor and those that read it: variables of makers, edges, redistributions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.sharding.layouts import REPLICATE, Placements
from autopar.sharding.redistribution import Redistribution
from autopar.sharding.strategy_costs import Ends


@dataclass(frozen=True)
class TensorUse:
    """An edge of the problem, and what it is about."""

    tensor: str
    reader: str
    outs: tuple[Any, ...]  # layouts by label, see `Made`
    ins: tuple[Ends, ...]
    redistribution: Redistribution
    kind: str  # "input", "activation" or "parameter"
    gradient: bool
    times: int


@dataclass(frozen=True)
class ProducedTensor:
    """Where a tensor comes from: its variable, and of every option the label of its layouts."""

    variable: int
    labels: np.ndarray
    layouts: tuple[Any, ...]  # by label: Ends, or Stored
    kind: str
    name: str


@dataclass(frozen=True)
class Reader:
    """Who reads a tensor: its variable, and of every option the label of the layouts that it wants."""

    variable: int
    name: str
    labels: np.ndarray
    layouts: tuple[Ends, ...]  # by label
    times: int = 1


def ways(link: TensorUse, out: Any, into: Ends, training: bool) -> list[tuple[Placements, Placements, bool, bool, int]]:
    """(from, to, of the gradient, once a step, how often) of all redistributions between a maker and a reader."""
    layout, gradient = into
    if link.kind == "activation":
        made, wanted = out
        back = [(gradient, wanted, True, False, 1)] if link.gradient and training else []
        return [(made, layout, False, False, 1), *back]
    if link.kind == "input":
        return [(out.layout, layout, False, False, 1)]
    again = [(out.state, out.layout, False, True, 1)]  # what the optimizer wrote
    if out.layout == layout:
        return [(gradient, out.state, True, True, 1), *again]
    return [(out.layout, layout, False, False, 2), (gradient, out.layout, True, False, 1), *again]


def finer(state: Placements, layout: Placements) -> bool:
    """Whether `state` is `layout` with some of its replicated axes cut."""
    return all(a == b or b == REPLICATE for a, b in zip(state, layout, strict=True))
