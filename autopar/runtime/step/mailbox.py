"""Messages between the slots of one execution: values to later stages, gradients to earlier ones."""

from __future__ import annotations

import queue
from typing import Any, NamedTuple

from autopar.schedule.clock import Phase


class Aborted(Exception):
    """Another slot failed; this one stops waiting."""


class Address(NamedTuple):
    """Which message it is: what `sender` sends `receiver` for a micro-batch."""

    direction: Phase  # FORWARD or BACKWARD
    sender: int  # stage
    receiver: int  # stage
    microbatch: int


class Mailbox:
    """One queue of messages per slot. A slot that waits for one message sets aside the others that arrive.

    Every execution has its own, so that one that failed leaves nothing behind for the next.
    """

    def __init__(self, n_slots: int) -> None:
        self._boxes: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(n_slots)]
        self._aside: list[dict[Address, Any]] = [{} for _ in range(n_slots)]  # a dict is used by its slot only

    def send(self, slot: int, address: Address, message: Any) -> None:
        self._boxes[slot].put((address, message))

    def receive(self, slot: int, address: Address) -> Any:
        """Wait for the message and return it. Raises Aborted after `abort`."""
        aside, box = self._aside[slot], self._boxes[slot]
        while address not in aside:
            message = box.get()
            if message is None:
                raise Aborted
            aside[message[0]] = message[1]
        return aside.pop(address)

    def abort(self) -> None:
        """Every slot that waits for a message, now or later, raises Aborted."""
        for box in self._boxes:
            box.put(None)
