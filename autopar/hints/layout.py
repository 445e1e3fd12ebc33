"""The values that `shard` takes: how each tensor is split, as numbers of parts or by the named axes of a mesh."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.errors import InputError


@dataclass(frozen=True)
class Layout:
    """A mesh of devices with a name for each axis. Call it to say which axes split each dimension of a tensor.

        layout = Layout((2, 2, 2), ("dp", "sp", "mp"))
        layout(("dp", "sp"), "None", "mp")

    splits dimension 0 into 4 parts (`dp` is the outer axis, `sp` the inner one), leaves dimension 1 whole and splits
    dimension 2 into 2 parts.

    Raises InputError unless every size is a whole number of at least 1 and every axis has a different name.
    """

    shape: tuple[int, ...]  # number of devices along each axis
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "names", (self.names,) if isinstance(self.names, str) else tuple(self.names))
        problems = [
            f"axis {i} has {n!r} devices; give a whole number of at least 1"
            for i, n in enumerate(self.shape)
            if type(n) is not int or n < 1
        ]
        if not self.shape:
            problems.append("a mesh needs at least one axis")
        if len(self.names) != len(self.shape):
            problems.append(f"there are {len(self.shape)} axes, but {len(self.names)} names")
        problems += [
            f"{name!r} cannot name an axis; give a string other than '' and 'None'"
            for name in self.names
            if not _is_axis_name(name)
        ]
        repeated = [name for name in dict.fromkeys(self.names) if self.names.count(name) > 1]
        problems += [f"several axes are named {name!r}; give each axis a name of its own" for name in repeated]
        if problems:
            raise InputError(f"Layout({self.shape}, {self.names}): {'; '.join(problems)}")

    @property
    def size(self) -> int:
        """Number of devices in the mesh."""
        return math.prod(self.shape)

    def __call__(self, *dims: str | tuple[str, ...] | None) -> TensorLayout:
        """The layout of a tensor over this mesh.

        `dims`: one entry per dimension of the tensor: an axis, "None" (the dimension stays whole), or several axes, the
        outermost first. Raises InputError if an axis is unknown or used twice.
        """
        axes: list[tuple[str, ...]] = []
        for dim in dims:
            names = dim if isinstance(dim, (tuple, list)) else (dim,)
            axes.append(tuple(name for name in names if name is not None and name != "None"))
        problems = [
            f"dimension {d}: the mesh has no axis {name!r}; its axes are {', '.join(self.names)}"
            for d, names in enumerate(axes)
            for name in names
            if name not in self.names
        ]
        used = [name for names in axes for name in names]
        for name in dict.fromkeys(used):
            if used.count(name) > 1:
                where = [str(d) for d, names in enumerate(axes) for n in names if n == name]
                problems.append(
                    f"axis {name!r} is used twice, for dimensions {' and '.join(where)}; an axis splits one dimension"
                )
        if problems:
            raise InputError(f"{self} applied to {dims}: {'; '.join(problems)}")
        return TensorLayout(self, tuple(axes))

    def __str__(self) -> str:
        return f"Layout({self.shape}, {self.names})"


def _is_axis_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", "None")


@dataclass(frozen=True)
class TensorLayout:
    """Which axes of a mesh split each dimension of one tensor."""

    layout: Layout
    dims: tuple[tuple[str, ...], ...]  # axes that split each dimension, the outermost first

    @property
    def parts(self) -> tuple[int, ...]:
        """Number of parts of each dimension."""
        sizes = dict(zip(self.layout.names, self.layout.shape, strict=True))
        return tuple(math.prod(sizes[name] for name in names) for names in self.dims)

    def __str__(self) -> str:
        return f"layout({', '.join('None' if not n else n[0] if len(n) == 1 else str(n) for n in self.dims)})"


TensorSplit = tuple[int, ...] | TensorLayout  # number of parts of each dimension, or which axes split it


@dataclass(frozen=True)
class ShardHint:
    """The arguments of one call of `shard`. An entry of None leaves the tensor to the search."""

    inputs: tuple[TensorSplit | None, ...] | None  # one entry per tensor input; None: no in_strategy
    outputs: tuple[TensorSplit | None, ...] | None  # one entry per tensor output; None: no out_strategy
    parameters: tuple[tuple[str, TensorSplit], ...] = ()  # (name relative to the module, split)

    def splits(self) -> Iterator[tuple[str, TensorSplit]]:
        """(argument of `shard` as users write it, its split) for every tensor with a split."""
        for side, entries in (("in_strategy", self.inputs), ("out_strategy", self.outputs)):
            for i, split in enumerate(entries or ()):
                if split is not None:
                    yield f"{side}[{i}]", split
        for name, split in self.parameters:
            yield f"parameter_plan[{name!r}]", split

    def __str__(self) -> str:
        return ", ".join(f"{where} {split}" for where, split in self.splits())


def parts_of(split: TensorSplit) -> tuple[int, ...]:
    """Number of parts of each dimension."""
    return split.parts if isinstance(split, TensorLayout) else split


def misfits(split: TensorSplit, shape: Sequence[int]) -> Iterator[str]:
    """The reasons why a tensor of this shape cannot be split like this; empty if it can."""
    parts = parts_of(split)
    if len(parts) != len(shape):
        yield f"{split} has {len(parts)} entries for the {len(shape)} dimensions of a tensor of shape {tuple(shape)}"
        return
    for d, (size, n) in enumerate(zip(shape, parts, strict=True)):
        if size % n:
            possible = ", ".join(str(k) for k in range(1, n + 1) if size % k == 0)
            axes = f" ({' x '.join(split.dims[d])})" if isinstance(split, TensorLayout) else ""
            yield (
                f"dimension {d} of shape {tuple(shape)} has {size} entries, which {n} parts{axes} do not divide; "
                f"{possible} would work"
            )
