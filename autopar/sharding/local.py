"""An operator's call on one device's parts of its tensors: sizes among its arguments become local sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.analysis.rules.views import FACTORIES, NEW

_LIKE_OTHERS = {
    "view_as": torch.ops.aten.view.default,
    "reshape_as": torch.ops.aten.reshape.default,
    "expand_as": torch.ops.aten.expand.default,
    "_reshape_alias": torch.ops.aten.reshape.default,
}
_SIZED = ("view", "reshape", "_unsafe_view", "expand", "broadcast_to", *NEW, *FACTORIES)


def sizes_place(target: Any) -> int | None:
    """The position of the result's sizes among the arguments of an ATen operator; None if it has no such argument."""
    if target.overloadpacket.__name__ not in (*_SIZED, "_reshape_alias"):
        return None
    names = [argument.name for argument in target._schema.arguments]
    return next((i for i, name in enumerate(names) if name in ("size", "shape")), None)


def takes_sizes(target: Any) -> bool:
    """Whether a call on parts needs the local sizes of its result as arguments."""
    name = target.overloadpacket.__name__
    return name in (*_LIKE_OTHERS, "unflatten", "narrow") or sizes_place(target) is not None


def local_call(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], shape: Sequence[Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(operator, args, kwargs) of the call for a result of the local `shape` (numbers, or nodes of a graph).

    Only operators that reshape or create tensors take sizes, as arguments or from another tensor (`view_as`)."""
    name = target.overloadpacket.__name__
    new = list(args)
    if name in _LIKE_OTHERS:
        return _LIKE_OTHERS[name], (new[0], list(shape)), {}
    place = sizes_place(target)
    if place is not None and place < len(new):
        new[place] = list(shape)
    elif name == "unflatten":
        dim = new[1] % (len(shape) - len(new[2]) + 1)
        new[2] = list(shape[dim : dim + len(new[2])])
    elif name == "narrow":
        new[3] = shape[new[1] % len(shape)]
    return target, tuple(new), dict(kwargs)
