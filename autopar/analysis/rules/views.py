r"""Rules of operators that move entries and compute nothing: views, folds, slices, copies, joins.

A view of other sizes keeps the entries in their row-major order. Both shapes are cut at the products of their last
sizes where one is a multiple of the other, and every piece between two cuts is an index:

```
   (B, 12, 32)   cuts  32        384        384 B            a b c
   (12 B, 4, 8)  cuts  8   32         ...   384 B            (a b) (c1 c2):  8, 4, 12 and B entries
```
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.analysis.rules.calls import Maker, OperatorCall, Stated, letters, line, quotient, whole
from autopar.analysis.rules.notation import Size


def _cuts(shape: Sequence[Size]) -> list[Size]:
    """Products of the last 1, 2, ... sizes, those of one entry left out."""
    result: list[Size] = []
    product: Size = 1
    for size in reversed(shape):
        if size != 1:
            product = product * size
            result.append(product)
    return result


def factorise(before: Sequence[Size], after: Sequence[Size]) -> tuple[list[str], list[str], dict[str, Size]] | None:
    """The dimensions of two shapes of the same entries in the same order, folded from common indices, and the sizes of
    these; None where they have none in common (6 x 4 as 4 x 6)."""
    ends = sorted_by_division({*_cuts(before), *_cuts(after)})
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
    """The values, each a divisor of the next; None where two do not divide each other."""
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
    others = [["[*_]"]] * (len(call.operands) - 1)  # view_as and the like take the shape of another tensor
    if 0 in before or (found := factorise(before, after)) is None:
        return line(
            whole(letters(len(before)), range(len(before))),
            *others,
            to=[whole(letters(len(after), "b"), range(len(after)))],
        )
    left, right, sizes = found
    return line(left, *others, to=[right], linear="0"), sizes


def squeezed(call: OperatorCall) -> Stated:
    """What would go, too, if it had one entry, has to be whole: a shard may have one."""
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
    """Dimensions of one entry, or that are missing in front, take any size: the index is new in the result."""
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
    """`repeat(2, 1)` puts copies behind each other: the number of the copy is the outer index."""
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
    """`repeat_interleave(2, dim)` puts copies beside each other: their number is the inner index."""
    if isinstance(call["repeats"], torch.Tensor) or call["dim"] is None:
        return None
    names, dim = letters(call.rank("self")), call.dim()
    result = [f"({n} r)" if d == dim else n for d, n in enumerate(names)]
    return line(names, to=[result], linear="0"), {"r": call["repeats"]}


def sliced(call: OperatorCall) -> Stated:
    """Dimensions that keep their size keep their entries; the others have to be whole."""
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
    """select, unbind: without the dimension."""
    names, dim = letters(call.rank("self")), call.dim()
    rest = [n for d, n in enumerate(names) if d != dim]
    return line(whole(names, [dim]), to=[rest] * len(call.output_shapes), linear="0")


def joined(call: OperatorCall) -> Stated:
    """cat: all of the joined dimension, each operand with sizes of its own. Empty vectors join anything."""
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
    """flip, roll: entries move within the dimensions that the argument `key` names; all where it names none."""

    def rule(call: OperatorCall) -> Stated:
        names = whole(letters(call.rank("self")), call.dims(key))
        return line(names, to=[names], linear=linear)

    return rule


def padded(call: OperatorCall) -> Stated:
    """Sizes that grow (or shrink) are whole; padding with zeros or with entries is linear."""
    before, after = call.shape("self"), call.output_shapes[0]
    changed = [d for d in range(len(before)) if before[d] != after[d]]
    names = letters(len(before))
    zeros = call.get("mode", "constant") != "constant" or not call.get("value")
    result = [f"[k{d}]" if d in changed else n for d, n in enumerate(names)]
    numbers: list[list[str]] = [[]] * (len(call.operands) - 1)  # the value, where the schema counts it
    return line(whole(names, changed), *numbers, to=[result], linear="0" if zeros else "")


def windows(call: OperatorCall) -> Stated:
    """Tensor.unfold: windows of a dimension become one more dimension at the end."""
    names, dim = letters(call.rank("self")), call.dim("dimension")
    return line(whole(names, [dim]), to=[[*("[k]" if d == dim else n for d, n in enumerate(names)), "[w]"]], linear="0")


def crossed(call: OperatorCall) -> Stated:
    """meshgrid: every operand along a dimension of its own."""
    names = letters(len(call.operands))
    if call.get("indexing", "ij") == "xy" or any(
        shape != (size,) for (_, shape), size in zip(call.operands, call.output_shapes[0], strict=True)
    ):
        return None
    return line(*[[n] for n in names], to=[names] * len(names))


def made(call: OperatorCall) -> Stated:
    """zeros, full, rand: every dimension is new."""
    others = [["[*_]"]] * len(call.operands)
    return line(*others, to=[letters(len(shape)) for shape in call.output_shapes])


def numbered(call: OperatorCall) -> Stated:
    """arange, eye: entries tell their place."""
    return line(to=[whole(letters(len(shape)), range(len(shape))) for shape in call.output_shapes])


RESHAPES = (
    *("view", "reshape", "_unsafe_view", "_reshape_alias", "flatten", "unflatten", "squeeze", "unsqueeze"),
    *("view_as", "reshape_as", "ravel"),
)
# Results of which only the operand's shape counts.
LIKE = ("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like")
LIKE_OTHERS = ("view_as", "reshape_as", "expand_as", "type_as", "to")  # of all operands but the first
NEW = ("new_zeros", "new_ones", "new_full", "new_empty")
FACTORIES = ("zeros", "ones", "full", "empty", "rand", "randn", "randint", "scalar_tensor")
FILLINGS = (
    "fill_value",
    "value",
    "s",
)  # parameters that tell entries; all others of the rules here tell sizes and places

_PERMUTES = (
    *("permute", "transpose", "t", "swapaxes", "swapdims", "numpy_T", "mT", "mH", "adjoint", "movedim", "moveaxis"),
)

# One tensor's entries, all of them or some, and nothing else.
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
    **dict.fromkeys((*NEW, *FACTORIES), made),
    **dict.fromkeys(("arange", "eye", "linspace", "tril_indices", "triu_indices", "randperm"), numbered),
}
