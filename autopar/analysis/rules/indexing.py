"""Rules of operators that read or write entries at indices."""

from __future__ import annotations

import torch

from autopar.analysis.rules.calls import Maker, OperatorCall, Stated, letters, line


def along(call: OperatorCall) -> Stated:
    """gather, scatter: all operands have the same rank.

    In `self`, dimension `dim` is whole, and so are dimensions that the index does not cover; all others are kept.
    gather keeps the index's dimension `dim`.
    """
    own, index, dim = call.shape("self"), call.shape("index"), call.dim()
    names, gathers = letters(len(own)), call.name == "gather"
    cut = [d for d in range(len(own)) if d == dim or own[d] != index[d]]
    sources = [shape for _, shape in call.operands[2:] if shape is not None]
    if not own or any(shape and len(shape) != len(own) for shape in sources):
        return None

    def dims(prefix: str) -> list[str]:
        free = gathers and prefix == "i"
        return [n if d not in cut else f"i{d}" if free and d == dim else f"[{prefix}{d}]" for d, n in enumerate(names)]

    result = dims("i" if gathers else "k")
    return line(dims("k"), dims("i"), *[dims("s") if shape else [] for shape in sources], to=[result])


def rows(call: OperatorCall) -> Stated:
    """index_select, index_add, index_copy, index_fill: slices along one dimension, at a list of places."""
    names, dim = letters(call.rank("self")), call.dim()

    def at(name: str) -> list[str]:
        return [name if d == dim else n for d, n in enumerate(names)]

    selects = call.name == "index_select"
    place = "i" if selects else "[i]"
    listed = [place] if call.rank("index") else []
    sources = [at(place) if shape else [] for _, shape in call.operands[2:]]
    linear = {"index_select": "0", "index_add": "02"}.get(call.name, "")
    return line(at("[k]"), listed, *sources, to=[at((place if listed else "[j]") if selects else "[k]")], linear=linear)


def _layout(call: OperatorCall, mark: str) -> tuple[list[str], list[list[str]], list[str]] | None:
    """For x[i, :, j]: the dimensions of x, of every index tensor (none for `:`), and of the result. None for masks.

    Index tensors broadcast with each other to dimensions named after `mark`. In the result these dimensions replace the
    indexed ones if those are adjacent, otherwise they come first.
    """
    own, indices = call.shape("self"), call["indices"]
    indexed_dims = [d for d, index in enumerate(indices) if index is not None]
    if not indexed_dims or any(indices[d].dtype in (torch.bool, torch.uint8) for d in indexed_dims):
        return None
    ranks = [0 if index is None else index.dim() for index in indices]
    spread = [mark.format(place) for place in range(max(ranks))]
    names = [f"[k{d}]" if d in indexed_dims else f"a{d}" for d in range(len(own))]
    rest = [n for d, n in enumerate(names) if d not in indexed_dims]
    place = indexed_dims[0] if indexed_dims == list(range(indexed_dims[0], indexed_dims[-1] + 1)) else 0
    return names, [spread[len(spread) - rank :] for rank in ranks], [*rest[:place], *spread, *rest[place:]]


def indexed(call: OperatorCall) -> Stated:
    dims = _layout(call, "i{}")
    return None if dims is None else line(dims[0], *dims[1], to=[dims[2]], linear="0")


def put(call: OperatorCall) -> Stated:
    """x[i, :, j] = values. The dimensions of the indices are whole: two entries may go to the same place."""
    masks, names = [index for index in call["indices"] if index is not None], letters(call.rank("self"))
    if [mask.dtype for mask in masks] == [torch.bool] and call["indices"][0] is not None and not call.rank("values"):
        gaps: list[list[str]] = [[]] * (len(call["indices"]) - 1)
        return line(names, names[: masks[0].dim()], *gaps, [], to=[names])  # as masked_fill
    dims = _layout(call, "[i{}]")
    if dims is None:
        return None
    own, indices, result = dims
    return line(own, *indices, result[len(result) - call.rank("values") :], to=[own])


def classes(call: OperatorCall) -> Stated:
    names = letters(call.rank("self"))
    return line(names, to=[[*names, "[c]"]])


def embedding(call: OperatorCall) -> Stated:
    """Rows of a table, which devices with parts of the table can look up together.

    Not so if gradients are sparse or depend on how often all devices read a row: then the table must be whole.
    """
    if call["scale_grad_by_freq"]:
        return "[v] d, [*i] -> [*i] d ; 0"
    return f"{'[v] [d], *i -> *i [d]' if call['sparse'] else '{v} d, *i -> *i d'} ; 0"


# The operands whose values are places in another operand.
PLACES = {
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce", "embedding"), slice(1, 2)),
    **dict.fromkeys(("index_select", "index_add", "index_copy", "index_fill"), slice(1, 2)),
    **dict.fromkeys(("index", "_unsafe_index"), slice(1, None)),
    **dict.fromkeys(("index_put", "_unsafe_index_put"), slice(1, -1)),
}

RULES: dict[str, str | Maker] = {
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce"), along),
    **dict.fromkeys(("index_select", "index_add", "index_copy", "index_fill"), rows),
    "index": indexed,
    **dict.fromkeys(("index_put", "_unsafe_index_put"), put),
    "_unsafe_index": indexed,
    "embedding": embedding,
    "one_hot": classes,
    "bucketize": "*a, [k] -> *a",
    "isin": "*a, [*k] -> *a",
    "histc": "[*a] -> [k]",
    "bincount": "[a], [a] -> [k]",
}
