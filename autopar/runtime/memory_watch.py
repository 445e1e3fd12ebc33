"""Measures how many bytes a step holds at its peak, to compare with the prediction of a plan."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture import torch_private
from cost_models import Device
from cost_models.hardware.devices import synchronize
from cost_models.memory.allocations import InPlaceSums
from cost_models.memory.convolution_copies import BACKWARD, CONVOLUTION, kernels

DeviceContext = Callable[[str], AbstractContextManager[object]]  # device name -> a context that its worker enters


class MemoryWatch:
    """The peak bytes of every place that a step runs on. A watch is a `DeviceContext`: workers enter it.

    Every CPU worker is a place of its own, although all share one memory. It holds a storage (parameter, gradient,
    input, activation) from its first operator that uses it until the storage is freed. A GPU is one place, however
    many workers it has. Its bytes are those allocated at the peak beyond those before the step, plus the parameters,
    buffers and inputs that were there already.

    What convolutions on a CPU copy never appears as a tensor, so it counts as `convolution_copies` knows it.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self._counters = {d.name: _Counter() for d in self.devices if d.shares_process_memory}
        self._gpu_peaks: dict[str, int] = {}

    def __call__(self, device: str) -> AbstractContextManager[object]:
        counter = self._counters.get(device)
        return _Counting(counter) if counter is not None else nullcontext()

    @contextmanager
    def step(self, resident: Sequence[torch.Tensor]) -> Iterator[None]:
        """Measure one step. `resident`: the parameters and buffers of the module, and what it is called with."""
        gpus = {d.torch_device for d in self.devices if not d.shares_process_memory}
        before = {}
        for gpu in gpus:
            synchronize(gpu)
            torch.cuda.reset_peak_memory_stats(gpu)
            before[gpu] = torch.cuda.memory_allocated(gpu)
        yield
        for gpu in gpus:
            synchronize(gpu)
            here = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in resident if t.device == gpu}
            self._gpu_peaks[str(gpu)] = torch.cuda.max_memory_allocated(gpu) - before[gpu] + sum(here.values())

    @property
    def peaks(self) -> dict[str, int]:
        """Bytes by place: the name of a CPU worker or of a GPU."""
        return {name: counter.peak for name, counter in self._counters.items()} | self._gpu_peaks


class _Counter:
    """Live storages that one thread has used. Any thread may free them."""

    def __init__(self) -> None:
        self.peak = 0
        self._live: dict[int, int] = {}  # storage -> bytes
        self._total = 0
        self._lock = threading.RLock()  # reentrant: a finalizer may run inside `touch` of the same thread

    def touch(self, storage: torch.UntypedStorage) -> None:
        with self._lock:
            key = id(storage)
            if key in self._live:
                return
            self._live[key] = storage.nbytes()
            self._total += storage.nbytes()
            self.peak = max(self.peak, self._total)
        weakref.finalize(storage, self._freed, key).atexit = False

    def for_a_moment(self, nbytes: int) -> None:
        """So many bytes appear and are freed at once."""
        with self._lock:
            self.peak = max(self.peak, self._total + nbytes)

    def replace(self, storage: torch.UntypedStorage, by: torch.UntypedStorage) -> None:
        """The bytes of `storage` are those of `by` from now on."""
        with self._lock:
            self._total -= self._live.get(id(storage), 0)
            self._live[id(storage)] = 0
            self.touch(by)

    def _freed(self, key: int) -> None:
        with self._lock:
            self._total -= self._live.pop(key)


class _Counting(TorchDispatchMode):
    """Passes every storage that an operator of this thread reads or writes to a counter, backward included."""

    def __init__(self, counter: _Counter) -> None:
        super().__init__()
        self._counter = counter
        self._in_place = InPlaceSums()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        in_place = torch_private.in_backward() and self._in_place.has(func, args)
        result = func(*args, **(kwargs or {}))
        if in_place:  # without this mode autograd would not have allocated the sum
            self._counter.replace(args[0].untyped_storage(), result.untyped_storage())
            return result
        self._touch((args, kwargs))
        if func in (CONVOLUTION, BACKWARD) and args[0].device.type == "cpu":
            results = (result,) if func is CONVOLUTION else result
            for kernel in kernels(func, args, result, torch.get_num_threads()):
                self._counter.for_a_moment(kernel.before)
                self._touch(results[kernel.result])
                self._counter.for_a_moment(kernel.beside)
        self._touch(result)
        return result

    def _touch(self, values: Any) -> None:
        for leaf in torch_private.tree_leaves(values):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.device.type == "cpu":
                self._counter.touch(leaf.untyped_storage())
