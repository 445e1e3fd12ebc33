r"""When the ranks of a job receive each other's messages over NCCL, so that no rank can wait for ever.

A GPU does not promise that work of two streams runs side by side. A kernel of NCCL waits on its GPU for the other end,
and whatever was launched after it may have to wait with it: kernels that share a hardware queue, one that is loaded at
its first launch, memory from the driver. So messages have to get through even if every GPU does all its work strictly
one after the other, in the order in which its host launches it.

Between two actions, a rank therefore exchanges messages once, as one operation of NCCL in which all transfers go on at
the same time: it sends what the action before has made, and receives what the next one reads:

```
   rank 0   F0 |send 0  | F1 |send 1, receive 2| B0 ...        as an operation of its own, "send 1" would wait for
   rank 1      |receive 0| F0  B0 |send 2, receive 1| F1 ...   rank 1, and "send 2" for rank 0
```
In some schedules this is not enough: a rank sends what another one reads only after messages that it waits for. There
the receive is part of an earlier exchange. `receives` finds these by going through the tables under the rule above.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from autopar.runtime.ranks.messages.tables import Message

Receives = Mapping[int, Mapping[int, Sequence[Message]]]  # by slot, by place of the action that they come after

START = -1  # place of what comes before the first action


def receives(messages: Sequence[Message]) -> Receives:
    """By slot and place of an action, the messages that it receives after that action, in the order in which each
    source sends them. Place `START`: before its first action."""
    slots = {slot: _Slot(slot, messages) for slot in sorted({end for m in messages for end in (m.source, m.target)})}
    while any(not one.at_end for one in slots.values()):
        if not _goes_on(slots):
            _receive_earlier(slots)
    return {slot: one.found for slot, one in slots.items()}


class _Slot:
    """A slot on its way through its table."""

    def __init__(self, slot: int, messages: Sequence[Message]) -> None:
        self.found: dict[int, list[Message]] = {}
        self._sends: defaultdict[int, list[Message]] = defaultdict(list)  # by place
        self._incoming: defaultdict[int, list[Message]] = defaultdict(list)  # by source, not received yet
        self._last = START
        for message in messages:
            if message.source == slot:
                self._sends[message.sent_by].append(message)
                self._last = max(self._last, message.sent_by)
            if message.target == slot:
                self._incoming[message.source].append(message)
                self._last = max(self._last, message.read_by - 1)
        self._place = START
        # Of the current exchange, the numbers of the messages that are not there yet.
        self.sending: set[int] = set()
        self.receiving: set[int] = set()
        self._enter()

    @property
    def at_end(self) -> bool:
        return self._place > self._last

    def _enter(self) -> None:
        """Begin the exchange at the current place."""
        self.sending = {message.number for message in self._sends[self._place]}
        for waiting in self._incoming.values():
            wanted = [i for i, message in enumerate(waiting) if message.read_by <= self._place + 1]
            if wanted:
                self._receive(waiting, wanted[-1] + 1)

    def _receive(self, waiting: list[Message], count: int) -> None:
        """In the order in which they are sent, so that those before one that is read come with it."""
        received = [waiting.pop(0) for _ in range(count)]
        self.found.setdefault(self._place, []).extend(received)
        self.receiving.update(message.number for message in received)

    def receive_now(self, message: Message) -> None:
        """Receive a message that is being sent in the current exchange."""
        waiting = self._incoming[message.source]
        self._receive(waiting, waiting.index(message) + 1)

    def goes_on(self) -> bool:
        """Whether it leaves an exchange that has ended."""
        if self.at_end or self.sending or self.receiving:
            return False
        self._place += 1
        if not self.at_end:
            self._enter()
        return True

    def blocked_sends(self) -> list[Message]:
        return [message for message in self._sends[self._place] if message.number in self.sending]


def _goes_on(slots: Mapping[int, _Slot]) -> bool:
    """Whether messages get through, or slots go on to their next exchanges."""
    progress = False
    for one in slots.values():
        for message in [] if one.at_end else one.blocked_sends():
            receiving = slots[message.target].receiving
            if message.number in receiving:
                receiving.discard(message.number)
                one.sending.discard(message.number)
                progress = True
    for one in slots.values():
        while one.goes_on():
            progress = True
    return progress


def _receive_earlier(slots: Mapping[int, _Slot]) -> None:
    """All wait for each other: one that is sent something receives it now."""
    for one in slots.values():
        for message in [] if one.at_end else one.blocked_sends():
            slots[message.target].receive_now(message)
            return
    raise ValueError("the messages of these tables deadlock by themselves")
