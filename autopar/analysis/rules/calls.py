"""One call of an ATen operator: its arguments by name, and its shapes, where batch sizes are sympy expressions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch import fx

from autopar.analysis.rules.notation import Size

# Parameters that count as operands (without dimensions) even if the schema takes a number for them.
_NUMBERS = {"self", "other", "value"}


def size_of(value: Any) -> Size:
    """A size as an int or a sympy expression; other values unchanged."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        expression = value.node.expr
        return int(expression) if isinstance(expression, (sympy.Integer, int)) else expression
    return value


@lru_cache(maxsize=4096)
def quotient(a: Size, b: Size) -> Size | None:
    """a / b if it is an integer for every batch size, else None. Both are positive."""
    if isinstance(a, int) and isinstance(b, int):
        return None if a % b else a // b
    ratio = sympy.cancel(sympy.sympify(a) / b)
    if not ratio.free_symbols:
        return int(ratio) if ratio.is_Integer else None
    if not ratio.is_polynomial():
        return None
    return ratio if all(c.is_Integer for c in sympy.Poly(ratio).coeffs()) else None


def unchanged(size: Size) -> Size:
    """The size itself."""
    return size


def shape_of(value: Any, renamed: Callable[[Size], Size] = unchanged) -> tuple[Size, ...] | None:
    """The shape of a tensor, () of a number, None of anything else. `renamed`: called with every size."""
    if isinstance(value, torch.Tensor):
        return tuple(renamed(size_of(size)) for size in value.shape)
    return () if isinstance(value, (int, float, bool, complex, *torch.types.py_sym_types)) else None


class OperatorCall:
    """The arguments of `node` by the names of its schema, including defaults.

    `value_of`: the tensor (or fake tensor) or number that a node computes. `renamed`: the size that replaces another
    one, as of several symbols that are the same number in every call.
    """

    def __init__(
        self, node: fx.Node, value_of: Callable[[fx.Node], Any], renamed: Callable[[Size], Size] = unchanged
    ) -> None:
        self._renamed = renamed
        self.name = str(node.target.overloadpacket.__name__)  # type: ignore[union-attr]
        self._arguments: dict[str, Any] = {}  # by parameter: nodes and constants
        self._types: dict[str, str] = {}
        for place, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
            value = (
                node.args[place] if place < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
            )
            self._arguments[argument.name] = value
            self._types[argument.name] = str(argument.type)
        self._value_of = value_of
        result = value_of(node)
        self.results = list(result) if isinstance(result, (tuple, list)) else [result]
        self.output_shapes = [
            shape for r in self.results if isinstance(r, torch.Tensor) and (shape := shape_of(r, renamed)) is not None
        ]

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            return [self._value(item) for item in argument]
        return self._value_of(argument) if isinstance(argument, fx.Node) else argument

    def has(self, name: str) -> bool:
        """Whether the schema has a parameter of this name."""
        return name in self._arguments

    def __getitem__(self, name: str) -> Any:
        """The value of an argument: a tensor, or sizes as ints or expressions."""
        value = self._value(self._arguments[name])
        return [self._renamed(size_of(v)) for v in value] if isinstance(value, list) else self._renamed(size_of(value))

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if self.has(name) else default

    def shape(self, name: str) -> tuple[Size, ...]:
        """The shape of an operand that must be present."""
        shape = shape_of(self[name], self._renamed)
        assert shape is not None
        return shape

    def rank(self, name: str) -> int:
        return len(self.shape(name))

    def dim(self, name: str = "dim", of: str = "self") -> int:
        """A dimension argument as a number from 0."""
        return int(self[name]) % max(self.rank(of), 1)

    def dims(self, name: str = "dim", of: str = "self") -> list[int]:
        """A list of dimensions as numbers from 0; all dimensions of the operand `of` without an argument."""
        value = self.get(name)
        if value is None or value == []:
            return list(range(self.rank(of)))
        return sorted({int(d) % max(self.rank(of), 1) for d in (value if isinstance(value, list) else [value])})

    def _takes_operands(self, name: str) -> bool:
        declared = self._types[name]
        return "Tensor" in declared or (name in _NUMBERS and declared in ("number", "Optional[number]"))

    @property
    def operands(self) -> list[tuple[Any, tuple[Size, ...] | None]]:
        """(node or number, shape) for every tensor parameter, and for every item of a list of tensors.

        The shape is None for an optional tensor that is missing.
        """
        result: list[tuple[Any, tuple[Size, ...] | None]] = []
        for name in filter(self._takes_operands, self._arguments):
            argument = self._arguments[name]
            if "List[" in self._types[name]:
                result += [(item, shape_of(self._value(item), self._renamed)) for item in argument or []]
            else:
                result.append((argument, shape_of(self._value(argument), self._renamed)))
        return result

    @property
    def options(self) -> list[tuple[str, fx.Node]]:
        """(parameter, node) for every other argument that a node computes: sizes and numbers."""
        result = []
        for name, argument in self._arguments.items():
            if not self._takes_operands(name):
                listed = argument if isinstance(argument, (list, tuple)) else [argument]
                result += [(name, n) for n in listed if isinstance(n, fx.Node)]
        return result


def letters(count: int, prefix: str = "a") -> list[str]:
    """`count` names of indices: a0, a1, ..."""
    return [f"{prefix}{i}" for i in range(count)]


# A line of index notation, a line with the sizes of indices that only occur folded, or None if no line fits the call.
Stated = str | tuple[str, dict[str, Size]] | None
Maker = Callable[[OperatorCall], Stated]  # the rule of an operator as a function of its call


def line(*operands: Sequence[str], to: Sequence[Sequence[str]], linear: str = "") -> str:
    """A line of index notation from the dimensions of operands and results."""
    left, right = (", ".join(" ".join(dims) for dims in side) for side in (operands, to))
    return f"{left} -> {right}" + (f" ; {linear}" if linear else "")


def whole(names: Sequence[str], dims: Sequence[int]) -> list[str]:
    """`names` with those at `dims` marked whole: `[a]`."""
    return [f"[{n}]" if i in dims else n for i, n in enumerate(names)]
