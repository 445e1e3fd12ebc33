"""The messages of one execution, and what ranks derive from them once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from autopar.runtime.ranks.messages.exchanges import Receives, receives
from autopar.runtime.ranks.messages.tables import Message
from autopar.runtime.step.mailbox import Address


@dataclass(frozen=True)
class ExecutionMessages:
    """The messages of one execution, the same on all ranks."""

    messages: tuple[Message, ...]
    parts: int  # that a message has, at most
    _incoming: dict[int, dict[int, list[Message]]] = field(default_factory=dict, compare=False)

    @cached_property
    def receives(self) -> Receives:
        """When they are received over NCCL (exchanges.py)."""
        return receives(self.messages)

    @cached_property
    def by_address(self) -> dict[Address, Message]:
        return {message.address: message for message in self.messages}

    def incoming(self, slot: int, sender: Callable[[Message], int]) -> dict[int, list[Message]]:
        """What this rank, of `slot`, receives, in order, by the sending rank, which `sender` gives."""
        if slot not in self._incoming:
            found: defaultdict[int, list[Message]] = defaultdict(list)
            for message in self.messages:
                if message.target == slot:
                    found[sender(message)].append(message)
            self._incoming[slot] = dict(found)
        return self._incoming[slot]
