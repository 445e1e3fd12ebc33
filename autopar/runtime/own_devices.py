"""The model's own code on the devices of its stages: for what cannot be pipelined, such as generating token by token.

Parameters lie on the devices of their stages. The model's code adds, multiplies and concatenates tensors of several
stages without moving them. So every function of torch whose tensors are on several devices gets them on one:

    1. that of the tensor that the function writes (a static key-value cache);
    2. that of a parameter: activations move, weights stay;
    3. that with most bytes: a key-value cache stays, the new keys and values move;
    4. of equals the device of the later stage: a residual moves along with the data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.capture import torch_private

# They change devices themselves, or compare two tensors without computing.
_LEFT_ALONE = {"to", "copy_", "type_as", "set_", "is_set_to", "__set__", "__get__", "backward", "data_ptr"}


def on_own_devices(model: nn.Module, order: Sequence[torch.device]) -> AbstractContextManager[object]:
    """Inside, the code of `model` runs although its tensors may be on several devices. Gradients flow back.

    `order`: the devices, that of the first stage first.
    """
    used = {tensor.device for tensor in [*model.parameters(), *model.buffers()]}
    return nullcontext() if used <= {torch.device("cpu")} else _OnOneDevice(order)


def takes_cache(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call has a key-value cache among its arguments: an object that the model updates in place.

    A captured graph has no way to update the caller's object. (Caches that are tuples of tensors are captured.)
    """
    return any(_is_cache(value) for value in (*args, *kwargs.values()))


def _is_cache(value: Any) -> bool:
    return any(cls.__name__.endswith("Cache") for cls in type(value).__mro__)


class _OnOneDevice(TorchFunctionMode):
    """Brings the tensors of every function of torch to one device."""

    def __init__(self, order: Sequence[torch.device]) -> None:
        super().__init__()
        self._place = {device: place for place, device in enumerate(order)}

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in torch_private.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        name = getattr(function, "__name__", "")
        if name in _LEFT_ALONE or len({x.device for x in tensors}) < 2:
            return function(*args, **kwargs)
        target = _written(name, args, kwargs) or self._heaviest(tensors)

        def moved(x: Any) -> Any:
            return x.to(target) if isinstance(x, torch.Tensor) and x.device != target else x

        args, kwargs = torch_private.tree_map(moved, (args, kwargs))
        return function(*args, **kwargs)

    def _heaviest(self, tensors: Sequence[torch.Tensor]) -> torch.device:
        """Where the parameters among `tensors` are, else where most of their bytes are."""
        n_bytes: Counter[torch.device] = Counter()
        for x in [x for x in tensors if isinstance(x, nn.Parameter)] or tensors:
            n_bytes[x.device] += x.nbytes
        return max(n_bytes, key=lambda device: (n_bytes[device], self._place.get(device, -1)))


def _written(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device | None:
    """Where the tensor is that function `name` writes; None if it writes none."""
    if isinstance(kwargs.get("out"), torch.Tensor):
        return kwargs["out"].device
    in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"
    return args[0].device if in_place and args and isinstance(args[0], torch.Tensor) else None
