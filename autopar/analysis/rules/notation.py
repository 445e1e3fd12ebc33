r"""Index notation: one line says what an operator does to every dimension of its tensors.

```
   linear   *b k, n k, n -> *b n ; 02 12          y[b,n] = sum_k x[b,k] w[n,k] + bias[n]
   softmax  a [k] -> a [k]                        rows need all of k
   flatten  b s h -> (b s) h                      one dimension made of two indices, the outer one first
   mean     a ~k -> a                             the mean over k
```

Operands are before the arrow and results after it, each as a list of dimensions:

- `k` an index. In every result: *kept*, so sharding the operands along it shards the results. In no result: *summed*,
  so the results of the shards add up to the result. Only in results: a new dimension, whose entries are all equal.
- `~k` *averaged*: the result is the mean of the shards' results, weighted by their sizes.
- `[k]` *whole*: the operator needs all of it at once.
- `{k}`, `{~k}` *together*: like `[k]` and `~k`, but devices with parts of the dimension can compute the exact result
  together if they communicate inside the operator (`autopar.sharding.group_operators`).
- `*b` all remaining dimensions; operands align at the last one, and broadcast.
- `1` a dimension of one entry.
- `(a b)` a dimension folded from several indices.

After the semicolon: sets of operands in which the operator is jointly linear while the others are fixed: `01` for a
sum, `0 1` for a product, `*` for all operands. An operand in every set (2 in `02 12` above, the bias) is a term that is
added once: if a summed index does not occur in it, only one shard adds it.
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
    inputs: tuple[Dims, ...]  # one per operand
    outputs: tuple[Dims, ...]  # one per returned tensor
    kinds: Mapping[str, IndexKind]  # by index
    sizes: Mapping[str, Size]  # by index: number of entries
    linear: tuple[frozenset[int], ...]  # sets of operands in which the operator is jointly linear, others fixed
    together: frozenset[str] = frozenset()  # indices that devices can split if they communicate inside the operator
    name: str = ""  # of the operator

    @property
    def addends(self) -> frozenset[int]:
        """Operands that are added once, over any summed index: the bias of an affine operator."""
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
    """The tensors of one side. An empty text is one tensor without dimensions, or no tensor if `count` is 0."""
    return [_operand(part) for part in text.split(",")] if text.strip() or count else []


def _unstarred(dims: list[_Written], rank: int) -> list[_Written]:
    """Replace `*b` by b3 b2 b1, numbered from the last dimension so that operands of different ranks align there."""
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
    """A line of index notation does not fit the tensors of a call."""


def read(
    line: str,
    operands: Sequence[Any],
    shapes: Sequence[Sequence[Size] | None],
    results: Sequence[Sequence[Size]],
    sizes: Mapping[str, Size] | None = None,
) -> Rule:
    """The rule that `line` states for one call.

    Args:
        line: index notation.
        operands: fx nodes or numbers, one per operand in the line.
        shapes: of the operands; None for an optional operand that is missing, which the rule leaves out.
        results: shapes of the results.
        sizes: of indices that only occur folded.

    Raises MisfitError where ranks or sizes do not fit.
    """
    equation, _, groups = line.partition(";")
    before, after = equation.split("->")
    left, right = _side(before, len(shapes)), _side(after, len(results))
    if len(left) != len(shapes) or len(right) != len(results):
        raise MisfitError(f"'{line}' for {len(shapes)} operands and {len(results)} results")
    present = [i for i, shape in enumerate(shapes) if shape is not None]
    tensors = [tuple(shape) for shape in (*shapes, *results) if shape is not None]
    written = [left[i] for i in present] + right
    spread = [_unstarred(dims, len(shape)) for dims, shape in zip(written, tensors, strict=True)]
    known = _index_sizes(line, spread, tensors, sizes or {})
    named = [
        tuple(() if size == 1 else tuple(name for _, _, name in dim) for dim, size in zip(dims, shape, strict=True))
        for dims, shape in zip(spread, tensors, strict=True)
    ]
    inputs, outputs = tuple(named[: len(present)]), tuple(named[len(present) :])
    marks = {name: mark for dims in spread for dim in dims for mark, _, name in dim if mark}
    used = {name for dims in named for dim in dims for name in dim}
    kinds = {name: _kind(name, marks.get(name, ""), inputs, outputs) for name in known if name in used}
    together = frozenset(name for dims in spread for dim in dims for mark, _, name in dim if "{" in mark)
    linear = _linear_groups(groups, {old: new for new, old in enumerate(present)})
    return Rule(tuple(operands[i] for i in present), inputs, outputs, kinds, known, linear, together & kinds.keys())


def _index_sizes(
    line: str, written: Sequence[list[_Written]], shapes: Sequence[tuple[Size, ...]], folded: Mapping[str, Size]
) -> dict[str, Size]:
    """The number of entries of every index. `folded`: those of indices that only occur folded."""
    known = dict(folded)
    for dims, shape in zip(written, shapes, strict=True):
        if len(dims) != len(shape):
            raise MisfitError(f"'{line}' for shapes {shapes}")
        for dim, size in zip(dims, shape, strict=True):
            if len(dim) == 1 and known.get(dim[0][2], 1) == 1:  # 1 broadcasts: another tensor has the size
                known[dim[0][2]] = size
    for dims, shape in zip(written, shapes, strict=True):
        for dim, size in zip(dims, shape, strict=True):
            if len(dim) == 1 and size != known[dim[0][2]] and size != 1:
                raise MisfitError(f"'{line}' for shapes {shapes}")
    return known


def _linear_groups(text: str, place: Mapping[int, int]) -> tuple[frozenset[int], ...]:
    """The sets of operands after the semicolon. `place`: operand in the line -> operand of the rule."""
    groups = {
        frozenset(place.values() if group == "*" else (place[int(c)] for c in group if int(c) in place))
        for group in text.split()
    }
    return tuple(sorted((group for group in groups if group), key=sorted))


def _kind(name: str, mark: str, inputs: tuple[Dims, ...], outputs: tuple[Dims, ...]) -> IndexKind:
    """The kind of an index by its mark, or without one by where it occurs."""
    if mark:
        return IndexKind.AVERAGED if "~" in mark else IndexKind.WHOLE
    counts = [sum(dim.count(name) for dim in dims) for dims in (*inputs, *outputs)]
    in_results = counts[len(inputs) :]
    if max(counts, default=0) > 1:
        return IndexKind.WHOLE  # a diagonal
    if all(in_results):
        return IndexKind.KEPT
    return IndexKind.WHOLE if any(in_results) else IndexKind.SUMMED
