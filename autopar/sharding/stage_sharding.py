"""How one stage of a plan is sharded, as data: a mesh, a strategy per operator, placements per parameter, and the steps
that each tensor takes between two operators.

Only JSON and printed plans use texts: one letter per mesh axis, with the dimension behind an S:

    S0R                          Shard(0) along the first axis, Replicate along the second; P is Partial
    S0R RS0 RS0 -> S0S1          a linear layer: batch along the first axis, columns along the second
    RP > RR, back RR             a tensor passes an all-reduce along the second axis; its gradient does not move
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from autopar.errors import PlanError
from autopar.sharding.layouts import PARTIAL, REPLICATE, Placements
from autopar.sharding.strategies import OperatorPlacements, Strategy

_CODE = re.compile(r"S(\d+)|R|P")


@dataclass(frozen=True)
class Stored:
    """How a parameter, or an input, lies on the mesh."""

    layout: Placements
    state: Placements  # of the optimizer's state: the same, or finer (ZeRO)
    # Its gradient is reduced for every micro-batch, and each device keeps the part that its state needs (ZeRO 2).
    scattered: bool = False


class Passage(NamedTuple):
    """The placements that a tensor passes through, and those that its gradient passes through in the backward.

    Two placements that follow each other differ along one mesh axis: one collective, or a local change.
    """

    forward: tuple[Placements, ...]  # at least one; one alone: the tensor does not move
    backward: tuple[Placements, ...] = ()  # empty: no gradient was planned

    @property
    def moves(self) -> bool:
        return len(self.forward) > 1 or len(self.backward) > 1


@dataclass(frozen=True)
class TensorRedistribution:
    """The steps of a tensor from the operator that makes it to one that reads it, and of its gradient back.

        made --- shared ---.--- own --- reader
                           `--- own --- another reader

    Readers share the first passage: it runs once for all of them.
    """

    tensor: str  # key of the operator that makes it, or name of a parameter or an input
    reader: str  # key of the operator; "" is the caller, who gets the whole tensor
    shared: Passage
    own: Passage

    @property
    def placements(self) -> Iterator[Placements]:
        """Everything that it passes through."""
        return itertools.chain(*self.shared, *self.own)


@dataclass(frozen=True)
class Exchange:
    """A collective that the devices of a stage take part in, along one axis of their mesh."""

    collective: str  # "all_reduce", "all_gather", "reduce_scatter", "all_to_all", ...
    axis: str  # of the mesh
    operator: str  # key of the operator that reads the result, and so causes the collective
    tensor: str  # key of the operator that made the tensor, or a parameter's name
    nbytes: int  # as `collective_seconds` counts them
    seconds: float
    backward: bool = False  # of a gradient, or of a parameter that is gathered once more
    once: bool = False  # per step, rather than per micro-batch
    again: bool = False  # once more in the backward, which runs this operator again (not with the whole stage)


@dataclass(frozen=True)
class Repeated:
    """Work of an operator that a device does although another device does the same."""

    operator: str  # key
    seconds: float  # per micro-batch


@dataclass(frozen=True)
class StageSharding:
    """The devices of a stage as meshes: `size` consecutive devices work on a micro-batch together.

    With more devices than the mesh has, the meshes are replicas: micro-batch i runs on mesh i mod r.

    The search fills `redistributions` with the steps that it priced, and lowering follows them. A plan that was written
    by hand, or by an older version, has none: lowering then takes between two placements the steps in which a device
    sends the fewest bytes. What happens once per step (gradients of parameters that are read as they are stored,
    parameters after the optimizer) is no redistribution of a tensor in the graph: the runtime adds up gradients.
    """

    mesh: tuple[int, ...]  # shape; the last axis runs fastest over the stage's devices
    axes: tuple[str, ...]  # names
    strategies: tuple[tuple[str, OperatorPlacements], ...] = ()  # by operator key; every device does all of the others
    parameters: tuple[tuple[str, Stored], ...] = ()  # by name; every device has all of the others
    redistributions: tuple[TensorRedistribution, ...] = ()  # that move a tensor, or share a passage
    exchanges: tuple[Exchange, ...] = ()
    # Of the exchanges for every micro-batch, forward and backward; not of those that happen once per step:
    collective_bytes: int | None = None  # that a device sends or receives
    collective_time: float | None = None  # s
    repeated_time: float | None = None  # s per micro-batch: work that a device does although another device does it
    repeated: tuple[Repeated, ...] = ()  # the operators of `repeated_time`
    # Of activations that are all-gathered, a device keeps its shards for the backward, and gathers them once more there
    # (Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, section 4.2.2). What is
    # made by several steps is kept as it was before the last ones, which gather.
    regather: bool = False

    @classmethod
    def from_texts(
        cls,
        mesh: tuple[int, ...],
        axes: tuple[str, ...],
        strategies: Mapping[str, str],
        parameters: Mapping[str, str] | None = None,
    ) -> StageSharding:
        """Written by hand: strategies by operator key, placements by parameter. Raises PlanError."""
        split = tuple((key, parse_strategy(text)) for key, text in strategies.items())
        stored = tuple((name, parse_stored(text)) for name, text in (parameters or {}).items())
        return cls(mesh, axes, split, stored)

    @property
    def size(self) -> int:
        return math.prod(self.mesh)

    @property
    def decision(self) -> StageSharding:
        """Without what it predicts."""
        return StageSharding(
            self.mesh, self.axes, self.strategies, self.parameters, self.redistributions, regather=self.regather
        )

    @property
    def texts(self) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
        """Strategies and parameters as printed and saved: (name, text)."""
        return (
            tuple((key, strategy_text(strategy)) for key, strategy in self.strategies),
            tuple((name, stored_text(stored)) for name, stored in self.parameters),
        )

    @cached_property
    def strategy_of(self) -> Mapping[str, OperatorPlacements]:
        """By operator key."""
        return dict(self.strategies)

    @cached_property
    def stored(self) -> Mapping[str, Stored]:
        """By parameter."""
        return dict(self.parameters)

    @cached_property
    def redistributions_of(self) -> Mapping[tuple[str, str], Sequence[TensorRedistribution]]:
        """By (tensor, reader): one for each place in which the reader takes the tensor differently."""
        found: dict[tuple[str, str], list[TensorRedistribution]] = defaultdict(list)
        for one in self.redistributions:
            found[one.tensor, one.reader].append(one)
        return found


def totals(each: Iterable[tuple[float, float]], repeated: Iterable[float]) -> tuple[float, float, float]:
    """(collective_bytes, collective_time, repeated_time) of a StageSharding.

    `each`: (bytes, seconds) of the exchanges for every micro-batch. `repeated`: seconds.
    """
    pairs = list(each)
    return sum(nbytes for nbytes, _ in pairs), math.fsum(seconds for _, seconds in pairs), math.fsum(repeated)


# -- texts ------------------------------------------------------------------------------------------------------------


def layout_text(layout: Placements) -> str:
    return "".join({REPLICATE: "R", PARTIAL: "P"}.get(code, f"S{code}") for code in layout)


def parse_layout(text: str) -> Placements:
    """Raises PlanError for a text that is no placements."""
    codes = [_CODE.fullmatch(part) for part in re.findall(r"S\d+|.", text.strip())]
    if None in codes or not codes:
        raise PlanError(
            f"'{text}' is no list of placements; write S0 (with a dimension), R or P for every axis of the mesh, as in "
            "'S0R'"
        )
    fixed = {"R": REPLICATE, "P": PARTIAL}
    return tuple(fixed[m[0]] if m[0] in fixed else int(m[1]) for m in codes if m is not None)


def strategy_text(strategy: OperatorPlacements | Strategy) -> str:
    sides = (" ".join(map(layout_text, side)) for side in (strategy.inputs, strategy.outputs))
    return " -> ".join(sides)


def parse_strategy(text: str) -> OperatorPlacements:
    """Raises PlanError."""
    sides = text.split("->")
    if len(sides) != 2:
        raise PlanError(
            f"'{text}' is no strategy; write the placements of the operands, '->', and those of the results, as in "
            "'S0 R -> S0'"
        )
    operands, results = (tuple(map(parse_layout, side.split())) for side in sides)
    return OperatorPlacements(operands, results)


def stored_text(stored: Stored) -> str:
    layout, state = layout_text(stored.layout), layout_text(stored.state)
    if stored.scattered:
        return f"{layout} / {state} / {state}"
    return layout if layout == state else f"{layout} / {state}"


def parse_stored(text: str) -> Stored:
    """The placements of a parameter, of its optimizer's state if they differ, and of its gradient if it is scattered.

    Raises PlanError.
    """
    placements = [parse_layout(part) for part in text.split("/")]
    if len(placements) > 3 or (len(placements) == 3 and placements[1] != placements[2]):
        raise PlanError(
            f"'{text}' is no way to store a parameter; write its placements, those of the optimizer's state, and once "
            "more those of the state if gradients lie like it, as in 'R / S0 / S0'"
        )
    return Stored(placements[0], placements[1] if len(placements) > 1 else placements[0], len(placements) == 3)


def passage_text(passage: Passage) -> str:
    forward, backward = (" > ".join(map(layout_text, side)) for side in passage)
    return f"{forward}, back {backward}" if backward else forward


def parse_passage(text: str) -> Passage:
    """Raises PlanError."""
    forward, _, backward = text.partition(", back ")
    sides = [tuple(map(parse_layout, side.split(">"))) if side else () for side in (forward, backward)]
    return Passage(*sides)


# -- validation -------------------------------------------------------------------------------------------------------


def problems(sharding: StageSharding, n_devices: int) -> list[str]:
    """Everything that is wrong with the sharding of a stage of `n_devices` devices, without its model."""
    mesh, axes = sharding.mesh, sharding.axes
    if any(n < 1 for n in mesh) or not mesh:
        return [f"a mesh has axes of at least one device, got {mesh}"]
    found = []
    if len(axes) != len(mesh) or len(set(axes)) < len(axes):
        found.append(f"a mesh of shape {mesh} needs {len(mesh)} different names, got {axes}")
    if n_devices % sharding.size:
        found.append(f"{n_devices} devices do not make meshes of shape {mesh}, which has {sharding.size}")
    for name, placements in _every_placements(sharding):
        if len(placements) != len(mesh):
            found.append(
                f"{name}: '{layout_text(placements)}' has {len(placements)} placements, but the mesh has {len(mesh)} "
                f"axes; write one for each, as in '{'S0' + 'R' * (len(mesh) - 1)}'"
            )
    for one in sharding.redistributions:
        for side in (*one.shared, *one.own):
            for before, after in itertools.pairwise(side):
                if not _is_step(before, after):
                    texts = f"'{layout_text(before)}' to '{layout_text(after)}'"
                    found.append(f"{one.tensor}: {texts} is no step; change one axis, and never Shard to Partial")
    return found


def _every_placements(sharding: StageSharding) -> Iterator[tuple[str, Placements]]:
    """(operator or tensor, placements) of everything in the stage."""
    for key, (inputs, outputs) in sharding.strategies:
        yield from ((key, placements) for placements in (*inputs, *outputs))
    for name, stored in sharding.parameters:
        yield from ((name, placements) for placements in (stored.layout, stored.state))
    for one in sharding.redistributions:
        yield from ((one.tensor, placements) for placements in one.placements)


def _is_step(before: Placements, after: Placements) -> bool:
    changed = [axis for axis, (a, b) in enumerate(zip(before, after, strict=False)) if a != b]
    return len(changed) == 1 and not (before[changed[0]] >= 0 and after[changed[0]] == PARTIAL)
