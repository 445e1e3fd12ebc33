r"""Rules of operators that move entries without computing: views, folds, slices, copies, joins.

A reshape keeps the entries in row-major order. To find the indices that both shapes are folded from, list the products
of the last 1, 2, ... sizes of both; every two neighbouring products enclose one index:

```
   (B, 12, 32)    products     32  384  384 B            a b (c1 c2)
   (12 B, 4, 8)   products  8  32       384 B            (a b) c1 c2         a, b, c1, c2: B, 12, 4 and 8 entries
```
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.analysis.rules.calls import Maker, OperatorCall, Stated, letters, line, quotient, whole
from autopar.analysis.rules.notation import Size


def _products(shape: Sequence[Size]) -> list[Size]:
    """Products of the last 1, 2, ... sizes, skipping sizes of 1."""
    result: list[Size] = []
    product: Size = 1
    for size in reversed(shape):
        if size != 1:
            product = product * size
            result.append(product)
    return result


def factorise(before: Sequence[Size], after: Sequence[Size]) -> tuple[list[str], list[str], dict[str, Size]] | None:
    """Express two shapes of the same entries, in the same order, by common indices.

    Returns the dimensions of both shapes and the sizes of the indices; None without common indices (6 x 4 as 4 x 6).
    """
    ends = sorted_by_division({*_products(before), *_products(after)})
    if ends is None:
        return None
    sizes: dict[str, Size] = {}
    starts: list[Size] = [1, *ends[:-1]] if ends else []
    for start, end in zip(starts, ends, strict=True):
        sizes[f"f{len(sizes)}"] = quotient(end, start)

    def folded(shape: Sequence[Size]) -> list[str]:
        dims, product = [], 1
        for size in reversed(shape):
            inside = [
                name
                for name, start in zip(sizes, starts, strict=True)
                if size != 1
                and quotient(start, product) is not None
                and quotient(product * size, start) not in (None, 1)
            ]
            product = product * size
            dims.append(f"({' '.join(reversed(inside))})" if len(inside) > 1 else "".join(inside) or "1")
        return dims[::-1]

    return folded(before), folded(after), sizes


def sorted_by_division(values: set[Size]) -> list[Size] | None:
    """The values in an order in which each divides the next; None if there is no such order."""
    result: list[Size] = []
    for value in values:
        place = len(result)
        while place and quotient(value, result[place - 1]) is None:
            place -= 1
        if place < len(result) and quotient(result[place], value) is None:
            return None
        result.insert(place, value)
    return result


def reshaped(call: OperatorCall) -> Stated:
    before, after = call.operands[0][1], call.output_shapes[0]
    assert before is not None
    others = [["[*_]"]] * (len(call.operands) - 1)  # the other tensor of view_as, which gives the shape
    if 0 in before or (common := factorise(before, after)) is None:
        return line(
            whole(letters(len(before)), range(len(before))),
            *others,
            to=[whole(letters(len(after), "b"), range(len(after)))],
        )
    left, right, sizes = common
    return line(left, *others, to=[right], linear="0"), sizes


def squeezed(call: OperatorCall) -> Stated:
    """Dimensions that may be squeezed are whole: a shard could have one entry where the whole tensor has more."""
    before, names = call.shape("self"), letters(call.rank("self"))
    kept = whole(names, call.dims())
    gone = [d for d in call.dims() if before[d] == 1]
    return line(kept, to=[[n for d, n in enumerate(kept) if d not in gone]], linear="0")


def permuted(call: OperatorCall) -> Stated:
    names = letters(call.rank("self"))
    if call.name in ("permute", "permute_copy"):
        order = [int(d) % len(names) for d in call["dims"]]
    elif call.name in ("t", "numpy_T"):
        order = list(reversed(range(len(names))))
    elif call.name in ("mT", "mH", "adjoint"):
        order = [*range(len(names) - 2), len(names) - 1, len(names) - 2]
    elif call.name in ("movedim", "moveaxis"):
        return _moved(call, names)
    else:
        first, second = (call.dim(key) for key in (("dim0", "dim1") if call.has("dim0") else ("axis0", "axis1")))
        order = list(range(len(names)))
        if names:
            order[first], order[second] = second, first
    return line(names, to=[[names[d] for d in order]], linear="0")


def _moved(call: OperatorCall, names: list[str]) -> str:
    source, target = (
        [d % len(names) for d in (v if isinstance(v, list) else [v])] for v in (call["source"], call["destination"])
    )
    rest = [name for d, name in enumerate(names) if d not in source]
    for place, name in sorted(zip(target, (names[d] for d in source), strict=True)):
        rest.insert(place, name)
    return line(names, to=[rest], linear="0")


def expanded(call: OperatorCall) -> Stated:
    """A dimension of one entry, or a missing first one, takes any size: its index is new in the result."""
    before, after = call.operands[0][1], call.output_shapes[0]
    assert before is not None
    names = letters(len(after))
    kept = [
        n if b == a else "1"
        for n, b, a in zip(names[len(after) - len(before) :], before, after[len(after) - len(before) :], strict=True)
    ]
    return line(kept, *[["[*_]"]] * (len(call.operands) - 1), to=[names], linear="0")


def broadcast(call: OperatorCall) -> Stated:
    """broadcast_tensors: every result has all dimensions."""
    names, sizes = letters(len(call.output_shapes[0])), call.output_shapes[0]
    operands = []
    for _, shape in call.operands:
        aligned = list(zip(names, sizes, strict=True))[len(names) - len(shape or ()) :]
        operands.append([n if own == size else "1" for own, (n, size) in zip(shape or (), aligned, strict=True)])
    return line(*operands, to=[names] * len(operands), linear="*")


def repeated(call: OperatorCall) -> Stated:
    """`repeat(2, 1)` concatenates copies: the number of the copy is the outer index."""
    before, counts = call.shape("self"), call["repeats"] if call.has("repeats") else call["dims"]
    counts = [1] * (len(before) - len(counts)) + counts
    names = ["1"] * (len(counts) - len(before)) + letters(len(before))
    result = [
        f"(r{i} {n})" if c != 1 and n != "1" else f"r{i}" if c != 1 else n
        for i, (n, c) in enumerate(zip(names, counts, strict=True))
    ]
    return line(letters(len(before)), to=[result], linear="0"), {
        f"r{i}": c for i, c in enumerate(counts) if c != 1
    } | dict(zip(letters(len(before)), before, strict=True))


def interleaved(call: OperatorCall) -> Stated:
    """`repeat_interleave(2, dim)` repeats each entry: the number of the copy is the inner index."""
    if isinstance(call["repeats"], torch.Tensor) or call["dim"] is None:
        return None
    names, dim = letters(call.rank("self")), call.dim()
    result = [f"({n} r)" if d == dim else n for d, n in enumerate(names)]
    return line(names, to=[result], linear="0"), {"r": call["repeats"]}


def sliced(call: OperatorCall) -> Stated:
    """Dimensions that keep their size keep their entries; all others are whole."""
    before, after = call.shape("self"), call.output_shapes[0]
    names = letters(len(before))
    cut = [d for d in range(len(before)) if before[d] != after[d]]
    result = [f"[k{d}]" if d in cut else n for d, n in enumerate(names)]
    return line(whole(names, cut), to=[result], linear="0")


def divided(call: OperatorCall) -> Stated:
    """split, chunk: several results."""
    names, dim = letters(call.rank("self")), call.dim()
    if len(call.output_shapes) == 1:
        return line(names, to=[names], linear="0")
    pieces = [[f"[k{i}]" if d == dim else n for d, n in enumerate(names)] for i in range(len(call.output_shapes))]
    return line(whole(names, [dim]), to=pieces, linear="0")


def selected(call: OperatorCall) -> Stated:
    """select, unbind: the dimension disappears."""
    names, dim = letters(call.rank("self")), call.dim()
    rest = [n for d, n in enumerate(names) if d != dim]
    return line(whole(names, [dim]), to=[rest] * len(call.output_shapes), linear="0")


def joined(call: OperatorCall) -> Stated:
    """cat: the joined dimension is whole, with an index per operand. Empty vectors may be joined to any shape."""
    rank = len(call.output_shapes[0])
    dim = int(call["dim"]) % rank
    operands = []
    for i, (_, shape) in enumerate(call.operands):
        empty = shape == (0,) and rank != 1
        operands.append([f"[e{i}]"] if empty else [f"[k{i}]" if d == dim else n for d, n in enumerate(letters(rank))])
    return line(*operands, to=[[("[k]" if d == dim else n) for d, n in enumerate(letters(rank))]], linear="*")


def stacked(call: OperatorCall) -> Stated:
    names = letters(len(call.output_shapes[0]) - 1)
    dim = int(call["dim"]) % (len(names) + 1)
    return line(*[names] * len(call.operands), to=[[*names[:dim], "[k]", *names[dim:]]], linear="*")


def whole_dims(key: str, linear: str = "0") -> Maker:
    """flip, roll: entries move within the dimensions in the argument `key`, or within all dimensions."""

    def rule(call: OperatorCall) -> Stated:
        names = whole(letters(call.rank("self")), call.dims(key))
        return line(names, to=[names], linear=linear)

    return rule


def padded(call: OperatorCall) -> Stated:
    """Dimensions that change size are whole; padding with zeros or with entries is linear."""
    before, after = call.shape("self"), call.output_shapes[0]
    changed = [d for d in range(len(before)) if before[d] != after[d]]
    names = letters(len(before))
    zeros = call.get("mode", "constant") != "constant" or not call.get("value")
    result = [f"[k{d}]" if d in changed else n for d, n in enumerate(names)]
    numbers: list[list[str]] = [[]] * (len(call.operands) - 1)  # the padding value, if it is an operand
    return line(whole(names, changed), *numbers, to=[result], linear="0" if zeros else "")


def windows(call: OperatorCall) -> Stated:
    """Tensor.unfold: the windows of a dimension become a new last dimension."""
    names, dim = letters(call.rank("self")), call.dim("dimension")
    return line(whole(names, [dim]), to=[[*("[k]" if d == dim else n for d, n in enumerate(names)), "[w]"]], linear="0")


def crossed(call: OperatorCall) -> Stated:
    """meshgrid: every operand has its own dimension."""
    names = letters(len(call.operands))
    if call.get("indexing", "ij") == "xy" or any(
        shape != (size,) for (_, shape), size in zip(call.operands, call.output_shapes[0], strict=True)
    ):
        return None
    return line(*[[n] for n in names], to=[names] * len(names))


def created(call: OperatorCall) -> Stated:
    """zeros, full, rand: every dimension is new."""
    others = [["[*_]"]] * len(call.operands)
    return line(*others, to=[letters(len(shape)) for shape in call.output_shapes])


def numbered(call: OperatorCall) -> Stated:
    """arange, eye: the entries depend on their places."""
    return line(to=[whole(letters(len(shape)), range(len(shape))) for shape in call.output_shapes])


RESHAPES = (
    *("view", "reshape", "_unsafe_view", "_reshape_alias", "flatten", "unflatten", "squeeze", "unsqueeze"),
    *("view_as", "reshape_as", "ravel"),
)
# Operators that only read the shape of their operand.
LIKE = ("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like")
# Operators that only read the shape (or type) of all operands except the first.
LIKE_OTHERS = ("view_as", "reshape_as", "expand_as", "type_as", "to")
NEW = ("new_zeros", "new_ones", "new_full", "new_empty")
FACTORIES = ("zeros", "ones", "full", "empty", "rand", "randn", "randint", "scalar_tensor")
# Parameters that are values of entries; all other numbers in the rules of this file are sizes or places.
FILLINGS = ("fill_value", "value", "s")

_PERMUTES = (
    *("permute", "transpose", "t", "swapaxes", "swapdims", "numpy_T", "mT", "mH", "adjoint", "movedim", "moveaxis"),
)

# Results contain only entries of one tensor, all or some of them.
MOVES: dict[str, str | Maker] = {
    **dict.fromkeys(RESHAPES, reshaped),
    "squeeze": squeezed,
    **dict.fromkeys(_PERMUTES, permuted),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), expanded),
    **dict.fromkeys(("repeat", "tile"), repeated),
    "repeat_interleave": interleaved,
    **dict.fromkeys(("slice", "narrow"), sliced),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split"), divided),
    **dict.fromkeys(("select", "unbind"), selected),
    "unfold": windows,
}
RULES: dict[str, str | Maker] = {
    **MOVES,
    **dict.fromkeys(("cat", "concat", "concatenate"), joined),
    "stack": stacked,
    **dict.fromkeys(("flip", "roll"), whole_dims("dims")),
    **dict.fromkeys(("tril", "triu"), "*a [m] [n] -> *a [m] [n] ; 0"),
    **dict.fromkeys(("pad", "constant_pad_nd"), padded),
    "meshgrid": crossed,
    "broadcast_tensors": broadcast,
    **dict.fromkeys(LIKE, "*a -> *a"),
    **dict.fromkeys((*NEW, *FACTORIES), created),
    **dict.fromkeys(("arange", "eye", "linspace", "tril_indices", "triu_indices", "randperm"), numbered),
}
