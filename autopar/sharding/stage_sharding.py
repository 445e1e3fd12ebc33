"""How one stage of a plan is sharded, as data: a mesh, a strategy an operator, a layout a parameter. Prints and saves.

Layouts and strategies are texts, one letter (with the dimension) an axis of the mesh:

    S0R          Shard(0) along the first axis, Replicate along the second; P is Partial
    S0R RS0 RS0 -> S0S1          a linear layer: batch by the first axis, columns by the second
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.errors import PlanError
from autopar.sharding.layouts import PARTIAL, REPLICATE, Placements
from autopar.sharding.strategies import Strategy

_CODE = re.compile(r"S(\d+)|R|P")


@dataclass(frozen=True)
class Stored:
    """How a parameter, or an input, lies on the mesh."""

    layout: Placements
    state: Placements  # of the optimizer's state: the same, or finer (ZeRO)


@dataclass(frozen=True)
class Exchange:
    """A collective that a stage's devices take part in, along one axis of their mesh."""

    collective: str  # "all_reduce", "all_gather", "reduce_scatter", "all_to_all", ...
    axis: str  # of the mesh
    operator: str  # key of the one that reads what comes of it, and so causes it
    tensor: str  # key of the operator that made it, or a parameter's name
    nbytes: int  # as `collective_seconds` counts them
    seconds: float
    backward: bool = False  # of a gradient
    once: bool = False  # a step, rather than a micro-batch


@dataclass(frozen=True)
class Repeated:
    """What a device does of an operator although another one does it, too."""

    operator: str  # key
    seconds: float  # of a micro-batch


@dataclass(frozen=True)
class StageSharding:
    """The devices of a stage as meshes: each `size` of them that follow each other work on a micro-batch together.

    With more devices than the mesh has, the meshes are replicas: micro-batch i runs on mesh i mod r.
    """

    mesh: tuple[int, ...]  # shape; the last axis runs fastest over the stage's devices
    axes: tuple[str, ...]  # names
    strategies: tuple[tuple[str, str], ...] = ()  # operator key -> layouts; who is not named is done by every device
    parameters: tuple[tuple[str, str], ...] = ()  # name -> layout, or layout / layout of the optimizer's state
    exchanges: tuple[Exchange, ...] = ()
    collective_bytes: int | None = None  # that a device sends or receives for a micro-batch, forward and backward
    collective_time: float | None = None  # s, of a micro-batch, with its part of what happens once a step
    repeated_time: float | None = None  # s, of a micro-batch: work that a device does although another does it, too
    repeated: tuple[Repeated, ...] = ()  # operators that make it

    @property
    def size(self) -> int:
        return math.prod(self.mesh)

    @property
    def texts(self) -> tuple[tuple[tuple[str, str], ...], ...]:
        return self.strategies, self.parameters

    @cached_property
    def strategy_of(self) -> Mapping[str, tuple[tuple[Placements, ...], tuple[Placements, ...]]]:
        """(layouts of the operands, of the results) by operator key."""
        return {key: parse_strategy(text, len(self.mesh)) for key, text in self.strategies}

    @cached_property
    def stored(self) -> Mapping[str, Stored]:
        """By parameter."""
        return {name: parse_stored(text, len(self.mesh)) for name, text in self.parameters}


def layout_text(layout: Placements) -> str:
    return "".join({REPLICATE: "R", PARTIAL: "P"}.get(code, f"S{code}") for code in layout)


def parse_layout(text: str, axes: int) -> Placements:
    """Raises PlanError for what is no layout over so many axes."""
    found = [_CODE.fullmatch(part) for part in re.findall(r"S\d+|.", text.strip())]
    if len(found) != axes or None in found:
        raise PlanError(
            f"'{text}' is no layout over {axes} axes of a mesh; write S0 (a dimension), R or P for each, as in "
            f"'{'S0' + 'R' * (axes - 1)}'"
        )
    fixed = {"R": REPLICATE, "P": PARTIAL}
    return tuple(fixed[m[0]] if m[0] in fixed else int(m[1]) for m in found if m is not None)


def strategy_text(strategy: Strategy) -> str:
    sides = (" ".join(map(layout_text, side)) for side in (strategy.inputs, strategy.outputs))
    return " -> ".join(sides)


def parse_strategy(text: str, axes: int) -> tuple[tuple[Placements, ...], tuple[Placements, ...]]:
    """(layouts of the operands, of the results). Raises PlanError."""
    sides = text.split("->")
    if len(sides) != 2:
        raise PlanError(
            f"'{text}' is no strategy; write the operands' layouts, '->', and the results', as 'S0 R -> S0'"
        )
    operands, results = (tuple(parse_layout(part, axes) for part in side.split()) for side in sides)
    return operands, results


def stored_text(stored: Stored) -> str:
    both = (layout_text(stored.layout), layout_text(stored.state))
    return both[0] if both[0] == both[1] else " / ".join(both)


def parse_stored(text: str, axes: int) -> Stored:
    """Raises PlanError."""
    layouts = [parse_layout(part, axes) for part in text.split("/")]
    return Stored(layouts[0], layouts[-1])


def problems(sharding: StageSharding, n_devices: int) -> list[str]:
    """Everything wrong with it by itself, on a stage of so many devices."""
    found = []
    if any(n < 1 for n in sharding.mesh) or not sharding.mesh:
        return [f"a mesh has axes of at least one device, got {sharding.mesh}"]
    if len(sharding.axes) != len(sharding.mesh) or len(set(sharding.axes)) < len(sharding.axes):
        found.append(f"a mesh of shape {sharding.mesh} needs {len(sharding.mesh)} different names, got {sharding.axes}")
    if n_devices % sharding.size:
        found.append(f"{n_devices} devices do not make meshes of shape {sharding.mesh}, which has {sharding.size}")
    for texts, parse in zip(sharding.texts, (parse_strategy, parse_stored), strict=True):
        for name, text in texts:
            try:
                parse(text, len(sharding.mesh))
            except PlanError as error:
                found.append(f"{name}: {error}")
    return found
