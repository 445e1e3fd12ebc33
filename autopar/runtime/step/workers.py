"""Worker threads, one per device. What they run, and what happens if it raises, is in execution.py."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence

import torch

from cost_models.errors import DeviceError
from cost_models.hardware.devices import Device, find_device


class WorkerThread(threading.Thread):
    """The thread of a worker. `pool`: the one that the worker belongs to."""

    pool: weakref.ref[WorkerPool]


class Worker:
    """A thread that works for one device. It ends when the Worker is collected or closed, and never delays the
    program's exit."""

    def __init__(self, device: Device, pool: WorkerPool) -> None:
        """Raises DeviceError if the thread cannot work on the device."""
        self.device = device
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        ready: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._thread = WorkerThread(
            target=_serve, args=(self._inbox, device, ready), name=f"autopar-{device.name}", daemon=True
        )
        self._thread.pool = weakref.ref(pool)
        threads = torch.get_num_threads()
        self._thread.start()
        failure = ready.get()
        torch.set_num_threads(threads)  # the worker's setting also became the default of new threads: undo that
        if failure is not None:
            raise DeviceError(f"no worker can start on {device.name}: {failure}") from failure
        self._finalizer = weakref.finalize(self, self._inbox.put, None)
        self._finalizer.atexit = False  # at exit, a daemon thread may still be in a step and submit to this worker

    def submit(self, work: Callable[[], None]) -> None:
        """Run `work` on the thread after earlier work. `work` must not raise. RuntimeError if the worker is closed."""
        if not self._finalizer.alive:
            raise RuntimeError(f"the pipeline's worker of {self.device.name} has been closed; call the module again")
        self._inbox.put(work)

    def close(self) -> None:
        """End the thread after the work submitted so far."""
        self._finalizer()


def _serve(
    inbox: queue.SimpleQueue[Callable[[], None] | None], device: Device, ready: queue.SimpleQueue[Exception | None]
) -> None:
    """`ready` gets one entry: the failure if the device cannot be used, None before the first work."""
    try:
        if device.torch_device.type == "cuda":
            torch.cuda.set_device(device.torch_device)
        # torch gives a thread the process's number of threads at its first parallel operator or its first
        # `get_num_threads()`, which would overwrite a number set before.
        torch.get_num_threads()
        torch.set_num_threads(device.threads)
    except Exception as error:
        ready.put(error)
        return
    ready.put(None)
    # Backwards run in the thread that calls them. By default autograd has one thread for all work on a GPU, which would
    # run those of all its workers one by one, and would wait for itself where the caller's backward runs on it.
    with torch.autograd.set_multithreading_enabled(False):
        while (work := inbox.get()) is not None:
            work()
            del work  # it refers to tensors of a finished call


class WorkerPool:
    """The workers of a module, by device name. A worker starts when it is first needed."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = tuple(devices)
        self._workers: dict[str, Worker] = {}

    def __getitem__(self, name: str) -> Worker:
        if name not in self._workers:
            self._workers[name] = Worker(find_device(self._devices, name), self)
        return self._workers[name]

    def close(self) -> None:
        """End all threads. Workers started later are new ones."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
