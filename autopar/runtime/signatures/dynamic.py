"""`dynamic=`: what a user knows about the sizes of inputs that change between calls.

None                                       a size becomes a symbol once a call with another one comes
True                                       all sizes and Python ints are symbols from the first capture on
False                                      every size is captured by itself
{"input_ids": 1, "steps": True}            these are symbols: dimension 1 of input_ids, and the Python int steps
{"input_ids": {1: (128, 512)}}             the same, with a plan of its own for up to 128, up to 512, and more
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopar.capture.call_inputs import leaf_names
from autopar.capture.program import Input, OpenSize
from autopar.errors import InputError
from autopar.options import Dynamic

Bucket = tuple[int, ...]  # for every size with buckets, which of its buckets a call falls into


def open_sizes(
    dynamic: Dynamic, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any]
) -> frozenset[OpenSize]:
    """The sizes that become symbols at the first capture. Raises InputError where `dynamic` does not fit the call."""
    if dynamic is True:
        return frozenset(size for place, leaf in enumerate(leaves) for size in _all_sizes(place, leaf))
    if not isinstance(dynamic, Mapping):
        return frozenset()
    return frozenset(size for size, _ in _requested(dynamic, model, args, kwargs, leaves))


def bucket(
    dynamic: Dynamic, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any]
) -> Bucket:
    """The bucket of a call; () where no size has buckets."""
    if not isinstance(dynamic, Mapping):
        return ()
    bounded = [(size, ends) for size, ends in _requested(dynamic, model, args, kwargs, leaves) if ends]
    return tuple(bisect.bisect_left(sorted(ends), value_of(size, leaves)) for size, ends in bounded)


def differing(leaves: Sequence[Any], inputs: Sequence[Input]) -> frozenset[OpenSize] | None:
    """The sizes in which a call differs from a captured one beside the batch; None where it differs in more."""
    found = set()
    for place, (leaf, one) in enumerate(zip(leaves, inputs, strict=True)):
        if not one.same_type(leaf):
            return None
        if one.shape is None:
            if leaf != one.value:
                if type(leaf) is not int or leaf < 0:
                    return None
                found.add(OpenSize(place, None))
            continue
        sizes = enumerate(zip(leaf.shape, one.shape, strict=True))
        found |= {OpenSize(place, dim) for dim, (size, seen) in sizes if size != seen and dim != one.batch_dim}
    return frozenset(found)


def changed_floats(leaves: Sequence[Any], inputs: Sequence[Input]) -> frozenset[OpenSize]:
    """The Python floats in which a call differs from a captured one."""
    return frozenset(
        OpenSize(place, None)
        for place, (leaf, one) in enumerate(zip(leaves, inputs, strict=True))
        if one.shape is None and type(leaf) is type(one.value) is float and leaf != one.value
    )


def describe_size(size: OpenSize, names: Sequence[str]) -> str:
    """`dimension 2 of 'pixel_values'`, or `'steps'`. `names`: of the flat inputs."""
    name = names[size.leaf]
    return f"'{name}'" if size.dim is None else f"dimension {size.dim} of '{name}'"


def value_of(size: OpenSize, leaves: Sequence[Any]) -> int | float:
    """The value of a size or number in a call."""
    value: int | float = leaves[size.leaf] if size.dim is None else leaves[size.leaf].shape[size.dim]
    return value


def _all_sizes(place: int, leaf: Any) -> Iterator[OpenSize]:
    if isinstance(leaf, torch.Tensor):
        yield from (OpenSize(place, dim) for dim, size in enumerate(leaf.shape) if size > 1)
    elif type(leaf) is int:
        yield OpenSize(place, None)


def _requested(
    dynamic: Mapping[str, Any],
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaves: Sequence[Any],
) -> Iterator[tuple[OpenSize, tuple[int, ...]]]:
    """Every size that the user names, with the upper ends of its buckets."""
    names = leaf_names(model, args, dict(sorted(kwargs.items())))
    for name, wanted in dynamic.items():
        places = [place for place, other in enumerate(names) if other == name]
        if not places:
            raise InputError(f"dynamic names input {name!r}, but this call has {', '.join(dict.fromkeys(names))}")
        for place in places:
            leaf = leaves[place]
            if wanted is True:
                yield from ((size, ()) for size in _all_sizes(place, leaf))
                continue
            if not isinstance(leaf, torch.Tensor):
                raise InputError(f"dynamic gives dimensions of input {name!r}, which is no tensor; give True")
            for dim, ends in _dimensions(wanted).items():
                if not -leaf.dim() <= dim < leaf.dim():
                    raise InputError(
                        f"dynamic gives dimension {dim} of input {name!r}, which has {leaf.dim()} dimensions"
                    )
                yield OpenSize(place, dim % leaf.dim()), ends


def _dimensions(wanted: Any) -> dict[int, tuple[int, ...]]:
    if isinstance(wanted, int):
        return {wanted: ()}
    if isinstance(wanted, Mapping):
        return {dim: () if ends is True else tuple(ends) for dim, ends in wanted.items()}
    return dict.fromkeys(wanted, ())
