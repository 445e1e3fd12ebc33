"""The problem of choosing one option of every operator, as values, and what a choice costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.errors import InputError


@dataclass(frozen=True, eq=False)
class Edge:
    """What a pair of options costs, by the labels of the two: seconds[out[s], into[t]] for option s and option t.

    Labels are what the cost depends on, such as the layout in which an operator leaves its output and the one in which
    its reader wants it; usually there are far fewer of them than options. Several edges may join the same variables.
    """

    source: int  # variable
    target: int  # variable
    out: np.ndarray  # [options of source] label
    into: np.ndarray  # [options of target] label
    seconds: np.ndarray  # [labels of out, labels of into] s >= 0, inf: not allowed

    @property
    def allowed_alone(self) -> Edge:
        """The edge without its seconds: what is not allowed stays so."""
        return replace(self, seconds=np.where(np.isinf(self.seconds), np.inf, 0.0))


@dataclass(frozen=True, eq=False)
class SelectionProblem:
    """Variables 0, 1, ... with options 0, 1, ... each, and edges between variables.

    Equal layers of a model need not be marked: arrays are compared by what they hold, and what has been worked out for
    one layer serves all. That is quickest where equal layers share their arrays.
    """

    seconds: Sequence[np.ndarray]  # of every variable [its options] s >= 0, inf: not allowed
    bytes: Sequence[np.ndarray]  # of every variable [its options] bytes >= 0 on each device, or [options, kinds]
    edges: Sequence[Edge] = ()
    fixed: Mapping[int, int] = field(default_factory=dict)  # variable -> the only option it may take

    def __post_init__(self) -> None:
        if len(self.seconds) != len(self.bytes):
            raise InputError(f"seconds of {len(self.seconds)} variables, but bytes of {len(self.bytes)}")
        sizes = [len(seconds) for seconds in self.seconds]
        for i, (seconds, size) in enumerate(zip(self.seconds, self.bytes, strict=True)):
            if seconds.ndim != 1 or size.ndim not in (1, 2) or len(seconds) != len(size) or not len(seconds):
                raise InputError(
                    f"variable {i}: seconds {seconds.shape} and bytes {size.shape} must be [options], at least 1"
                )
        for i, option in self.fixed.items():
            if not (0 <= i < len(sizes) and 0 <= option < sizes[i]):
                raise InputError(f"fixed: variable {i} has no option {option}")
        for n, edge in enumerate(self.edges):
            ends = ((edge.source, edge.out), (edge.target, edge.into))
            for axis, (i, labels) in enumerate(ends):
                if not 0 <= i < len(sizes):
                    raise InputError(f"edge {n}: there is no variable {i}, the last one is {len(sizes) - 1}")
                if labels.shape != (sizes[i],) or not np.issubdtype(labels.dtype, np.integer):
                    raise InputError(
                        f"edge {n}: labels of {i} must be integers [{sizes[i]}], not {labels.dtype}{labels.shape}"
                    )
                if edge.seconds.ndim != 2 or labels.min() < 0 or labels.max() >= edge.seconds.shape[axis]:
                    raise InputError(
                        f"edge {n}: labels {labels.min()} to {labels.max()} of variable {i} do not all lie in "
                        f"axis {axis} of seconds {edge.seconds.shape}"
                    )
        _refuse_negative("seconds", self.seconds)
        _refuse_negative("bytes", self.bytes, finite=True)
        _refuse_negative("seconds of edges", (edge.seconds for edge in self.edges))


@dataclass(frozen=True)
class Selection:
    """One option of every variable, and how good that is known to be."""

    options: tuple[int, ...]  # of every variable
    seconds: float  # s, sum over variables and edges
    bytes: float  # bytes, sum over variables
    bound: float  # s, no choice within the memory takes less; equal to `seconds` where that is proven the least
    width: int  # most neighbours that a variable had when it was eliminated
    proven: bool  # whether `seconds` is the least, to a relative 1e-10


def cost(choices: SelectionProblem, options: Sequence[int]) -> tuple[float, float]:
    """Seconds and bytes of `options`, one of every variable: edge by edge, apart from how `select` gets there.

    Bytes of several kinds are added up."""
    seconds = [float(choices.seconds[i][option]) for i, option in enumerate(options)]
    seconds += [float(e.seconds[e.out[options[e.source]], e.into[options[e.target]]]) for e in choices.edges]
    return math.fsum(seconds), math.fsum(sizes(choices, options))


def sizes(choices: SelectionProblem, options: Sequence[int]) -> tuple[float, ...]:
    """Bytes of every kind."""
    if not options:
        return (0.0,)
    total = np.sum([choices.bytes[i][option] for i, option in enumerate(options)], axis=0)
    return tuple(float(nbytes) for nbytes in np.atleast_1d(total))


def _refuse_negative(name: str, arrays: Iterable[np.ndarray], finite: bool = False) -> None:
    distinct = {id(array): array for array in arrays}
    for array in distinct.values():
        good = array >= 0  # not so for NaN
        if finite:
            good &= np.isfinite(array)
        if not good.all():
            raise InputError(f"{name} must be {'finite and ' if finite else ''}at least 0, not {array[~good][0]}")
