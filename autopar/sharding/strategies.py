"""The strategies of an operator, from its line of index notation.

The devices along an axis do one of these with a linear layer. A strategy has one of them for every mesh axis; where
several axes cut one index, the first axis is the outermost:

```
    linear  *b k, n k, n -> *b n ; 02 12
      b1     x Shard(0)   w Replicate  bias Replicate  -> y Shard(0)      kept: data parallelism
      n      x Replicate  w Shard(0)   bias Shard(0)   -> y Shard(1)      kept: columns
      k      x Shard(1)   w Shard(1)   bias Partial    -> y Partial       summed: rows
      02     x Partial    w Replicate  bias Partial    -> y Partial       linear in x (and the bias)
      12     x Replicate  w Partial    bias Partial    -> y Partial       linear in w
      -      all Replicate                                                every device does the same work
```
Devices that work together can also cut an index in braces (`{k}`): results with the index are cut, others are addends.
`Strategy.special` names the operator of `parallel_operators` that does so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from autopar.analysis.rules.notation import Dims, IndexKind, Rule
from autopar.sharding.layouts import DUAL, PARTIAL, REPLICATE, Placements

REPEATED = "-"


class OperatorPlacements(NamedTuple):
    """A strategy as a plan holds it: all that does not follow from the operator's rule."""

    inputs: tuple[Placements, ...]  # of the operands, in the order of the operator's rule
    outputs: tuple[Placements, ...]  # of the results


@dataclass(frozen=True)
class Strategy:
    """How one operator is split over a mesh, with what follows from its rule."""

    axes: tuple[str, ...]  # along each: the index, the operands in which it is linear, or REPEATED
    inputs: tuple[Placements, ...]  # of the rule's operands
    outputs: tuple[Placements, ...]  # of the tensors it returns
    share: float  # part of the work that each device does
    scale: float = 1.0  # factor of the results: a mean over parts is the mean of their means
    special: str = ""  # how the devices do it together, where the operator on local parts is not enough (`special`)

    @property
    def placements(self) -> OperatorPlacements:
        return OperatorPlacements(self.inputs, self.outputs)

    def gradient_in(self, operand: int) -> Placements:
        """The placements of the gradient that is computed for an operand.

        Along an axis that cuts something, the gradients of an operand that all devices read add up. Along an axis
        that repeats the work, they are the same."""
        pairs = zip(self.axes, self.inputs[operand], strict=True)
        return tuple(REPLICATE if axis == REPEATED else DUAL.get(code, code) for axis, code in pairs)

    def gradient_out(self, result: int) -> Placements:
        """The placements of the gradient that is needed for a result: addends all need the gradient of their sum."""
        return tuple(REPLICATE if code == PARTIAL else code for code in self.outputs[result])


@dataclass(frozen=True)
class _AxisChoice:
    """What the devices along one axis of a mesh may do with an operator."""

    name: str
    inputs: tuple[int, ...]  # a code of each operand's layout
    outputs: tuple[int, ...]
    index: str | None  # that is cut
    averaged: bool = False
    together: bool = False  # the devices exchange something within


def strategies(rule: Rule, mesh: Sequence[int]) -> list[Strategy]:
    """All strategies of an operator over a mesh of this shape; the first repeats it everywhere.

    Sizes must be numbers. Parts are even: an index whose size an axis does not divide is not cut by it.
    """
    choices = list(_axis_choices(rule))
    found: dict[tuple[object, ...], Strategy] = {}
    for chosen in itertools.product(*(choices if n > 1 else choices[:1] for n in mesh)):
        strategy = _combined(rule, chosen, mesh)
        if strategy is not None:
            found.setdefault((strategy.inputs, strategy.outputs, strategy.scale), strategy)
    return list(found.values())


def strategy_with(rule: Rule, placements: OperatorPlacements, mesh: Sequence[int]) -> Strategy | None:
    """The strategy of `strategies(rule, mesh)` with these placements, built axis by axis; None if there is none."""
    if len(placements.inputs) != len(rule.operands) or len(placements.outputs) != len(rule.outputs):
        return None
    choices = list(_axis_choices(rule))
    fitting = []  # by axis: what gives the placements along it
    for axis, n in enumerate(mesh):
        along = tuple(tuple(codes[axis] for codes in side) for side in placements)
        possible = choices if n > 1 else choices[:1]
        fitting.append([choice for choice in possible if (choice.inputs, choice.outputs) == along])
    combined = (_combined(rule, chosen, mesh) for chosen in itertools.product(*fitting))
    return next((strategy for strategy in combined if strategy is not None), None)


def _combined(rule: Rule, chosen: Sequence[_AxisChoice], mesh: Sequence[int]) -> Strategy | None:
    """One choice per axis as a strategy; None if an index cannot be cut evenly."""
    cut: dict[str, int] = {}  # index -> parts
    for choice, n in zip(chosen, mesh, strict=True):
        if choice.index is not None:
            cut[choice.index] = cut.get(choice.index, 1) * n
    if any(rule.sizes[index] % n for index, n in cut.items()):
        return None
    scale = math.prod(1 / n for choice, n in zip(chosen, mesh, strict=True) if choice.averaged)
    inputs = tuple(tuple(choice.inputs[i] for choice in chosen) for i in range(len(rule.operands)))
    outputs = tuple(tuple(choice.outputs[i] for choice in chosen) for i in range(len(rule.outputs)))
    special = rule.name if any(choice.together for choice in chosen) else ""
    names = tuple(choice.name for choice in chosen)
    return Strategy(names, inputs, outputs, 1 / math.prod(cut.values()), scale, special)


def repeated(n_inputs: int, n_outputs: int, axes: int) -> Strategy:
    """For an operator without a rule: every device does all of it, which is always correct."""
    whole = (REPLICATE,) * axes
    return Strategy((REPEATED,) * axes, (whole,) * n_inputs, (whole,) * n_outputs, 1.0)


def _axis_choices(rule: Rule) -> Iterator[_AxisChoice]:
    nothing = tuple(REPLICATE for _ in rule.operands), tuple(REPLICATE for _ in rule.outputs)
    yield _AxisChoice(REPEATED, *nothing, None)
    for index, kind in rule.kinds.items():
        together = index in rule.together
        if (kind is IndexKind.WHOLE and not together) or rule.sizes[index] == 1:
            continue
        inputs = [_place(dims, index, rule) for dims in rule.inputs]
        outputs = [_place(dims, index, rule) for dims in rule.outputs]
        if None in inputs or None in outputs:
            continue
        if kind is not IndexKind.KEPT and REPLICATE in outputs:
            outputs = [PARTIAL for _ in outputs]
        if kind is IndexKind.SUMMED:
            added = [i in rule.addends and code == REPLICATE for i, code in enumerate(inputs)]
            if any(a and not _is_tensor(rule, i) for i, a in enumerate(added)):
                continue
            inputs = [PARTIAL if a else code for a, code in zip(added, inputs, strict=True)]
        averaged = kind is IndexKind.AVERAGED and not together
        yield _AxisChoice(index, _codes(inputs), _codes(outputs), index, averaged, together)
    for group in rule.linear:
        if all(_is_tensor(rule, i) for i in group):
            inputs = [PARTIAL if i in group else REPLICATE for i in range(len(rule.operands))]
            name = "".join(map(str, sorted(group)))
            yield _AxisChoice(name, _codes(inputs), tuple(PARTIAL for _ in rule.outputs), None)


def _codes(found: Sequence[int | None]) -> tuple[int, ...]:
    return tuple(code for code in found if code is not None)


def _place(dims: Dims, index: str, rule: Rule) -> int | None:
    """The dimension that is cut into blocks if `index` is cut; REPLICATE if the operand does not have the index.

    None where the parts would not be blocks: for an index inside of another one in a folded dimension."""
    for d, inside in enumerate(dims):
        if index in inside:
            outer = inside[: inside.index(index)]
            return d if all(rule.sizes[i] == 1 for i in outer) else None
    return REPLICATE


def _is_tensor(rule: Rule, operand: int) -> bool:
    """Whether the operand is a tensor, rather than a number, which is the same on all devices."""
    return isinstance(rule.operands[operand], (torch.fx.Node, torch.Tensor))
