"""How many receives a rank posts before it needs them.

More of them hide more of the transfers and take more memory. Two are enough to keep a neighbour busy. An interleaved
schedule sends further ahead than its receivers read: if a send waited for its receive, and receives were posted only
two ahead, two ranks could wait for each other's receives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autopar.runtime.ranks.messages.tables import Message
from autopar.schedule.clock import Phase

LEAST = 2


def look_ahead(messages: Sequence[Message]) -> int:
    """The fewest receives ahead, at least LEAST, with which no rank would wait for ever if every send waited until its
    receive had been posted. Raises ValueError where no number is enough: the tables deadlock by themselves."""
    for number in range(LEAST, len(messages) + LEAST + 1):
        if _gets_through(messages, number):
            return number
    raise ValueError("the messages of these tables deadlock, however early receives are posted")


class _Slot:
    """What one slot still has to do: its reads and sends in the order of its table."""

    def __init__(self, slot: int, messages: Sequence[Message]) -> None:
        reads = [(m.read_by, 0, m.address.sender, m.number, m) for m in messages if m.target == slot]
        sends = [(m.sent_by, 1, m.number, m.number, m) for m in messages if m.source == slot]
        self.todo = [(is_send == 1, m) for _, is_send, _, _, m in sorted(reads + sends, key=lambda item: item[:4])]
        self.done = 0
        # Values whose gradients' shapes it knows: it has begun to send them, or an earlier execution did.
        sent_here = {m.address[1:] for m in messages if m.address.direction is Phase.FORWARD}
        gradients = {(b, a, i) for direction, a, b, i in (m.address for m in messages) if direction is Phase.BACKWARD}
        self.announced: set[tuple[int, int, int]] = gradients - sent_here
        self.incoming: defaultdict[int, list[Message]] = defaultdict(list)  # by source, in the order of sending
        for message in messages:
            if message.target == slot:
                self.incoming[message.source].append(message)
        self.n_posted: defaultdict[int, int] = defaultdict(int)
        self.n_read: defaultdict[int, int] = defaultdict(int)
        self.posted: set[int] = set()  # numbers of messages

    def post(self, number: int) -> bool:
        """Post receives as far as `number` ahead; whether there were any."""
        before = len(self.posted)
        for source, waiting in self.incoming.items():
            while self.n_posted[source] < len(waiting) and self.n_posted[source] - self.n_read[source] < number:
                message = waiting[self.n_posted[source]]
                a, b, i = message.address[1:]
                if message.address.direction is Phase.BACKWARD and (b, a, i) not in self.announced:
                    break
                self.n_posted[source] += 1
                self.posted.add(message.number)
        return len(self.posted) > before

    def post_up_to(self, message: Message) -> None:
        """A rank that needs a message posts all that come before it from the same source."""
        waiting = self.incoming[message.source]
        while message.number not in self.posted:
            self.posted.add(waiting[self.n_posted[message.source]].number)
            self.n_posted[message.source] += 1


def _gets_through(messages: Sequence[Message], number: int) -> bool:
    slots = {slot: _Slot(slot, messages) for slot in {end for m in messages for end in (m.source, m.target)}}
    sent: set[int] = set()
    progress = True
    while progress:
        progress = False
        for one in slots.values():
            progress |= one.post(number)
            while one.done < len(one.todo):
                is_send, message = one.todo[one.done]
                if is_send:
                    if message.address.direction is Phase.FORWARD:
                        one.announced.add(message.address[1:])
                    one.post(number)
                    if message.number not in slots[message.target].posted:
                        break
                    sent.add(message.number)
                else:
                    if message.number not in one.posted:
                        one.post_up_to(message)
                        progress = True
                    if message.number not in sent:
                        break
                    one.n_read[message.source] += 1
                    one.post(number)
                one.done += 1
                progress = True
    return all(one.done == len(one.todo) for one in slots.values())
