"""One call of an ATen operator: its arguments by name, its shapes with the sizes of the batch as expressions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch import fx

from autopar.analysis.rules.notation import Size

# Parameters that count as operands (a number has no dimensions) where a schema takes a number for them.
_NUMBERS = {"self", "other", "value"}


def size_of(value: Any) -> Size:
    """A size as an int or a sympy expression; anything else as it is."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        expression = value.node.expr
        return int(expression) if isinstance(expression, (sympy.Integer, int)) else expression
    return value


@lru_cache(maxsize=4096)
def quotient(a: Size, b: Size) -> Size | None:
    """a / b where that is an integer for every size of the batch, else None. Both positive."""
    if isinstance(a, int) and isinstance(b, int):
        return None if a % b else a // b
    ratio = sympy.cancel(sympy.sympify(a) / b)
    if not ratio.free_symbols:
        return int(ratio) if ratio.is_Integer else None
    if not ratio.is_polynomial():
        return None
    return ratio if all(c.is_Integer for c in sympy.Poly(ratio).coeffs()) else None


def shape_of(value: Any) -> tuple[Size, ...] | None:
    """The shape of a tensor, () of a number, None of anything else."""
    if isinstance(value, torch.Tensor):
        return tuple(map(size_of, value.shape))
    return () if isinstance(value, (int, float, bool, complex, *torch.types.py_sym_types)) else None


class OperatorCall:
    """The arguments of `node` by the names of its schema, with defaults; `values`: tensors (or fakes) and numbers for
    nodes."""

    def __init__(self, node: fx.Node, value_of: Callable[[fx.Node], Any]) -> None:
        self.name = str(node.target.overloadpacket.__name__)  # type: ignore[union-attr]
        self._nodes: dict[str, Any] = {}  # as given
        self._types: dict[str, str] = {}
        for place, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
            given = (
                node.args[place] if place < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
            )
            self._nodes[argument.name] = given
            self._types[argument.name] = str(argument.type)
        self._value_of = value_of
        result = value_of(node)
        self.results = list(result) if isinstance(result, (tuple, list)) else [result]
        self.output_shapes = [
            shape for r in self.results if isinstance(r, torch.Tensor) and (shape := shape_of(r)) is not None
        ]

    def _value(self, given: Any) -> Any:
        if isinstance(given, (list, tuple)):
            return [self._value(item) for item in given]
        return self._value_of(given) if isinstance(given, fx.Node) else given

    def has(self, name: str) -> bool:
        """Whether the schema has a parameter of this name."""
        return name in self._nodes

    def __getitem__(self, name: str) -> Any:
        """An argument: tensors as fakes, sizes as ints or expressions."""
        value = self._value(self._nodes[name])
        return [size_of(v) for v in value] if isinstance(value, list) else size_of(value)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if self.has(name) else default

    def shape(self, name: str) -> tuple[Size, ...]:
        """The shape of an operand that is given."""
        found = shape_of(self[name])
        assert found is not None
        return found

    def rank(self, name: str) -> int:
        return len(self.shape(name))

    def dim(self, name: str = "dim", of: str = "self") -> int:
        """A dimension, counted from the front."""
        return int(self[name]) % max(self.rank(of), 1)

    def dims(self, name: str = "dim", of: str = "self") -> list[int]:
        """A list of dimensions counted from the front; all of them where none is given."""
        value = self.get(name)
        if value is None or value == []:
            return list(range(self.rank(of)))
        return sorted({int(d) % max(self.rank(of), 1) for d in (value if isinstance(value, list) else [value])})

    def _takes_operands(self, name: str) -> bool:
        kind = self._types[name]
        return "Tensor" in kind or (name in _NUMBERS and kind in ("number", "Optional[number]"))

    @property
    def operands(self) -> list[tuple[Any, tuple[Size, ...] | None]]:
        """(node or number, shape) of every tensor that the operator may take, items of lists one by one; shape None:
        not given."""
        found: list[tuple[Any, tuple[Size, ...] | None]] = []
        for name in filter(self._takes_operands, self._nodes):
            given = self._nodes[name]
            if "List[" in self._types[name]:
                found += [(item, shape_of(self._value(item))) for item in given or []]
            else:
                found.append((given, shape_of(self._value(given))))
        return found

    @property
    def options(self) -> list[tuple[str, fx.Node]]:
        """(parameter, node) of what is computed among the other arguments: sizes and numbers."""
        found = []
        for name, given in self._nodes.items():
            if not self._takes_operands(name):
                listed = given if isinstance(given, (list, tuple)) else [given]
                found += [(name, n) for n in listed if isinstance(n, fx.Node)]
        return found


def letters(count: int, prefix: str = "a") -> list[str]:
    """Names of so many indices."""
    return [f"{prefix}{i}" for i in range(count)]


# A line, a line with the sizes of indices that only occur folded, or None where no line can tell.
Stated = str | tuple[str, dict[str, Size]] | None
Maker = Callable[[OperatorCall], Stated]


def line(*operands: Sequence[str], to: Sequence[Sequence[str]], linear: str = "") -> str:
    """A line of index notation from the dimensions of operands and results."""
    left, right = (", ".join(" ".join(dims) for dims in side) for side in (operands, to))
    return f"{left} -> {right}" + (f" ; {linear}" if linear else "")


def whole(names: Sequence[str], dims: Sequence[int]) -> list[str]:
    """`names` with those at `dims` whole: `[a]`."""
    return [f"[{n}]" if i in dims else n for i, n in enumerate(names)]
