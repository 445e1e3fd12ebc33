r"""Index notation: one line says what an operator does to every dimension of its tensors.

```
   linear   *b k, n k, n -> *b n ; 02 12          y[b,n] = sum_k x[b,k] w[n,k] + bias[n]
   softmax  a [k] -> a [k]                        rows need all of k
   flatten  b s h -> (b s) h                      one dimension made of two indices, the outer one first
   mean     a ~k -> a                             the mean over k
```

Operands stand before the arrow, results behind it, each a list of dimensions:

- `k` an index. In every result: *kept*, so sharding the operands along it shards the results. In none: *summed*, so
  the results of the shards add up to the whole one. Only in results: new there, all along it computed alike.
- `~k` *averaged*: the whole result is the mean of the shards', weighted by their sizes.
- `[k]` *whole*: the operator needs all of it at once.
- `{k}`, `{~k}` *together*: like `[k]` and `~k` for the operator alone, but devices that have parts of it find what the
  whole operator does, exactly, when they exchange something within (`autopar.sharding.special`).
- `*b` as many dimensions as are left over; operands align at the last of them, and broadcast there.
- `1` a dimension of one entry, which broadcasts or says nothing.
- `(a b)` a dimension folded from several indices.

Behind the semicolon: sets of operands in which the operator is linear together while the others stay fixed: `01` for a
sum, `0 1` for a product, `*` for all of them. Of an affine operator (`02 12` above) the term that is in every set is
added once: where an index is summed that it does not have, it counts in one shard only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

Size = Any  # an int, or a sympy expression of the batch size
Dims = tuple[tuple[str, ...], ...]  # the indices that every dimension is folded from, outermost first; () for size one


class IndexKind(Enum):
    """What happens to an index that is sharded."""

    KEPT = "kept"
    SUMMED = "summed"
    AVERAGED = "averaged"
    WHOLE = "whole"


@dataclass(frozen=True)
class Rule:
    """What one call of an operator does to the dimensions of its tensors."""

    operands: tuple[Any, ...]  # fx nodes, or numbers (which have no dimensions)
    inputs: tuple[Dims, ...]  # of every operand
    outputs: tuple[Dims, ...]  # of every tensor that is returned
    kinds: Mapping[str, IndexKind]  # by index
    sizes: Mapping[str, Size]  # by index: entries
    linear: tuple[frozenset[int], ...]  # operands in which the operator is linear together, the others fixed
    together: frozenset[str] = frozenset()  # indices that devices can cut if they work together
    name: str = ""  # of the operator

    @property
    def addends(self) -> frozenset[int]:
        """Operands that are added once, whatever is summed: the bias of an affine operator."""
        return frozenset.intersection(*self.linear) if self.linear else frozenset()

    def __str__(self) -> str:
        def marked(index: str) -> str:
            name = f"~{index}" if self.kinds[index] is IndexKind.AVERAGED else index
            if index in self.together:
                return f"{{{name}}}"
            return f"[{index}]" if self.kinds[index] is IndexKind.WHOLE else name

        def dim(indices: tuple[str, ...]) -> str:
            names = " ".join(map(marked, indices))
            return f"({names})" if len(indices) > 1 else names or "1"

        sides = (", ".join(" ".join(map(dim, dims)) for dims in side) for side in (self.inputs, self.outputs))
        groups = " ".join("".join(map(str, sorted(group))) for group in self.linear)
        return " -> ".join(sides) + (f" ; {groups}" if groups else "")


_TOKEN = re.compile(r"(?P<open>\()|(?P<close>\))|(?P<mark>\[|\{?~|\{)?(?P<star>\*?)(?P<name>\w+)[\]}]?")

# A dimension as written: (mark, star, name) of every index in it; () for size one.
_Written = tuple[tuple[str, bool, str], ...]


def _operand(text: str) -> list[_Written]:
    result: list[_Written] = []
    folded: list[tuple[str, bool, str]] | None = None
    for token in _TOKEN.finditer(text):
        if token["open"]:
            folded = []
        elif token["close"]:
            assert folded is not None
            result.append(tuple(folded))
            folded = None
        else:
            index = (token["mark"] or "", bool(token["star"]), token["name"])
            if folded is not None:
                folded.append(index)
            else:
                result.append(() if token["name"] == "1" else (index,))
    return result


def _side(text: str, count: int) -> list[list[_Written]]:
    """Nothing written is one tensor without dimensions, or none at all."""
    return [_operand(part) for part in text.split(",")] if text.strip() or count else []


def _unstarred(dims: list[_Written], rank: int) -> list[_Written]:
    """`*b` becomes b3 b2 b1: numbered from the last one, so that operands of several ranks align there."""
    extra = rank - sum(not (dim and dim[0][1]) for dim in dims)
    result: list[_Written] = []
    for dim in dims:
        if dim and dim[0][1]:
            mark, _, name = dim[0]
            result += [((mark, False, f"{name}{place}"),) for place in range(extra, 0, -1)]
        else:
            result.append(dim)
    return result


class MisfitError(ValueError):
    """A line that does not fit the tensors it is read for."""


def read(
    line: str,
    operands: Sequence[Any],
    shapes: Sequence[Sequence[Size] | None],
    results: Sequence[Sequence[Size]],
    sizes: Mapping[str, Size] | None = None,
) -> Rule:
    """The rule that `line` states for tensors of these shapes (None: an optional operand that is not given, which is
    left out of the rule).

    `sizes`: of indices that only occur folded. Raises MisfitError where ranks or sizes do not fit.
    """
    equation, _, groups = line.partition(";")
    before, after = equation.split("->")
    left, right = _side(before, len(shapes)), _side(after, len(results))
    if len(left) != len(shapes) or len(right) != len(results):
        raise MisfitError(f"'{line}' for {len(shapes)} operands and {len(results)} results")
    given = [i for i, shape in enumerate(shapes) if shape is not None]
    tensors = [tuple(shape) for shape in (*shapes, *results) if shape is not None]
    written = [left[i] for i in given] + right
    spread = [_unstarred(dims, len(shape)) for dims, shape in zip(written, tensors, strict=True)]
    known = dict(sizes or {})
    for dims, shape in zip(spread, tensors, strict=True):
        if len(dims) != len(shape):
            raise MisfitError(f"'{line}' for shapes {tensors}")
        for dim, size in zip(dims, shape, strict=True):
            if len(dim) == 1 and (known.get(dim[0][2], 1) == 1):
                known[dim[0][2]] = size
    marks: dict[str, IndexKind] = {}
    together: set[str] = set()
    named: list[Dims] = []
    for dims, shape in zip(spread, tensors, strict=True):
        tensor: list[tuple[str, ...]] = []
        for dim, size in zip(dims, shape, strict=True):
            for mark, _, name in dim:
                if mark:
                    marks[name] = IndexKind.AVERAGED if "~" in mark else IndexKind.WHOLE
                if "{" in mark:
                    together.add(name)
            if len(dim) == 1 and size != known[dim[0][2]] and size != 1:
                raise MisfitError(f"'{line}' for shapes {tensors}")
            tensor.append(() if size == 1 else tuple(name for _, _, name in dim))
        named.append(tuple(tensor))
    inputs, outputs = tuple(named[: len(given)]), tuple(named[len(given) :])
    place = {old: new for new, old in enumerate(given)}
    linear = {
        frozenset(place.values() if group == "*" else (place[int(c)] for c in group if int(c) in place))
        for group in groups.split()
    }
    present = {name for dims in named for dim in dims for name in dim}
    kinds = {name: marks.get(name, _kind(name, inputs, outputs)) for name in known if name in present}
    ordered = tuple(sorted((group for group in linear if group), key=sorted))
    shared = frozenset(together & kinds.keys())
    return Rule(tuple(operands[i] for i in given), inputs, outputs, kinds, known, ordered, shared)


def _kind(name: str, inputs: tuple[Dims, ...], outputs: tuple[Dims, ...]) -> IndexKind:
    counts = [sum(dim.count(name) for dim in dims) for dims in (*inputs, *outputs)]
    behind = counts[len(inputs) :]
    if max(counts, default=0) > 1:
        return IndexKind.WHOLE  # a diagonal
    if all(behind):
        return IndexKind.KEPT
    return IndexKind.WHOLE if any(behind) else IndexKind.SUMMED
