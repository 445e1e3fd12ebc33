"""In the place of torch.cuda's streams and events, and of the queues between threads: they only write down an order."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING, Any

import torch
from happens_before import Clock

if TYPE_CHECKING:
    from pretend_gpus import PretendGpus


class Stream:
    """In the place of torch.cuda.Stream."""

    def __init__(self, gpus: PretendGpus, device: Any, name: str = "") -> None:
        self.gpus, self.device = gpus, torch.device(device)
        with gpus.order.lock:
            gpus.n_streams += 1
            self.name = f"{self.device} {name or f'stream {gpus.n_streams}'}"

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.gpus)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.gpus.queue(self)
        self.gpus.order.follow(self.name, event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


class Event:
    """In the place of torch.cuda.Event."""

    def __init__(self, gpus: PretendGpus) -> None:
        self.gpus = gpus
        self.clock: Clock = {}  # of an event that was never recorded: nothing waits for it

    def record(self, stream: Stream) -> None:
        self.gpus.queue(stream)
        self.clock = self.gpus.order.clock(stream.name)

    def elapsed_time(self, end: Event) -> float:
        """In ms, as if everything that has to come before an event took a microsecond, one after another."""
        return (sum(end.clock.values()) - sum(self.clock.values())) * 1e-3

    def synchronize(self) -> None:
        self.gpus.wait("Event.synchronize")
        self.gpus.order.follow(self.gpus.thread, self.clock)


class ClockedQueue:
    """queue.SimpleQueue, where a thread that gets an entry goes on after those that put it in."""

    def __init__(self, gpus: PretendGpus) -> None:
        self._gpus = gpus
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, entry: Any) -> None:
        self._queue.put((self._gpus.order.clock(self._gpus.thread), entry))

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        clock, entry = self._queue.get(block, timeout)
        self._gpus.order.follow(self._gpus.thread, clock)
        return entry
