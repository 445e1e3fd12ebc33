"""Messages between the slots of one call: values on their way to later stages, gradients on their way back."""

from __future__ import annotations

import queue
from typing import Any, NamedTuple

from autopar.schedule.clock import Phase


class Aborted(Exception):
    """Another slot failed; this one stops waiting."""


class Address(NamedTuple):
    """What a message is."""

    way: Phase  # FORWARD or BACKWARD
    sender: int  # stage
    receiver: int  # stage
    microbatch: int


class Mailbox:
    """A mailbox a slot. A slot that waits for one message puts aside the others that arrive.

    Mailboxes belong to one execution, so one that failed leaves nothing behind for the next.
    """

    def __init__(self, n_slots: int) -> None:
        self._boxes: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(n_slots)]
        self._aside: list[dict[Address, Any]] = [{} for _ in range(n_slots)]  # each touched by its slot alone

    def send(self, slot: int, address: Address, message: Any) -> None:
        self._boxes[slot].put((address, message))

    def receive(self, slot: int, address: Address) -> Any:
        """Waits for the message. Raises Aborted where it will not come."""
        aside, box = self._aside[slot], self._boxes[slot]
        while address not in aside:
            message = box.get()
            if message is None:
                raise Aborted
            aside[message[0]] = message[1]
        return aside.pop(address)

    def abort(self) -> None:
        """Whoever waits, or will wait, stops."""
        for box in self._boxes:
            box.put(None)
