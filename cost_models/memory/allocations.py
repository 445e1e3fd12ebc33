"""Bytes in use over time: which storages of tensors appear and disappear during a pass, and when.

A dispatch mode sees the results of every kernel, forward and backward, and a weak reference reports when a storage is
freed. On the meta device a pass takes no memory and computes nothing, but its tensors live as long as on any device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cost_models.graphs import storage_key, tensors_in
from cost_models.memory.convolution_copies import BACKWARD, CONVOLUTION, ConvolutionKernel
from cost_models.memory.meta_results import MetaResults

_aten = torch.ops.aten

_WHOLE = {_aten.mse_loss.default, _aten.smooth_l1_loss.default, _aten.binary_cross_entropy.default}
"""Losses whose scalar lies in a storage for all elements: the kernel allocates one loss an element and then resizes the
result (TORCH_META_FUNC(mse_loss) in aten/src/ATen/native/Loss.cpp). On the meta device they do not."""

_NUMBERS = {torch.bool: True, torch.int64: 1, torch.int32: 1}
"""What `item()` returns for a tensor without values, by dtype; 1.0 for the other dtypes."""


Convolutions = Callable[[Any, tuple[Any, ...], Any], Iterable[ConvolutionKernel]]
"""The kernels of a convolution's call (operator, arguments, results), for what they have in memory."""


class Allocations(TorchDispatchMode):
    """Records when every storage on the meta device appears and when it is freed.

    `block`: sizes are rounded up to a multiple of this number of bytes. `convolutions`: what they have in memory beside
    what they read and return; None: nothing that counts.
    """

    def __init__(self, block: int = 1, *, convolutions: Convolutions | None = None) -> None:
        super().__init__()
        self._convolutions = convolutions
        self.nbytes: list[int] = []  # of every storage
        self.recomputed: list[int] = []  # indices of storages that a backward created by running operators again
        self.events: list[int] = []  # `index` (in `nbytes`) when a storage appears, `~index` when it is freed
        self.in_backward = False
        self._block = block
        self._places: dict[int, int] = {}  # index of every living storage by its key
        self._references: dict[int, weakref.ref[Any]] = {}
        self._in_place = InPlaceSums()
        self._results = MetaResults()

    def record(self, tensors: Iterable[torch.Tensor], least: int = 0) -> list[int]:
        """The indices of the storages of `tensors`; those not seen before appear now, with at least `least` bytes."""
        places = []
        for tensor in tensors:
            key = storage_key(tensor)
            if key not in self._places:
                storage = tensor.untyped_storage()
                self._places[key] = len(self.nbytes)
                self._references[key] = weakref.ref(storage, partial(self._gone, key))
                self.events.append(len(self.nbytes))
                self.nbytes.append(-(-max(storage.nbytes(), least) // self._block) * self._block)
                if self.in_backward and torch.is_grad_enabled():
                    self.recomputed.append(self._places[key])
            places.append(self._places[key])
        return places

    def living(self) -> list[int]:
        """The indices of the living storages."""
        return list(self._places.values())

    def _convolved(self, result: Any, run: Iterable[ConvolutionKernel]) -> None:
        results = tensors_in(result) if isinstance(result, torch.Tensor) else result
        for kernel in run:
            self._for_a_moment(kernel.before)
            self.record([results[kernel.result]])
            self._for_a_moment(kernel.beside)

    def _for_a_moment(self, nbytes: int) -> None:
        """A storage that is freed at once."""
        self.events += [len(self.nbytes), ~len(self.nbytes)]
        self.nbytes.append(-(-nbytes // self._block) * self._block)

    def _gone(self, key: int, _: Any) -> None:
        del self._references[key]
        self.events.append(~self._places.pop(key))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten._local_scalar_dense.default and args[0].is_meta:
            return _NUMBERS.get(args[0].dtype, 1.0)
        if self.in_backward and self._in_place.has(func, args):
            return args[0]
        result = self._results.of(func, args, kwargs or {})
        if self._convolutions is not None and func in (CONVOLUTION, BACKWARD):
            self._convolved(result, self._convolutions(func, args, result))
        least = args[0].numel() * args[0].element_size() if func in _WHOLE else 0
        self.record((t for t in tensors_in(result) if t.is_meta), least)
        return result


class InPlaceSums:
    """Tells of calls that a dispatch mode sees during a backward whether they add up two gradients, and autograd would
    add the second to the first in place, because nothing else refers to the first.

    Under a dispatch mode autograd allocates the sum instead (torch/csrc/autograd/input_buffer.cpp,
    can_accumulate_inplace).
    """

    def __init__(self) -> None:
        self._last_reference = _references_to_a_gradient()  # not known inside of a mode, where autograd is off

    def has(self, func: Any, args: Any) -> bool:
        if func is not _aten.add.Tensor or torch.is_grad_enabled() or not isinstance(args[1], torch.Tensor):
            return False
        first, second = args
        return (
            first.shape == second.shape
            and first.untyped_storage().nbytes() >= first.numel() * first.element_size()  # else it is expanded
            and _references(first) == self._last_reference
        )


def _references(tensor: torch.Tensor) -> tuple[int, int]:
    """The number of references to a tensor and to its storage; torch has no public function for them."""
    return tensor._use_count(), torch._C._storage_Use_Count(storage_key(tensor))  # type: ignore[attr-defined]


@cache
def _references_to_a_gradient() -> tuple[int, int]:
    """The `_references` of a gradient that only autograd holds while it adds another one. It depends on how torch
    hands tensors to Python, so it is measured."""
    counts: list[tuple[int, int]] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _aten.add.Tensor:
                counts.append(_references(args[0]))
            return func(*args, **(kwargs or {}))

    with torch.enable_grad():
        x = torch.empty(2, device="meta", requires_grad=True) * 2
        total = x.exp() * x.sin()
        with Look():
            total.backward(torch.empty_like(total))
    return counts[0]
