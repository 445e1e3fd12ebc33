"""The model's own code on the devices of its stages: what cannot be pipelined, such as generating token by token.

Parameters lie on the devices of their stages. The model's code adds, multiplies and concatenates tensors of several
stages without moving them. So every operator whose tensors are on several devices gets them on one: that with most of
their bytes. Then weights and key-value caches stay where they are, and activations move.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture import torch_private


def on_own_devices(model: nn.Module, order: Sequence[torch.device]) -> AbstractContextManager[object]:
    """Inside, the code of `model` runs wherever its tensors are. `order`: the devices, those of first stages first."""
    used = {tensor.device for tensor in [*model.parameters(), *model.buffers()]}
    if used <= {torch.device("cpu")}:
        return nullcontext()
    return _Together({device: place for place, device in enumerate(order)})


class _Together(TorchDispatchMode):
    """Brings the tensors of every operator to one device."""

    def __init__(self, place: Mapping[torch.device, int]) -> None:
        super().__init__()
        self._place = place

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = torch_private.tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        if len({x.device for x in tensors}) < 2 or function in _COPIES:
            return function(*args, **kwargs)
        target = self._target(function, args, tensors)

        def moved(x: Any) -> Any:
            return x.to(target) if isinstance(x, torch.Tensor) and x.device != target else x

        args, kwargs = torch_private.tree_map(moved, (args, kwargs))
        return function(*args, **kwargs)

    def _target(self, function: Any, args: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> torch.device:
        """Where an operator runs: where the tensor lies that it writes, else where most bytes are; of equals, the later
        stage."""
        schema = getattr(function, "_schema", None)
        if schema is not None and schema.is_mutable:
            for argument, value in zip(schema.arguments, args, strict=False):
                if argument.is_write and isinstance(value, torch.Tensor):
                    return value.device
        n_bytes: Counter[torch.device] = Counter()
        for x in tensors:
            n_bytes[x.device] += x.nbytes
        return max(n_bytes, key=lambda device: (n_bytes[device], self._place.get(device, -1)))


_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)  # they are there to change devices
