"""Worker threads: one for each device."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

import torch

from cost_models.hardware.devices import Device


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
