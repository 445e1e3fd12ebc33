"""What lies between an operator that makes a tensor and one that reads it: the variables of both, an edge, and the
redistributions that their choices cause."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from autopar.sharding.layouts import PARTIAL, REPLICATE, Placements, parts
from autopar.sharding.redistribution import RedistributionStep, RedistributionTable
from autopar.sharding.stage_sharding import Passage, Stored
from autopar.sharding.strategy_costs import Ends

OUTPUT = "output"  # the reader of what the graph returns
TensorOrigin = Literal["input", "activation", "parameter"]
Moved = Literal["activation", "parameter", "gradient"]  # gradients are those of parameters


class ParameterTables(NamedTuple):
    """Prices of a parameter's collectives; elements of its gradient may have another size."""

    once: RedistributionTable  # once a step, in buckets
    once_gradient: RedistributionTable
    gradient: RedistributionTable  # of every micro-batch

    def of(self, needed: NeededRedistribution) -> RedistributionTable | None:
        """None for the parameter itself, gathered for a micro-batch like an activation."""
        if needed.once or needed.in_buckets:
            return self.once_of(needed)
        return self.gradient if needed.backward else None

    def once_of(self, needed: NeededRedistribution) -> RedistributionTable:
        return self.once_gradient if needed.backward else self.once


@dataclass(frozen=True, eq=False)
class TensorUse:
    """An edge of the problem: one tensor and one operator that reads it, or the layouts in which readers share it."""

    tensor: str  # node that made it, or parameter
    item: str  # node that is read: the tensor's own, or an item of a list of results
    reader: str  # node; `OUTPUT`
    outs: tuple[Any, ...]  # by label where it is made: Ends of an activation, Stored of a parameter or an input
    ins: tuple[Ends, ...]  # by label where it is read
    table: RedistributionTable
    tables: ParameterTables | None  # of a parameter
    origin: TensorOrigin
    gradient: bool  # a gradient flows back to it; to another operand of the reader, where it is a frozen parameter
    times: int  # copies of a folded layer for which this happens
    nbytes: int  # of the whole tensor
    constant: bool = False  # a parameter or a buffer
    shared: bool = False  # it leads to the layouts that several readers share
    via: TensorUse | None = None  # the use that leads to where this one starts

    def table_of(self, needed: NeededRedistribution) -> RedistributionTable:
        return self.table if self.tables is None else self.tables.of(needed) or self.table


@dataclass(frozen=True)
class SharedStored(Stored):
    """A parameter that several operators read, such as a tied weight. Its gradient is never scattered.

    The gradients of those that read it as it is stored are added up on each device, and reduced once a step together:

        embedding -- P --.
                          >-- P -- reduced once --> state
        head      -- P --'
    """

    gradient: Placements = ()  # of that sum; a reader with other placements has its gradient reduced for itself


@dataclass(frozen=True)
class ProducedTensor:
    """The origin of a tensor: its variable, and the label of its layouts for every option."""

    variable: int
    labels: np.ndarray
    layouts: tuple[Any, ...]  # by label: Ends, or Stored
    origin: TensorOrigin
    name: str


@dataclass(frozen=True)
class Reader:
    """An operator that reads a tensor: its variable, and the label of the layouts that it needs for every option."""

    variable: int
    name: str
    labels: np.ndarray
    layouts: tuple[Ends, ...]  # by label
    times: int = 1


@dataclass(frozen=True)
class NeededRedistribution:
    """A change of placements that a pair of choices causes."""

    before: Placements
    after: Placements
    backward: bool = False  # of the gradient
    once: bool = False  # per step, rather than per micro-batch
    in_buckets: bool = False  # of several parameters together; what happens once a step always is
    again: bool = False  # of the tensor, for the backward: the copy of the forward is not kept


def needed_redistributions(use: TensorUse, out: Any, into: Ends, training: bool) -> list[NeededRedistribution]:
    """All redistributions between what makes a tensor in `out` and what reads it in `into`.

    A parameter that is read as it is stored (`read_as_stored`) has its gradient reduced once per step, or scattered for
    every micro-batch to where its optimizer's state lies (ZeRO 2). Stored otherwise (ZeRO 3, FSDP),
    it is gathered for every forward and again for every backward, and every gradient is scattered:

        forward     gather | operator                  a stage that recomputes runs this line twice
        backward    gather | operator | scatter
    """
    layout, gradient = into
    if use.origin == "activation":
        made, wanted = out
        back = [NeededRedistribution(gradient, wanted, backward=True)] if use.gradient and training else []
        return [NeededRedistribution(made, layout), *back]
    if use.origin == "input":
        found = [NeededRedistribution(out.layout, layout)]
        if use.constant and use.gradient and training:
            found.append(NeededRedistribution(out.layout, layout, again=True))
        return found
    shared = isinstance(out, SharedStored)
    updated = [] if shared else [_updated(out)]
    if read_as_stored(out.layout, layout):
        local = [NeededRedistribution(out.layout, layout)] if out.layout != layout else []
        if shared and gradient == out.gradient:
            return local
        each = out.scattered
        reduced = NeededRedistribution(gradient, out.state, backward=True, once=not each, in_buckets=each)
        return [*local, reduced, *updated]
    return [
        NeededRedistribution(out.layout, layout),
        NeededRedistribution(out.layout, layout, again=True),
        NeededRedistribution(gradient, out.layout, backward=True),
        *updated,
    ]


def read_as_stored(stored: Placements, read: Placements) -> bool:
    """Whether each device's gradient of a parameter belongs, entry by entry, to what it stores of the parameter.

    That is so where it reads what it stores, also if only the first device along an axis counts it, and the others add
    zeros: the bias of a linear layer that is cut by rows. There each device has the gradient of the whole bias.

        stored R    read P    gradient R
    """
    return all(b in (a, PARTIAL) if a == REPLICATE else a == b for a, b in zip(stored, read, strict=True))


def needed_once(stored: Stored) -> list[NeededRedistribution]:
    """What a parameter needs once a step for all its readers together."""
    if not isinstance(stored, SharedStored):
        return []
    return [NeededRedistribution(stored.gradient, stored.state, backward=True, once=True), _updated(stored)]


def _updated(stored: Stored) -> NeededRedistribution:
    """Of what the optimizer wrote."""
    return NeededRedistribution(stored.state, stored.layout, once=True)


@dataclass(frozen=True, eq=False)
class ChosenUse:
    """The choices on both sides of an edge."""

    use: TensorUse
    out: Any  # see `TensorUse.outs`
    into: Ends
    training: bool

    @cached_property
    def passage(self) -> Passage:
        """The placements that the tensor, and its gradient, pass through for every micro-batch, as they were priced."""
        forward: tuple[Placements, ...] = (self.out.layout if isinstance(self.out, Stored) else self.out[0],)
        backward: tuple[Placements, ...] = ()
        for needed in needed_redistributions(self.use, self.out, self.into, self.training):
            passed = tuple(step.after for step in self.use.table_of(needed).path(needed.before, needed.after))
            if needed.in_buckets:
                continue  # of what autograd has added up on each device
            if needed.backward and not needed.once:
                backward = (needed.before, *passed)
            elif not (needed.once or needed.again):
                forward = (needed.before, *passed)
        if self.use.origin == "parameter" and len(forward) > 1 and self.training:
            backward = backward or self.into[1:]  # it moves once a step
        return Passage(forward, backward)


@dataclass(frozen=True)
class Collective:
    """One redistribution that a step needs, with at least one collective."""

    tensor: str  # node that made it, or parameter
    item: str  # node that is read, see `TensorUse`
    reader: str  # node; `OUTPUT`
    backward: bool  # in the backward: of its gradient, or of a parameter once more
    once: bool  # per step, rather than per micro-batch
    times: int  # per step or micro-batch: equal layers that the reader represents
    steps: tuple[RedistributionStep, ...]
    shared: bool = False  # by all readers of a parameter; listed with the first
    moves: Moved = "activation"
    in_buckets: bool = False  # together with those of other parameters
    # Of an activation, gathered once more for the backward of these nodes, which do not keep the gathered copy.
    regathered_for: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Of all times."""
        return self.times * sum(step.seconds for step in self.steps)


def collectives_of(use: TensorUse, out: Any, into: Ends, training: bool) -> Iterator[Collective]:
    """The redistributions between two choices that are not local."""
    for needed in needed_redistributions(use, out, into, training):
        steps = use.table_of(needed).path(needed.before, needed.after)
        if any(step.collective for step in steps):
            backward = needed.backward or needed.again
            moves = _moved(use, needed)
            ends = use.tensor, use.item, use.reader, backward
            yield Collective(
                *ends, needed.once, use.times, steps, moves=moves, in_buckets=needed.once or needed.in_buckets
            )


def _moved(use: TensorUse, needed: NeededRedistribution) -> Moved:
    """Activations and their gradients lie on the path of a pass; parameters and their gradients do not."""
    if use.origin == "parameter":
        return "gradient" if needed.backward else "parameter"
    return "parameter" if use.constant else "activation"


def gathered_bytes(use: TensorUse, out: Any, into: Ends) -> float:
    """Bytes on each device of a parameter that is gathered for its reader, and of a gradient until it is scattered,
    with the part of it that arrives.

    They are there while the reader runs. As the price lets no collective overlap with the operators before it, none is
    gathered ahead.
    """
    if use.origin == "activation" or not use.constant:
        return 0.0
    if read_as_stored(out.layout, into[0]):
        sent, stored = (use.nbytes / parts(layout, use.table.mesh) for layout in (into[1], out.state))
        return sent + stored if out.scattered else 0.0
    if not any(step.collective for step in use.table.path(out.layout, into[0])):
        return 0.0  # a part of what the device has
    mesh = use.table.mesh
    copies = into if use.origin == "parameter" else into[:1]
    return sum(use.nbytes / parts(layout, mesh) for layout in copies)


def finer(state: Placements, layout: Placements) -> bool:
    """Whether `state` is `layout` with some of its replicated axes cut."""
    return all(a == b or b == REPLICATE for a, b in zip(state, layout, strict=True))
