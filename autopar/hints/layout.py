"""What `shard` asks for, as values: how a tensor is cut, by numbers of parts or by the names of a mesh's axes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.errors import InputError


@dataclass(frozen=True)
class Layout:
    """The devices as a mesh whose axes have names; called with what cuts every dimension of a tensor.

        layout = Layout((2, 2, 2), ("dp", "sp", "mp"))
        layout(("dp", "sp"), "None", "mp")      dimension 0 in 4 parts, dp the outer; 1 whole; 2 in 2 parts

    Raises InputError: sizes that are no whole numbers from 1, names that are not one an axis and different.
    """

    shape: tuple[int, ...]
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
            problems.append("a mesh has at least one axis")
        if len(self.names) != len(self.shape):
            problems.append(f"{len(self.shape)} axes, but {len(self.names)} names")
        problems += [f"the name {name!r}; give a text other than 'None'" for name in self.names if not _is_name(name)]
        problems += [f"the name {n!r} for several axes" for n in dict.fromkeys(self.names) if self.names.count(n) > 1]
        if problems:
            raise InputError(f"Layout({self.shape}, {self.names}): {'; '.join(problems)}")

    @property
    def size(self) -> int:
        """Devices."""
        return math.prod(self.shape)

    def __call__(self, *dims: str | tuple[str, ...] | None) -> Arranged:
        """One entry a dimension: an axis, "None", or several axes, the outermost first. Raises InputError."""
        found: list[tuple[str, ...]] = []
        for dim in dims:
            names = dim if isinstance(dim, (tuple, list)) else (dim,)
            found.append(tuple(name for name in names if name is not None and name != "None"))
        used = [name for names in found for name in names]
        problems = [
            f"dimension {d}: {name!r} is no axis of it; the axes are {', '.join(self.names)}"
            for d, names in enumerate(found)
            for name in names
            if name not in self.names
        ]
        for name in dict.fromkeys(used):
            if used.count(name) > 1:
                where = [str(d) for d, names in enumerate(found) for n in names if n == name]
                problems.append(f"axis {name!r} is used twice, for dimensions {' and '.join(where)}; once is possible")
        if problems:
            raise InputError(f"{self} of {dims}: {'; '.join(problems)}")
        return Arranged(self, tuple(found))

    def __str__(self) -> str:
        return f"Layout({self.shape}, {self.names})"


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", "None")


@dataclass(frozen=True)
class Arranged:
    """Which axes of a mesh cut every dimension of a tensor."""

    layout: Layout
    dims: tuple[tuple[str, ...], ...]  # axes of every dimension, the outermost first

    @property
    def slices(self) -> tuple[int, ...]:
        """The number of parts of every dimension."""
        sizes = dict(zip(self.layout.names, self.layout.shape, strict=True))
        return tuple(math.prod(sizes[name] for name in names) for names in self.dims)

    def __str__(self) -> str:
        return f"layout({', '.join('None' if not n else n[0] if len(n) == 1 else str(n) for n in self.dims)})"


Cut = tuple[int, ...] | Arranged  # parts of every dimension, or which axes cut it


@dataclass(frozen=True)
class ShardHint:
    """What one call of `shard` asked for."""

    inputs: tuple[Cut | None, ...] | None
    outputs: tuple[Cut | None, ...] | None
    parameters: tuple[tuple[str, Cut], ...] = ()

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        """All that is asked for, and what for."""
        for side, given in (("in_strategy", self.inputs), ("out_strategy", self.outputs)):
            for i, cut in enumerate(given or ()):
                if cut is not None:
                    yield f"{side}[{i}]", cut
        for name, cut in self.parameters:
            yield f"parameter_plan[{name!r}]", cut

    def plain(self) -> dict[str, Any]:
        """In plain types."""

        def plain(cut: Cut | None) -> Any:
            return (cut.layout.shape, cut.layout.names, cut.dims) if isinstance(cut, Arranged) else cut

        sides = {"in": self.inputs, "out": self.outputs}
        told = {side: None if cuts is None else tuple(map(plain, cuts)) for side, cuts in sides.items()}
        return {**told, "parameters": tuple((name, plain(cut)) for name, cut in self.parameters)}

    @classmethod
    def parse(cls, plain: Mapping[str, Any]) -> ShardHint:
        """From what `plain` gave."""

        def parse(cut: Any) -> Any:
            arranged = cut is not None and len(cut) == 3 and isinstance(cut[0], tuple)
            return Arranged(Layout(cut[0], cut[1]), cut[2]) if arranged else cut

        inputs, outputs = (None if plain[side] is None else tuple(map(parse, plain[side])) for side in ("in", "out"))
        return cls(inputs, outputs, tuple((name, parse(cut)) for name, cut in plain["parameters"]))

    def __str__(self) -> str:
        return ", ".join(f"{where} {cut}" for where, cut in self.cuts())
