"""Simulated GPUs whose threads share one interpreter: only one of them launches at a time.

Every thread has a clock of its own in simulated seconds. Who asks for the lock first by these clocks gets it first:

    GPU 0   host  |l|.|l|.|l|            . waits for the lock
            device   |k| |k| |k|
    GPU 1   host  .|l|.|l|.|l|
            device    |k| |k| |k|

So the real threads wait until all others have come as far, and the results do not depend on the machine.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from simulated_gpu import LAUNCH, SimulatedGpu

from cost_models.measuring import operator_times, timed_passes
from cost_models.measuring.timed_passes import GraphRunner

META = torch.device("meta")


class Interpreter:
    """The lock, and who may ask for it."""

    def __init__(self, product: float) -> None:
        self.product = product  # s of a matrix product on every GPU
        self.places: list[torch.device] = []  # of the runners, in the order in which they were made
        self._gpus: list[_Gpu] = []
        self._running: list[_Gpu] = []  # those that may launch before they meet the others again
        self._changed = threading.Condition()
        self._free = 0.0  # s: when the lock is free
        self._of_thread = threading.local()

    def gpu(self, place: torch.device) -> _Gpu:
        """A GPU for a new runner."""
        self.places.append(place)
        self._gpus.append(_Gpu(self, len(self._gpus)))
        return self._gpus[-1]

    def launch(self, gpu: _Gpu) -> None:
        with self._changed:
            self._changed.wait_for(lambda: min(self._running, key=lambda one: (one.host, one.index)) is gpu)
            gpu.host = self._free = max(gpu.host, self._free) + LAUNCH
            self._changed.notify_all()

    def wait(self, gpu: _Gpu) -> None:
        with self._changed:
            SimulatedGpu.wait(gpu)
            self._changed.notify_all()

    def enter(self, gpu: _Gpu) -> None:
        self._of_thread.gpu = gpu

    def time(self) -> float:
        """The clock of this thread."""
        seconds: float = self._of_thread.gpu.host
        return seconds

    def barrier(self, parties: int) -> threading.Barrier:
        """For the newest GPUs, whose clocks agree when all have come."""
        return _Barrier(self, parties)

    def leave(self) -> None:
        """This thread launches nothing until it has met the others."""
        with self._changed:
            self._running = [gpu for gpu in self._running if gpu is not getattr(self._of_thread, "gpu", None)]
            self._changed.notify_all()

    def start(self, parties: int) -> None:
        with self._changed:
            self._running = self._gpus[-parties:]
            now = max(gpu.host for gpu in self._running)
            for gpu in self._running:
                gpu.host = now
            self._free = max(self._free, now)


class _Gpu(SimulatedGpu):
    def __init__(self, interpreter: Interpreter, index: int) -> None:
        super().__init__(interpreter.product)
        self.index, self._interpreter = index, interpreter

    def launch(self) -> None:
        self._interpreter.launch(self)

    def wait(self) -> None:
        self._interpreter.wait(self)

    def __enter__(self) -> Self:
        self._interpreter.enter(self)
        super().__enter__()
        return self


class _Barrier(threading.Barrier):
    def __init__(self, interpreter: Interpreter, parties: int) -> None:
        super().__init__(parties, action=lambda: interpreter.start(parties))
        self._interpreter = interpreter

    def wait(self, timeout: float | None = None) -> int:
        self._interpreter.leave()
        return super().wait(timeout)


def one_interpreter(monkeypatch: pytest.MonkeyPatch, product: float) -> Interpreter:
    """`cost_models.measuring.operator_times.measure` on simulated GPUs, on tensors without memory."""
    interpreter = Interpreter(product)

    class Runner(GraphRunner):
        def __init__(self, module: Any, device: Any, training: bool, n_outputs: Any, **options: Any) -> None:
            gpu = interpreter.gpu(device)
            super().__init__(module, META, training, n_outputs, gpu, **options)
            self._gpu = gpu

        @contextmanager
        def _conditions(self) -> Iterator[None]:
            with super()._conditions(), self._gpu:
                yield

    def on_meta(value: Any, device: torch.device) -> Any:
        is_tensor = isinstance(value, torch.Tensor)
        return value.detach().to(META).requires_grad_(value.requires_grad) if is_tensor else value

    names = {name: getattr(threading, name) for name in ("Thread", "Lock", "BrokenBarrierError")}
    monkeypatch.setattr(operator_times, "threading", SimpleNamespace(**names, Barrier=interpreter.barrier))
    monkeypatch.setattr(operator_times, "GraphRunner", Runner)
    monkeypatch.setattr(operator_times, "_to", on_meta)
    monkeypatch.setattr(operator_times, "waiting_is_known", lambda: True)
    monkeypatch.setattr(timed_passes, "time", SimpleNamespace(perf_counter=interpreter.time))
    monkeypatch.setattr(timed_passes, "waited_for_core", lambda: 0.0)
    return interpreter
