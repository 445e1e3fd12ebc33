"""An oracle for the order of reads and writes on GPU streams and host threads: a race detector with vector clocks.

A host thread and a stream are actors, each with a vector clock (Lamport 1978, Mattern 1989). What an actor has done
counts as its own entry. These make one actor's clock follow another's:

```
    a kernel or copy is queued     the stream after the thread that queues it
    event.record(stream)           the event after the stream
    stream.wait_event(event)       the stream after the event
    event.synchronize()            the thread after the event
    queue.put -> queue.get         the thread that gets after the thread that puts
```
A read must come after the last write, a write after the last write and after all reads since. Memory of a GPU belongs
to the stream on which it was allocated: once freed, the next tensor of that stream may get it at once. So when it is
freed, the end of that stream must come after every use on other streams, unless `record_stream` has named them.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field

Actor = Hashable
Clock = dict[Actor, int]


@dataclass
class Memory:
    """One storage."""

    name: str
    owner: Actor | None  # the stream that it was allocated on; None: the host
    last_write: tuple[Actor, int, str] | None = None  # actor, its clock, what wrote
    reads: dict[Actor, tuple[int, str]] = field(default_factory=dict)  # since the last write
    recorded: set[Actor] = field(default_factory=set)  # streams that the allocator will wait for


class HappensBefore:
    """Clocks of all actors, and the faults found so far."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.lock = threading.RLock()  # reentrant: memory may be freed while a thread is in here
        self._clocks: dict[Actor, Clock] = {}

    def clock(self, actor: Actor) -> Clock:
        """A copy of the actor's clock."""
        with self.lock:
            return dict(self._clocks.get(actor, {}))

    def follow(self, actor: Actor, clock: Clock) -> None:
        """What the actor does from now on happens after `clock`."""
        with self.lock:
            mine = self._clocks.setdefault(actor, {})
            for other, count in clock.items():
                mine[other] = max(mine.get(other, 0), count)

    def queue(self, thread: Actor, actor: Actor) -> None:
        """The thread has the actor do something: itself, or a stream."""
        with self.lock:
            if actor != thread:
                self.follow(actor, self.clock(thread))
            mine = self._clocks.setdefault(actor, {})
            mine[actor] = mine.get(actor, 0) + 1

    def read(self, memory: Memory, actor: Actor, what: str) -> None:
        with self.lock:
            self._check_write(memory, actor, f"{what} reads")
            memory.reads[actor] = (self._now(actor), what)

    def write(self, memory: Memory, actor: Actor, what: str) -> None:
        with self.lock:
            self._check_write(memory, actor, f"{what} overwrites")
            for reader, (count, reading) in memory.reads.items():
                if not self._is_before(reader, count, actor):
                    self._fault(f"{what} on {actor} overwrites {memory.name} before {reading} on {reader} has read it")
            memory.reads.clear()
            memory.last_write = (actor, self._now(actor), what)

    def free(self, memory: Memory) -> None:
        """The last reference is gone."""
        if memory.owner is None:
            return
        with self.lock:
            uses = [(actor, count, what) for actor, (count, what) in memory.reads.items()]
            uses += [memory.last_write] if memory.last_write is not None else []
            for actor, count, what in uses:
                if actor not in memory.recorded and not self._is_before(actor, count, memory.owner):
                    self._fault(f"{memory.name} of {memory.owner} is freed before {what} on {actor} is done with it")

    def _check_write(self, memory: Memory, actor: Actor, what: str) -> None:
        if memory.last_write is not None and not self._is_before(*memory.last_write[:2], actor):
            writer, _, writing = memory.last_write
            self._fault(f"{what} on {actor} {memory.name} before {writing} on {writer} has written it")

    def _is_before(self, actor: Actor, count: int, later: Actor) -> bool:
        return actor == later or self._clocks.get(later, {}).get(actor, 0) >= count

    def _now(self, actor: Actor) -> int:
        return self._clocks.get(actor, {}).get(actor, 0)

    def _fault(self, text: str) -> None:
        self.faults.append(text)
