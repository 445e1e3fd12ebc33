"""Groups of devices that compute one operator together: their exchanges, and the arguments of their calls by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from autopar.analysis.rules.notation import Rule
from autopar.sharding.layouts import local_shape
from autopar.sharding.strategies import Strategy

Call = tuple[Any, Sequence[Any], Mapping[str, Any]]  # target, args, kwargs


@dataclass(frozen=True)
class OperatorGroup:
    """The devices of a mesh by number (the last axis runs fastest) under one strategy."""

    strategy: Strategy
    mesh: tuple[int, ...]

    @cached_property
    def numbers(self) -> np.ndarray:
        """The device numbers in an array of the mesh's shape."""
        return np.arange(int(np.prod(self.mesh))).reshape(self.mesh)

    def cutting(self, *dims: int, operand: int = 0) -> tuple[int, ...]:
        """The mesh axes that split one of the dimensions `dims` of an operand."""
        return tuple(axis for axis, code in enumerate(self.strategy.inputs[operand]) if code in dims)

    def groups(self, axes: Sequence[int]) -> list[list[int]]:
        """The groups of devices that differ only in their coordinates along `axes`, ordered like their parts."""
        rest = [a for a in range(len(self.mesh)) if a not in axes]
        size = int(np.prod([self.mesh[a] for a in axes]))
        return [[int(i) for i in line] for line in self.numbers.transpose(*rest, *axes).reshape(-1, size)]

    def first(self, axes: Sequence[int]) -> list[bool]:
        """For each device, whether it is the first of its group."""
        firsts = {group[0] for group in self.groups(axes)}
        return [i in firsts for i in range(self.numbers.size)]

    def starts(self, sizes: Sequence[int], axes: Sequence[int]) -> list[int]:
        """For each device, where its part (of sizes[device] entries) begins in the dimension that its group splits."""
        found = [0] * len(sizes)
        for group in self.groups(axes):
            for before, after in itertools.pairwise(group):
                found[after] = found[before] + sizes[before]
        return found

    def all_reduce(
        self,
        parts: Sequence[torch.Tensor],
        axes: Sequence[int],
        combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.add,
    ) -> list[torch.Tensor]:
        """For each device, the sum (or another combination) over its group, always in the same order. The results carry
        no gradient, and callers must not write to them, because workers of one device may share a tensor."""
        found = [part.detach() for part in parts]
        for group in self.groups(axes) if axes else []:
            whole = found[group[0]]
            for i in group[1:]:
                whole = combine(whole, found[i].to(whole.device))
            for i in group:
                found[i] = whole.to(found[i].device)
        return found


@dataclass(frozen=True)
class GroupCall:
    """An operator under one strategy, as far as its cost depends on it."""

    rule: Rule
    crew: OperatorGroup
    operands: Sequence[torch.Tensor | None]  # whole, on the meta device; of the rule

    def local(self, operand: int) -> tuple[int, ...]:
        """The shape of a device's part."""
        tensor = self.operands[operand]
        assert tensor is not None
        return local_shape(self.crew.strategy.inputs[operand], tensor.shape, self.crew.mesh)

    def itemsize(self, operand: int = 0) -> int:
        """Bytes per entry of the sums."""
        tensor = self.operands[operand]
        assert tensor is not None
        return accumulated(tensor.dtype).itemsize

    @property
    def together(self) -> tuple[int, ...]:
        """The mesh axes along which devices exchange values."""
        return tuple(axis for axis, index in enumerate(self.crew.strategy.axes) if index in self.rule.together)


# (bytes, axes, in the backward) of every all-reduce
Exchanged = Iterator[tuple[float, tuple[int, ...], bool]]


def named(call: Call) -> dict[str, Any]:
    """The arguments of a call by the names of its operator's schema, with defaults."""
    target, args, kwargs = call
    return {
        argument.name: args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
        for place, argument in enumerate(target._schema.arguments)
    }


def again(call: Call, **changes: Any) -> torch.Tensor:
    """The call, with other arguments."""
    target, given = call[0], named(call) | changes
    fixed = {argument.name for argument in target._schema.arguments if argument.kwarg_only}
    result: torch.Tensor = target(
        *(value for name, value in given.items() if name not in fixed), **{name: given[name] for name in fixed}
    )
    return result


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums over entries of `dtype` are computed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
