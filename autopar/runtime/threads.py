"""Worker threads, and what a thread must be told of its caller's state."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from autopar import _torch
from cost_models.device import Device


@dataclass(frozen=True)
class CallerState:
    """Thread-local settings of torch that a fresh thread does not inherit."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    default_device: torch.device | None  # None: the CPU, as in a fresh thread
    saved_tensors_hooks: _torch.SavedTensorsHooks | None
    streams: tuple[torch.cuda.Stream, ...]  # of each GPU that the caller queues its kernels on: workers join it

    @classmethod
    def of_this_thread(cls, devices: Iterable[torch.device], *, training: bool = False) -> CallerState:
        """`training`: gradients are recorded whatever the caller's grad mode (a training step was asked for)."""
        device_types = {device.type for device in devices}
        default = torch.get_default_device()
        return cls(
            training or torch.is_grad_enabled(),
            not training and torch.is_inference_mode_enabled(),
            tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in sorted(device_types)),
            torch.is_autocast_cache_enabled(),
            None if default.type == "cpu" else default,
            _torch.saved_tensors_hooks(),
            tuple(torch.cuda.current_stream(d) for d in sorted(set(devices), key=str) if d.type == "cuda"),
        )

    @contextlib.contextmanager
    def applied(self, device: torch.device) -> Iterator[None]:
        """In a worker's thread, for its device."""
        with contextlib.ExitStack() as stack:
            for stream in self.streams:
                stack.enter_context(torch.cuda.stream(stream))
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
            if self.default_device is not None:
                stack.enter_context(self.default_device)
            if self.saved_tensors_hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.saved_tensors_hooks))
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device_type, enabled, dtype in self.autocast:
                if enabled:
                    stack.enter_context(torch.autocast(device_type, dtype=dtype, cache_enabled=self.autocast_cache))
            yield


@contextlib.contextmanager
def neutral_state(device_types: set[str]) -> Iterator[None]:
    """torch's defaults, for a capture that must not depend on where the first call happens to be made."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if _torch.saved_tensors_hooks() is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is))
        for device_type in sorted(device_types):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Worker:
    """A thread that serves one device. It ends when the Worker is collected or closed, and never blocks the exit."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        ready = threading.Event()
        self._thread = threading.Thread(
            target=_serve, args=(self._inbox, device, ready), name=f"autopar-{device.name}", daemon=True
        )
        threads = torch.get_num_threads()
        self._thread.start()
        ready.wait()
        torch.set_num_threads(threads)  # the worker's own setting also became the default of threads to come
        self._finalizer = weakref.finalize(self, self._inbox.put, None)
        self._finalizer.atexit = False  # a daemon thread may still be in a step when the program ends

    def submit(self, work: Callable[[], None]) -> None:
        """Run `work` on the thread, after what was submitted before. `work` must not raise."""
        if not self._finalizer.alive:
            raise RuntimeError(f"the pipeline's worker of {self.device.name} has been closed; call the module anew")
        self._inbox.put(work)

    def close(self) -> None:
        """End the thread when its work is done."""
        self._finalizer()


def _serve(inbox: queue.SimpleQueue[Callable[[], None] | None], device: Device, ready: threading.Event) -> None:
    if device.torch_device.type == "cuda":
        torch.cuda.set_device(device.torch_device)
    # Asked for the first time, or at its first parallel operator, a thread takes over the process's number: after this
    # question its own holds.
    torch.get_num_threads()
    torch.set_num_threads(device.threads)
    ready.set()
    while (work := inbox.get()) is not None:
        work()
        del work  # it holds tensors of a finished call
