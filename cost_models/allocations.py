"""Bytes in use over time, told by the storages of tensors that come and go.

A dispatch mode sees the results of every kernel, forward and backward, and a weak reference tells when a storage is
freed. Where it lies does not matter: on the meta device a pass takes no memory and computes nothing, but its tensors
live and die as anywhere else.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cost_models.graphs import storage_key, tensors_in

_aten = torch.ops.aten


class Allocations(TorchDispatchMode):
    """Notes every storage that appears inside, and its end.

    `block`: sizes are rounded up to multiples of so many bytes. `events` has the place of a storage in `nbytes` when
    it appears, and its complement (~place) when it is freed.
    """

    def __init__(self, block: int = 1) -> None:
        super().__init__()
        self.nbytes: list[int] = []
        self.events: list[int] = []
        self._block = block
        self._places: dict[int, int] = {}  # of storages that live
        self._references: dict[int, weakref.ref[Any]] = {}
        self._last_reference = references_to_the_only_gradient()

    def note(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        """The places of the storages of `tensors`, each once; those not seen before appear now."""
        places: dict[int, None] = {}
        for tensor in tensors:
            key = storage_key(tensor)
            if key not in self._places:
                storage = tensor.untyped_storage()
                self._places[key] = len(self.nbytes)
                self._references[key] = weakref.ref(storage, partial(self._gone, key))
                self.events.append(len(self.nbytes))
                self.nbytes.append(-(-storage.nbytes() // self._block) * self._block)
            places[self._places[key]] = None
        return list(places)

    def _gone(self, key: int, _: Any) -> None:
        self._references.pop(key, None)
        self.events.append(~self._places.pop(key))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        meta = any(t.is_meta for t in tensors_in(args))
        if func is _aten._local_scalar_dense.default and meta:
            return _NUMBER.get(args[0].dtype, 1.0)
        if func is _aten.add.Tensor and not torch.is_grad_enabled() and self._sums_gradients(*args):
            return args[0]
        result = func(*args, **kwargs)
        self.note(tensors_in(result))
        return result

    def _sums_gradients(self, first: Any, second: Any) -> bool:
        """Whether autograd would add the second to the first in place, had it not seen a dispatch mode: where nobody
        else holds the first (`can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp)."""
        return (
            isinstance(first, torch.Tensor)
            and isinstance(second, torch.Tensor)
            and first.shape == second.shape
            and first.untyped_storage().nbytes() >= first.numel() * first.element_size()  # else it is expanded
            and _references(first) == self._last_reference
        )


_NUMBER: dict[torch.dtype, int | bool] = {torch.bool: True, torch.int64: 1, torch.int32: 1}
"""What `item()` of a tensor without values gives; 1.0 for the other dtypes."""


def _references(tensor: torch.Tensor) -> tuple[int, int]:
    """To a tensor and to its storage; torch has no public way to know."""
    return tensor._use_count(), torch._C._storage_Use_Count(storage_key(tensor))  # type: ignore[attr-defined]


@cache
def references_to_the_only_gradient() -> tuple[int, int]:
    """What `_references` counts of a gradient that autograd alone holds when it adds another to it: looked up, since it
    depends on how torch hands tensors over to Python."""
    found: list[tuple[int, int]] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _aten.add.Tensor:
                found.append(_references(args[0]))
            return func(*args, **(kwargs or {}))

    with torch.enable_grad():
        x = torch.empty(2, device="meta", requires_grad=True)
        both = x.exp(), x.sin()
        roots = [operator.mul(y, 2.0) for y in both]
        with Look():
            torch.autograd.backward(roots, [torch.empty_like(y) for y in roots])
    return found[0]
