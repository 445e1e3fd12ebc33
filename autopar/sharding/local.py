"""An operator's call on the part of its tensors that one device has: sizes among its arguments become local ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_RESHAPING = ("view", "reshape", "_unsafe_view", "expand", "broadcast_to")
_LIKE_OTHERS = {
    "view_as": torch.ops.aten.view.default,
    "reshape_as": torch.ops.aten.reshape.default,
    "expand_as": torch.ops.aten.expand.default,
    "_reshape_alias": torch.ops.aten.reshape.default,
}


def local_call(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], shape: Sequence[int]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The same for results of the local `shape`: only what reshapes has sizes among its arguments, or in a tensor that
    it makes its own like."""
    name = target.overloadpacket.__name__
    new = list(args)
    if name in _LIKE_OTHERS:
        return _LIKE_OTHERS[name], (new[0], list(shape)), {}
    if name in _RESHAPING:
        new[1] = list(shape)
    elif name == "unflatten":
        dim = new[1] % (len(shape) - len(new[2]) + 1)
        new[2] = list(shape[dim : dim + len(new[2])])
    return target, tuple(new), dict(kwargs)
