"""What the devices along each axis of a plan's meshes do, by their matrix products, which are most of a model's work.

    samples       they cut the samples of a product, and each has its whole matrix
    parameters    they cut the matrix
    elsewhere     they cut another dimension of the activations, such as the sequence
    whole         each of them does the whole product

Samples are the first dimension, and the second as well where an operator makes the first the second (`transpose(0, 1)`
before an attention of torch). Products count alike, however large they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from autopar.plan.stage import Stage
from autopar.sharding.layouts import PARTIAL
from autopar.sharding.stage_sharding import StageSharding
from autopar.sharding.strategies import OperatorPlacements

# The begin of a product's name, and which of its operands are parameters.
_WEIGHTS = {
    **dict.fromkeys(("linear", "conv", "mm", "grouped_mm", "_grouped_mm"), slice(1, 2)),
    "addmm": slice(2, 3),
    "embedding": slice(0, 1),
    "lstm": slice(3, None),
    **dict.fromkeys(("gru", "rnn"), slice(2, None)),
}
_STATES = ("lstm", "gru", "rnn")  # the states that they return have the samples second
_SECOND = 1
_MOST, _FEW = 0.75, 0.5
_NEARLY_ALL = 0.9


class Axis(NamedTuple):
    """The matrix products along an axis of the meshes, by what its devices do."""

    size: int
    samples: int
    parameters: int
    elsewhere: int
    whole: int

    @property
    def shared(self) -> int:
        """Products that the devices share."""
        return self.samples + self.parameters + self.elsewhere

    @property
    def cuts_samples(self) -> bool:
        """Whether it counts as one of data parallelism."""
        return self.samples > 0 and self.samples == max(self.samples, self.parameters, self.elsewhere)

    @property
    def only_samples(self) -> bool:
        """Whether hardly any product is shared in another way."""
        return self.samples > _MOST * self.shared


def axes_of(stages: Sequence[Stage]) -> list[Axis] | None:
    """Each axis of the meshes of some stages; None where stages have different meshes, or none."""
    shardings = [stage.sharding for stage in stages]
    first = shardings[0]
    if first is None or any(one is None or (one.mesh, one.axes) != (first.mesh, first.axes) for one in shardings):
        return None
    found = []
    for axis, size in enumerate(first.mesh):
        kinds: Counter[str] = Counter()
        for stage in stages:
            kinds.update(_kinds(stage, axis))
        found.append(Axis(size, *(kinds[kind] for kind in ("samples", "parameters", "elsewhere", "whole"))))
    return found


def words(axis: Axis) -> str:
    """`data parallel 8`, `mostly data parallel 2 (tensor parallel in 43% of the matrix products)`."""
    if not axis.shared:
        return f"{axis.size} devices that all do the same"
    shares = {
        "data parallel": axis.samples / axis.shared,
        "tensor parallel": axis.parameters / axis.shared,
        "sequence parallel": axis.elsewhere / axis.shared,
    }
    most, *others = sorted(shares, key=lambda name: -shares[name])
    beside = " and ".join(f"{name} in {shares[name]:.0%}" for name in others if shares[name])
    if shares[most] > _MOST:
        return f"{most} {axis.size}"
    much = "mostly " if shares[most] > _FEW else "partly "
    return f"{much}{most} {axis.size} ({beside} of the matrix products)"


def repeated(axes: Sequence[Axis]) -> str:
    """Which share of the products is not shared along the axes of data parallelism: `25% of the matrix products`."""
    worst = max((axis.whole / (axis.whole + axis.shared) for axis in axes if axis.cuts_samples), default=0.0)
    return f"{worst:.0%} of the matrix products" if worst >= 0.005 else ""


def zero_words(stages: Sequence[Stage], axes: Sequence[Axis]) -> str:
    """`ZeRO-3`, or `mostly ZeRO-3` where some parameters are cut less; "" without ZeRO."""
    along = [index for index, axis in enumerate(axes) if axis.cuts_samples and axis.size > 1]
    levels = [level for stage in stages if stage.sharding for level in _zero_levels(stage.sharding, along)]
    most = max(levels, default=0)
    if not most:
        return ""
    share = sum(level == most for level in levels) / len(levels)
    return f"{'' if share >= _NEARLY_ALL else 'mostly ' if share >= _FEW else 'partly '}ZeRO-{most}"


def _zero_levels(sharding: StageSharding, axes: Sequence[int]) -> Iterator[int]:
    """Of each parameter that some of these axes could cut, how far they cut it."""
    moved: dict[str, set[int]] = {}  # name -> the axes along which some operator reads it in parts
    for one in sharding.redistributions:
        last = (one.own.forward or one.shared.forward)[-1]
        moved.setdefault(one.tensor, set()).update(axis for axis in axes if last[axis] >= 0)
    trained = {one.tensor for one in sharding.redistributions if one.shared.backward or one.own.backward}
    for name, stored in sharding.parameters:
        if name in moved and name not in trained:
            continue  # an input of the model
        read = moved.get(name, {axis for axis in axes if stored.layout[axis] >= 0})
        whole = [axis for axis in axes if axis not in read]
        if not whole:
            continue
        if any(stored.layout[axis] >= 0 for axis in whole):
            yield 3
        elif any(stored.state[axis] >= 0 for axis in whole):
            yield 2 if stored.scattered else 1
        else:
            yield 0


def _kinds(stage: Stage, axis: int) -> Iterator[str]:
    """Of every matrix product of a stage, what its devices do along an axis."""
    assert stage.sharding is not None, "the stage has a mesh"
    strategies = dict(stage.sharding.strategies)
    samples = {0, _SECOND} if any(_moves_samples(one, axis) for one in strategies.values()) else {0}
    for key in dict.fromkeys((*stage.operators, *strategies)):
        name = key.rpartition("/")[2].partition("#")[0]
        begin = max((begin for begin in _WEIGHTS if name.startswith(begin)), key=len, default=None)
        if begin is None:
            continue
        one, where = strategies.get(key), samples | {_SECOND} if begin in _STATES else samples
        yield "whole" if one is None else _kind(one, axis, _WEIGHTS[begin], where)


def _kind(one: OperatorPlacements, axis: int, weights: slice, samples: set[int]) -> str:
    cut = {p[axis] for p in one.outputs if p[axis] >= 0}
    if any(p[axis] >= 0 for p in one.inputs[weights]):
        return "parameters"
    if cut:
        return "samples" if cut <= samples else "elsewhere"
    return "elsewhere" if any(p[axis] == PARTIAL for p in one.outputs) else "whole"


def _moves_samples(one: OperatorPlacements, axis: int) -> bool:
    """Whether an operator makes the first dimension the second."""
    return [p[axis] for p in one.inputs] == [0] and [p[axis] for p in one.outputs] == [_SECOND]
