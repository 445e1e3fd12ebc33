r"""All messages of one execution, from the tables of actions: who sends what to whom, in which order.

```
   slot 0   F0 --0--> F1 --1--> ....... B0  F2        messages 0, 1 .. in the order of the sender's table,
               \         \             /              slot by slot
   slot 1       F0        B0 --2------'   F1 ..
```
Every rank makes the same list from the same tables, so that both ends of a message know its number. Where messages have
no tags, they match in the order in which their sender sends them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autopar.runtime.step.mailbox import Address
from autopar.schedule.clock import Action, Phase


@dataclass(frozen=True)
class Message:
    """What one slot sends another for a micro-batch."""

    number: int  # among all of the execution
    address: Address
    source: int  # slot that sends it
    target: int  # slot that reads it
    sent_by: int  # place of the sending action in the sender's table
    read_by: int  # place of the reading action in the receiver's table


def messages(
    tables: Sequence[Sequence[Action]],
    slot_of: Callable[[int, int], int],
    consumers: Sequence[Sequence[int]],
    sources: Sequence[Sequence[int]],
) -> tuple[Message, ...]:
    """The messages between different slots, in the order of the senders' tables.

    `tables`: the actions of the execution by slot. `slot_of(stage, micro-batch)`: where it runs. `consumers` and
    `sources`: for each stage, the stages that it sends to and receives from, in the order in which it sends.
    """
    places = {_part(action): place for table in tables for place, action in enumerate(table)}
    found: list[Message] = []
    for slot, table in enumerate(tables):
        for place, action in enumerate(table):
            for address in _sent(action, consumers, sources):
                target = slot_of(address.receiver, address.microbatch)
                read = places.get((address.direction, address.receiver, address.microbatch))
                if target != slot and read is not None:
                    found.append(Message(len(found), address, slot, target, place, read))
    return tuple(found)


def _part(action: Action) -> tuple[Phase, int, int]:
    """The input part of a backward reads and sends what a whole one does; the weight part does neither."""
    phase = Phase.BACKWARD if action.phase is Phase.INPUT else action.phase
    return phase, action.stage, action.microbatch


def _sent(action: Action, consumers: Sequence[Sequence[int]], sources: Sequence[Sequence[int]]) -> Iterator[Address]:
    """What an action sends, in order (`Passes._send_outputs` and `Passes._send_gradients`)."""
    phase, stage, microbatch = _part(action)
    if phase is Phase.FORWARD:
        yield from (Address(Phase.FORWARD, stage, other, microbatch) for other in consumers[stage])
    elif phase is Phase.BACKWARD:
        yield from (Address(Phase.BACKWARD, stage, other, microbatch) for other in sources[stage])
