"""Gradients for measured passes to add to, in less memory than those of a large model take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn

# Bytes that the gradients of a measured graph share: more than caches hold, fewer than those of a large model.
_GRADIENT_BYTES = 256 << 20


def give_gradients(parameters: Iterable[nn.Parameter], most: int = _GRADIENT_BYTES) -> None:
    """Give each parameter that is trained a gradient, so that every pass accumulates, like all micro-batches but the
    first. Those of a large model share `most` bytes in turns: as many as caches forget, and at least the largest one.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.requires_grad:
            groups[parameter.dtype, parameter.device].append(parameter)
    for (dtype, device), mine in groups.items():
        sizes = [parameter.numel() for parameter in mine]
        room = torch.zeros(max(*sizes, min(sum(sizes), most // dtype.itemsize)), dtype=dtype, device=device)
        start = 0
        for parameter, size in zip(mine, sizes, strict=True):
            start = start if start + size <= room.numel() else 0
            parameter.grad = _in_order_of(parameter, room[start : start + size])
            start += size


def _in_order_of(parameter: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """The entries as a tensor with the sizes of `parameter`, and with its strides if it has no gaps."""
    order = sorted(range(parameter.dim()), key=lambda d: (-parameter.stride()[d], d))
    dense = parameter.permute(order).is_contiguous()
    if not dense:
        return entries.view(parameter.shape)
    back = sorted(range(parameter.dim()), key=order.__getitem__)
    return entries.view([parameter.shape[d] for d in order]).permute(back)
